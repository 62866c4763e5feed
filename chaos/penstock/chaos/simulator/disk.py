"""Logs in memory with what a disk has of them: a power loss takes what was not flushed.

After a power loss a log is what the last flush left, with the first few of the operations since:
how many is a matter of chance. After a kill all of them are there: the page cache survives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import AppendInfo, Buffer, EpochEnd, TimestampedOffset
from penstock.broker.core.producer_state import ANY_PRODUCER, Duplicate, ProducerState
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.wire.errors import CorruptRecordError, FencedLeaderEpochError, OffsetOutOfRangeError
from penstock.wire.ids import LeaderEpoch, TopicIdPartition
from penstock.wire.records import (
    BatchHeader,
    decode_batch,
    iter_batches,
    offset_patch,
    parse_header,
    verify_batch,
    verify_producer_batch,
)


class Batch(NamedTuple):
    """One batch as it stands in a log."""

    header: BatchHeader
    data: bytes


class Cut(NamedTuple):
    """Everything at and after the offset is gone."""

    offset: int


class Restart(NamedTuple):
    """Everything is gone, and the log begins at the offset."""

    offset: int


class Start(NamedTuple):
    """The log begins at the offset."""

    offset: int


Operation = Batch | Cut | Restart | Start


@dataclass(slots=True)
class Contents:
    """What a log holds, on a disk or in the page cache."""

    start: int = 0
    end: int = 0
    batches: list[Batch] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        """Carry out one operation."""
        match operation:
            case Batch(header, _):
                self.batches.append(operation)
                self.end = header.next_offset
            case Cut(offset):
                while self.batches and self.batches[-1].header.next_offset > offset:
                    self.end = self.batches.pop().header.base_offset
                self.end = min(self.end, max(offset, self.start))
                self.start = min(self.start, self.end)  # Batches are not split.
            case Restart(offset):
                self.start = self.end = offset
                self.batches.clear()
            case Start(offset):
                self.start = offset
                keep = self.index_of(offset)
                del self.batches[:keep]

    def index_of(self, offset: int) -> int:
        """The place of the batch that holds ``offset``, or of the first after it."""
        place = bisect_right(self.batches, offset, key=lambda batch: batch.header.base_offset) - 1
        if place >= 0 and self.batches[place].header.next_offset > offset:
            return place
        return place + 1


class MemoryLog:
    """The Log port of penstock.broker.core.ports, under flush.policy=commit.

    ``generation`` counts the cuts, so that a checker knows when to look again.
    """

    def __init__(self, on_disk: Contents) -> None:
        self._disk = on_disk
        self._now = Contents(on_disk.start, on_disk.end, list(on_disk.batches))
        self._operations: list[Operation] = []  # Carried out, and not flushed.
        self._durable = on_disk.end
        self.generation = 0
        self._epochs = EpochHistory()
        for batch in self._now.batches:
            self._epochs.assign(batch.header.leader_epoch, batch.header.base_offset)
        self._epochs.truncate_from_start(self._now.start)
        self._producers = self._rebuilt_producers()

    def _rebuilt_producers(self) -> ProducerState:
        state = ProducerState(forgotten_up_to=ANY_PRODUCER if self._now.start else -1)
        for header, _ in self._now.batches:
            state.record(header, header.base_offset, 0)
        return state

    # Reading.

    @property
    def log_start_offset(self) -> int:
        """See Log."""
        return self._now.start

    @property
    def log_end_offset(self) -> int:
        """See Log."""
        return self._now.end

    @property
    def durable_offset(self) -> int:
        """See Log."""
        return self._durable

    @property
    def last_epoch(self) -> int:
        """See Log."""
        return self._epochs.last_epoch

    def batches_from(self, offset: int) -> Iterable[Batch]:
        """Whole batches, from the one that holds ``offset`` on."""
        return self._now.batches[self._now.index_of(offset) :]

    def read(self, offset: int, max_bytes: int, *, below: int, min_one: bool = True) -> bytes:
        """See Log."""
        if not self._now.start <= offset <= self._now.end:
            raise OffsetOutOfRangeError(f"{offset} is outside {self._now.start}..{self._now.end}")
        parts: list[bytes] = []
        size = 0
        for header, data in self.batches_from(offset):
            size += len(data)
            if header.next_offset > below or (size > max_bytes and (parts or not min_one)):
                break
            parts.append(data)
        return b"".join(parts)

    def cold_read(self, offset: int, max_bytes: int) -> Callable[[], None] | None:
        """See Log: everything is in memory."""
        return None

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        """See Log."""
        return self._epochs.end_of_epoch(leader_epoch, self._now.end)

    def offset_for_timestamp(self, timestamp_ms: int, *, below: int) -> TimestampedOffset | None:
        """See Log."""
        for found in self._timestamps(below):
            if found.timestamp_ms >= timestamp_ms:
                return found
        return None

    def max_timestamp(self, *, below: int) -> TimestampedOffset | None:
        """See Log."""
        return max(self._timestamps(below), key=lambda found: found.timestamp_ms, default=None)

    def _timestamps(self, below: int) -> Iterable[TimestampedOffset]:
        for header, data in self._now.batches:
            for record in decode_batch(data):
                if self._now.start <= record.offset < below:
                    yield TimestampedOffset(record.offset, record.timestamp_ms, header.leader_epoch)

    # Writing.

    def _do(self, operation: Operation) -> None:
        self._operations.append(operation)
        self._now.apply(operation)

    def append_as_leader(
        self, records: Buffer, leader_epoch: LeaderEpoch, *, now_ms: int
    ) -> AppendInfo:
        """See Log."""
        if leader_epoch < self._epochs.last_epoch:
            raise FencedLeaderEpochError(f"epoch {leader_epoch} is over")
        stage = self._producers.staged()
        offset = self._now.end
        batches: list[Batch] = []
        for _, view in iter_batches(records):
            header = verify_producer_batch(view)
            found = stage.check(header)
            if isinstance(found, Duplicate):
                return AppendInfo(found.base_offset, found.last_offset, -1, 0, duplicate=True)
            data = offset_patch(header, offset, leader_epoch) + bytes(view[16:])
            placed = header._replace(base_offset=offset, leader_epoch=leader_epoch)
            stage.record(placed, offset, now_ms)
            batches.append(Batch(placed, data))
            offset = placed.next_offset
        self._append(batches)
        stage.commit()
        size = sum(len(batch.data) for batch in batches)
        return AppendInfo(batches[0].header.base_offset, offset - 1, -1, size)

    def append_as_follower(self, records: Buffer) -> AppendInfo:
        """See Log."""
        stage = self._producers.staged()
        start, offset = self._now.start, self._now.end
        first = parse_header(records)
        if start == offset and first.base_offset < offset <= first.last_offset:
            offset = first.base_offset  # The log begins within this batch.
        begin = offset
        batches: list[Batch] = []
        for _, view in iter_batches(records):
            header = verify_batch(view)
            if header.base_offset != offset:
                raise CorruptRecordError(f"a batch at {header.base_offset} comes after {offset}")
            if header.leader_epoch < self._epochs.last_epoch and not batches:
                raise CorruptRecordError(f"a batch of epoch {header.leader_epoch} comes late")
            stage.record(header, offset, 0)
            batches.append(Batch(header, bytes(view)))
            offset = header.next_offset
        if begin < start:
            self._cut(Restart(begin))
        self._append(batches)
        if begin < start:
            self._do(Start(start))
            self._durable = max(self._durable, start)
        stage.commit()
        return AppendInfo(batches[0].header.base_offset, offset - 1, -1, len(records))

    def _append(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self._epochs.assign(batch.header.leader_epoch, batch.header.base_offset)
            self._do(batch)

    def assign_epoch(self, leader_epoch: LeaderEpoch) -> None:
        """See Log."""
        self._epochs.assign(leader_epoch, self._now.end)

    def truncate_to(self, offset: int) -> None:
        """See Log."""
        if offset < self._now.end:
            self._cut(Cut(offset))
            self._producers = self._rebuilt_producers()
        self._epochs.truncate_from_end(self._now.end)

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """See Log."""
        self._cut(Restart(offset))
        self._epochs.clear()
        self._producers = self._rebuilt_producers()
        self._durable = offset

    def _cut(self, operation: Operation) -> None:
        self.generation += 1
        self._do(operation)
        self._durable = min(self._durable, self._now.end)

    def advance_log_start(self, offset: int) -> None:
        """See Log."""
        if offset > self._now.start:
            self._do(Start(offset))
            self._epochs.truncate_from_start(offset)
            self._durable = max(self._durable, offset)

    # The disk.

    @property
    def needs_flush(self) -> bool:
        """Something is not on the disk."""
        return bool(self._operations)

    def begin_flush(self) -> Callable[[], None]:
        """Start a flush; the call that is returned ends it."""
        count, generation, end = len(self._operations), self.generation, self._now.end

        def finish() -> None:
            for operation in self._operations[:count]:
                self._disk.apply(operation)
            del self._operations[:count]
            if generation == self.generation:
                self._durable = max(self._durable, end)

        return finish

    def after_crash(self, survivors: int | None) -> Contents:
        """What is found after a crash that ``survivors`` (None: all) of the operations survived."""
        for operation in self._operations[:survivors]:
            self._disk.apply(operation)
        return self._disk

    @property
    def unflushed(self) -> int:
        """How many operations are not on the disk."""
        return len(self._operations)


class Disk:
    """One node's disk. It outlives the processes of the node."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.slow_ms = 0  # At most so much longer does a flush take.
        self.clean_epoch = -1  # The broker epoch of a clean shutdown, -1 otherwise.
        self.high_watermarks: dict[TopicIdPartition, int] = {}
        self._scheduler = scheduler
        self._rng = rng
        self._kept: dict[TopicIdPartition, Contents] = {}
        self._open: dict[TopicIdPartition, MemoryLog] = {}
        self._flushing: set[int] = set()

    def hurry(self) -> None:
        """Be as fast as ever again."""
        self.slow_ms = 0

    def log(self, key: TopicIdPartition) -> MemoryLog:
        """Open (or make) a partition's log."""
        if key not in self._open:
            self._open[key] = MemoryLog(self._kept.pop(key, Contents()))
        return self._open[key]

    def partitions(self) -> list[TopicIdPartition]:
        """The partitions that there is a log of."""
        return sorted({*self._kept, *self._open})

    def erase(self, key: TopicIdPartition) -> None:
        """Delete a partition's log."""
        self._open.pop(key, None)
        self._kept.pop(key, None)
        self.high_watermarks.pop(key, None)

    def flush_soon(self, log: MemoryLog, on_durable: Callable[[], None]) -> None:
        """Flush; what comes meanwhile is flushed after it."""
        if id(log) in self._flushing:
            return
        self._flushing.add(id(log))
        finish = log.begin_flush()

        def done() -> None:
            self._flushing.discard(id(log))
            if log not in self._open.values():
                return  # The process that wrote it is gone.
            finish()
            on_durable()
            if log.needs_flush:
                self.flush_soon(log, on_durable)

        slow = self._rng.randint(0, self.slow_ms) if self.slow_ms else 0
        self._scheduler.after(self._rng.randint(1, 6) + slow, done)

    def crash(self, *, power_loss: bool) -> None:
        """The process ended without a word."""
        for key, log in self._open.items():
            survivors = self._rng.randint(0, log.unflushed) if power_loss else None
            self._kept[key] = log.after_crash(survivors)
        self._open.clear()
        self._flushing.clear()

    def close(self, broker_epoch: int) -> None:
        """The process stopped cleanly."""
        self.crash(power_loss=False)
        self.clean_epoch = broker_epoch
