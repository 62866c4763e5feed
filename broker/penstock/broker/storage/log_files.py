"""The files of one log: its segments in order, what of them is not on the disk yet, their cuts."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.cleaner.swapping import (
    SwapFiles,
    finish,
    put_in_place,
    put_index_in_place,
)
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import (
    Buffer,
    Disk,
    SharedFile,
    is_disk_full,
    remove_if_there,
)
from penstock.broker.storage.index import RELATIVE_OFFSET_MAX, MemoryIndex
from penstock.broker.storage.placing import Limits, Placed
from penstock.broker.storage.segment import Segment
from penstock.wire.records import BatchHeader

_KNOWN_POSITIONS: Final = 16

FileWrite = tuple[Path, Callable[[], bytes]]
"""A file to be written whole, and what makes its bytes (in the thread that writes)."""


class Batch:
    """A checked batch on its way into the log: its header as it will be there, and its bytes."""

    __slots__ = ("buffers", "header", "size_bytes")

    def __init__(self, header: BatchHeader, buffers: tuple[Buffer, ...]) -> None:
        self.header = header
        self.size_bytes = header.size_bytes
        self.buffers = buffers


class LogFiles:
    """The segments of a log, oldest first; the last is the active one. Used on one thread.

    Methods that touch files raise OSError where they write (the caller knows what to undo) and
    StorageError or CorruptRecordError where they read.
    """

    def __init__(
        self, home: DataDirectory, directory: Path, name: str, segments: Sequence[Segment]
    ) -> None:
        self._home = home
        self._name = name
        self.directory = directory
        self.segments = list(segments)
        self._bases = [segment.base_offset for segment in segments]
        # Where the batch of a base offset is: readers mostly go on where they stopped.
        self._positions: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._unsynced: dict[Segment, None] = {}
        # Segments up to this base are in the directory for certain, also after a power cut.
        self.named_up_to = segments[-1].base_offset
        self._names_changed = False  # The directory has entries that are not on the disk yet.
        self._unsaved_indexes: dict[Segment, None] = {}
        self._cleaning: SwapFiles | None = None  # Between two steps of a swap.
        self._swapped = False  # It is in place, and step 4 is not over.

    @property
    def active(self) -> Segment:
        """The segment that is appended to."""
        return self.segments[-1]

    @property
    def size_bytes(self) -> int:
        """The size of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    # --- appending -------------------------------------------------------------------------------

    def has_room_for(self, batches: Sequence[Batch], limits: Limits) -> bool:
        """Whether all the batches go into the active segment; see ``must_roll``."""
        active = self.active
        size = active.size_bytes + sum([batch.size_bytes for batch in batches])
        latest_ms = max([batch.header.max_timestamp_ms for batch in batches])
        started_ms = active.roll_timestamp_ms()
        return (
            size <= limits.segment_bytes
            and batches[-1].header.last_offset - active.base_offset <= RELATIVE_OFFSET_MAX
            and started_ms is not None
            and latest_ms - started_ms <= limits.segment_ms
        )

    def must_roll(self, header: BatchHeader, pending: int, limits: Limits) -> bool:
        """Whether the batch belongs into a new segment, when ``pending`` bytes go before it."""
        active = self.active
        size = active.size_bytes + pending
        if size == 0:
            return False
        started_ms = active.roll_timestamp_ms()
        return (
            size + header.size_bytes > limits.segment_bytes
            or header.last_offset - active.base_offset > RELATIVE_OFFSET_MAX
            or (started_ms is not None and header.max_timestamp_ms - started_ms > limits.segment_ms)
        )

    def append(
        self,
        batches: Sequence[Batch],
        limits: Limits,
        interval_bytes: int,
        rolled: Callable[[int], None],
    ) -> None:
        """Write the batches, in a new segment where one is due; see ``must_roll``.

        ``rolled`` is called after each roll, with the offset where the new segment begins. After
        OSError a part may be there.
        """
        if self.has_room_for(batches, limits):
            self.write(batches, interval_bytes)
            return
        group: list[Batch] = []
        pending = 0
        for batch in batches:
            if self.must_roll(batch.header, pending, limits):
                if group:
                    self._write_first(group, interval_bytes, limits)
                self.roll(batch.header.base_offset)
                rolled(batch.header.base_offset)
                group, pending = [], 0
            group.append(batch)
            pending += batch.size_bytes
        self._write_first(group, interval_bytes, limits)

    def _write_first(self, batches: Sequence[Batch], interval_bytes: int, limits: Limits) -> None:
        """As ``write``; a segment gets its room, if there is some, with what is first in it."""
        if limits.allocate_bytes and not self.active.size_bytes:
            self.active.allocate(limits.allocate_bytes, limits.reserve_bytes)
        self.write(batches, interval_bytes)

    def write(self, batches: Sequence[Batch], interval_bytes: int) -> None:
        """Append batches to the active segment: all of them, or none when OSError is raised."""
        buffers = [buffer for batch in batches for buffer in batch.buffers]
        size = sum([batch.size_bytes for batch in batches])
        active = self.active
        position = active.append(buffers, size)
        self._unsynced[active] = None
        for batch in batches:
            active.note(batch.header, position, interval_bytes)
            position += batch.size_bytes

    def roll(self, base_offset: int) -> None:
        """Close the active segment and begin a new one."""
        closed = self.active
        if closed.give_back():
            self._unsynced[closed] = None  # Else a power cut could let it keep what it has left.
        segment = Segment.create(self._home, self.directory, self._name, base_offset)
        closed.complete_index()
        self._unsaved_indexes[closed] = None
        self._names_changed = True
        self._add(segment)

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._bases.append(segment.base_offset)

    def end_of(self, segment: Segment, log_end_offset: int) -> int:
        """Where a segment has to end: where the next one begins."""
        at = self.segments.index(segment) + 1
        return self.segments[at].base_offset if at < len(self.segments) else log_end_offset

    # --- finding ---------------------------------------------------------------------------------

    def segment_of(self, offset: int) -> Segment:
        """The segment that holds, or would hold, ``offset``."""
        return self.segments[self._place_of(offset)]

    def _place_of(self, offset: int) -> int:
        return max(0, bisect_right(self._bases, offset) - 1)

    def locate(self, offset: int) -> tuple[Segment, int, int] | None:
        """The segment, position and base offset of the batch that holds ``offset``."""
        known = self._positions.get(offset)
        if known is not None and known[1] < known[0].size_bytes:
            return *known, offset
        segment = self.segment_of(offset)
        placed = segment.position_of(offset)
        if placed is None:
            return None
        return segment, placed.position, placed.header.base_offset

    def cold_read(self, offset: int, size: int) -> Callable[[], None] | None:
        """None when what is read from ``offset`` on is in memory, else what brings it there.

        That is to be called once, in any thread. So ``locate`` need not read a whole segment whose
        index must be made anew. Raises CorruptRecordError.
        """
        indexing = None
        if offset not in self._positions:
            indexing = self.segment_of(offset).indexing(offset, size)
        if indexing is not None:
            return indexing
        found = self.locate(offset)
        if found is None:
            return None
        segment, position, base_offset = found
        self.remember(base_offset, segment, position)
        return segment.cold_read(position, size)

    def remember(self, offset: int, segment: Segment, position: int) -> None:
        """The batch with base ``offset`` begins (or will begin) there."""
        self._positions[offset] = (segment, position)
        self._positions.move_to_end(offset)
        if len(self._positions) > _KNOWN_POSITIONS:
            self._positions.popitem(last=False)

    def walk(self, offset: int, end: int) -> Iterator[tuple[Segment, Placed]]:
        """The batches that hold offsets from ``offset`` to below ``end``, headers only."""
        first = self.segments.index(self.segment_of(offset))
        for segment in self.segments[first:]:
            if segment.base_offset >= end:
                return
            for placed in segment.walk_from_offset(max(offset, segment.base_offset)):
                if placed.header.base_offset >= end:
                    return
                yield segment, placed

    def size_between(self, offset: int, end: int) -> int:
        """The size of the batches that hold offsets from ``offset`` to below ``end``."""
        *whole, last = self.segments_between(offset, end)
        before = sum(segment.size_bytes for segment in whole)
        first = whole[0] if whole else last
        return before + _position(last, end) - _position(first, offset)

    def segments_between(self, offset: int, end: int) -> list[Segment]:
        """The segments from that of ``offset`` to that of ``end``, at least one."""
        return self.segments[self._place_of(offset) : self._place_of(end) + 1]

    # --- cutting ---------------------------------------------------------------------------------

    def truncate(self, offset: int, interval_bytes: int) -> int:
        """Cut the batches that hold ``offset`` or come after it, durably; the log's new end.

        Later segments go first, so that what a crash in between leaves is one piece.
        """
        self._end_swap_now()
        end = self._cut(offset, interval_bytes)
        disk = self._home.disk
        disk.sync_directory(self.directory)
        disk.sync_data(self.active.file.fd)
        self._names_are_durable()
        return end

    def take_back(self, offset: int, interval_bytes: int) -> None:
        """Cut what an append wrote from ``offset`` on before it failed. The next flush has it.

        A swap goes on: it is of segments that were on the disk before. The cut must not be flushed
        here: an error of a write before is reported once, and is for the flush to hear that counts
        what was written as durable.
        """
        self._cut(offset, interval_bytes)
        self._unsynced[self.active] = None
        self._names_changed = True

    def _cut(self, offset: int, interval_bytes: int) -> int:
        self._positions.clear()
        keep = self.segments.index(self.segment_of(offset))
        for segment in reversed(self.segments[keep + 1 :]):
            self._remove(segment)
        active = self.active
        active.activate(interval_bytes)
        self._unsaved_indexes.pop(active, None)
        placed = active.position_of(offset)
        if placed is not None:
            active.truncate(placed.position, placed.header.base_offset)
            offset = placed.header.base_offset
        return offset

    def reset(self, base_offset: int) -> None:
        """Drop every segment and begin anew at ``base_offset``, durably."""
        self._end_swap_now()
        self._positions.clear()
        for segment in reversed(self.segments):
            self._remove(segment)
        self._add(Segment.create(self._home, self.directory, self._name, base_offset))
        self._home.disk.sync_directory(self.directory)
        self._names_are_durable()

    def _names_are_durable(self) -> None:
        self._names_changed = False
        self.named_up_to = self.active.base_offset

    def _remove(self, segment: Segment) -> None:
        self._drop(segment)
        for path in segment.paths():
            remove_if_there(self._home.disk, path)

    def _drop(self, segment: Segment) -> None:
        segment.close_file()
        at = self.segments.index(segment)
        del self.segments[at], self._bases[at]
        self._unsynced.pop(segment, None)
        self._unsaved_indexes.pop(segment, None)

    def has_below(self, offset: int) -> bool:
        """Whether a segment ends at or below ``offset`` that may be let go of.

        It stays until a power cut can't take the one after it: a log must not forget where it
        ended.
        """
        segments = self.segments
        return len(segments) > 1 and segments[1].base_offset <= min(offset, self.named_up_to)

    def delete_below(self, offset: int, *, at_most: int) -> list[Path]:
        """Let go of the segments that end at or below ``offset``; their files, still to be deleted.

        That a log begins there must be durable: see LogStart. The files have other names by then,
        which a restart ignores.
        """
        paths: list[Path] = []
        for _ in range(at_most):
            if not self.has_below(offset):
                break
            oldest = self.segments[0]
            self._drop(oldest)
            self._names_changed = True
            self._positions.clear()
            for path in oldest.paths():
                if path.exists():
                    paths += _retired(self._home.disk, path)
        return paths

    # --- cleaning --------------------------------------------------------------------------------

    def are_closed(self, segments: Sequence[Segment]) -> bool:
        """Whether these are still here, one after the other, and none is appended to."""
        if not segments or segments[0] not in self.segments:
            return False
        first = self.segments.index(segments[0])
        return self.segments[first : first + len(segments)] == list(segments) and (
            first + len(segments) < len(self.segments)
        )

    def is_flushed(self, segment: Segment) -> bool:
        """Whether no flush will touch a closed segment's files any more."""
        return segment.index is None and segment not in self._unsynced

    def begin_swap(self, files: SwapFiles) -> None:
        """A cleaned segment is about to take its place: a cut or a reset will undo it."""
        assert not self._swapped, "the swap before is not over"
        self._cleaning = files

    def is_swapping(self, files: SwapFiles) -> bool:
        """Whether nothing has undone it since."""
        return self._cleaning is files

    def swap(self, files: SwapFiles, old: Sequence[Segment], size_bytes: int) -> list[Path]:
        """Put a cleaned segment in the place of old ones; their files, still to be deleted.

        See penstock.broker.storage.cleaner.swapping, step 3. Whoever reads the old ones holds their
        descriptors. Raises OSError, and nothing has changed; or StorageError.
        """
        assert self.are_closed(old)
        assert self.is_swapping(files)
        first = self.segments.index(old[0])
        put_in_place(self._home.disk, files)
        for segment in old:
            segment.close_file()
        try:
            put_index_in_place(self._home.disk, files)
            doomed = [path for segment in old[1:] for path in segment.paths() if path.exists()]
            retired = [new for path in doomed for new in _retired(self._home.disk, path)]
        except OSError as error:
            raise self._home.fail(error, f"cleaning {self._name}") from error
        cleaned = Segment(
            self._home, self.directory, self._name, files.base_offset, size_bytes=size_bytes
        )
        self.segments[first : first + len(old)] = [cleaned]
        self._bases[first : first + len(old)] = [cleaned.base_offset]
        self._positions.clear()
        self._swapped = True
        # What the producers had written when the old segments ended is no place to begin at now.
        return retired + [
            path
            for taken_at, path in snapshots(self.directory)
            if files.base_offset < taken_at < files.end_offset
        ]

    def end_swap(self, files: SwapFiles) -> None:
        """Step 4 is over: no start will find the swap file."""
        if self._cleaning is files:
            self._cleaning, self._swapped = None, False

    def _end_swap_now(self) -> None:
        """What is under way is undone before a cut, or brought to an end: the next start must not
        put a swap file over what is written after the cut.
        """
        files, swapped = self._cleaning, self._swapped
        self._cleaning, self._swapped = None, False
        if files is not None and swapped:
            finish(self._home.disk, files, ())
        elif files is not None:
            files.discard(self._home.disk)

    # --- flushing --------------------------------------------------------------------------------

    def take_unsynced(self) -> tuple[list[SharedFile], bool, list[Segment]]:
        """What a flush has to do, oldest segment first; the caller must see to it.

        The files to sync (acquired: release them), whether to sync the directory's names, and the
        closed segments whose index files are to be written.
        """
        files = [segment.file.acquire() for segment in self._unsynced]
        taken = files, self._names_changed, list(self._unsaved_indexes)
        self._unsynced = {}
        self._names_changed = False
        self._unsaved_indexes = {}
        return taken

    def put_back(self, closed: Sequence[Segment], *, names_changed: bool) -> None:
        """The next flush is to write the files of these segments, and sync the names, after all."""
        unsaved = {*self._unsaved_indexes, *closed} - {self.active}
        self._unsaved_indexes = {one: None for one in self.segments if one in unsaved}
        self._names_changed |= names_changed

    def write_again(self, offset: int, epochs: EpochHistory) -> None:
        """Read all batches from ``offset`` on, and write them where they are.

        Whatever became of what was written before, a flush after this says of all of them whether
        they are on the disk. Raises CorruptRecordError when one can't be read as it was written.
        """
        first = self.segments.index(self.segment_of(offset))
        self._unsynced = dict.fromkeys(self.segments[first:])
        for segment in self._unsynced:
            placed = segment.position_of(max(offset, segment.base_offset))
            if placed is not None:
                segment.write_again(placed, epochs)

    @property
    def has_rolled(self) -> bool:
        """Whether a segment was closed that is not on the disk yet."""
        return bool(self._unsaved_indexes)

    @property
    def has_unsynced(self) -> bool:
        """Whether a flush has something to do."""
        return bool(self._unsynced or self._names_changed or self._unsaved_indexes)

    def close(self) -> None:
        """Close every descriptor."""
        for segment in self.segments:
            segment.close_file()


def _position(segment: Segment, offset: int) -> int:
    placed = segment.position_of(offset)
    return segment.size_bytes if placed is None else placed.position


def deletion(disk: Disk, paths: Sequence[Path]) -> Callable[[], None]:
    """What deletes the files, in any thread."""

    def delete() -> None:
        for path in paths:
            with contextlib.suppress(OSError):  # The next start tries again.
                disk.remove(path)

    return delete


def _retired(disk: Disk, path: Path) -> list[Path]:
    """Give a file of a deleted segment a name that a restart ignores; the files to delete later."""
    target = path.with_name(path.name + ".deleted")
    try:
        disk.rename(path, target)
    except OSError as error:
        if not is_disk_full(error):
            raise
    else:
        return [target]
    disk.remove(path)  # A longer name may take room, and this is to make some.
    return []


def index_writes(segment: Segment, index: MemoryIndex) -> list[FileWrite]:
    """What writes a segment's index files."""
    writes: list[FileWrite] = [
        (segment.index_path, index.encode_offsets),
        (segment.time_index_path, index.encode_times),
    ]
    if segment.transactions is not None:
        writes.append((segment.transaction_index_path, segment.transactions.encode))
    return writes
