"""What a read_committed fetch and its offset queries are given, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from penstock.broker.core.transactions import EndedTransaction, Marker
from penstock.broker.replication.offsets import LATEST, MAX_TIMESTAMP
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.errors import CorruptRecordError, ErrorCode
from penstock.wire.ids import LeaderEpoch
from penstock.wire.laden import FETCH_RESPONSE
from penstock.wire.records import RecordData, encode_batch, iter_batches
from tests.support import eventually
from tests.unit.replication.brokers import TOPIC, BrokerProcess, batch, running

COMMITTED = common_pb2.ISOLATION_LEVEL_READ_COMMITTED
UNCOMMITTED = common_pb2.ISOLATION_LEVEL_READ_UNCOMMITTED


def write(
    broker: BrokerProcess, value: bytes, *, producer_id: int = 7, timestamp_ms: int = 0
) -> None:
    """A record of the producer's transaction."""
    data = encode_batch(
        [RecordData(timestamp_ms, None, value)],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=broker.log().log_end_offset,  # Logs in memory don't look at it.
        is_transactional=True,
    )
    append(broker, data, (producer_id, 0))


def append(broker: BrokerProcess, data: bytes, verified: tuple[int, int] | None = None) -> None:
    partition = broker.partition()
    epoch = LeaderEpoch(partition.replica.leader_epoch)
    partition.log.append_as_leader(data, epoch, now_ms=0, verified=verified)
    partition.log_moved()
    for feed in partition.feeds.values():
        feed.records_ready(partition, len(data))


def end(broker: BrokerProcess, *, commit: bool, producer_id: int = 7) -> None:
    partition = broker.partition()
    markers = [Marker(producer_id, 1, commit, 0)]
    epoch = LeaderEpoch(partition.replica.leader_epoch)
    info = partition.log.append_markers(markers, epoch, now_ms=0)
    partition.log_moved()
    for feed in partition.feeds.values():
        feed.records_ready(partition, info.size_bytes)


async def fetch(
    broker: BrokerProcess,
    offset: int,
    *,
    max_wait_ms: int = 0,
    level: common_pb2.IsolationLevel.ValueType = COMMITTED,
) -> log_pb2.FetchPartitionResult:
    request = log_pb2.FetchRequest(min_bytes=1, max_wait_ms=max_wait_ms, isolation_level=level)
    request.partitions.add(
        partition=common_pb2.TopicPartition(topic=TOPIC, partition=0),
        fetch_offset=offset,
        current_leader_epoch=-1,
        last_fetched_epoch=-1,
    )
    return FETCH_RESPONSE.whole(await broker.manager.fetch(request)).partitions[0]


def listed(
    broker: BrokerProcess, timestamp_ms: int, level: common_pb2.IsolationLevel.ValueType
) -> int:
    request = log_pb2.ListOffsetsRequest(isolation_level=level)
    request.partitions.add(
        partition=common_pb2.TopicPartition(topic=TOPIC, partition=0),
        timestamp_ms=timestamp_ms,
        current_leader_epoch=-1,
    )
    return broker.manager.list_offsets(request).partitions[0].offset


def aborted(result: log_pb2.FetchPartitionResult) -> list[tuple[int, int]]:
    return [(one.producer_id, one.first_offset) for one in result.aborted_transactions]


def end_of(result: log_pb2.FetchPartitionResult) -> int:
    ends = [header.next_offset for header, _ in iter_batches(result.records)]
    return ends[-1] if ends else -1


def all_committed(broker: BrokerProcess) -> Callable[[], bool]:
    return lambda: broker.partition().replica.high_watermark == broker.log().log_end_offset


async def test_a_fetch_ends_at_the_last_stable_offset() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        append(broker, batch(b"a"))
        write(broker, b"b")
        append(broker, batch(b"c"))
        await eventually(all_committed(broker))
        for offset, expected in ((0, 1), (1, -1), (2, -1)):
            result = await fetch(broker, offset)
            assert (end_of(result), result.error.code) == (expected, 0)
            assert (result.high_watermark, result.last_stable_offset) == (3, 1)
        unbounded = await fetch(broker, 0, level=UNCOMMITTED)
        assert (end_of(unbounded), unbounded.last_stable_offset) == (3, 1)


