"""Tables where something comes between: an interrupt, a pause, damage, no pyarrow."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from penstock.client import ConfigurationError, Consumer, Producer, TopicPartition
from penstock.client.core.fetch_events import FetchAnswered, Fetched, Woken
from penstock.client.deadline import Deadline
from penstock.wire.compression import Compression
from penstock.wire.records import RecordData, encode_batch
from tests.unit.client.conftest import Background
from tests.unit.client.test_damaged_batches import flipped
from tests.unit.client.test_fetcher import T0 as FETCHED
from tests.unit.client.test_fetcher import batch, make, start

T0 = TopicPartition("t", 0)


def produce(background: Background, count: int) -> None:
    background.cluster.add_topic("t")
    with Producer(background.cluster.bootstrap) as producer:
        for number in range(count):
            producer.send("t", b"%d" % number)


def test_without_pyarrow_it_says_what_to_install(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        Consumer(background.cluster.bootstrap) as consumer,
        pytest.raises(ConfigurationError, match=r"pip install 'penstock\[arrow\]'"),
    ):
        consumer.fetch_arrow()


@pytest.mark.parametrize("then", ["poll", "fetch_arrow", "pause"])
def test_what_an_interrupt_kept_from_the_application_comes_next(
    background: Background, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    produce(background, 4)
    with Consumer(
        background.cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        run = consumer._thread.run

        def interrupted(*work: Any, **arguments: Any) -> None:
            if run(*work, **arguments):  # The engine took records; then came Ctrl-C.
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(consumer._thread, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                consumer.fetch_arrow(5_000)
        found: list[int] = []
        if then == "pause":
            consumer.pause(T0)
            assert consumer.fetch_arrow(50).num_rows == 0
            consumer.resume(T0)
        while len(found) < 4:
            if then == "poll":
                found += [record.offset for record in consumer.poll(5_000)]
            else:
                found += consumer.fetch_arrow(5_000)["offset"].to_pylist()
        assert found == [0, 1, 2, 3]


def test_columns_end_where_damage_begins_and_in_the_middle_of_a_batch() -> None:
    fetcher, _ = make((1, 0), max_partition_bytes=100)
    [fetch] = start(fetcher, offset=1)
    data = batch(0, 4) + flipped(batch(4, 2))
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(FETCHED, None, data),)), 0)
    [run] = fetcher.take_columns(2, 10_000, 0)
    assert (run.first_offset, run.columns.record_count, run.end.offset) == (1, 2, 3)
    assert fetcher.cursor(FETCHED) == 3
    [run] = fetcher.take_columns(9, 10_000, 0)
    assert (run.first_offset, run.columns.record_count, run.end.offset) == (3, 1, 4)
    fetcher.handle(Woken(), 0)
    assert fetcher.take_columns(9, 10_000, 0) == []
    fetcher.validate()


def test_what_an_interrupt_kept_is_no_more_than_the_next_call_asks_for(
    background: Background,
) -> None:
    produce(background, 9)
    with Consumer(
        background.cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        step = consumer._engine.step
        assert consumer._run(step, Deadline.after_ms(5_000), None, columns=True)
        assert consumer._handout.column_rows > 5
        found: list[int] = []
        while len(found) < 9:
            table = consumer.fetch_arrow(5_000, 5)
            assert table.num_rows <= 5
            found += table["offset"].to_pylist()
        assert found == list(range(9))


def test_columns_are_bounded_by_what_they_are_decompressed() -> None:
    """They hold 2 GB at most, and what is beyond would be lost with the error."""
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    data = b"".join(
        encode_batch(
            [RecordData(1, None, bytes(100_000), ())],
            base_offset=base,
            compression=Compression.GZIP,
        )
        for base in range(9)
    )
    assert len(data) < 5_000
    answer = FetchAnswered(fetch.fetch_id, (Fetched(FETCHED, None, data),))
    fetcher.handle(answer, 1)
    found: list[int] = []
    while len(found) < 9:
        [columns] = fetcher.take_columns(100, 250_000, 1)
        assert columns.columns.record_count <= 3
        found += memoryview(columns.columns.offsets).cast("q").tolist()
    assert found == list(range(9))
