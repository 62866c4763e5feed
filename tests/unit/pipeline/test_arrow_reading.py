"""Reading against a consumer that answers as it is told: what real brokers do only now and then."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from penstock.client import (
    InvalidRequestError,
    LeaderNotAvailableError,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetOutOfRangeError,
    PenstockError,
    TopicPartition,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.client.arrow import schema
from penstock.pipeline.errors import DataLossError, PipelineError, ReadTimeoutError
from penstock.pipeline.source import arrow_reading
from penstock.pipeline.source.arrow_reading import Slice, read_slice
from penstock.pipeline.source_options import SourceOptions

WHERE = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=7)
OTHER_ID = uuid.UUID(int=8)


def table(*offsets: int, time_ms: int = 0) -> pa.Table:
    count = len(offsets)
    columns = [
        pa.array([None] * count, pa.binary()),
        pa.array([b"%d" % offset for offset in offsets], pa.binary()),
        pa.array(["t"] * count).dictionary_encode().cast(schema().field("topic").type),
        pa.array([0] * count, pa.int32()),
        pa.array(offsets, pa.int64()),
        pa.array([time_ms] * count, pa.timestamp("ms", "UTC")),
        pa.array([[]] * count, schema().field("headers").type),
    ]
    return pa.table(columns, schema=schema())


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, span_s: float) -> None:
        self.now_s += span_s


class FakeConsumer:
    """Gives what each step of its script says: a table, an error, or None for nothing in time.

    A step may be a pair of a table and the position after it.
    """

    def __init__(self, clock: Clock, script: list[Any], *, log: tuple[int, int] = (0, 100)) -> None:
        self.config = type("Config", (), {"default_api_timeout_ms": 60_000})
        self.clock = clock
        self.script = script
        self.begin, self.end = log
        self.at = -1
        self.asked: list[int] = []
        self.seeks: list[int] = []
        self.answered = False
        self.topic_id = TOPIC_ID
        self.waiting: PenstockError | None = None
        self.ignorance: list[PenstockError] = []
        self.opens = 0
        self.is_open = False

    def open(self, _options: SourceOptions) -> FakeConsumer:
        """As by a new connection: what the one before was told is not known."""
        assert not self.is_open
        self.opens += 1
        self.is_open, self.answered, self.at = True, False, -1
        return self

    def close(self, _timeout_ms: float) -> None:
        assert self.is_open
        self.is_open = False

    def assign(self, partitions: list[TopicPartition]) -> None:
        assert self.is_open
        assert partitions == [WHERE]
        if self.ignorance:
            raise self.ignorance.pop(0)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.at = offset
        self.seeks.append(offset)
        self.answered = False

    def fetch_arrow(self, timeout_ms: float, max_records: int) -> pa.Table:
        assert self.is_open
        self.asked.append(max_records)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Callable):  # type: ignore[arg-type]
            step = step(self)
        if isinstance(step, Exception):
            raise step
        if step is None:
            self.clock.now_s += timeout_ms / 1000
            return table()
        rows, position = step if isinstance(step, tuple) else (step, step.column("offset")[-1])
        self.at = position if isinstance(step, tuple) else position.as_py() + 1
        self.answered = True
        return rows

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {WHERE: OffsetAndMetadata(self.at, topic_id=self.topic_id.bytes)}

    def position(self, partition: TopicPartition) -> int:
        return self.at

    def current_lag(self, partition: TopicPartition) -> int | None:
        return self.end - self.at if self.answered else None

    def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {WHERE: self.begin}

    def trouble(self) -> PenstockError | None:
        return self.waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(arrow_reading, "monotonic", made)
    monkeypatch.setattr(arrow_reading, "sleep", made.pass_by)
    return made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    def read_with(consumer: FakeConsumer, start: int, end: int, **options: str) -> list[int]:
        monkeypatch.setattr(arrow_reading, "open_consumer", consumer.open)
        given = {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "t", **options}
        wanted = Slice("t", 0, start, end, str(TOPIC_ID), 0)
        try:
            batches = list(read_slice(SourceOptions.load(given), wanted))
        finally:
            assert not consumer.is_open
        return [offset for batch in batches for offset in batch.column("offset").to_pylist()]

    return read_with


Read = Callable[..., list[int]]


def test_exactly_what_is_between_two_offsets(clock: Clock, read: Read) -> None:
    consumer = FakeConsumer(clock, [table(5, 6), table(7, 8, 9, 10)])
    assert read(consumer, 5, 9) == [5, 6, 7, 8]
    assert consumer.asked == [5, 3]  # One more than there can be.


def test_batches_are_bounded(clock: Clock, read: Read) -> None:
    consumer = FakeConsumer(clock, [table(5, 6), table(7, 8), table(9)])
    assert read(consumer, 5, 10, maxRecordsPerFetch="2") == [5, 6, 7, 8, 9]
    assert set(consumer.asked) == {2}


def test_a_position_behind_the_end_is_the_end(clock: Clock, read: Read) -> None:
    # Behind offset 6 there are a mark and what was aborted.
    assert read(FakeConsumer(clock, [(table(5, 6), 20)]), 5, 15) == [5, 6]
    assert read(FakeConsumer(clock, [None, (table(), 15)]), 5, 15) == []


def test_records_behind_a_gap_at_the_end_are_not_read(clock: Clock, read: Read) -> None:
    assert read(FakeConsumer(clock, [table(5, 30, 31)]), 5, 20) == [5]
    assert read(FakeConsumer(clock, [table(30, 31)]), 5, 20) == []


def answer_nothing(consumer: FakeConsumer) -> None:
    consumer.answered = True


def test_where_the_log_has_nothing_up_to_the_end_nothing_is_waited_for(
    clock: Clock, read: Read
) -> None:
    silence: list[Any] = [None] * 50
    consumer = FakeConsumer(clock, [table(5), *silence, answer_nothing], log=(0, 20))
    assert read(consumer, 5, 20) == [5]
    assert consumer.seeks == [5, 6]
    assert clock.now_s < 5


def test_an_old_answer_says_nothing_of_what_is_there(clock: Clock, read: Read) -> None:
    # The answer that brought offset 5 has told the end of the log. Then a leader is gone for long.
    silence: list[Any] = [None] * 400
    consumer = FakeConsumer(clock, [table(5), *silence, table(6, 7)], log=(0, 8))
    assert read(consumer, 5, 8) == [5, 6, 7]


def test_records_that_come_with_the_answer_are_taken(clock: Clock, read: Read) -> None:
    # The answer comes after the fetch was given up, and before anybody asks whether it came.
    silence: list[Any] = [None] * 60
    consumer = FakeConsumer(clock, [*silence, answer_nothing, table(5, 6, 7)], log=(0, 8))
    assert read(consumer, 5, 8) == [5, 6, 7]


def test_a_log_that_is_still_shorter_than_the_range_is_waited_for(clock: Clock, read: Read) -> None:
    silence: list[Any] = [None] * 60
    consumer = FakeConsumer(clock, [*silence, answer_nothing, None, table(5, 6, 7)], log=(0, 5))
    assert read(consumer, 5, 8) == [5, 6, 7]


def test_silence_ends_in_an_error_that_says_why(clock: Clock, read: Read) -> None:
    consumer = FakeConsumer(clock, [])
    consumer.waiting = LeaderNotAvailableError("partition t-0 has no leader")
    with pytest.raises(ReadTimeoutError, match=r"offset 5 \(of 5 to 8\) for 60 s: .*no leader"):
        read(consumer, 5, 8)
    assert 60 <= clock.now_s < 62


def out_of_range() -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError("the log begins at 7")


def test_retention_that_was_faster(clock: Clock, read: Read) -> None:
    with pytest.raises(DataLossError, match=r"from offset 5 on, up to 10.*begins at offset 7"):
        read(FakeConsumer(clock, [out_of_range()], log=(7, 100)), 5, 10)
    goes_on = FakeConsumer(clock, [out_of_range(), table(7, 8, 9)], log=(7, 100))
    assert read(goes_on, 5, 10, failOnDataLoss="false") == [7, 8, 9]
    assert goes_on.seeks == [5, 7]
    all_gone = FakeConsumer(clock, [out_of_range()], log=(70, 100))
    assert read(all_gone, 5, 10, failOnDataLoss="false") == []


@pytest.mark.parametrize(
    "error",
    [NoOffsetError("made anew"), UnknownTopicOrPartitionError("no such topic"), out_of_range()],
)
def test_a_topic_that_is_gone(clock: Clock, read: Read, error: PenstockError) -> None:
    # Of the last one the log ends before the position: another topic has the name.
    with pytest.raises(DataLossError, match="from offset 6 on"):
        read(FakeConsumer(clock, [table(5), *[error] * 200], log=(0, 3)), 5, 10)
    assert clock.now_s < 5
    consumer = FakeConsumer(clock, [table(5), *[error] * 200], log=(0, 3))
    assert read(consumer, 5, 10, failOnDataLoss="false") == [5]
    assert 10 <= clock.now_s < 20


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("topic t has no partition 0"),
        UnknownTopicOrPartitionError("no such topic"),
        UnknownTopicIdError("no such topic"),
        out_of_range(),
    ],
)
@pytest.mark.parametrize("fail", ["true", "false"])
def test_what_one_broker_has_not_heard_of_is_asked_for_again(
    clock: Clock, read: Read, error: PenstockError, fail: str
) -> None:
    """By new connections, before anything is skipped: the broker may be behind."""
    behind = FakeConsumer(clock, [table(5, 6, 7)])
    behind.ignorance = [error] * 3
    assert read(behind, 5, 8, failOnDataLoss=fail) == [5, 6, 7]
    assert behind.opens == 4
    silence = [] if isinstance(error, InvalidRequestError) else [error] * 3
    later = FakeConsumer(clock, [table(5), *silence, table(6, 7)])
    assert read(later, 5, 8, failOnDataLoss=fail) == [5, 6, 7]
    assert later.opens == 1 + len(silence)


def test_an_answer_that_has_the_partition_is_worth_all_before_it(clock: Clock, read: Read) -> None:
    gone = [UnknownTopicOrPartitionError("no such topic")] * 60
    consumer = FakeConsumer(
        clock, [table(5), *gone, answer_nothing, *gone, table(6, 7)], log=(0, 8)
    )
    assert read(consumer, 5, 8, failOnDataLoss="false") == [5, 6, 7]


def test_two_answers_far_apart_are_too_few_to_pass_over_anything(clock: Clock, read: Read) -> None:
    error = UnknownTopicOrPartitionError("no such topic")

    def late(consumer: FakeConsumer) -> PenstockError:
        consumer.clock.pass_by(60)
        return error

    consumer = FakeConsumer(clock, [table(5), error, late, table(6, 7)], log=(0, 8))
    assert read(consumer, 5, 8, failOnDataLoss="false") == [5, 6, 7]


def test_records_of_another_topic_are_not_read(clock: Clock, read: Read) -> None:
    consumer = FakeConsumer(clock, [table(5, 6)])
    consumer.script *= 200
    consumer.topic_id = OTHER_ID
    with pytest.raises(DataLossError, match="made anew"):
        read(consumer, 5, 10)


def test_a_log_that_was_cut_doubles_nothing(clock: Clock, read: Read) -> None:
    script = [table(5, 6, 7), table(6, 7, 8, 9)]
    with pytest.raises(DataLossError, match="was cut, and goes on at offset 6"):
        read(FakeConsumer(clock, list(script)), 5, 10)
    consumer = FakeConsumer(clock, list(script))
    assert read(consumer, 5, 10, failOnDataLoss="false") == [5, 6, 7, 8, 9]


def test_a_time_that_spark_has_no_room_for(clock: Clock, read: Read) -> None:
    consumer = FakeConsumer(clock, [table(5, 6, time_ms=2**62)])
    with pytest.raises(PipelineError, match="a record at offset 5 to 6 has a time"):
        read(consumer, 5, 7)
