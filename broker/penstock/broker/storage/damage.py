"""Finding what of a segment is damaged, and putting sound batches in its place.

Replicas of a partition have the same bytes at the same offsets, so a damaged stretch is mended
where it lies: with the batches of another replica that take up exactly its room. What is sound
around it is never touched.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.batches import goes_on_behind, next_header, verify_run
from penstock.broker.storage.checkpoints import write_atomically
from penstock.broker.storage.disk import Disk, SharedFile
from penstock.broker.storage.index import (
    TIME_ENTRY,
    IndexDamagedError,
    MemoryIndex,
    OffsetEntry,
    TimeEntry,
    unseal,
)
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from penstock.broker.storage.transaction_index import TransactionIndex
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, BatchHeader

DAMAGED_SUFFIX: Final = ".damaged"
MAX_KEPT: Final = 8
"""So many damaged stretches of a partition are kept to be looked at; the oldest goes first."""

MAX_FOUND: Final = 100
"""So many damaged batches one look at a segment tells of; the next look finds the others."""

_CHUNK_BYTES: Final = 256 * 1024
_ANY_OFFSET: Final = 2**63 - 1
_BASE_OFFSET: Final = struct.Struct(">q")
# Of a batch's header: base offset, length, largest timestamp, number of records.
_TIMED: Final = struct.Struct(">qi23xq14xi")
_LENGTH_END: Final = 12

Pace = Callable[[int], None]
"""Called in the reading thread with how much was read; it returns when more may be."""


class Damage(NamedTuple):
    """A batch that is not sound: where it should begin, by offset and in the file.

    Or a hole: what should be between the segment's last batch and the next segment. From
    ``end_offset`` on batches can be read again; where the batch hides its own end, that is where
    the index knows of one, or where the next segment begins. -1: it is not known.
    """

    offset: int
    position: int
    what: str
    is_hole: bool = False
    end_offset: int = -1


class _Place(NamedTuple):
    """Where a batch begins in the file, and which."""

    position: int
    offset: int


@dataclass(slots=True)
class Findings:
    """What a look at a segment found. ``error``: it could not be read to the end."""

    damages: list[Damage] = field(default_factory=list)
    index_is_damaged: bool = False
    error: OSError | None = None
    size_bytes: int = 0


class Hole(NamedTuple):
    """What is wrong where two segments should meet, and an offset that only the first can have."""

    offset: int
    what: str


def hole_between(end: int, following: int, *, start_offset: int) -> Hole | None:
    """What is wrong where a segment ends at one offset and the next one begins at another."""
    if end == following or following <= start_offset:
        return None
    if end > following:
        return Hole(
            following - 1, f"the batches go to offset {end}, but the next begin at {following}"
        )
    missing = max(end, start_offset)
    return Hole(missing, f"the batches of offsets {missing} to {following - 1} are missing")


class Examination:
    """A look at one segment as it is now. Made on the log's thread; ``run`` goes in any other."""

    def __init__(self, log: PartitionLog, segment: Segment) -> None:
        self.segment = segment
        self._disk: Disk = log.home.disk
        self._file: SharedFile = segment.file.acquire()
        self._size_bytes = segment.size_bytes
        self._base_offset = segment.base_offset
        self._end_offset = log.files.end_of(segment, log.log_end_offset)
        self._start_offset = log.log_start_offset
        self._epochs = EpochHistory(log.epochs.entries)
        # The index of a segment that is appended to is in memory, and not in its file yet.
        self._index_paths = (
            (segment.index_path, segment.time_index_path) if segment.index is None else None
        )
        self._transactions_path = segment.transaction_index_path
        self._index = None if segment.index is None else segment.index.copy()
        self._entries: list[OffsetEntry] = []
        self._times: _TimesCheck | None = None

    def run(self, pace: Pace = lambda _: None) -> Findings:
        """Read everything. To be called once; raises nothing."""
        findings = Findings(size_bytes=self._size_bytes)
        try:
            self._load_index(findings)
            self._scan(findings, pace)
            if self._times is not None and not self._times.holds(self._size_bytes):
                findings.index_is_damaged = True
        except OSError as error:
            findings.error = error
        finally:
            self._file.release()
        return findings

    def _load_index(self, findings: Findings) -> None:
        if self._index is not None:
            self._entries = self._index.entries()[::-1]
        if self._index_paths is None:
            return
        try:
            offsets, times = (path.read_bytes() for path in self._index_paths)
            index = MemoryIndex.decode(offsets, times)
            if self._transactions_path.exists():  # Else it is made anew when it is asked for.
                TransactionIndex.load(self._transactions_path, self._base_offset)
        except (FileNotFoundError, IndexDamagedError):
            findings.index_is_damaged = True
            return
        self._entries = index.entries()[::-1]  # The next one is the last.
        self._times = _TimesCheck(unseal(times, TIME_ENTRY)[0], self._base_offset)

    def _scan(self, findings: Findings, pace: Pace) -> None:
        position, offset = 0, self._base_offset
        wanted = _CHUNK_BYTES
        while position < self._size_bytes and len(findings.damages) < MAX_FOUND:
            data = self._read(min(wanted, self._size_bytes - position), position)
            pace(len(data))
            run = verify_run(data, offset, below=_ANY_OFFSET, epochs=self._epochs)
            self._check_index(findings, data[: run.size_bytes], position)
            if self._times is not None:
                self._times.note(data[: run.size_bytes])
            position, offset, wanted = position + run.size_bytes, run.next_offset, _CHUNK_BYTES
            if run.damage is None and run.size_bytes:
                continue
            rest = data[run.size_bytes :]
            try:
                header = self._header(rest, position, offset)
            except CorruptRecordError as error:
                # Where the next one begins only its length could tell.
                what = run.damage.what if run.damage is not None else error.message
                behind = self._known_behind(position)
            else:
                if run.damage is None:
                    wanted = header.size_bytes  # It is larger than what was read.
                    continue
                what = run.damage.what
                behind = _Place(position + header.size_bytes, header.next_offset)
                if not self._begins_at(behind):  # Its header names a wrong end as well.
                    behind = self._known_behind(position)
            end_offset = self._end_offset if behind is None else behind.offset
            if end_offset > self._start_offset:  # Below it, epochs are not known any more.
                damage = Damage(offset, position, what, end_offset=end_offset)
                findings.damages.append(damage)
            if behind is None:
                return
            position, offset = behind
        if not findings.damages:  # A damaged batch may name a wrong end; that is mended first.
            self._check_end(findings, position, offset)

    def _header(self, data: bytes, position: int, offset: int) -> BatchHeader:
        """The header that must follow. Raises CorruptRecordError, also where the batch would go on
        behind one that the index knows of: so much need not be read to see that.
        """
        header = next_header(data, 0, offset, self._size_bytes - position)
        for relative_offset, at in reversed(self._entries):
            if at > position:
                place = _Place(at, self._base_offset + relative_offset)
                if at < position + header.size_bytes and self._begins_at(place):
                    raise CorruptRecordError(goes_on_behind(header, position, at))
                break
        return header

    def _check_end(self, findings: Findings, position: int, offset: int) -> None:
        """Batches follow each other without a gap, from segment to segment too (ADR 7)."""
        hole = hole_between(offset, self._end_offset, start_offset=self._start_offset)
        if hole is not None:
            end_offset = max(self._end_offset, hole.offset + 1)
            damage = Damage(hole.offset, position, hole.what, is_hole=True, end_offset=end_offset)
            findings.damages.append(damage)

    def _known_behind(self, position: int) -> _Place | None:
        """Where the index knows of the next batch behind one that hides where it ends."""
        while self._entries:
            relative_offset, at = self._entries[-1]
            place = _Place(at, self._base_offset + relative_offset)
            if position < at < self._size_bytes and self._begins_at(place):
                return place
            self._entries.pop()
        return None

    def _begins_at(self, place: _Place) -> bool:
        if place.position == self._size_bytes:
            return True
        begins = self._read(_BASE_OFFSET.size, place.position)
        return bool(_BASE_OFFSET.unpack(begins)[0] == place.offset)

    def _read(self, size: int, position: int) -> bytes:
        data = self._disk.read_at(self._file.fd, size, position)
        return data if len(data) == size else data + bytes(size - len(data))

    def _check_index(self, findings: Findings, sound: bytes, position: int) -> None:
        """Whether the entries that point into these batches name what is there."""
        end = position + len(sound)
        while self._entries and self._entries[-1][1] < end:
            relative_offset, at = self._entries.pop()
            if at < position:
                continue  # Into a damaged batch: it is looked at again once that is mended.
            [base_offset] = _BASE_OFFSET.unpack_from(sound, at - position)
            if base_offset != self._base_offset + relative_offset:
                findings.index_is_damaged |= self._index is None


