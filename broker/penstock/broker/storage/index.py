"""The sparse indexes of a segment: offset to position, and time to offset.

``BASE.index`` has entries of 8 bytes (relative offset u32, position u32), ``BASE.timeindex`` of
12 (timestamp i64, relative offset u32), big-endian and rising. An offset entry names a batch: its
base offset and where it begins. A time entry (T, O) says that no record before it is later than T,
and that the batch with base offset O is the first to have T; the last entry of a closed segment
holds the segment's largest timestamp. After the entries comes their CRC-32C (u32), which files of
earlier versions lack: the size tells.

The active segment's index lives in memory and is written when the segment is closed: after a
crash that segment is read anyway. A closed segment's index stays in its files. Both can be made
anew from the log, and what they say is checked against the log where it is used: whoever gets a
time entry from here compares it with the batch that it names.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

OFFSET_ENTRY: Final = struct.Struct(">II")
TIME_ENTRY: Final = struct.Struct(">qI")
_CHECKSUM: Final = struct.Struct(">I")
RELATIVE_OFFSET_MAX: Final = 2**31 - 1


class IndexDamagedError(Exception):
    """An index file is missing, cut short or contradicts the log; make it anew."""


class OffsetEntry(NamedTuple):
    """A batch: its base offset, relative to the segment's, and its position."""

    relative_offset: int
    position: int


class TimeEntry(NamedTuple):
    """The largest timestamp so far, and the base offset (relative) of the first batch with it."""

    timestamp_ms: int
    relative_offset: int


START: Final = OffsetEntry(0, 0)


class MemoryIndex:
    """Both indexes of a segment that is appended to; compact, 8 and 12 bytes an entry."""

    __slots__ = ("_offsets", "_positions", "_time_offsets", "_times", "last_indexed_position")

    def __init__(self) -> None:
        self._offsets = array("I")
        self._positions = array("I")
        self._times = array("q")
        self._time_offsets = array("I")
        self.last_indexed_position = 0

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def last_offset(self) -> int:
        """The relative offset of the last batch indexed, 0 for none."""
        return self._offsets[-1] if self._offsets else 0

    def entries(self) -> list[OffsetEntry]:
        """Of the batches that are indexed, in their order."""
        return list(map(OffsetEntry, self._offsets, self._positions))

    def add_offset(self, relative_offset: int, position: int) -> None:
        """Index the batch that begins at ``position``."""
        self._offsets.append(relative_offset)
        self._positions.append(position)
        self.last_indexed_position = position

    def add_time(self, timestamp_ms: int, relative_offset: int) -> None:
        """Note the largest timestamp so far, if it is larger than the last one noted."""
        if not self._times or timestamp_ms > self._times[-1]:
            self._times.append(timestamp_ms)
            self._time_offsets.append(relative_offset)

    def floor_offset(self, relative_offset: int) -> OffsetEntry:
        """The last entry at or before the offset; the segment's start when there is none."""
        at = bisect_right(self._offsets, relative_offset) - 1
        return OffsetEntry(self._offsets[at], self._positions[at]) if at >= 0 else START

    def floor_position(self, position: int) -> int:
        """Where the last batch indexed that begins at or before the position does; else 0."""
        at = bisect_right(self._positions, position) - 1
        return self._positions[at] if at >= 0 else 0

    def next_offset(self, relative_offset: int) -> OffsetEntry | None:
        """The first entry behind the offset; None when there is none."""
        at = bisect_right(self._offsets, relative_offset)
        return (
            OffsetEntry(self._offsets[at], self._positions[at]) if at < len(self._offsets) else None
        )

    def floor_time(self, timestamp_ms: int) -> TimeEntry | None:
        """The last entry whose timestamp is at or before the one given."""
        at = bisect_right(self._times, timestamp_ms) - 1
        return TimeEntry(self._times[at], self._time_offsets[at]) if at >= 0 else None

    def last_time_below(self, relative_offset: int) -> TimeEntry | None:
        """The last time entry whose batch begins before the offset."""
        at = bisect_right(self._time_offsets, relative_offset - 1) - 1
        return TimeEntry(self._times[at], self._time_offsets[at]) if at >= 0 else None

    def truncate(self, relative_offset: int) -> None:
        """Drop the entries of batches that begin at or after the offset."""
        keep = bisect_right(self._offsets, relative_offset - 1)
        del self._offsets[keep:], self._positions[keep:]
        keep = bisect_right(self._time_offsets, relative_offset - 1)
        del self._times[keep:], self._time_offsets[keep:]
        self.last_indexed_position = self._positions[-1] if self._positions else 0

    def copy(self) -> MemoryIndex:
        """An index that changes on its own."""
        other = MemoryIndex()
        other._offsets, other._positions = self._offsets[:], self._positions[:]
        other._times, other._time_offsets = self._times[:], self._time_offsets[:]
        other.last_indexed_position = self.last_indexed_position
        return other

    def encode_offsets(self) -> bytes:
        """What BASE.index holds."""
        out = array("I", bytes(8 * len(self._offsets)))
        out[0::2] = self._offsets
        out[1::2] = self._positions
        if sys.byteorder == "little":
            out.byteswap()
        return _sealed(out.tobytes())

    def encode_times(self) -> bytes:
        """What BASE.timeindex holds."""
        return _sealed(b"".join(map(TIME_ENTRY.pack, self._times, self._time_offsets)))

    @classmethod
    def decode(cls, offsets: bytes, times: bytes) -> MemoryIndex:
        """The index that the two files hold. Raises IndexDamagedError when they can't be that."""
        index = cls()
        for relative_offset, position in OFFSET_ENTRY.iter_unpack(unseal(offsets, OFFSET_ENTRY)[0]):
            index.add_offset(relative_offset, position)
        for timestamp_ms, relative_offset in TIME_ENTRY.iter_unpack(unseal(times, TIME_ENTRY)[0]):
            index._times.append(timestamp_ms)
            index._time_offsets.append(relative_offset)
        if not index.is_rising():
            raise IndexDamagedError("an index file's entries do not rise")
        return index

    def is_rising(self) -> bool:
        """Whether every column rises strictly, as it does unless a file was damaged."""
        columns: tuple[array[int], ...] = (
            self._offsets,
            self._positions,
            self._times,
            self._time_offsets,
        )
        return all(older < newer for column in columns for older, newer in pairwise(column))