async def test_an_answer_names_the_aborted_transactions_in_it() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        write(broker, b"a")
        write(broker, b"b", producer_id=8)
        end(broker, commit=False)
        end(broker, commit=True, producer_id=8)
        write(broker, b"c", producer_id=9)
        end(broker, commit=False, producer_id=9)
        await eventually(all_committed(broker))
        result = await fetch(broker, 0)
        assert (end_of(result), aborted(result)) == (6, [(7, 0), (9, 4)])
        assert aborted(await fetch(broker, 3)) == [(9, 4)]
        assert aborted(await fetch(broker, 0, level=UNCOMMITTED)) == []


async def test_a_fetch_waits_until_the_mark_is_committed() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        broker = brokers[1]
        write(broker, b"a")
        await eventually(all_committed(broker))
        fetching = asyncio.create_task(fetch(broker, 0, max_wait_ms=60_000))
        await eventually(lambda: bool(broker.partition().fetch_waiters))
        brokers[2].logs.hold = True
        end(broker, commit=False)
        await eventually(lambda: brokers[2].log().log_end_offset == 2)
        assert broker.log().last_stable_offset(1) == 0
        assert not fetching.done()
        brokers[2].logs.release()
        result = await fetching
        assert (end_of(result), aborted(result), result.last_stable_offset) == (2, [(7, 0)], 2)


async def test_who_leads_next_knows_what_is_open() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        write(brokers[1], b"a")
        await eventually(all_committed(brokers[1]))
        await eventually(lambda: brokers[2].log().log_end_offset == 1)
        brokers.change(leader=2)
        await eventually(lambda: brokers[2].partition().replica.high_watermark == 1)
        result = await fetch(brokers[2], 0)
        assert (end_of(result), result.last_stable_offset) == (-1, 0)
        end(brokers[2], commit=True)
        assert end_of(await fetch(brokers[2], 0, max_wait_ms=60_000)) == 2


async def test_offsets_are_looked_for_below_the_last_stable_offset() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        append(broker, batch(b"a", timestamp_ms=10))
        write(broker, b"b", timestamp_ms=20)
        await eventually(all_committed(broker))
        for timestamp_ms, committed, uncommitted in (
            (LATEST, 1, 2),
            (MAX_TIMESTAMP, 0, 1),
            (15, -1, 1),
            (5, 0, 0),
        ):
            assert listed(broker, timestamp_ms, COMMITTED) == committed
            assert listed(broker, timestamp_ms, UNCOMMITTED) == uncommitted
        end(broker, commit=False)
        await eventually(all_committed(broker))
        assert listed(broker, LATEST, COMMITTED) == 3


async def test_an_index_that_is_not_in_memory_is_read_in_a_thread() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        write(broker, b"a")
        end(broker, commit=False)
        await eventually(all_committed(broker))
        threads: list[int] = []
        jobs = [lambda: threads.append(threading.get_ident())]
        broker.log().cold_aborted = lambda _: jobs.pop() if jobs else None  # type: ignore[method-assign]
        assert end_of(await fetch(broker, 0, level=UNCOMMITTED)) == 2
        assert threads == []
        result = await fetch(broker, 0)
        assert aborted(result) == [(7, 0)]
        assert len(threads) == 1
        assert threads != [threading.get_ident()]


async def test_nothing_is_served_whose_aborted_transactions_are_not_known() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broker = brokers[1]
        write(broker, b"a")
        end(broker, commit=False)
        await eventually(all_committed(broker))

        def damaged(_: int, *, below: int) -> list[EndedTransaction]:
            raise CorruptRecordError("the index can't be made anew")

        broker.log().aborted_transactions = damaged  # type: ignore[method-assign]
        result = await fetch(broker, 0)
        assert (result.records, result.error.code) == (b"", ErrorCode.CORRUPT_MESSAGE)
