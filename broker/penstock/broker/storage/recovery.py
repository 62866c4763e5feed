"""Opening a log: after a clean stop by trusting it, after a crash by checking what may be torn.

Everything below the recovery point was on the disk before the crash. What lies above may be whole,
torn, or garbage: it is kept up to the first batch that is not sound, and the rest is cut off. A
batch that is all there and not sound was not torn (``tearing.py``): it may have been flushed, so
that crash is not one that cost nothing. What is kept is written again before it is flushed: a
kernel that could not write it calls it clean all the same, so it may be in memory alone, and a
flush would find nothing to do and go well.

Below the recovery point nothing is ever cut: damage there is a failing disk, not a crash. A damaged
batch whose header is whole stays and is refused when it is read, and so is what is missing between
two segments; where the chain of headers is broken in the part that is read, or ends too early, or
the first segments are gone, the log does not open (DamagedLogError), so that the replica is copied
anew (penstock.broker.shut_logs) and not taken for a shorter, sound one. Which leader epochs wrote
there the checkpoint says, not the headers (``found_epochs.py``).
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.aborted import begin_rebuild
from penstock.broker.storage.batches import next_header
from penstock.broker.storage.checkpoints import (
    EPOCHS_FILE,
    TEMPORARY_SUFFIX,
    CheckpointDamagedError,
    encode_epochs,
    read_epochs,
    remove_snapshots,
    write_atomically,
)
from penstock.broker.storage.cleaner.swapping import finish_swaps
from penstock.broker.storage.damage import hole_between
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Disk, is_disk_full, remove_if_there
from penstock.broker.storage.found_epochs import FoundEpochs
from penstock.broker.storage.index import IndexDamagedError, MemoryIndex
from penstock.broker.storage.leftovers import copy_anew
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.log_files import LogFiles
from penstock.broker.storage.log_start import LogStart
from penstock.broker.storage.placing import Placed
from penstock.broker.storage.producers import load_producers
from penstock.broker.storage.segment import Segment
from penstock.broker.storage.settings import TopicLogConfig
from penstock.broker.storage.tearing import LOOKED_AT_BYTES, last_end, was_whole
from penstock.broker.storage.transaction_index import TransactionIndex
from penstock.broker.storage.walking import ChangedError
from penstock.wire.errors import CorruptRecordError, StorageError
from penstock.wire.ids import TopicIdPartition, TopicPartition
from penstock.wire.records import HEADER_BYTES, verify_batch

_LOG_NAME: Final = re.compile(r"(\d{20})\.log")
_INDEX_NAME: Final = re.compile(r"(\d{20})\.(?:index|timeindex|txnindex)")
_CHUNK_BYTES: Final = 1024 * 1024
_log = structlog.get_logger()


class SavedState(NamedTuple):
    """What local state says of a log; the defaults suit a log that it does not know."""

    recovery_point: int = 0
    log_start_offset: int = 0
    clean: bool = False
    cleaned_offset: int = 0
    high_watermark: int = 0


@dataclass(slots=True)
class _Opening:
    """A log on its way to being open."""

    home: DataDirectory
    directory: Path
    name: str
    config: TopicLogConfig
    saved: SavedState
    segments: list[Segment] = field(default_factory=list)
    deleted: list[Segment] = field(default_factory=list)  # Below the start: to be removed.
    dropped_records: bool = False
    marked: list[Segment] = field(default_factory=list)  # Those found to have control batches.
    unread: int = 0  # So many of the segments were taken as they are.
    holes: list[int] = field(default_factory=list)  # Offsets in segments that do not meet the next.
    end_offset: int = 0
    epochs: EpochHistory = field(default_factory=EpochHistory)
    found_epochs: FoundEpochs | None = None  # After a crash, where these come from.
    unsaved: list[Segment] | None = None  # Those a flush must save the indexes of, if it is due.


def open_log(
    home: DataDirectory,
    directory: Path,
    *,
    partition: TopicPartition,
    key: TopicIdPartition,
    config: TopicLogConfig,
    saved: SavedState = SavedState(),  # noqa: B008 - immutable.
) -> PartitionLog:
    """The log in ``directory`` (made when empty), recovered if the last stop was not clean.

    Raises DamagedLogError, naming place and next step, for damage that no crash explains, having
    changed nothing below the recovery point; StorageError when the disk fails. DiskFullError when
    there is no room: what it did so far is no worse than what it found, and it may be tried again.
    Where there is none for the small files alone the log is open for reading, and ``needs_flush``.
    Blocks while it reads what lies above the recovery point.
    """
    opening = _Opening(home, directory, str(partition), config, saved)
    try:
        _check_saved(opening)
        finish_swaps(home.disk, directory)
        _remove_leftovers(home.disk, directory)
        opened_clean = _find_segments(opening) or (saved.clean and _open_clean(opening))
        if not opened_clean:
            _recover(opening)
        if opening.end_offset < saved.log_start_offset:
            _start_anew(opening, saved.log_start_offset)
        _find_holes(opening)
        return _assemble(opening, partition, key, opened_clean=opened_clean)
    except CorruptRecordError as error:
        _close(opening)
        raise DamagedLogError(
            f"{error.message}. The damage lies below what was safely on the disk, so it is no torn "
            f"write: the log stays shut, and what {directory} holds is kept as it is, until all of "
            "it is copied anew from another replica that is in sync and leads; while there is "
            "none, `penstock log dump` shows what can be read of its segments",
            _end_on_disk(opening),
        ) from error
    except OSError as error:
        _close(opening)
        raise home.translate(error, f"opening {partition}") from error


def _end_on_disk(opening: _Opening) -> int:
    """Up to where there were records, as far as can be told; the recovery point is seconds old."""
    end = opening.saved.recovery_point
    for last in opening.segments[-1:]:
        position = max(0, last.size_bytes - LOOKED_AT_BYTES)
        with contextlib.suppress(OSError, CorruptRecordError, StorageError):
            end = last_end(bytes(last.read_at(last.size_bytes - position, position)), end)
        last.close_file()
        end = max(end, last.base_offset)
    return end


def _check_saved(opening: _Opening) -> None:
    """Obey no log start that can't be: what lies below it is deleted.

    A clean stop has flushed all there was, so that the log began at or below the recovery point.
    After a crash it may well be above: what was deleted need not have been flushed.
    """
    start, point = opening.saved.log_start_offset, opening.saved.recovery_point
    if opening.saved.clean and start > point:
        raise StorageError(
            f"{opening.name}: local state says that the log in {opening.directory} begins at "
            f"offset {start}, but a clean stop left it ending at {point}, so one of the two is "
            f"damaged; {copy_anew(opening.directory)}"
        )


def _close(opening: _Opening) -> None:
    for segment in opening.segments:
        segment.close_file()


def _remove_leftovers(disk: Disk, directory: Path) -> None:
    """Files that a crash left between two steps: half-written ones, and those of no segment."""
    names = {path.name: path for path in directory.iterdir()}
    for name, path in names.items():
        index = _INDEX_NAME.fullmatch(name)
        orphan = index is not None and f"{index[1]}.log" not in names
        if orphan or name.endswith((TEMPORARY_SUFFIX, ".deleted")):
            disk.remove(path)


def _find_segments(opening: _Opening) -> bool:
    """Find the segments; True when there were none, and an empty one was made.

    Raises CorruptRecordError when there must have been some.
    """
    found = []
    for path in opening.directory.iterdir():
        match = _LOG_NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path.stat().st_size))
    if not found:
        start, point = opening.saved.log_start_offset, opening.saved.recovery_point
        if point > start:
            raise CorruptRecordError(
                f"{opening.name}: the log in {opening.directory} has no segments, but was on the "
                f"disk up to {point}"
            )
        opening.segments = [Segment.create(opening.home, opening.directory, opening.name, start)]
        opening.home.disk.sync_directory(opening.directory)
        opening.end_offset = start
        return True
    opening.segments = [
        Segment(opening.home, opening.directory, opening.name, base_offset, size_bytes=size)
        for base_offset, size in sorted(found)
    ]
    _leave_out_deleted(opening)
    _check_beginning(opening)
    return False


def _leave_out_deleted(opening: _Opening) -> None:
    """Let go of what lies below the log's start, before anything is made of its gaps.

    A power cut may have brought back any of the names that were being removed, one without the
    next. They go once the log is open.
    """
    bases = [segment.base_offset for segment in opening.segments]
    gone = max(0, bisect_right(bases, opening.saved.log_start_offset) - 1)
    opening.deleted, opening.segments = opening.segments[:gone], opening.segments[gone:]


def _check_beginning(opening: _Opening) -> None:
    """Raise CorruptRecordError when the log begins later than it was said to.

    As a follower it would be in sync before long, and as a leader have all the others delete what
    is missing here.
    """
    start, point = opening.saved.log_start_offset, opening.saved.recovery_point
    first = opening.segments[0].base_offset
    if point <= start or first <= start:
        return
    with contextlib.suppress(CheckpointDamagedError):
        oldest = read_epochs(opening.directory)[:1]
        # Earlier versions noted a new start there first.
        if oldest and first <= oldest[0][1]:
            return
    raise CorruptRecordError(
        f"{opening.name}: the log in {opening.directory} begins at offset {first}, but was on the "
        f"disk from {start} on"
    )


# --- after a clean stop --------------------------------------------------------------------------


def _open_clean(opening: _Opening) -> bool:
    """Take what the files say; False when they do not fit together, or are less than there was:
    somebody changed them.
    """
    active = opening.segments[-1]
    try:
        index = active.index = MemoryIndex()
        if active.size_bytes:
            index = active.load_index()
            if active.known_transactions() is None:
                active.forget_transactions()
        else:
            active.transactions = TransactionIndex()
        end = active.base_offset
        for placed in active.walk_from_offset(active.base_offset + index.last_offset):
            end = placed.header.next_offset
        if end > opening.segments[0].base_offset:
            opening.epochs = EpochHistory(read_epochs(opening.directory))
    except (IndexDamagedError, CheckpointDamagedError, CorruptRecordError, ValueError) as error:
        _log.warning("log_not_as_it_was_left", partition=opening.name, reason=str(error))
        active.index = None
        return False
    start = opening.segments[0].base_offset
    point = opening.saved.recovery_point
    if start > opening.saved.log_start_offset or end != point:
        reason = f"it has offsets {start} to {end}, but was left ending at {point}"
        _log.warning("log_not_as_it_was_left", partition=opening.name, reason=reason)
        active.index = None
        return False
    opening.end_offset = end
    opening.unread = len(opening.segments) - 1
    return True


# --- after a crash -------------------------------------------------------------------------------


def _recover(opening: _Opening) -> None:
    """Check what lies above the recovery point, and cut what is not sound."""
    point = opening.saved.recovery_point
    segments = opening.segments
    # A segment that ends right at the point may have been closed since, its index files not
    # written yet; those of the segments before it were.
    below = [segment for segment in segments if segment.base_offset < point]
    first = max(0, len(below) - 1)
    epochs = FoundEpochs(
        opening.name,
        opening.directory,
        trusted=segments[:first],
        read_from=segments[first].base_offset,
        recovery_point=point,
    )
    opening.found_epochs, opening.epochs = epochs, epochs.history
    end = segments[first].base_offset
    whole = True
    for at in range(first, len(segments)):
        segment = segments[at]
        if not whole or segment.base_offset != end:
            if end < point:
                break  # No crash does that, so nothing is dropped for it.
            # Most likely none of it was flushed. But a flush of it can't be ruled out.
            opening.dropped_records |= any(later.size_bytes for later in segments[at:])
            _drop_from(opening, at, end)
            break
        end, whole = _scan(opening, segment, epochs)
        _sync(opening, segment)
    if end < point:
        raise CorruptRecordError(
            f"{opening.name}: the log in {opening.directory} ends at offset {end}, but was on the "
            f"disk up to {point}"
        )
    remove_snapshots(opening.home.disk, opening.directory, above=end)
    opening.epochs.truncate_from_end(end)
    for segment in opening.marked:
        _index_transactions(opening, segment)
    _save_found(opening, segments[first:-1])
    opening.home.disk.sync_directory(opening.directory)
    opening.end_offset = end
    opening.unread = first


def _index_transactions(opening: _Opening, segment: Segment) -> None:
    """Make the index of aborted transactions anew.

    What damage below the recovery point hides of it is made when it is asked for, or refused then.
    """
    if segment not in opening.segments:
        return
    disk = opening.home.disk
    rebuild = begin_rebuild(disk, opening.segments, segment, opening.epochs)
    try:
        segment.transactions = rebuild.index(segment.size_bytes)
    except (CorruptRecordError, ChangedError):
        segment.forget_transactions()


def _save_found(opening: _Opening, closed: list[Segment]) -> None:
    """Write what nobody will look for below the recovery point, where all of this lies from now on.

    For want of room that is left to a flush, and the recovery point stays where it is until then.
    """
    disk = opening.home.disk
    for segment in closed:
        segment.complete_index()
        segment.give_back()
    try:
        for segment in closed:
            segment.save_index()
        checkpoint = encode_epochs(opening.epochs.entries)
        write_atomically(disk, opening.directory / EPOCHS_FILE, checkpoint)
    except OSError as error:
        if not is_disk_full(error):
            raise
        opening.home.room.refused(str(error), f"opening {opening.name}")
        opening.unsaved = closed
        return
    for segment in closed:
        segment.index = None
        segment.close_file()


def _sync(opening: _Opening, segment: Segment) -> None:
    """Put a segment on the disk. No failure of that may be tried again, whatever its reason."""
    try:
        opening.home.disk.sync_data(segment.file.fd)
    except OSError as error:
        raise opening.home.fail(error, f"flushing {segment.path}") from error


def _drop_from(opening: _Opening, at: int, end: int) -> None:
    """Delete the segments from number ``at`` on, the last first: what they followed was cut."""
    for segment in reversed(opening.segments[at:]):
        _log.warning(
            "log_segment_dropped",
            partition=opening.name,
            segment=str(segment.path),
            bytes=segment.size_bytes,
            log_end_offset=end,
        )
        segment.close_file()
        for path in segment.paths():
            remove_if_there(opening.home.disk, path)
    del opening.segments[at:]


def _scan(opening: _Opening, segment: Segment, epochs: FoundEpochs) -> tuple[int, bool]:
    """Read a segment, make its index and cut it before the first batch that is not sound.

    The offset where it ends, and whether all of it was sound. Below the recovery point only the
    headers are read, and damage raises CorruptRecordError; what is sound above is written again.
    """
    point = opening.saved.recovery_point
    segment.index, segment.max_timestamp = MemoryIndex(), None
    segment.transactions = TransactionIndex()
    position, offset = 0, segment.base_offset

    def take(placed: Placed) -> tuple[int, int]:
        epochs.take(segment, placed.header)
        segment.note(placed.header, placed.position, opening.config.index_interval_bytes)
        if placed.header.is_control and segment not in opening.marked[-1:]:
            opening.marked.append(segment)
        return placed.position + placed.header.size_bytes, placed.header.next_offset

    walk, last = segment.walk(0, offset), None
    while offset < point and position < segment.size_bytes:
        last = next(walk)
        position, offset = take(last)
    if last is not None and offset > point:
        _verify(segment, last)
    chunks = _Chunks(segment)
    while position < segment.size_bytes:
        try:
            position, offset = take(chunks.sound_batch(position, offset))
            last = None
        except CorruptRecordError as error:
            if last is not None:
                _verify(segment, last)
            chunks.write_again(position)
            _cut_tail(opening, segment, Cut(position, offset, error.message))
            return offset, False
    chunks.write_again(position)
    return offset, True


def _verify(segment: Segment, last: Placed) -> None:
    """Check the last batch below the recovery point, where what follows it is not as expected.

    It may be its header that names a wrong end: then what follows is elsewhere, and not torn.
    Raises CorruptRecordError.
    """
    try:
        verify_batch(segment.read_at(last.header.size_bytes, last.position))
    except CorruptRecordError as error:
        raise segment.damaged(last.position, error.message) from None


class Cut(NamedTuple):
    """Where a torn tail begins, and what is wrong there."""

    position: int
    offset: int
    reason: str


def _cut_tail(opening: _Opening, segment: Segment, cut: Cut) -> None:
    tail = segment.read_at(min(segment.size_bytes - cut.position, LOOKED_AT_BYTES), cut.position)
    was_acknowledged = was_whole(tail, cut.position, cut.offset)  # For all that is known.
    opening.dropped_records |= was_acknowledged
    tell = _log.error if was_acknowledged else _log.warning
    tell(
        "log_tail_cut",
        partition=opening.name,
        segment=str(segment.path),
        position=cut.position,
        bytes=segment.size_bytes - cut.position,
        log_end_offset=cut.offset,
        reason=cut.reason,
        is_torn=not was_acknowledged,
    )
    opening.home.disk.truncate(segment.file.fd, cut.position)
    segment.size_bytes = cut.position


class _Chunks:
    """Reads a segment from front to back in large pieces, and writes them where they were."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._at = 0
        self._data = b""

    def sound_batch(self, position: int, offset: int) -> Placed:
        """The batch at ``position``, all of it checked. Raises CorruptRecordError.

        Everything before it, from the first one on, was sound: see ``write_again``.
        """
        room = self._segment.size_bytes - position
        header = next_header(self._read(position, min(room, HEADER_BYTES)), 0, offset, room)
        verify_batch(self._read(position, header.size_bytes))
        return Placed(header, position)

    def _read(self, position: int, size: int) -> memoryview:
        start = position - self._at
        if start < 0 or start + size > len(self._data):
            self.write_again(position)
            self._data = self._segment.read_at(max(size, _CHUNK_BYTES), position)
            self._at, start = position, 0
        return memoryview(self._data)[start : start + size]

    def write_again(self, end: int) -> None:
        """Write what was read last, up to the position ``end``, as it was when it was checked.

        Read once more it could be something else: memory may forget what the disk does not have.
        """
        if end > self._at and self._data:
            self._segment.overwrite(memoryview(self._data)[: end - self._at], self._at)