class TimesFile(NamedTuple):
    """What a look at all of a time index file found: its last entry, and whether it has a checksum.

    Without one a bit that flipped, or entries that are gone from the end, can't be told by the file
    alone.
    """

    last: TimeEntry | None
    is_sealed: bool


class FileIndex:
    """Both indexes of a closed segment, searched in their files: no memory, few small reads."""

    __slots__ = ("_offsets_path", "_times_path")

    def __init__(self, offsets_path: Path, times_path: Path) -> None:
        self._offsets_path = offsets_path
        self._times_path = times_path

    def floor_offset(self, relative_offset: int) -> OffsetEntry:
        """As MemoryIndex. Raises IndexDamagedError."""
        found, _ = _around(self._offsets_path, OFFSET_ENTRY, 0, relative_offset)
        return OffsetEntry(*found) if found else START

    def next_offset(self, relative_offset: int) -> OffsetEntry | None:
        """As MemoryIndex. Raises IndexDamagedError."""
        _, found = _around(self._offsets_path, OFFSET_ENTRY, 0, relative_offset)
        return OffsetEntry(*found) if found else None

    def floor_time(self, timestamp_ms: int) -> TimeEntry | None:
        """As MemoryIndex. Raises IndexDamagedError."""
        found, _ = _around(self._times_path, TIME_ENTRY, 0, timestamp_ms)
        return TimeEntry(*found) if found else None

    def last_time_below(self, relative_offset: int) -> TimeEntry | None:
        """As MemoryIndex. Raises IndexDamagedError."""
        found, _ = _around(self._times_path, TIME_ENTRY, 1, relative_offset - 1)
        return TimeEntry(*found) if found else None

    def check_times(self) -> TimesFile:
        """Read all of the time index, and compare its checksum. Raises IndexDamagedError."""
        try:
            data = self._times_path.read_bytes()
        except OSError as error:
            raise IndexDamagedError(str(error)) from None
        entries, is_sealed = unseal(data, TIME_ENTRY)
        last = TimeEntry(*TIME_ENTRY.unpack(entries[-TIME_ENTRY.size :])) if entries else None
        return TimesFile(last, is_sealed)

    def load(self) -> MemoryIndex:
        """Both files in memory, to append to. Raises IndexDamagedError."""
        try:
            return MemoryIndex.decode(
                self._offsets_path.read_bytes(), self._times_path.read_bytes()
            )
        except OSError as error:
            raise IndexDamagedError(str(error)) from None


def _sealed(entries: bytes) -> bytes:
    return entries + _CHECKSUM.pack(crc32c(entries))


def unseal(data: bytes, entry: struct.Struct) -> tuple[bytes, bool]:
    """The entries that an index file holds, and whether a checksum vouches for them.

    Raises IndexDamagedError when it is cut short, or fails its checksum.
    """
    left = len(data) % entry.size
    if left == 0:
        return data, False
    entries = data[: -_CHECKSUM.size]
    if left != _CHECKSUM.size or data[-_CHECKSUM.size :] != _CHECKSUM.pack(crc32c(entries)):
        raise IndexDamagedError("an index file is cut short or fails its checksum")
    return entries, True


_Entry = tuple[int, int] | None


def _around(path: Path, entry: struct.Struct, column: int, wanted: int) -> tuple[_Entry, _Entry]:
    """The last entry of the file whose ``column`` is at most ``wanted``, and the one behind it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise IndexDamagedError(str(error)) from None
    try:
        size = os.fstat(fd).st_size
        if size % entry.size not in (0, _CHECKSUM.size):
            raise IndexDamagedError(f"{path} is cut short")
        low, high = 0, size // entry.size
        found: _Entry = None
        following: _Entry = None
        while low < high:
            middle = (low + high) // 2
            values = entry.unpack(os.pread(fd, entry.size, middle * entry.size))
            if values[column] <= wanted:
                found, low = values, middle + 1
            else:
                following, high = values, middle
    except (OSError, struct.error) as error:
        raise IndexDamagedError(f"{path}: {error}") from None
    finally:
        os.close(fd)
    return found, following
