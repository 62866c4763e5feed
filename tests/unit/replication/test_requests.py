"""What clients ask of a leader: fetches, offsets, deletions, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.log import LogServicer
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import checksum
from penstock.wire.errors import (
    BrokerFencedError,
    ErrorCode,
    FencedLeaderEpochError,
    InvalidRequiredAcksError,
    LeaderNotAvailableError,
    NotLeaderError,
    PenstockError,
    StorageError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.laden import FETCH_RESPONSE
from penstock.wire.records import decode_batch, iter_batches
from tests.support import eventually
from tests.unit.replication.brokers import TOPIC, TOPIC_ID, BrokerProcess, batch, running


def values(records: bytes) -> list[bytes]:
    return [
        record.value or b"" for _, part in iter_batches(records) for record in decode_batch(part)
    ]


def where(partition: int = 0, topic: str = TOPIC) -> common_pb2.TopicPartition:
    return common_pb2.TopicPartition(topic=topic, partition=partition)


# --- Fetch ---------------------------------------------------------------------------------------


async def test_a_fetch_waits_for_what_is_committed() -> None:
    async with running(2) as brokers:
        brokers.create_topic(configs={"min.insync.replicas": "2"})
        brokers[2].logs.hold = True
        fetching = asyncio.create_task(brokers[1].fetch(0))
        appending = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: brokers[2].log().log_end_offset == 1)
        assert not fetching.done()
        brokers[2].logs.release()
        await appending
        result = await fetching
        assert values(result.records) == [b"a"]
        assert (result.high_watermark, result.last_stable_offset) == (1, 1)
        assert not brokers[1].partition().fetch_waiters


async def test_a_fetch_ends_in_time_with_nothing() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        result = await brokers[1].fetch(0, wait_ms=20)
        assert (result.records, result.error.code, result.high_watermark) == (b"", 0, 0)
        assert not brokers[1].partition().fetch_waiters


async def test_a_fetch_gathers_min_bytes_over_several_appends() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"0")
        wanted = 3 * len(batch(b"0"))
        fetching = asyncio.create_task(brokers[1].fetch(1, min_bytes=wanted))
        await eventually(lambda: bool(brokers[1].partition().fetch_waiters))
        for value in (b"1", b"2", b"3"):
            assert not fetching.done()
            await brokers[1].append(value)
        assert values((await fetching).records) == [b"1", b"2", b"3"]


async def test_a_batch_larger_than_every_limit_is_given_alone() -> None:
    async with running(1) as brokers:
        brokers.create_topic(partitions=2)
        for partition in (0, 1):
            await brokers[1].append(b"x" * 5000, partition=partition)
            await brokers[1].append(b"y", partition=partition)
        request = log_pb2.FetchRequest(min_bytes=1, max_bytes=10)
        for partition in (0, 1):
            request.partitions.add(
                partition=where(partition),
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=10,
            )
        sizes = []
        for _ in range(2):
            results = FETCH_RESPONSE.whole(await brokers[1].manager.fetch(request)).partitions
            sizes.append([len(values(result.records)) for result in results])
        # One batch in all; and another partition's turn the next time.
        assert sorted(sizes) == [[0, 1], [1, 0]]


async def test_a_partitions_limit_leaves_room_for_others() -> None:
    async with running(1) as brokers:
        brokers.create_topic(partitions=2)
        for partition in (0, 1):
            for _ in range(3):
                await brokers[1].append(b"x" * 100, partition=partition)
        request = log_pb2.FetchRequest(min_bytes=1, max_bytes=100_000)
        for partition in (0, 1):
            request.partitions.add(
                partition=where(partition),
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=400,
            )
        results = FETCH_RESPONSE.whole(await brokers[1].manager.fetch(request)).partitions
        assert [len(values(result.records)) for result in results] == [2, 2]


async def test_an_answer_has_the_checksum_of_all_its_records() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        empty = await brokers[1].fetch(0, wait_ms=0)
        assert not empty.HasField("records_crc")
        for _ in range(3):
            await brokers[1].append(b"x")
        result = await brokers[1].fetch(0)
        assert len(values(result.records)) == 3
        assert result.records_crc == checksum(result.records)


async def test_an_error_of_one_partition_answers_at_once() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        request = log_pb2.FetchRequest(min_bytes=1, max_wait_ms=60_000)
        request.partitions.add(partition=where(), current_leader_epoch=-1, last_fetched_epoch=-1)
        request.partitions.add(partition=where(7), current_leader_epoch=-1)
        results = FETCH_RESPONSE.whole(await brokers[1].manager.fetch(request)).partitions
        assert [result.error.code for result in results] == [0, 3]
        assert (
            "has no partition 7; it has 1, from 0 to 0; next: name one of these"
            in results[1].error.message
        )


async def test_a_waiting_fetch_learns_of_the_new_leader() -> None:
    async with running() as brokers:
        brokers.create_topic()
        fetching = asyncio.create_task(brokers[1].fetch(0))
        await eventually(lambda: bool(brokers[1].partition().fetch_waiters))
        brokers.change(leader=2)
        result = await fetching
        assert result.error.code == ErrorCode.NOT_LEADER
        leader = result.error.current_leader
        assert (leader.node_id, leader.leader_epoch, leader.port) == (2, 1, brokers[2].port)


@pytest.mark.parametrize(("offset", "code"), [(1, 1), (9, 1), (2, 0), (4, 0)])
async def test_offsets_outside_of_the_log(offset: int, code: int) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a", b"b")
        await brokers[1].append(b"c", b"d")
        brokers[1].partition().advance_log_start(2)
        result = await brokers[1].fetch(offset, wait_ms=0)
        assert result.error.code == code
        if code:
            assert result.error.message.startswith("orders-0 has offsets 2 to 4")


async def test_a_reader_whose_history_was_cut_is_told_where() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a", b"b")  # epoch 0: 0, 1
        for _ in range(3):
            brokers.change(leader=1)
        await brokers[1].append(b"c")  # epoch 3: 2
        cases: list[tuple[int, int, tuple[int, int] | None]] = [
            (2, 0, None),
            (3, 3, None),
            (3, 2, (0, 2)),  # Read two of an epoch that this log never had.
            (3, 0, (0, 2)),
        ]
        for offset, last_epoch, expected in cases:
            result = await brokers[1].fetch(offset, wait_ms=0, last_fetched_epoch=last_epoch)
            end = result.diverging_epoch
            got = (end.leader_epoch, end.end_offset) if result.HasField("diverging_epoch") else None
            assert got == expected, (offset, last_epoch)
        # Of epoch 0 nothing is left: who stands at the log's start is right, who stands later
        # read what is not here.
        brokers[1].partition().advance_log_start(2)
        assert not (await brokers[1].fetch(2, wait_ms=0, last_fetched_epoch=0)).HasField(
            "diverging_epoch"
        )
        end = (await brokers[1].fetch(3, wait_ms=0, last_fetched_epoch=0)).diverging_epoch
        assert (end.leader_epoch, end.end_offset) == (0, 2)


# --- Refusals ------------------------------------------------------------------------------------


async def refusal(broker: BrokerProcess, **options: Any) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await broker.append(b"x", **options)
    return refused.value


async def test_requests_of_another_epoch_are_refused() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        brokers.change(leader=2)
        brokers.change(leader=1)
        await brokers[1].append(b"a", current_leader_epoch=2)
        assert isinstance(await refusal(brokers[1], current_leader_epoch=1), FencedLeaderEpochError)
        assert isinstance(
            await refusal(brokers[1], current_leader_epoch=3), UnknownLeaderEpochError
        )
        result = await brokers[1].fetch(0, current_leader_epoch=0)
        assert result.error.code == ErrorCode.FENCED_LEADER_EPOCH
        assert brokers[1].log().log_end_offset == 1


async def test_unknown_topics_name_near_ones() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        manager = brokers[1].manager
        for topic, topic_id, partition, kind, text in [
            ("ordrs", b"", 0, UnknownTopicOrPartitionError, "did you mean 'orders'?"),
            ("zzz", b"", 0, UnknownTopicOrPartitionError, "no topic 'zzz'"),
            (TOPIC, b"", 4, UnknownTopicOrPartitionError, "has no partition 4"),
            (TOPIC, b"x" * 16, 0, UnknownTopicIdError, "made anew"),
        ]:
            with pytest.raises(kind, match=text):
                await manager.append(
                    topic, topic_id, partition, batch(b"x"), acks=common_pb2.ACKS_ALL, timeout_ms=9
                )
        await manager.append(
            TOPIC, TOPIC_ID, 0, batch(b"x"), acks=common_pb2.ACKS_ALL, timeout_ms=999
        )


async def test_who_does_not_lead_says_who_does() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        error = await refusal(brokers[2])
        assert isinstance(error, NotLeaderError)
        assert error.leader is not None
        assert (error.leader.node_id, error.leader.port) == (1, brokers[1].port)
        brokers.change(leader=-1)
        error = await refusal(brokers[2])
        assert isinstance(error, LeaderNotAvailableError)
        assert "in-sync replicas [1, 2]" in error.message


async def test_a_broker_that_lost_its_lease_serves_nothing() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        brokers[1].may_serve = False
        assert isinstance(await refusal(brokers[1]), BrokerFencedError)
        assert (await brokers[1].fetch(0)).error.code == ErrorCode.BROKER_FENCED
        brokers[1].may_serve = True
        await brokers[1].append(b"a")


async def test_acks_that_mean_nothing_append_nothing() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        error = await refusal(brokers[1], acks=common_pb2.ACKS_UNSPECIFIED)
        assert isinstance(error, InvalidRequiredAcksError)
        assert brokers[1].log().log_end_offset == 0


async def test_a_corrupt_batch_is_refused_and_nothing_is_appended() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        broken = bytearray(batch(b"hello"))
        broken[-1] ^= 1
        with pytest.raises(PenstockError, match="CRC"):
            await brokers[1].manager.append(
                TOPIC, b"", 0, bytes(broken), acks=common_pb2.ACKS_ALL, timeout_ms=9
            )
        assert brokers[1].log().log_end_offset == 0
        await brokers[1].append(b"a")


async def test_a_broken_disk_is_said() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        brokers[1].log().broken = True
        assert isinstance(await refusal(brokers[1]), StorageError)
        assert isinstance(await refusal(brokers[1]), StorageError)


# --- Offsets -------------------------------------------------------------------------------------


def ask(broker: BrokerProcess, timestamp_ms: int) -> log_pb2.ListOffsetsPartitionResult:
    request = log_pb2.ListOffsetsRequest()
    request.partitions.add(partition=where(), timestamp_ms=timestamp_ms, current_leader_epoch=-1)
    return broker.manager.list_offsets(request).partitions[0]


async def test_offsets_by_time() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        for time_ms in (100, 300, 200):
            await brokers[1].manager.append(
                TOPIC,
                b"",
                0,
                batch(b"x", timestamp_ms=time_ms),
                acks=common_pb2.ACKS_ALL,
                timeout_ms=999,
            )
        brokers[1].logs.hold = True
        waiting = asyncio.create_task(brokers[1].append(b"not committed"))
        await eventually(lambda: brokers[1].log().log_end_offset == 4)
        got = [
            (ask(brokers[1], t).offset, ask(brokers[1], t).timestamp_ms)
            for t in (-1, -2, -3, 0, 101, 250, 301)
        ]
        assert got == [(3, -1), (0, -1), (1, 300), (0, 100), (1, 300), (1, 300), (-1, -1)]
        assert ask(brokers[1], -9).error.code == ErrorCode.INVALID_REQUEST
        brokers[1].logs.release()
        await waiting


async def test_a_search_by_time_reads_what_is_cold_in_a_thread_and_others_read_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        asked: list[int] = []
        threads: list[threading.Thread] = []

        def cold_times(*, below: int) -> Callable[[], None]:
            asked.append(below)
            return lambda: threads.append(threading.current_thread())

        monkeypatch.setattr(brokers[1].log(), "cold_times", cold_times)
        servicer = LogServicer(brokers[1].manager, MetadataImage(), BrokerMetrics())
        request = log_pb2.ListOffsetsRequest()
        for timestamp_ms, partition in ((-1, 0), (-2, 0), (0, 0), (0, 7), (-3, 0)):
            request.partitions.add(partition=where(partition), timestamp_ms=timestamp_ms)
            request.partitions[-1].current_leader_epoch = -1
        results = (await servicer.ListOffsets(request, None)).partitions
        assert [result.offset for result in results] == [1, 0, 0, -1, 0]
        assert asked == [1, 1]
        assert len(threads) == 2
        assert threading.current_thread() not in threads


async def test_the_end_does_not_seem_to_go_back_after_an_election() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[2].partition().replica._high_watermark = 0
        brokers[3].logs.hold = True
        brokers[3].deaf = True
        brokers.change(leader=2)
        assert ask(brokers[2], -1).error.code == ErrorCode.LEADER_NOT_AVAILABLE
        assert ask(brokers[2], -2).offset == 0
        brokers[3].listen()
        await eventually(lambda: ask(brokers[2], -1).offset == 1)


async def test_where_epochs_end() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a", b"b")
        brokers.change(leader=1)
        await brokers[1].append(b"c")
        request = log_pb2.OffsetForLeaderEpochRequest()
        for epoch in (0, 1, 5):
            request.partitions.add(partition=where(), current_leader_epoch=-1, leader_epoch=epoch)
        request.partitions.add(partition=where(), current_leader_epoch=0, leader_epoch=0)
        results = brokers[1].manager.offset_for_leader_epoch(request).partitions
        assert [(r.epoch_end.leader_epoch, r.epoch_end.end_offset) for r in results[:3]] == [
            (0, 2),
            (1, 3),
            (1, 3),
        ]
        assert results[3].error.code == ErrorCode.FENCED_LEADER_EPOCH


async def delete(broker: BrokerProcess, before: int, timeout_ms: int = 9000) -> tuple[int, int]:
    request = log_pb2.DeleteRecordsRequest(timeout_ms=timeout_ms)
    request.partitions.add(partition=where(), before_offset=before)
    result = (await broker.manager.delete_records(request)).partitions[0]
    return result.low_watermark, result.error.code


async def test_deleted_records_are_deleted_on_every_in_sync_replica() -> None:
    async with running() as brokers:
        brokers.create_topic()
        for value in (b"a", b"b", b"c"):
            await brokers[1].append(value)
        assert await delete(brokers[1], 2) == (2, 0)
        assert [brokers[n].log().log_start_offset for n in (1, 2, 3)] == [2, 2, 2]
        assert await delete(brokers[1], 9) == (-1, ErrorCode.OFFSET_OUT_OF_RANGE)
        assert await delete(brokers[1], 1) == (2, 0)  # Never back.
        assert await delete(brokers[1], -1) == (3, 0)
        assert (await brokers[1].fetch(0, wait_ms=0)).error.code == ErrorCode.OFFSET_OUT_OF_RANGE


async def test_a_deletion_that_a_replica_does_not_follow_times_out() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers[3].stop()
        assert await delete(brokers[1], 1, 100) == (-1, ErrorCode.REQUEST_TIMED_OUT)
        assert brokers[1].log().log_start_offset == 1


# --- Coordinators --------------------------------------------------------------------------------


async def test_coordinators_read_to_the_end_and_wait_until_it_is_committed() -> None:
    async with running() as brokers:
        brokers.create_topic()
        manager = brokers[1].manager
        for node_id in (2, 3):
            brokers[node_id].logs.hold = True
        appending = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: brokers[1].log().log_end_offset == 1)
        assert manager.read_log(TOPIC, 0, 0, 1000, to_end=False) == b""
        assert values(manager.read_log(TOPIC, 0, 0, 1000, to_end=True)) == [b"a"]
        assert (manager.high_watermark(TOPIC, 0), manager.log_end_offset(TOPIC, 0)) == (0, 1)
        waiting = asyncio.create_task(manager.wait_high_watermark(TOPIC, 0, 1))
        deposed = asyncio.create_task(manager.wait_high_watermark(TOPIC, 0, 2))
        for node_id in (2, 3):
            brokers[node_id].logs.release()
        await asyncio.gather(appending, waiting)
        assert not deposed.done()
        brokers.change(leader=2)
        with pytest.raises(NotLeaderError):
            await deposed
        with pytest.raises(NotLeaderError):
            manager.read_log(TOPIC, 0, 0, 1000, to_end=True)


@pytest.mark.parametrize("late", [1, 3])
async def test_records_count_as_deleted_once_no_power_cut_brings_them_back(late: int) -> None:
    async with running() as brokers:
        brokers.create_topic()
        for value in (b"a", b"b", b"c"):
            await brokers[1].append(value)
        log = brokers[late].log()
        log.holds_start = True
        timed_out = (-1, ErrorCode.REQUEST_TIMED_OUT)
        assert await delete(brokers[1], 2, timeout_ms=100) == timed_out
        assert [brokers[n].log().log_start_offset for n in (1, 2, 3)] == [2, 2, 2]
        deleting = asyncio.create_task(delete(brokers[1], 2))
        await eventually(lambda: bool(brokers[1].partition().log_start_waiters))
        log.durable_start_offset = 2
        brokers[late].logs.on_durable(log)
        assert await deleting == (2, 0)