class _TimesCheck:
    """Compares a time index with the batches of its segment, which are noted in their order."""

    def __init__(self, entries: bytes, base_offset: int) -> None:
        self._left = [TimeEntry(*entry) for entry in TIME_ENTRY.iter_unpack(entries)]
        self._last = self._left[-1] if self._left else None
        self._left.reverse()  # The next one is the last.
        self._base_offset = base_offset
        self._largest: TimeEntry | None = None
        self._noted_bytes = 0
        self._is_sound = True

    def note(self, batches: bytes) -> None:
        """Sound batches, those that come next."""
        at = 0
        while at < len(batches):
            base_offset, length, timestamp_ms, record_count = _TIMED.unpack_from(batches, at)
            at += _LENGTH_END + length
            if record_count and (
                self._largest is None or timestamp_ms > self._largest.timestamp_ms
            ):
                self._largest = TimeEntry(timestamp_ms, base_offset - self._base_offset)
                self._compare(self._largest)
        self._noted_bytes += len(batches)

    def _compare(self, largest: TimeEntry) -> None:
        """Every entry is one of the batches that are later than all before them; not all are."""
        while self._left and self._left[-1].relative_offset <= largest.relative_offset:
            self._is_sound &= self._left.pop() == largest

    def holds(self, size_bytes: int) -> bool:
        """Whether the entries are right, as far as so many bytes of batches were all noted.

        Otherwise some are damaged, and this is looked at again once they are mended.
        """
        if self._noted_bytes < size_bytes:
            return True
        return self._is_sound and self._last == self._largest


