"""Producer state from a snapshot and the batches that follow it in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.producer_state import (
    ANY_PRODUCER,
    NEVER_FORGOT,
    RESTART_GRACE_MS,
    ProducerState,
)
from penstock.broker.core.producer_undo import ProducerUndo
from penstock.broker.core.transactions import EndedTransaction
from penstock.broker.storage.checkpoints import newest_snapshot, snapshot_path, write_ahead
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.log_files import Batch, FileWrite, LogFiles
from penstock.broker.storage.log_start import LogStart
from penstock.broker.storage.walking import ChangedError, Source, batches_between
from penstock.wire.batch import checksum_of
from penstock.wire.errors import CorruptRecordError, ErrorCode, RequestTimedOutError
from penstock.wire.markers import mark_of
from penstock.wire.records import BatchHeader, Buffer, verify_batch

_log = structlog.get_logger()
_EXPIRY_INTERVAL_MS: Final = 600_000
_INLINE_BYTES: Final = 256 * 1024
"""So much of a log is read for a cut at once: some milliseconds, also where batches are small."""

_UNDONE_BYTES: Final = 32 * 1024
"""So much of what a start reads can be taken back: what a killed broker holds and no leader has is
a message or two, and of larger ones there are fewer batches to be read.
"""


class CutDelayedError(RequestTimedOutError, code=ErrorCode.REQUEST_TIMED_OUT, retriable=True):
    """What a cut needs is being read in the background: it is to be tried again."""


class FoundProducers(NamedTuple):
    """What a start found of the producers of a log, and what takes the last batches back."""

    state: ProducerState
    undo: ProducerUndo


def load_producers(
    files: LogFiles, end_offset: int, epochs: EpochHistory, now_ms: int, *, committed: int = 0
) -> FoundProducers:
    """What the producers wrote below ``end_offset``; all below ``committed`` is committed.

    The clock of an append is not in the log, so those found there count as seen at ``now_ms``:
    they are remembered rather too long than too short. Without the log's beginning and a snapshot
    of it, any producer may have been forgotten. A batch that is not what its producer was to send
    next is believed only if its checksum holds: one bit of a header would let in what is there
    already, or refuse all that comes. Else it is in doubt, and whoever asks for the state is to
    have it mended. Raises CorruptRecordError where a header can't be.
    """
    state, offset = _known(files, end_offset, epochs)
    undo = ProducerUndo()
    _replay(files, state, offset, end_offset, now_ms, undo=undo, committed=committed)
    _tell_of_doubts(files, state)
    return FoundProducers(state, undo)


def _tell_of_doubts(files: LogFiles, state: ProducerState) -> None:
    if state.doubted:
        _log.error(
            "log_has_damaged_batches",
            path=str(files.directory),
            first_offset=state.doubted[0].header.base_offset,
            batches=len(state.doubted),
            reason="their checksums do not hold, so nobody knows who wrote them",
            next_step="they are not served, and mended once another replica is in sync; look at "
            "the disk",
        )


def _known(files: LogFiles, end_offset: int, epochs: EpochHistory) -> tuple[ProducerState, int]:
    """The newest state that is known at or below ``end_offset``, and of which offset."""
    first = files.segments[0].base_offset
    found = newest_snapshot(files.directory, end_offset, epochs)
    if found is None or found[1] < first:
        return _unknown(first), first
    transactions = found[0].transactions
    for producer_id, first_offset in transactions.first_offsets().items():
        if first_offset >= first and not _begins_at(files, first_offset, producer_id):
            transactions.forget(producer_id)
    return found


def _begins_at(files: LogFiles, offset: int, producer_id: int) -> bool:
    """Whether a batch of the producer's transaction begins at the offset.

    Once one that was open when a snapshot was taken is decided, compaction may leave nothing of it,
    nor of its mark. One that is open still is not touched.
    """
    placed = files.segment_of(offset).position_of(offset)
    if placed is None:
        return False
    header = placed.header
    is_of_it = header.producer_id == producer_id and header.is_transactional
    return is_of_it and header.base_offset == offset and not header.is_control


def _unknown(first: int) -> ProducerState:
    """What is known of a log that begins at an offset where nothing was written down."""
    return ProducerState(forgotten_up_to=ANY_PRODUCER if first else NEVER_FORGOT)


def _replay(
    files: LogFiles,
    state: ProducerState,
    offset: int,
    end: int,
    now_ms: int,
    *,
    undo: ProducerUndo | None = None,
    committed: int = 0,
) -> None:
    """Bring the state at ``offset`` up to ``end``; ``undo`` notes the last of it.

    Marks below ``committed`` are for good.
    """
    active = files.active
    for segment, placed in files.walk(offset, end):
        header = placed.header
        read = partial(segment.read_at, header.size_bytes, placed.position)
        is_last = segment is active and active.size_bytes - placed.position <= _UNDONE_BYTES
        _note(state, header, read, now_ms, undo if is_last else None)
        if header.is_control:  # There may be very many of them.
            state.transactions.committed(committed)


def _note(
    state: ProducerState,
    header: BatchHeader,
    read: Callable[[], Buffer],
    now_ms: int,
    undo: ProducerUndo | None = None,
) -> None:
    """Bring the state up to the end of a batch that may be damaged; ``read`` gives all of it."""
    mark = None
    if not state.expects(header):
        batch = read()
        try:
            verify_batch(batch)
        except CorruptRecordError:
            state.doubt(header, checksum_of(batch))
            return
        mark = mark_of(header, batch)
    if undo is None:
        state.record(header, header.base_offset, now_ms, mark)
        return
    stage = ProducerStage(state)
    stage.record(header, header.base_offset, now_ms, mark)
    undo.note(header.base_offset, header.next_offset, stage)
    stage.commit()


def bounded(producers: ProducerState, home: DataDirectory) -> ProducerState:
    """What was found on the disk, with the times that this process can trust."""
    now_ms, expiration_ms = home.clock_ms(), home.settings.producer_expiration_ms
    oldest_ms = now_ms - expiration_ms + min(RESTART_GRACE_MS, expiration_ms)
    producers.bound_ages(oldest_ms, now_ms)
    return producers


class Expiry:
    """Forgets the producers of one log that have long been silent, now and then."""

    def __init__(self, home: DataDirectory) -> None:
        self._home = home
        self._next_ms = home.clock_ms() + _EXPIRY_INTERVAL_MS

    def run(self, producers: ProducerState) -> tuple[int, bool]:
        """Forget who is to be forgotten; the time by which that is judged, and whether any was.

        Not the time that records are stamped with: that may jump, and then a retry of what was
        written a moment ago would be written again.
        """
        now_ms = self._home.clock_ms()
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + _EXPIRY_INTERVAL_MS
            gone = producers.expire(now_ms, self._home.settings.producer_expiration_ms)
            return now_ms, gone > 0
        return now_ms, False


def states_at(
    offsets: Sequence[int], before: ProducerState, batches: Sequence[Batch], seen_ms: int
) -> Iterator[tuple[int, ProducerState]]:
    """The state ``before`` an append of ``batches`` as it is at each of the rising ``offsets``
    where one of them begins, a copy for each.
    """
    if not offsets:
        return
    state, at = before.copy(), 0
    for offset in offsets:
        while batches[at].header.base_offset < offset:
            header = batches[at].header
            mark = None
            if header.is_control:
                mark = mark_of(header, b"".join(batches[at].buffers))
            state.record(header, header.base_offset, seen_ms, mark)
            at += 1
        yield offset, state.copy()


class LogProducers:
    """What one log knows of its producers, and what of that is written down. On the log's thread.

    ``state`` is as of the log's end. While a batch that is not deleted is in doubt no snapshot is
    written: a later start would believe that there was no such batch.
    """

    def __init__(
        self,
        home: DataDirectory,
        files: LogFiles,
        epochs: EpochHistory,
        start: LogStart,
        found: FoundProducers,
        *,
        name: str,
    ) -> None:
        state, self._undo = found
        self.state = bounded(state, home)
        self._home = home
        self._files = files
        self._epochs = epochs
        self._start = start
        self._name = name
        # Nobody was asked for what is not written down of the log's beginning.
        self.are_unknown = start.offset > 0 and state == _unknown(start.offset)
        self._expiry = Expiry(home)
        self._rewinding = Rewinding(home, files, epochs, name=name)

    @property
    def doubted_offsets(self) -> tuple[int, ...]:
        """Of each damaged batch that is not deleted, and of which nobody knows who wrote it."""
        start = self._start.offset
        found = [one.header for one in self.state.doubted if one.header.last_offset >= start]
        return tuple(max(header.base_offset, start) for header in found)

    @property
    def are_in_doubt(self) -> bool:
        """Whether there is such a batch."""
        return self.state.doubts_from(self._start.offset)

    @property
    def are_being_read(self) -> bool:
        """Whether a cut waits for what is read in the background."""
        return self._rewinding.is_under_way

    def expire(self) -> int:
        """Forget those that have long been silent, now and then; the time to judge others by."""
        now_ms, any_gone = self._expiry.run(self.state)
        if any_gone:
            self._undo.clear()  # It would bring some of them back, and not all.
        return now_ms

    def commit(self, begin: int, end: int, stage: ProducerStage) -> list[EndedTransaction]:
        """The batches of an append from ``begin`` to below ``end`` are in the log.

        The transactions that they end, by their marks.
        """
        self._undo.note(begin, end, stage)
        return stage.commit()

    def committed(self, offset: int) -> None:
        """What lies below ``offset`` is not expected to be cut."""
        self._undo.committed(offset)
        self.state.transactions.committed(offset)

    def snapshot(self, offset: int, state: ProducerState | None = None) -> list[FileWrite]:
        """What a flush is to write of the state at ``offset``: by default of that of now."""
        if self.are_in_doubt:
            return []
        taken = self.state.copy() if state is None else state
        epoch = self._epochs.epoch_at(offset - 1)
        return [(snapshot_path(self._files.directory, offset), lambda: taken.encode(offset, epoch))]

    # --- beginning anew --------------------------------------------------------------------------

    def keep(self, state: ProducerState, offset: int, doing: str) -> Callable[[], None]:
        """Write down what the log is to begin with; what is returned has a start find it.

        Both durably: what is appended before a flush may be there after a crash without what that
        was to write. Raises DiskFullError or StorageError; what is returned, OSError.
        """
        disk, directory = self._home.disk, self._files.directory
        if state == _unknown(offset):
            return lambda: None
        path, data = snapshot_path(directory, offset), state.encode(offset, -1)
        try:
            # A flush may be writing a snapshot of this offset, for a segment that ended there.
            name = write_ahead(disk, path, data, mark=".begun")
        except OSError as error:
            raise self._home.translate(error, doing) from error

        def keep() -> None:
            name()
            disk.sync_directory(directory)

        return keep

    def begin(self, state: ProducerState) -> None:
        """The log has begun with that."""
        self.state = state
        self._undo.clear()
        self.are_unknown = False

    # --- cuts ------------------------------------------------------------------------------------

    def before_cut(self, end: int) -> ProducerState:
        """The state at offset ``end``, where a batch begins.

        Raises CutDelayedError until it was read, CorruptRecordError for a damaged header, or
        StorageError.
        """
        if not self.state.touches(end):
            return self.state
        recent = self._undo.state_at(end, self.state)
        if recent is None:
            self._undo.clear()  # It is of a state that may have forgotten what is read there.
        return self._rewinding.state_at(end, recent)

    def cut(self, end: int, state: ProducerState) -> tuple[int, ...]:
        """The log ends where ``before_cut`` gave that; offsets of damage that it came upon."""
        known = set(self.state.doubted)
        self.state = state
        self._undo.cut(end)
        if known.issuperset(state.doubted):
            return ()
        _tell_of_doubts(self._files, state)
        return self.doubted_offsets

    # --- damage ----------------------------------------------------------------------------------

    def learn(self, end: int, earlier: Replay | None) -> Replay:
        """What reads what producers wrote below ``end``, now that what was damaged is mended.

        It is to be run in any thread, and goes on where an ``earlier`` one came to.
        """
        if earlier is None:
            first = self.state.doubted[0].header.base_offset
            return self._rewinding.replay(*_known(self._files, first, self._epochs), end)
        return self._rewinding.replay(earlier.state, earlier.end, end)

    def learned(self, replay: Replay, end: int) -> bool:
        """Know what was read; False when so much was appended since that it is to go on.

        Nothing may have been cut or mended meanwhile. Raises CorruptRecordError or StorageError.
        """
        self._rewinding.check(replay)
        if self._files.size_between(replay.end, end) > _INLINE_BYTES:
            return False
        _replay(self._files, replay.state, replay.end, end, self._home.clock_ms())
        self.state = bounded(replay.state, self._home)
        self._undo.clear()
        return True


class Rewinding:
    """The producer state as it was at an earlier end of the log, for a cut. On the log's thread.

    Where more than a little must be read for it, that is done in the background, and before
    anything is cut: what lies below the cut stays as it is meanwhile, so whatever else happens to
    the log, what was read is true of any cut to the same offset of the same epoch.
    """

    def __init__(
        self, home: DataDirectory, files: LogFiles, epochs: EpochHistory, *, name: str
    ) -> None:
        self._home = home
        self._files = files
        self._epochs = epochs
        self._name = name
        self._replay: Replay | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something is being read for a cut."""
        return self._replay is not None and not self._replay.is_done

    def state_at(self, end: int, recent: tuple[ProducerState, int] | None) -> ProducerState:
        """The state at offset ``end``, where a batch begins.

        ``recent`` is one of a little before, and its offset, where that is known; else the newest
        that was written down is gone on from. Raises CutDelayedError until it was read,
        CorruptRecordError for a damaged header, or StorageError.
        """
        place = end, self._epochs.epoch_at(end - 1)
        if self._replay is None or self._replay.place != place:
            state, offset = recent or _known(self._files, end, self._epochs)
            if self._files.size_between(offset, end) <= _INLINE_BYTES:
                _replay(self._files, state, offset, end, self._home.clock_ms())
                return bounded(state, self._home)
            self._replay = self.replay(state, offset, end)
            self._home.run_in_background(self._replay.run)
        return self._finished()

    def replay(self, state: ProducerState, offset: int, end: int) -> Replay:
        """What brings the state at ``offset`` up to ``end``."""
        place = end, self._epochs.epoch_at(end - 1)
        sources = [
            Source(segment.path, segment.base_offset, segment.size_bytes)
            for segment in self._files.segments_between(offset, end)
        ]
        return Replay(self._home, place, state, offset, sources)

    def _finished(self) -> ProducerState:
        replay = self._replay
        assert replay is not None
        if replay.is_done:
            self._replay = None
            if not isinstance(replay.error, ChangedError):
                self.check(replay)
                return bounded(replay.state, self._home)
        raise CutDelayedError(
            f"{self._name}: what producers wrote below offset {replay.end} is being read, "
            "after which the log is cut there; it goes on by itself"
        )

    def check(self, replay: Replay) -> None:
        """Raise CorruptRecordError, also for a log that changed meanwhile, or StorageError."""
        error = replay.error
        if isinstance(error, ChangedError):
            raise CorruptRecordError(f"{self._name}: it changed while it was read") from error
        if isinstance(error, CorruptRecordError):
            raise CorruptRecordError(f"{self._name}: {error.message}") from error
        if error is not None:
            raise self._home.translate(error, f"reading {self._name} up to a cut") from error


class Replay:
    """Reads the headers of the batches between two offsets; ``run`` in any thread, once."""

    def __init__(
        self,
        home: DataDirectory,
        place: tuple[int, int],
        state: ProducerState,
        offset: int,
        sources: list[Source],
    ) -> None:
        self.place = place  # The offset to end at, and the epoch that wrote before it.
        self.state = state
        self.error: Exception | None = None
        self.is_done = False  # What else there is may be looked at then.
        self._offset = offset
        self._sources = sources
        self._disk = home.disk
        self._now_ms = home.clock_ms()

    @property
    def end(self) -> int:
        """The offset up to which it reads."""
        return self.place[0]

    def run(self) -> None:
        """Bring ``state`` up to the place. Raises nothing: what failed is in ``error``."""
        try:
            for header, read in batches_between(self._disk, self._sources, self._offset, self.end):
                _note(self.state, header, read, self._now_ms)
        except Exception as error:  # Whatever it is: the state is not that of the place.
            self.error = error
        finally:
            self.is_done = True
