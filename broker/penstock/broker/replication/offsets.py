"""Questions about offsets, and moving log starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.replication.cold_reads import warm
from penstock.broker.replication.partition import Partition
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.errors import (
    InvalidRequestError,
    LeaderNotAvailableError,
    OffsetOutOfRangeError,
    PenstockError,
    RequestTimedOutError,
)

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3


class LocateLeader(Protocol):
    """Finds a partition that is led here."""

    def __call__(
        self, where: common_pb2.TopicPartition, current_leader_epoch: int = -1
    ) -> Partition:
        """The partition; raises the typed refusal when it is not led here in that epoch."""
        ...


def list_offsets(
    request: log_pb2.ListOffsetsRequest, locate: LocateLeader
) -> log_pb2.ListOffsetsResponse:
    """Answer an offset query, partition by partition."""
    response = log_pb2.ListOffsetsResponse()
    for entry in request.partitions:
        result = response.partitions.add(
            partition=entry.partition, offset=-1, timestamp_ms=-1, leader_epoch=-1
        )
        try:
            partition = locate(entry.partition, entry.current_leader_epoch)
            found = _find(partition, entry.timestamp_ms, request.isolation_level)
        except PenstockError as error:
            result.error.CopyFrom(error.to_proto())
            continue
        if found is not None:
            result.offset = found.offset
            result.timestamp_ms = found.timestamp_ms
            result.leader_epoch = found.leader_epoch
    return response


async def find_times(request: log_pb2.ListOffsetsRequest, locate: LocateLeader) -> None:
    """Have what an offset query must know of segments found out in threads, before it is answered.

    Raises nothing: the query itself will say what is wrong.
    """
    for entry in request.partitions:
        if entry.timestamp_ms < 0 and entry.timestamp_ms != MAX_TIMESTAMP:
            continue
        try:
            partition = locate(entry.partition, entry.current_leader_epoch)
            job = partition.log.cold_times(below=readable_end(partition, request.isolation_level))
        except PenstockError:
            continue
        if job is not None:
            await warm(job)


def readable_end(partition: Partition, isolation_level: common_pb2.IsolationLevel.ValueType) -> int:
    """Where what a reader may be given ends: the high watermark or the last stable offset."""
    high_watermark = partition.replica.high_watermark
    if isolation_level == common_pb2.ISOLATION_LEVEL_READ_COMMITTED:
        return partition.log.last_stable_offset(high_watermark)
    return high_watermark


def _find(
    partition: Partition, timestamp_ms: int, isolation_level: common_pb2.IsolationLevel.ValueType
) -> TimestampedOffset | None:
    log, replica = partition.log, partition.replica
    if timestamp_ms == EARLIEST:
        return TimestampedOffset(log.log_start_offset, -1, -1)
    committed = replica.high_watermark
    if committed < replica.epoch_start_offset:
        # The former leader may have told a later end than what is known here to be committed;
        # the end must not seem to go back (KIP-207).
        raise LeaderNotAvailableError(
            f"{partition.name}: its new leader does not know yet how much is committed: it knows "
            f"of offset {committed}, and needs word of its in-sync replicas about "
            f"{replica.epoch_start_offset}; retry"
        )
    below = readable_end(partition, isolation_level)
    if timestamp_ms == LATEST:
        return TimestampedOffset(below, -1, replica.leader_epoch)
    if timestamp_ms == MAX_TIMESTAMP:
        return log.max_timestamp(below=below)
    if timestamp_ms < 0:
        raise InvalidRequestError(
            f"timestamp {timestamp_ms} means nothing; send milliseconds since 1970, -1 (latest), "
            "-2 (earliest) or -3 (largest timestamp)"
        )
    return log.offset_for_timestamp(timestamp_ms, below=below)


def offset_for_leader_epoch(
    request: log_pb2.OffsetForLeaderEpochRequest, locate: LocateLeader
) -> log_pb2.OffsetForLeaderEpochResponse:
    """Answer where leader epochs ended, partition by partition."""
    response = log_pb2.OffsetForLeaderEpochResponse()
    for entry in request.partitions:
        result = response.partitions.add(partition=entry.partition)
        try:
            partition = locate(entry.partition, entry.current_leader_epoch)
        except PenstockError as error:
            result.error.CopyFrom(error.to_proto())
            continue
        end = partition.log.end_of_epoch(entry.leader_epoch)
        result.epoch_end.leader_epoch = end.leader_epoch
        result.epoch_end.end_offset = end.end_offset
    return response


async def delete_records(
    request: log_pb2.DeleteRecordsRequest, locate: LocateLeader
) -> log_pb2.DeleteRecordsResponse:
    """Move log starts up, and wait until the in-sync replicas have followed."""
    timeout_s = max(request.timeout_ms, 0) / 1000
    results = await asyncio.gather(
        *(_delete(entry, locate, timeout_s) for entry in request.partitions)
    )
    return log_pb2.DeleteRecordsResponse(partitions=results)


async def _delete(
    entry: log_pb2.DeleteRecordsPartition, locate: LocateLeader, timeout_s: float
) -> log_pb2.DeleteRecordsPartitionResult:
    result = log_pb2.DeleteRecordsPartitionResult(partition=entry.partition, low_watermark=-1)
    try:
        result.low_watermark = await _delete_before(
            locate(entry.partition), entry.before_offset, timeout_s
        )
    except PenstockError as error:
        result.error.CopyFrom(error.to_proto())
    return result


async def _delete_before(partition: Partition, before_offset: int, timeout_s: float) -> int:
    high_watermark = partition.replica.high_watermark
    offset = high_watermark if before_offset == -1 else before_offset
    if not 0 <= offset <= high_watermark:
        raise OffsetOutOfRangeError(
            f"{partition.name}: records may be deleted up to the high watermark {high_watermark}, "
            f"not to {offset}"
        )
    if offset > partition.log.log_start_offset:
        partition.advance_log_start(offset)
    await _until(partition, lambda: low_watermark(partition) >= offset, timeout_s)
    return low_watermark(partition)


def low_watermark(partition: Partition) -> int:
    """The smallest durable log start over the in-sync replicas, as far as they have told.

    What was deleted up to there is not seen again, whoever leads after whatever power cut.
    """
    replica = partition.replica
    followers = (
        follower.log_start_offset
        for node_id, follower in replica.followers().items()
        if node_id in replica.isr
    )
    return min([partition.log.durable_start_offset, *followers])


async def _until(partition: Partition, reached: Callable[[], bool], timeout_s: float) -> None:
    moved = asyncio.Event()
    partition.log_start_waiters.add(moved.set)
    try:
        async with asyncio.timeout(timeout_s):
            while not reached():
                moved.clear()
                await moved.wait()
                partition.check_leading()
    except TimeoutError:
        raise RequestTimedOutError(
            f"{partition.name}: the records are deleted on the leader, but not every in-sync "
            "replica has followed in time; it will"
        ) from None
    finally:
        partition.log_start_waiters.discard(moved.set)