def patch_of(log: PartitionLog, segment: Segment, damage: Damage, sound: bytes) -> bytes | None:
    """What of ``sound``, batches of another replica, takes up the room of the damaged stretch.

    None when no number of them does: then the segments are not made of the same batches. ``sound``
    begins at the damaged batch's offset. Raises StorageError.
    """
    size, offset = 0, damage.offset
    following = log.files.end_of(segment, log.log_end_offset)
    while size < len(sound):
        run = verify_run(sound[size:], offset, below=_ANY_OFFSET, epochs=log.epochs)
        if run.size_bytes == 0:
            return None
        header = next_header(sound, size, offset, len(sound) - size)
        size, offset = size + header.size_bytes, header.next_offset
        end = damage.position + size
        if end > segment.size_bytes:
            return None
        if end == segment.size_bytes:
            return sound[:size] if offset == following else None
        begins = segment.read_at(HEADER_BYTES, end)
        if len(begins) >= _BASE_OFFSET.size and _BASE_OFFSET.unpack_from(begins)[0] == offset:
            return sound[:size]
    return None


def mend(log: PartitionLog, segment: Segment, damage: Damage, patch: bytes) -> Callable[[], None]:
    """Put sound batches where the damaged ones are; what makes that durable, in any thread.

    What was there is kept beside the segment, if there is room. Raises StorageError or
    DiskFullError; what is returned raises OSError, which fails the data directory.
    """
    was = segment.read_at(len(patch), damage.position)
    try:
        segment.overwrite(patch, damage.position)
    except OSError as error:
        raise log.home.translate(error, f"mending {segment.path}") from error
    log.rewrites += 1
    if segment.is_doubtful and segment is not log.files.active:
        segment.index = segment.max_timestamp = None  # Made anew, now that the time can be read.
        segment.is_doubtful = False
    file, disk = segment.file.acquire(), log.home.disk

    kept_as = log.directory / f"{segment.path.stem}-{damage.position}{DAMAGED_SUFFIX}"

    def sync() -> None:
        _keep(disk, kept_as, was)
        try:
            disk.sync_data(file.fd)
        finally:
            file.release()

    return sync


def _keep(disk: Disk, path: Path, damaged: bytes) -> None:
    with contextlib.suppress(OSError):  # It is for people to look at, no more.
        write_atomically(disk, path, damaged)
        for oldest in kept(path.parent)[:-MAX_KEPT]:
            disk.remove(oldest)


def kept(directory: Path) -> list[Path]:
    """The damaged stretches kept in a partition's directory, the oldest first."""
    found = directory.glob(f"*{DAMAGED_SUFFIX}")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
