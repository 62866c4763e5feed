"""Fetch by long poll: read what is committed, or wait until it is.

Of transactions ``read_committed`` is given what is decided: all below the last stable offset, and
beside it which transactions were aborted that have, or may have, records in the answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.transactions import EndedTransaction
from penstock.broker.replication.cold_reads import Job, both, warm
from penstock.broker.replication.partition import Partition
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import Buffer, checksum
from penstock.wire.errors import OffsetOutOfRangeError, PenstockError
from penstock.wire.laden import Laden
from penstock.wire.records import HEADER_BYTES, parse_header

MAX_FETCH_BYTES: Final = 48 * 1024 * 1024
"""No answer is larger, but for one batch that is: it fits a gRPC message in any case."""

MAX_WAIT_MS: Final = 300_000

_LENGTH: Final = struct.Struct(">i")
_LENGTH_AT: Final = 8  # In a batch; it counts what follows it.


class Room(Protocol):
    """What there is in memory for one answer, which others share."""

    def left(self) -> int:
        """What may be read now; at 0 nothing may."""
        ...

    def take(self, size_bytes: int) -> None:
        """So much was read."""
        ...


class _Boundless:
    def left(self) -> int:
        return MAX_FETCH_BYTES

    def take(self, size_bytes: int) -> None:
        pass


BOUNDLESS: Final[Room] = _Boundless()
"""For answers that leave at once."""

Locate = Callable[[log_pb2.FetchPartition], Partition]
"""The partition asked for, when it is led here under the epoch asked for; else it raises."""


def next_offset_after(records: Buffer) -> int:
    """The offset after the last of whole batches, which a log has checked. There is at least one.

    Raises CorruptRecordError when they are no batches.
    """
    last, position, end = 0, 0, len(records)
    while position + HEADER_BYTES <= end:
        last = position
        (length,) = _LENGTH.unpack_from(records, position + _LENGTH_AT)
        if length < HEADER_BYTES - _LENGTH_AT - _LENGTH.size:
            break  # parse_header says what is wrong.
        position += _LENGTH_AT + _LENGTH.size + length
    return parse_header(records, last).next_offset


class PartitionRead:
    """What one partition of a fetch has given so far."""

    __slots__ = (
        "_aborted",
        "_chunks",
        "_leader_epoch",
        "_next_offset",
        "_read_committed",
        "diverging",
        "error",
        "partition",
        "request",
        "size_bytes",
    )

    def __init__(
        self, request: log_pb2.FetchPartition, locate: Locate, *, read_committed: bool = False
    ) -> None:
        self.request = request
        self.partition: Partition | None = None
        self.error: PenstockError | None = None
        self.diverging: EpochEnd | None = None
        self.size_bytes = 0
        self._read_committed = read_committed
        self._chunks: list[Buffer] = []
        self._aborted: dict[EndedTransaction, None] = {}  # In the chunks, or perhaps.
        self._next_offset = request.fetch_offset
        self._leader_epoch = -1
        try:
            partition = locate(request)
            self._check_position(partition)
        except PenstockError as error:
            self.error = error
        else:
            self.partition = partition
            self._leader_epoch = partition.replica.leader_epoch

    @property
    def settled(self) -> bool:
        """Whether the fetch is to be answered at once for this partition's sake."""
        return self.error is not None or self.diverging is not None

    def _check_position(self, partition: Partition) -> None:
        request, log = self.request, partition.log
        start, end = log.log_start_offset, log.log_end_offset
        if request.last_fetched_epoch >= 0:
            self.diverging = divergence(partition, request.fetch_offset, request.last_fetched_epoch)
        if self.diverging is None and not start <= request.fetch_offset <= end:
            raise OffsetOutOfRangeError(
                f"{partition.name} has offsets {start} to {end}, {request.fetch_offset} is outside;"
                " seek to one of them"
            )

    def _limit(self, budget: int) -> int:
        most = self.request.partition_max_bytes or MAX_FETCH_BYTES
        return min(budget, most - self.size_bytes)

    def _below(self, partition: Partition) -> int:
        """Where what this reader may be given ends."""
        high_watermark = partition.replica.high_watermark
        if self._read_committed:
            return partition.log.last_stable_offset(high_watermark)
        return high_watermark

    def _leads(self, partition: Partition) -> bool:
        return partition.is_leader and partition.replica.leader_epoch == self._leader_epoch

    def cold(self, budget: int, *, min_one: bool) -> Job | None:
        """What is to be run in a thread before ``read``; None when that needs no disk."""
        partition, limit = self.partition, self._limit(budget)
        if (
            partition is None
            or self.settled
            or not self._leads(partition)
            or self._next_offset >= self._below(partition)
            or (limit <= 0 and not min_one)
        ):
            return None
        log = partition.log
        try:
            records = log.cold_read(self._next_offset, max(limit, 1))
        except PenstockError:
            return None  # ``read`` meets it too, and answers.
        try:
            aborted = log.cold_aborted(self._next_offset) if self._read_committed else None
        except PenstockError:
            aborted = None
        return both(records, aborted)

    def read(self, budget: int, *, min_one: bool) -> int:
        """Read on, up to ``budget`` bytes; the bytes gained."""
        partition = self.partition
        if partition is None or self.settled:
            return 0
        if not self._leads(partition):
            self._lost_leader(partition)
            return 0
        below = self._below(partition)
        limit = self._limit(budget)
        offset = self._next_offset
        if offset >= below or (limit <= 0 and not min_one):
            return 0
        log = partition.log
        try:
            data = log.read(offset, max(limit, 0), below=below, min_one=min_one)
            if not data:
                return 0
            next_offset = next_offset_after(data)
            if self._read_committed:
                aborted = log.aborted_transactions(offset, below=next_offset)
                self._aborted.update(dict.fromkeys(aborted))
        except PenstockError as error:
            if not self._chunks:
                self.error = error
            return 0
        self._next_offset = next_offset
        self._chunks.append(data)
        self.size_bytes += len(data)
        return len(data)

    def _lost_leader(self, partition: Partition) -> None:
        # What was read is committed and stays true, but the client must look elsewhere for more.
        try:
            partition.check_leading()
        except PenstockError as error:
            self.error = error
        else:
            self._leader_epoch = partition.replica.leader_epoch

    def result(self) -> tuple[log_pb2.FetchPartitionResult, Buffer]:
        """The answer for this partition, and its records beside it."""
        result = log_pb2.FetchPartitionResult(
            partition=self.request.partition,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
        )
        if self.error is not None:
            result.error.CopyFrom(self.error.to_proto())
            return result, b""
        partition = self.partition
        assert partition is not None
        result.high_watermark = high_watermark = partition.replica.high_watermark
        result.last_stable_offset = partition.log.last_stable_offset(high_watermark)
        result.log_start_offset = partition.log.log_start_offset
        if self.diverging is not None:
            result.diverging_epoch.leader_epoch = self.diverging.leader_epoch
            result.diverging_epoch.end_offset = self.diverging.end_offset
        elif self._chunks:
            records = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            result.records_crc = checksum(records)
            for one in sorted(self._aborted, key=lambda one: one.first_offset):
                result.aborted_transactions.add(
                    producer_id=one.producer_id, first_offset=one.first_offset
                )
            return result, records
        return result, b""


