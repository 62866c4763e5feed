"""The examples that keep a state of their own, by ``transformWithState``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

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


class Sums(StatefulProcessor):
    """Of what a key has sent so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sum = handle.getValueState("sum", "sum bigint")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timer_values: TimerValues
    ) -> Iterator[pd.DataFrame]:
        before = self.sum.get()
        after = (before[0] if before else 0) + sum(int(frame.number.sum()) for frame in rows)
        self.sum.update((after,))
        yield pd.DataFrame({"key": [key[0]], "value": [str(after)]})


def test_processors_in_pandas_go_on_from_their_state_which_can_be_read(streams: Streams) -> None:
    numbers, target = streams.topic("numbers"), streams.topic("sums")

    def run() -> dict[str, list[int]]:
        records = streams.stream(numbers).selectExpr(
            "CAST(key AS STRING) AS key", "CAST(CAST(value AS STRING) AS BIGINT) AS number"
        )
        sums = records.groupBy("key").transformWithStateInPandas(
            Sums(), "key string, value string", outputMode="Append", timeMode="None"
        )
        streams.run(sums, topic=target)
        return streams.written(target)

    streams.send(numbers, 1, 2, key="a")
    assert run() == {"a": [3]}
    streams.crash()
    streams.send(numbers, 4, key="a")
    assert run() == {"a": [3, 7]}
    state = streams.spark.read.format("statestore").option("stateVarName", "sum")
    [row] = state.load(str(streams.directory / "checkpoint")).collect()
    assert (row.key.key, row.value.sum) == ("a", 7)