def _find_holes(opening: _Opening) -> None:
    """See whether the segments that nobody has read end where the next ones begin.

    The log opens all the same: what is there is served, and what is missing is refused, never
    passed over, until it was copied from another replica.
    """
    start = min(opening.saved.log_start_offset, opening.end_offset)
    for segment, following in pairwise(opening.segments[: opening.unread + 1]):
        try:
            end = segment.end_offset()
        except CorruptRecordError:
            continue  # Whoever reads that is told, and the scrubber reads all of it.
        segment.close_file()
        hole = hole_between(end, following.base_offset, start_offset=start)
        if hole is not None:
            opening.holes.append(hole.offset)
            _log.error(
                "log_has_a_hole",
                partition=opening.name,
                segment=str(segment.path),
                offset=hole.offset,
                reason=hole.what,
                next_step="it is not passed over, and the partition is copied anew from its leader "
                "if another replica is in sync; find out who took files away or cut them",
            )


# --- either way ----------------------------------------------------------------------------------


def _start_anew(opening: _Opening, offset: int) -> None:
    """The log ends before it starts: what it holds was deleted, by an order that outlived it."""
    _drop_from(opening, 0, offset)
    segment = Segment.create(opening.home, opening.directory, opening.name, offset)
    opening.home.disk.sync_directory(opening.directory)
    opening.segments = [segment]
    opening.unsaved = None
    opening.end_offset = offset
    opening.epochs.clear()


