"""The examples that keep a state of their own, by ``transformWithState``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from examples.pipelines.streams.count_customers import count, moves
from examples.pipelines.streams.remind import remind
from penstock.pipeline.session import ROCKSDB_STATE
from penstock.pipeline.tables import upserts_into
from tests.pipeline.streams import COMPACTED, Streams, at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MINUTE_MS = 60_000


@pytest.fixture(autouse=True)
def rocksdb(spark: SparkSession) -> Iterator[None]:
    """As the examples' sessions have it."""
    for name, value in ROCKSDB_STATE.items():
        spark.conf.set(name, value)
    yield
    for name in ROCKSDB_STATE:
        spark.conf.unset(name)


def test_a_table_made_of_a_table_follows_it(streams: Streams) -> None:
    customers, between = streams.topic("customers", **COMPACTED), streams.topic("moves")
    target = streams.topic("countries", **COMPACTED)

    def run() -> dict[str, int | None]:
        streams.run(moves(streams.stream(customers)), topic=between)
        writer = count(streams.stream(between)).writeStream.outputMode("update")
        upserts = writer.foreachBatch(upserts_into(target, streams.options))
        streams.finish(upserts, "second checkpoint")
        found = streams.written(target)
        return {key: values[-1] and values[-1]["customers"] for key, values in found.items()}

    def put(**countries: str | None) -> None:
        values = {name: country and {"country": country} for name, country in countries.items()}
        streams.put(customers, **values)

    put(ann="SE", bob="SE", cid="DE", dan="US")
    put(dan="GB")
    streams.put(customers, eve={"country": None}, fay=None)
    assert run() == {"SE": 2, "DE": 1, "GB": 1}
    streams.crash()
    streams.crash("second checkpoint")
    put(ann="DE", bob="SE", cid=None, dan=None)
    assert run() == {"SE": 1, "DE": 1, "GB": None}
    put(cid="GB", ann="SE")
    assert run() == {"SE": 2, "DE": None, "GB": 1}
    # Nothing was written for what did not change.
    assert [len(values) for _, values in sorted(streams.written(target).items())] == [3, 3, 3]


def test_reminders_come_by_the_events_own_time(streams: Streams) -> None:
    events, target = streams.topic("events"), streams.topic("reminders")

    def send(**happened: tuple[str, float]) -> None:
        for name, (event, minute) in happened.items():
            streams.send(events, {"order_id": name, "event": event, "at": at(minute)}, key=name)

    def run() -> dict[str, list[str]]:
        streams.run(remind(streams.stream(events), 10 * MINUTE_MS, "1 minute"), topic=target)
        found = streams.written(target)
        return {name: [value["step"] for value in values] for name, values in found.items()}

    send(slow=("placed", 0), quick=("placed", 1), forgotten=("placed", 2), early=("paid", 3))
    send(quick=("paid", 4), early=("placed", 3))
    streams.send(events, b"no JSON", {"order_id": "timeless", "event": "placed"})
    assert run() == {}
    # Eleven minutes and a bit: time for those that were placed in the first one.
    send(other=("placed", 12.5))
    assert run() == {"slow": ["first reminder"]}
    streams.crash()
    # Too late to count: what is not in the state by now is not put there.
    send(slow=("paid", 13), ghost=("placed", 1), last=("paid", 24))
    assert run() == {
        "slow": ["first reminder"],
        "forgotten": ["first reminder"],
        "other": ["first reminder"],
    }
    # Time jumps: each step has its turn all the same, one in each batch.
    send(much=("paid", 500))
    assert run()["forgotten"] == ["first reminder", "second reminder"]
    send(later=("paid", 600))
    assert run()["forgotten"] == ["first reminder", "second reminder", "given up"]
    send(later=("paid", 700))
    assert run() == {
        "slow": ["first reminder"],
        "forgotten": ["first reminder", "second reminder", "given up"],
        "other": ["first reminder", "second reminder", "given up"],
    }