def divergence(partition: Partition, fetch_offset: int, last_fetched_epoch: int) -> EpochEnd | None:
    """Where the reader's history leaves this log's, if it does (KIP-320)."""
    log = partition.log
    end = log.end_of_epoch(last_fetched_epoch)
    if end.leader_epoch < 0:
        # Only newer epochs are left here, and they begin at the log's start at the latest.
        if fetch_offset <= log.log_start_offset:
            return None
        return EpochEnd(last_fetched_epoch, log.log_start_offset)
    if end.leader_epoch < last_fetched_epoch or end.end_offset < fetch_offset:
        return end
    return None


class Fetcher:
    """Answers fetches. An idle one costs nothing: it is woken by what it waits for."""

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._rotation = 0

    async def fetch(
        self, request: log_pb2.FetchRequest, room: Room = BOUNDLESS
    ) -> Laden[log_pb2.FetchResponse]:
        """Answer when ``min_bytes`` are there, when something is to be told, or in time; and at
        once when there is no ``room`` for what could be read.
        """
        committed = request.isolation_level == common_pb2.ISOLATION_LEVEL_READ_COMMITTED
        reads = [
            PartitionRead(entry, self._locate, read_committed=committed)
            for entry in request.partitions
        ]
        budget = min(request.max_bytes or MAX_FETCH_BYTES, MAX_FETCH_BYTES)
        total, waited = await _read_round(self._rotated(reads), budget, 0, room)
        if (
            total < request.min_bytes
            and request.max_wait_ms > 0
            and not _settled(reads)
            and room.left()
        ):
            # While the disk was waited for, those read before may have got more.
            await self._wait(request, reads, budget, reads if waited else (), room)
        results = [read.result() for read in reads]
        response = log_pb2.FetchResponse(partitions=[result for result, _ in results])
        return Laden(response, [records for _, records in results])

    def _rotated(self, reads: list[PartitionRead]) -> list[PartitionRead]:
        # Every fetch begins with another partition, so that a full answer starves none.
        if len(reads) < 2:
            return reads
        self._rotation += 1
        first = self._rotation % len(reads)
        return reads[first:] + reads[:first]

    async def _wait(
        self,
        request: log_pb2.FetchRequest,
        reads: list[PartitionRead],
        budget: int,
        again: Sequence[PartitionRead],
        room: Room,
    ) -> None:
        loop = asyncio.get_running_loop()
        by_partition: dict[Partition, list[PartitionRead]] = {}
        for read in reads:
            if read.partition is not None:
                by_partition.setdefault(read.partition, []).append(read)
        dirty = dict.fromkeys(again)
        woken = asyncio.Event()
        if dirty:
            woken.set()
        expired = False
        total = sum(read.size_bytes for read in reads)

        def wake(partition: Partition) -> None:
            dirty.update(dict.fromkeys(by_partition[partition]))
            woken.set()

        def expire() -> None:
            nonlocal expired
            expired = True
            woken.set()

        timer = loop.call_later(min(request.max_wait_ms, MAX_WAIT_MS) / 1000, expire)
        for partition in by_partition:
            partition.fetch_waiters.add(wake)
        try:
            while total < request.min_bytes and not expired and not _settled(reads):
                await woken.wait()
                woken.clear()
                changed = list(dirty)
                dirty.clear()
                gained, _ = await _read_round(changed, budget - total, total, room)
                total += gained
                if not gained and not room.left():
                    return
        finally:
            timer.cancel()
            for partition in by_partition:
                partition.fetch_waiters.discard(wake)


def _settled(reads: Sequence[PartitionRead]) -> bool:
    return any(read.settled for read in reads)


async def _read_round(
    reads: Sequence[PartitionRead], budget: int, total: int, room: Room
) -> tuple[int, bool]:
    """Read each of them on; the bytes gained, and whether the loop did other work meanwhile."""
    gained, waited = 0, False
    for read in reads:
        if read.partition is None:
            continue  # It has an error to tell.
        if not (left := room.left()):
            break
        job = read.cold(min(budget - gained, left), min_one=total + gained == 0)
        if job is not None:
            waited = True
            await warm(job)
            if not (left := room.left()):  # Others were answered meanwhile.
                break
        size_bytes = read.read(min(budget - gained, left), min_one=total + gained == 0)
        room.take(size_bytes)
        gained += size_bytes
    return gained, waited
