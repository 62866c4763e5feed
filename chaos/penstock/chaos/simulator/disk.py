"""Logs in memory with what a disk has of them: a power loss takes what was not flushed.

After a power loss a log is what the last flush left, with the first few of the operations since:
how many is a matter of chance. Of the appends that follow those, some may be there in whole or in
part; who opens the log cuts it before the first that is not sound. After a kill all of them are
there: the page cache survives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import AppendInfo, Buffer, EpochEnd, TimestampedOffset
from penstock.broker.core.producer_state import ANY_PRODUCER, Duplicate, ProducerState
from penstock.chaos.simulator.runs import Runs
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.wire.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    OffsetOutOfRangeError,
    PenstockError,
)
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

_CRC_AT: Final = 17  # The checksum is there, and covers all that follows it.

_FLUSH_MS: Final = {"commit": (1, 6), "interval": (100, 1000), "os": (500, 5000)}


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


def is_sound(batch: Batch) -> bool:
    """Whether a batch is on the disk as it was written. Tests of the checkers put a bug here."""
    try:
        verify_batch(batch.data)
    except PenstockError:
        return False
    return True


def is_served(batch: Batch) -> bool:
    """Whether a reader may be given the batch. Tests of the checkers put a bug here."""
    return is_sound(batch)


def is_failure_heeded() -> bool:
    """Whether a failed flush ends the use of the disk. Tests of the checkers put a bug here."""
    return True


@dataclass(slots=True)
class Contents:
    """What a log holds, on a disk or in the page cache.

    What lies above ``synced`` is looked at by who opens the log. ``flipped`` are the base offsets
    of batches of which the disk has changed a bit since. ``history`` is the leader epoch in which
    the log was last known to be a prefix of its leader's, or -1: a power loss may have brought back
    what had been cut.
    """

    start: int = 0
    end: int = 0
    batches: list[Batch] = field(default_factory=list)
    synced: int = 0
    flipped: set[int] = field(default_factory=set)
    history: int = -1

    def recover(self) -> None:
        """Cut what lies above ``synced`` before the first batch that is not sound."""
        for place in range(self.index_of(self.synced), len(self.batches)):
            if not is_sound(self.batches[place]):
                self.end = self.batches[place].header.base_offset
                del self.batches[place:]
                break
        self.synced = self.end

    def copy(self) -> Contents:
        """The same, to be changed apart."""
        return Contents(self.start, self.end, list(self.batches), self.synced, set(self.flipped))

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
                self.synced = min(self.synced, self.end)
                self.flipped = {base for base in self.flipped if base < self.end}
            case Restart(offset):
                self.start = self.end = self.synced = offset
                self.batches.clear()
                self.flipped.clear()
            case Start(offset):
                self.start = offset
                keep = self.index_of(offset)
                self.flipped.difference_update(b.header.base_offset for b in self.batches[:keep])
                del self.batches[:keep]

    def index_of(self, offset: int) -> int:
        """The place of the batch that holds ``offset``, or of the first after it."""
        place = bisect_right(self.batches, offset, key=lambda batch: batch.header.base_offset) - 1
        if place >= 0 and self.batches[place].header.next_offset > offset:
            return place
        return place + 1


class MemoryLog:
    """The Log port of penstock.broker.core.ports.

    ``waits``: flush.policy is commit; else durable is what is in the page cache. ``generation``
    counts the cuts and ``mends`` what was mended, so that a checker knows when to look again;
    ``history`` is that of Contents, set by who knows the replica.
    """

    def __init__(self, on_disk: Contents, *, waits: bool = True) -> None:
        on_disk.recover()
        self._disk = on_disk
        self._now = on_disk.copy()
        self._operations: list[Operation] = []  # Carried out, and not flushed.
        self._durable = on_disk.end
        self._waits = waits
        self.generation = 0
        self.mends = 0
        self.history = on_disk.history
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
        return self._durable if self._waits else self._now.end

    @property
    def last_epoch(self) -> int:
        """See Log."""
        return self._epochs.last_epoch

    @property
    def contents(self) -> Contents:
        """All of it, to look at."""
        return self._now

    @property
    def on_disk(self) -> Contents:
        """What of it was flushed, to look at."""
        return self._disk

    def batches_from(self, offset: int) -> Iterable[Batch]:
        """Whole batches, from the one that holds ``offset`` on."""
        return self._now.batches[self._now.index_of(offset) :]

    def read(self, offset: int, max_bytes: int, *, below: int, min_one: bool = True) -> bytes:
        """See Log."""
        if not self._now.start <= offset <= self._now.end:
            raise OffsetOutOfRangeError(f"{offset} is outside {self._now.start}..{self._now.end}")
        parts: list[bytes] = []
        size = 0
        for batch in self.batches_from(offset):
            header, data = batch
            size += len(data)
            if header.next_offset > below or (size > max_bytes and (parts or not min_one)):
                break
            if header.base_offset in self._now.flipped and not is_served(batch):
                if parts:
                    break
                raise CorruptRecordError(f"the batch at {header.base_offset} is damaged")
            parts.append(data)
        return b"".join(parts)

    def cold_read(self, offset: int, max_bytes: int) -> Callable[[], None] | None:
        """See Log: everything is in memory."""
        return None

    def cold_times(self, *, below: int) -> Callable[[], None] | None:
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

    def flip_bit(self, rng: Random, below: int, kept: Container[bytes]) -> int | None:
        """Change one bit of a batch on the disk; where that begins, None if there is none.

        Of one of the last below an offset, which somebody may still read here, among those
        ``kept`` elsewhere.
        """
        recent = self._now.batches[-40:]
        lasting = [
            batch
            for batch in self._disk.batches
            if batch.header.next_offset <= below and batch in recent and batch.data in kept
        ]
        if not lasting:
            return None
        header, data = batch = rng.choice(lasting)
        bit = rng.randrange(8 * _CRC_AT, 8 * len(data))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        for contents in (self._disk, self._now):
            contents.batches[contents.batches.index(batch)] = Batch(header, bytes(damaged))
            contents.flipped.add(header.base_offset)
        return header.base_offset

    def first_damage(self) -> int | None:
        """Where the first batch begins that is not sound, None when all are."""
        return min(self._now.flipped, default=None)

    def mend(self, offset: int, records: Buffer) -> bool:
        """Put a sound batch in the damaged one's place, durably; False if it does not fit there.

        It fits if it takes up the same room and is of the leader epoch that this log knows there.
        """
        place = self._now.index_of(offset)
        header, damaged = self._now.batches[place]
        _, view = next(iter_batches(records))
        sound = Batch(verify_batch(view), bytes(view))
        fits = sound.header == header and len(sound.data) == len(damaged)
        if not fits:
            return False
        for contents in (self._disk, self._now):
            at = contents.index_of(offset)
            if at < len(contents.batches) and contents.batches[at].header == header:
                contents.batches[at] = sound
            contents.flipped.discard(offset)
        self.mends += 1
        return True

    def producers_below(self, offset: int) -> bytes:
        """Nothing, as of more producers than are handed over: see simulator.md."""
        return b""

    def truncate_fully_and_start_at(self, offset: int, producers: bytes = b"") -> None:
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
            self._disk.synced = self._disk.end
            del self._operations[:count]
            if generation == self.generation:
                self._durable = max(self._durable, end)

        return finish

    def believe_flushed(self, rng: Random) -> None:
        """Take a failed flush for done, which never must be: the system has dropped the pages."""
        for operation in self._operations:
            broken = _battered(operation, rng) if isinstance(operation, Batch) else operation
            self._disk.apply(broken)
        self._operations.clear()
        self._durable = self._now.end

    def after_crash(self, rng: Random | None) -> Contents:
        """What is found after a crash: all, or with ``rng`` what a power loss left."""
        operations = self._operations
        kept = len(operations) if rng is None else rng.randint(0, len(operations))
        for operation in operations[:kept]:
            self._disk.apply(operation)
        for operation in operations[kept:]:
            if rng is None or not isinstance(operation, Batch):
                break
            self._disk.apply(_battered(operation, rng))
        self._disk.recover()
        self._disk.history = self.history if rng is None else -1
        return self._disk

    @property
    def unflushed(self) -> int:
        """How many operations are not on the disk."""
        return len(self._operations)


def _battered(batch: Batch, rng: Random) -> Batch:
    """A batch as the disk may have it that never was told to keep it."""
    header, data = batch
    at = rng.randrange(len(data))
    match rng.choice(("torn", "zeroes", "garbage", "whole")):
        case "torn":
            return Batch(header, data[:at])
        case "zeroes":
            return Batch(header, data[:at] + bytes(len(data) - at))
        case "garbage":
            return Batch(header, data[:at] + rng.randbytes(len(data) - at))
        case _:
            return batch


class Disk:
    """One node's disk. It outlives the processes of the node.

    ``flush_policy`` is commit, interval or os; but for commit, a flush comes when it comes.
    """

    def __init__(self, scheduler: Scheduler, rng: Random, flush_policy: str = "commit") -> None:
        self.slow_ms = 0  # At most so much longer does a flush take.
        self.flush_fails = False  # The next flush does, and what it was for is in doubt.
        self.high_watermarks: dict[TopicIdPartition, int] = {}
        self.aside: set[TopicIdPartition] = set()
        self.failed: set[TopicIdPartition] = set()  # What is not flushed of these is in doubt.
        self.runs = Runs(waits=flush_policy == "commit")
        self._flush_ms = _FLUSH_MS[flush_policy]
        self._waits = self.runs.waits
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
            kept = self._kept.pop(key, Contents())
            self._open[key] = MemoryLog(kept, waits=self._waits)
            self.cut_high_watermark(key, self._open[key].log_end_offset)
        return self._open[key]

    def cut_high_watermark(self, key: TopicIdPartition, offset: int) -> None:
        """None is kept above the end of a log: what is appended there is other records."""
        if self.high_watermarks.get(key, 0) > offset:
            self.high_watermarks[key] = offset

    def partitions(self) -> list[TopicIdPartition]:
        """The partitions that there is a log of."""
        return sorted({*self._kept, *self._open})

    def contents(self, key: TopicIdPartition) -> Contents | None:
        """What a process has in a partition's log, or would find there."""
        log = self._open.get(key)
        return self._kept.get(key) if log is None else log.contents

    def synced(self, key: TopicIdPartition) -> Contents:
        """What a power loss would leave of a partition's log."""
        log = self._open.get(key)
        return self._kept.get(key, Contents()) if log is None else log.on_disk

    def durable_end(self, key: TopicIdPartition) -> int:
        """Up to where a partition's log counts as durable; -1 without one."""
        if key in self._open:
            return self._open[key].durable_offset
        return self._kept[key].end if key in self._kept else -1

    def erase(self, key: TopicIdPartition) -> None:
        """Delete a partition's log."""
        self._open.pop(key, None)
        self._kept.pop(key, None)
        self.high_watermarks.pop(key, None)

    def set_aside(self, key: TopicIdPartition) -> None:
        """Take a partition's log out of use, for a person to look at."""
        self.aside.add(key)
        self.erase(key)

    def replace(self) -> None:
        """Put an empty disk in its place."""
        self._kept.clear()
        self.high_watermarks.clear()
        self.runs.lost()

    def flush_soon(
        self, log: MemoryLog, on_durable: Callable[[], None], on_failed: Callable[[], None]
    ) -> None:
        """Flush; what comes meanwhile is flushed after it."""
        if id(log) in self._flushing or any(self._open.get(key) is log for key in self.failed):
            return
        self._flushing.add(id(log))
        slow = self._rng.randint(0, self.slow_ms) if self.slow_ms else 0
        if self._waits:
            finish = log.begin_flush()

        def done() -> None:
            self._flushing.discard(id(log))
            if log not in self._open.values():
                return  # The process that wrote it is gone.
            if any(self._open.get(key) is log for key in self.failed):
                return
            failed, self.flush_fails = self.flush_fails, False
            if failed and is_failure_heeded():
                on_failed()
                return
            if failed:
                log.believe_flushed(self._rng)
            elif self._waits:
                finish()
            else:  # The system writes what there is when it comes to it.
                log.begin_flush()()
            on_durable()
            if log.needs_flush:
                self.flush_soon(log, on_durable, on_failed)

        self._scheduler.after(self._rng.randint(*self._flush_ms) + slow, done)

    def crash(self, *, power_loss: bool) -> None:
        """The process ended without a word."""
        for key, log in self._open.items():
            in_doubt = power_loss or key in self.failed
            self._kept[key] = log.after_crash(self._rng if in_doubt else None)
        self._open.clear()
        self.failed.clear()
        self._flushing.clear()
        self.flush_fails = False

    def close(self, broker_epoch: int) -> None:
        """The process stopped of itself, and flushed what it could: all, or it leaves no marker."""
        is_clean = not self.failed
        self.crash(power_loss=False)
        if is_clean:
            self.runs.stopped(broker_epoch)