def _assemble(
    opening: _Opening, partition: TopicPartition, key: TopicIdPartition, *, opened_clean: bool
) -> PartitionLog:
    home, end = opening.home, opening.end_offset
    files = LogFiles(home, opening.directory, opening.name, opening.segments)
    epochs = opening.epochs
    saved = epochs.entries
    epochs.truncate_from_end(end)
    # The oldest epoch begins where the log began when the checkpoint was written, which may be
    # later than local state knew.
    oldest = epochs.entries[0].start_offset if epochs.entries else 0
    first = files.segments[0].base_offset
    start = min(max(opening.saved.log_start_offset, first, oldest), end)
    epochs.truncate_from_start(start)
    for segment in opening.deleted:
        for path in segment.paths():
            remove_if_there(home.disk, path)
    producers = load_producers(
        files, end, epochs, home.clock_ms(), committed=opening.saved.high_watermark
    )
    is_saved = opening.unsaved is None
    if opening.unsaved is not None:
        files.put_back(opening.unsaved, names_changed=True)
    log = PartitionLog(
        home,
        files,
        partition=partition,
        key=key,
        config=opening.config,
        start=LogStart(
            home,
            files,
            opening.name,
            offset=start,
            durable_offset=min(opening.saved.log_start_offset, start),
        ),
        end_offset=end,
        synced_offset=end if is_saved else min(opening.saved.recovery_point, end),
        opened_clean=opened_clean,
        dropped_records=opening.dropped_records,
        holes=opening.holes,
        epochs=epochs,
        epochs_saved=is_saved and epochs.entries == saved,
        producers=producers,
        cleaned_offset=opening.saved.cleaned_offset,
    )
    if opening.found_epochs is not None:
        log.noted_damage = opening.found_epochs.damaged
    log.noted_damage += log.known_producers.doubted_offsets
    return log
