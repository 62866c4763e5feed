"""What consumers hand out of logs with transactions, by what brokers answer them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.broker.core.transactions import Marker
from penstock.broker.replication.fetch import PartitionRead
from penstock.client.core.aborted import AbortedBatches
from penstock.client.core.fetch_events import (
    FetchAnswered,
    OutOfRange,
    SendFetch,
    Woken,
)
from penstock.client.core.fetcher import Fetcher
from penstock.client.core.subscription import Handout, Position, Run
from penstock.client.fetch_loop import results_of
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from penstock.wire.laden import Laden
from penstock.wire.markers import MarkerType, encode_marker
from penstock.wire.records import RecordData, encode_batch, parse_header
from tests.unit.client.test_fetcher import T0, make, start
from tests.unit.client.test_handout import one, record
from tests.unit.replication.memory_log import MemoryLog

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["plain", "write", "write", "commit", "abort"])),
    max_size=40,
)


class History:
    """A log, and what of it a reader is to get, by the definition."""

    def __init__(self) -> None:
        self.log = MemoryLog(TopicIdPartition(TopicId(b"t" * 16), 0))
        self.all: list[bytes] = []
        self.epochs: dict[int, int] = {}
        self.writes: list[tuple[int, bytes, list[str]]] = []  # Offset, value, and what became.
        self.open: dict[int, list[str]] = {}
        self.first: dict[int, int] = {}

    def do(self, producer_id: int, kind: str) -> None:
        epoch = self.epochs.setdefault(producer_id, 0)
        offset = self.log.log_end_offset
        if kind in ("commit", "abort"):
            marker = Marker(producer_id, epoch + 1, kind == "commit", 0)
            self.log.append_markers([marker], 0, now_ms=1)
            self.epochs[producer_id] = epoch + 1
            if producer_id in self.open:
                self.open.pop(producer_id).append(kind)
                del self.first[producer_id]
            return
        values = [b"%d" % offset, b"%d" % (offset + 1)]
        if kind == "plain":
            data = encode_batch([RecordData(1, None, value) for value in values])
            outcome = ["commit"]
            verified = None
        else:
            data = encode_batch(
                [RecordData(1, None, value) for value in values],
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=0,
                is_transactional=True,
            )
            outcome = self.open.setdefault(producer_id, [])
            self.first.setdefault(producer_id, offset)
            verified = (producer_id, epoch)
        self.log.append_as_leader(data, 0, now_ms=1, verified=verified)
        self.writes += [(offset, values[0], outcome), (offset + 1, values[1], outcome)]

    @property
    def stable(self) -> int:
        return min([self.log.log_end_offset, *self.first.values()])

    def expected(self, offset: int, *, committed: bool) -> list[bytes]:
        return [
            value
            for at, value, outcome in self.writes
            if at >= offset and (not committed or (at < self.stable and outcome == ["commit"]))
        ]


def answer(log: MemoryLog, fetch: SendFetch, *, committed: bool) -> FetchAnswered:
    """What a broker answers that leads the partition, all of which is committed."""
    partition: Any = SimpleNamespace(
        name=T0,
        log=log,
        is_leader=True,
        replica=SimpleNamespace(high_watermark=log.log_end_offset, leader_epoch=0),
    )
    [wanted] = fetch.wanted
    request = log_pb2.FetchPartition(
        partition=common_pb2.TopicPartition(topic="t", partition=0),
        fetch_offset=wanted.offset,
        last_fetched_epoch=wanted.last_fetched_epoch,
        partition_max_bytes=fetch.max_bytes,
    )
    read = PartitionRead(request, lambda _: partition, read_committed=committed)
    read.read(fetch.max_bytes, min_one=True)
    result, records = read.result()
    response = log_pb2.FetchResponse(partitions=[result])
    return FetchAnswered(
        fetch.fetch_id, results_of(Laden(response, [records]), read_committed=committed)
    )


def values_of(fetcher: Fetcher, how: str) -> list[bytes]:
    if how == "columns":
        runs = fetcher.take_columns(3, 10_000, 0)
        texts = []
        for each in runs:
            columns = each.columns
            ends = memoryview(columns.values.offsets).cast("i")
            data = bytes(columns.values.data)
            texts += [data[ends[at] : ends[at + 1]] for at in range(columns.record_count)]
        return texts
    return [one.value or b"" for run in fetcher.take(3, 0) for one in run.records]


@given(
    steps=STEPS,
    part=st.floats(0, 1),
    max_bytes=st.integers(80, 600),
    committed=st.booleans(),
    how=st.sampled_from(["records", "columns"]),
)
def test_a_consumer_gets_what_it_may_see_and_goes_to_the_end(
    steps: list[tuple[int, str]], part: float, max_bytes: int, committed: bool, how: str
) -> None:
    history = History()
    for step in steps:
        history.do(*step)
    end = history.stable if committed else history.log.log_end_offset
    offset = round(part * end)
    fetcher, _ = make((1, 0), max_partition_bytes=max_bytes, prefetch_max_bytes=max_bytes)
    fetches = start(fetcher, offset=offset)
    got: list[bytes] = []
    for _ in range(10 * len(steps) + 10):
        for fetch in fetches:
            effects = fetcher.handle(answer(history.log, fetch, committed=committed), 0)
            assert not [one for one in effects if isinstance(one, OutOfRange)]
        got += values_of(fetcher, how)
        fetches = [one for one in fetcher.handle(Woken(), 0) if isinstance(one, SendFetch)]
        fetches += [one for one in effects if isinstance(one, SendFetch)]
        if fetcher.cursor(T0) == end:
            break
    assert got == history.expected(offset, committed=committed)
    assert fetcher.cursor(T0) == fetcher.end_offset(T0) == end


def head(kind: str, producer_id: int, offset: int) -> Any:
    if kind == "mark":
        return parse_header(
            encode_marker(
                MarkerType.ABORT,
                producer_id=producer_id,
                producer_epoch=0,
                coordinator_epoch=0,
                timestamp_ms=0,
                base_offset=offset,
            )
        )
    return parse_header(
        encode_batch(
            [RecordData(1, None, b"v")] * 2,
            base_offset=offset,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=kind == "transactional",
        )
    )


def test_an_aborted_transaction_ends_with_the_next_mark_of_its_producer() -> None:
    aborted = AbortedBatches([(7, 12), (7, 2)])
    seen = [
        aborted.covers(head(kind, producer_id, offset))
        for kind, producer_id, offset in [
            ("transactional", 7, 0),
            ("transactional", 7, 2),
            ("transactional", 7, 2),
            ("plain", 7, 4),
            ("transactional", 8, 6),
            ("mark", 8, 8),
            ("transactional", 7, 9),
            ("mark", 7, 11),
            ("transactional", 7, 12),
            ("mark", 7, 14),
            ("transactional", 7, 15),
        ]
    ]
    assert seen == [False, True, True, False, False, False, True, False, True, False, False]
    assert not aborted


def test_a_batch_that_is_left_out_is_verified_first() -> None:
    history = History()
    for step in ((1, "write"), (3, "write"), (3, "commit"), (1, "abort")):
        history.do(*step)
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    answered = answer(history.log, fetch, committed=True)
    [result] = answered.results
    damaged = bytearray(result.records)
    damaged[parse_header(damaged).size_bytes + 50] ^= 2  # As if producer 1 had written it.
    fetcher.handle(answered, 0)
    lane = fetcher._lanes[T0]
    lane.chunks[0].data = bytes(damaged)
    assert not any(run.records for run in fetcher.take(10, 0))
    assert isinstance(lane.last_error, CorruptRecordError)
    assert fetcher.cursor(T0) == 2


# --- positions -----------------------------------------------------------------------------------


def records(start: int, stop: int, end: int, partition: TopicPartition = T0) -> Run:
    return Run(partition, [record(at, partition) for at in range(start, stop)], 0, Position(end, 3))


def test_what_is_behind_the_last_record_counts_with_it() -> None:
    handout = Handout()
    handout.begin(T0, Position(0), b"")
    handout.keep([records(0, 2, 5), records(0, 0, 7)])
    assert [one(handout), one(handout)] == [0, 1]
    assert one(handout) is None
    assert handout.processed()[T0] == Position(7, 3)


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_marks_that_come_late_are_gone_past_by_the_next_poll(limit: int) -> None:
    handout = Handout()
    handout.begin(T0, Position(0), b"")
    handout.keep([records(0, 2, 2)])
    while handout.take(limit, 1.0):
        pass
    handout.keep([records(0, 0, 4)])
    assert handout.processed()[T0].offset <= 2
    assert handout.delivered()[T0] == Position(4, 3)
    handout.settle()
    assert handout.processed()[T0] == Position(4, 3)


def test_who_waits_for_the_next_record_is_done_with_marks_that_come_meanwhile() -> None:
    handout = Handout()
    handout.begin(T0, Position(0), b"")
    handout.keep([records(0, 1, 1)])
    assert [one(handout), one(handout)] == [0, None]
    handout.keep([records(0, 0, 2)])
    assert handout.processed()[T0] == Position(2, 3)
    handout.keep([records(2, 3, 3)])
    assert one(handout) == 2
    assert handout.processed()[T0] == Position(2, 3)


def test_nothing_is_gone_past_before_what_is_kept_is_handed_out() -> None:
    handout = Handout()
    handout.begin(T0, Position(0), b"")
    handout.keep([records(0, 2, 2)])
    handout.hold([T0])
    handout.keep([records(0, 0, 4)])
    assert handout.delivered()[T0] == Position(0)
    handout.release([T0])
    handout.take(1, 1.0)
    assert handout.delivered()[T0].offset == 1
    handout.take(1, 1.0)
    assert handout.delivered()[T0] == Position(4, 3)


@pytest.mark.parametrize("committed", [True, False])
def test_reading_stands_behind_what_is_open_until_its_mark(committed: bool) -> None:
    history = History()
    history.do(0, "plain")
    history.do(1, "write")
    history.do(0, "plain")
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    for at_ms in (0, 1_000):
        [effect] = fetcher.handle(answer(history.log, fetch, committed=committed), at_ms)
        assert isinstance(effect, SendFetch)
        fetch = effect
        values_of(fetcher, "records")
    assert (fetcher.held_back(5_000) is not None) == committed
    history.do(1, "commit")
    fetcher.handle(answer(history.log, fetch, committed=committed), 6_000)
    assert fetcher.held_back(9_000) is None
