"""Logs in memory with what a disk has of them: a power loss takes what was not flushed.

After a power loss a log is what the last flush left, with the first few of the operations since:
how many is a matter of chance. Of the appends that follow those, some may be there in whole or in
part; who opens the log cuts it before the first that is not sound. After a kill all of them are
there: the page cache survives.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from random import Random
from typing import Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import AppendInfo, Buffer, EpochEnd, TimestampedOffset
from penstock.broker.core.producer_stage import ProducerStage, staged_markers
from penstock.broker.core.producer_state import ANY_PRODUCER, Duplicate, ProducerState
from penstock.broker.core.transactions import (
    EndedTransaction,
    Marker,
    OpenTransaction,
    OpenTransactions,
)
from penstock.chaos.simulator.contents import (
    Batch,
    Contents,
    Cut,
    Operation,
    Restart,
    Start,
    StartWithin,
    battered,
    is_sound,
)
from penstock.wire.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    OffsetOutOfRangeError,
)
from penstock.wire.ids import LeaderEpoch
from penstock.wire.markers import MarkerType, mark_of, marker_type
from penstock.wire.records import (
    decode_batch,
    iter_batches,
    offset_patch,
    parse_header,
    verify_batch,
    verify_producer_batch,
)

_CRC_AT: Final = 17  # The checksum is there, and covers all that follows it.


def is_served(batch: Batch) -> bool:
    """Whether a reader may be given the batch. Tests of the checkers put a bug here."""
    return is_sound(batch)


class _Aborted:
    """The aborted transactions of a log: looked for anew only in what was appended since."""

    __slots__ = ("_as_of", "_found", "_seen", "_transactions")

    def __init__(self) -> None:
        self._as_of: tuple[int, ...] = ()
        self._seen = 0  # So many batches.
        self._found: list[EndedTransaction] = []
        self._transactions = OpenTransactions()

    def of(self, log: MemoryLog) -> list[EndedTransaction]:
        """All of the log, in the order of their marks."""
        contents = log.contents
        # Whatever changes other than what is appended changes one of these.
        as_of = log.generation, log.mends, contents.start, len(contents.flipped)
        if as_of != self._as_of:
            self._as_of, self._seen, self._found = as_of, 0, []
            self._transactions = contents.before.transactions.copy()
        for header, data in contents.batches[self._seen :]:
            ended = self._transactions.note(header, header.base_offset)
            if ended is not None and marker_type(data) is MarkerType.ABORT:
                self._found.append(ended)
        self._seen = len(contents.batches)
        return self._found


class MemoryLog:
    """The Log port of penstock.broker.core.ports.

    ``waits``: flush.policy is commit; else durable is what is in the page cache. ``hands_over``:
    what is known of producers is not too much for a replica that begins anew. ``clock_ms`` tells
    how long producers are silent. ``changes`` counts the operations, ``generation`` the cuts among
    them and ``mends`` what was mended, so that a checker knows when to look again; ``history`` is
    that of Contents, set by who knows the replica.
    """

    def __init__(
        self,
        on_disk: Contents,
        *,
        waits: bool = True,
        hands_over: bool = True,
        clock_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        on_disk.recover()
        self._clock_ms = clock_ms
        self._disk = on_disk
        self._now = on_disk.copy()
        self._operations: list[Operation] = []  # Carried out, and not flushed.
        self._durable = on_disk.end
        self._waits = waits
        self._hands_over = hands_over
        self.internal = False  # One of the cluster's own: transactional batches need no sequence.
        self.changes = 0
        self.generation = 0
        self.mends = 0
        self.history = on_disk.history
        self._epochs = EpochHistory()
        for batch in self._now.batches:
            self._epochs.assign(batch.header.leader_epoch, batch.header.base_offset)
        self._epochs.truncate_from_start(self._now.start)
        self._producers = self._now.producers(self._clock_ms())
        self._aborted = _Aborted()
        self._was_begun = False  # Somebody had it begin anew, and handed over what there was.

    # Reading.

    @property
    def knows_no_producers(self) -> bool:
        """See Log."""
        unknown = ProducerState(forgotten_up_to=ANY_PRODUCER)
        is_empty = self._now.start == self._now.end > 0
        return is_empty and not self._was_begun and self._producers == unknown

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

    # Transactions.

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """See Log."""
        return self._producers.has_open_transaction(producer_id, producer_epoch)

    def open_transactions(self) -> list[OpenTransaction]:
        """See Log."""
        return self._producers.open_transactions()

    def last_stable_offset(self, high_watermark: int) -> int:
        """See Log."""
        stable = self._producers.transactions.stable_offset(high_watermark)
        return min(max(stable, self._now.start), high_watermark)

    def aborted_transactions(self, offset: int, *, below: int) -> list[EndedTransaction]:
        """See Log: those of the whole log that overlap the range."""
        return [
            one
            for one in self._aborted.of(self)
            if one.last_offset >= offset and one.first_offset < below
        ]

    def cold_aborted(self, offset: int) -> Callable[[], None] | None:
        """See Log: everything is in memory."""
        return None

    # Writing.

    def _do(self, operation: Operation) -> None:
        self.changes += 1
        self._operations.append(operation)
        self._now.apply(operation)

    def append_as_leader(
        self,
        records: Buffer,
        leader_epoch: LeaderEpoch,
        *,
        now_ms: int,
        verified: tuple[int, int] | None = None,
    ) -> AppendInfo:
        """See Log."""
        if leader_epoch < self._epochs.last_epoch:
            raise FencedLeaderEpochError(f"epoch {leader_epoch} is over")
        stage = ProducerStage(self._producers)
        offset = self._now.end
        batches: list[Batch] = []
        for _, view in iter_batches(records):
            header = verify_producer_batch(view, sequenced=not self.internal)
            found = stage.check(header)
            if isinstance(found, Duplicate):
                return AppendInfo(found.base_offset, found.last_offset, -1, 0, duplicate=True)
            if header.producer_id >= 0:
                stage.check_transaction(header, verified)
            data = offset_patch(header, offset, leader_epoch) + bytes(view[16:])
            placed = header._replace(base_offset=offset, leader_epoch=leader_epoch)
            stage.record(placed, offset, self._clock_ms())
            batches.append(Batch(placed, data))
            offset = placed.next_offset
        self._append(batches)
        stage.commit()
        size = sum(len(batch.data) for batch in batches)
        return AppendInfo(batches[0].header.base_offset, offset - 1, -1, size)

    def append_markers(
        self, markers: Sequence[Marker], leader_epoch: LeaderEpoch, *, now_ms: int
    ) -> AppendInfo:
        """See Log."""
        if leader_epoch < self._epochs.last_epoch:
            raise FencedLeaderEpochError(f"epoch {leader_epoch} is over")
        stage = ProducerStage(self._producers)
        placed = staged_markers(
            stage,
            markers,
            base_offset=self._now.end,
            leader_epoch=leader_epoch,
            now_ms=now_ms,
            seen_ms=self._clock_ms(),
        )
        if not placed:
            return AppendInfo(-1, -1, -1, 0)
        batches = [Batch(*one) for one in placed]
        self._append(batches)
        stage.commit()
        first, last = batches[0].header, batches[-1].header
        size = sum(len(batch.data) for batch in batches)
        return AppendInfo(first.base_offset, last.last_offset, -1, size)

    def append_as_follower(self, records: Buffer) -> AppendInfo:
        """See Log."""
        stage = ProducerStage(self._producers)
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
            stage.record(header, offset, self._clock_ms(), mark_of(header, view))
            batches.append(Batch(header, bytes(view)))
            offset = header.next_offset
        if begin < start:
            self._cut(StartWithin(begin))
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
        if offset >= self._now.end:
            self._epochs.truncate_from_end(self._now.end)
        elif offset <= self._now.start:
            self.truncate_fully_and_start_at(offset)
        else:
            self._cut(Cut(offset))
            self._producers = self._now.producers(self._clock_ms())
            self._epochs.truncate_from_end(self._now.end)

    def forget(self, offset: int) -> None:
        """The disk has nothing at or after the offset any more, whatever it had confirmed."""
        self.truncate_to(offset)
        self.begin_flush()()

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

    @property
    def producers(self) -> ProducerState:
        """What is known of producers, to look at."""
        return self._producers

    def note_committed(self, offset: int) -> None:
        """See Log: a cut here takes no time."""
        self._producers.transactions.committed(offset)

    def expire_producers(self, expiration_ms: int) -> int:
        """Forget those that have written nothing for so long; how many there were."""
        return self._producers.expire(self._clock_ms(), expiration_ms)

    def producers_below(self, offset: int) -> bytes:
        """See Log."""
        return self._producers.handed_over(offset) if self._hands_over else b""

    def truncate_fully_and_start_at(self, offset: int, producers: bytes = b"") -> None:
        """See Log."""
        if offset == self._now.start and not producers:
            producers = self.producers_below(offset)
        self._cut(Restart(offset, producers))
        self._was_begun = True
        self._epochs.clear()
        self._producers = self._now.producers(self._clock_ms())
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
            broken = battered(operation, rng) if isinstance(operation, Batch) else operation
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
            self._disk.apply(battered(operation, rng))
        self._disk.recover()
        self._disk.history = self.history if rng is None else -1
        return self._disk

    @property
    def unflushed(self) -> int:
        """How many operations are not on the disk."""
        return len(self._operations)
