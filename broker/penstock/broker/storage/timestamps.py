"""Finding records by time over the segments of a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.index import IndexDamagedError, MemoryIndex
from penstock.broker.storage.log_files import LogFiles
from penstock.broker.storage.placing import Placed
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import CorruptRecordError, PenstockError
from penstock.wire.records import Record, decode_batch


def cold_times(home: DataDirectory, files: LogFiles, below: int) -> Callable[[], None] | None:
    """What learns the largest times of segments that begin below ``below``, in any thread.

    None when they are known. Without it a search looks for them in the files of each segment, the
    first time after a start.
    """
    unknown = [one for one in files.segments if one.base_offset < below and one.needs_time]
    if not unknown:
        return None

    def learn() -> None:
        own = DataDirectory(home.path, home.settings, home.clock_ms, disk=home.disk)
        for segment in unknown:
            _learn_time(segment, own)

    return learn


class _Detached(Segment):
    """A segment whose files are looked at beside the log. Nothing of it is made anew."""

    __slots__ = ()

    def mend_index(self) -> MemoryIndex:
        raise IndexDamagedError(f"{self.index_path} is damaged")


def _learn_time(segment: Segment, home: DataDirectory) -> None:
    """Find the largest timestamp for the log's thread, in any other; raises nothing.

    ``home`` is one of that thread's own. What is damaged is left for ``largest_timestamp``.
    """
    size, base_offset = segment.size_bytes, segment.base_offset
    copy = _Detached(home, segment.directory, segment.name, base_offset, size_bytes=size)
    try:
        segment.learned_time = size, copy.largest_in_file()
    except (IndexDamagedError, PenstockError):
        return
    finally:
        copy.close_file()


def first_at_or_after(
    files: LogFiles, timestamp_ms: int, *, start: int, below: int
) -> TimestampedOffset | None:
    """The first record from ``start`` to below ``below`` whose time is at or after the one given.

    Raises CorruptRecordError for a damaged batch on the way.
    """
    for segment in files.segments:
        if segment.base_offset >= below:
            break
        largest_entry = segment.largest_timestamp()
        if largest_entry is None or largest_entry.timestamp_ms < timestamp_ms:
            continue
        for placed in segment.walk_from_time(timestamp_ms):
            header = placed.header
            if header.base_offset >= below:
                break
            if header.max_timestamp_ms < timestamp_ms or header.last_offset < start:
                continue
            for record in _records(segment, placed):
                if record.timestamp_ms >= timestamp_ms and start <= record.offset < below:
                    return _found(record, placed)
    return None


def largest(files: LogFiles, *, start: int, below: int) -> TimestampedOffset | None:
    """The record with the largest time from ``start`` to below ``below``; the first of several.

    Raises CorruptRecordError for a damaged batch on the way.
    """
    best: _Best | None = None
    for segment in files.segments:
        if segment.base_offset >= below:
            break
        entry = segment.largest_timestamp()
        if entry is None or (best is not None and entry.timestamp_ms <= best.timestamp_ms):
            continue
        found = _largest_of(segment, start, below)
        if found is not None and (best is None or found.timestamp_ms > best.timestamp_ms):
            best = found
    if best is None:
        return None
    for record in _records(best.segment, best.placed):
        if record.timestamp_ms >= best.timestamp_ms and start <= record.offset < below:
            return _found(record, best.placed)
    return None  # The header promised a time that no record has.


class _Best(NamedTuple):
    """The batch with the largest time so far."""

    segment: Segment
    placed: Placed
    timestamp_ms: int


def _largest_of(segment: Segment, start: int, below: int) -> _Best | None:
    if start > segment.base_offset:
        walk = segment.walk_from_offset(start)
    else:
        # Where ``below`` splits a batch, that batch's largest time may not count.
        split = segment.position_of(below)
        walk = segment.walk_from_largest_below(split.header.base_offset if split else below)
    best: _Best | None = None
    for placed in walk:
        header = placed.header
        if header.base_offset >= below:
            break
        timestamp_ms = header.max_timestamp_ms
        if not header.record_count:
            continue
        if best is not None and timestamp_ms <= best.timestamp_ms:
            continue
        if header.base_offset < start or header.next_offset > below:
            inside = [
                record.timestamp_ms
                for record in _records(segment, placed)
                if start <= record.offset < below
            ]
            if not inside or (best is not None and max(inside) <= best.timestamp_ms):
                continue
            timestamp_ms = max(inside)
        best = _Best(segment, placed, timestamp_ms)
    return best


def _records(segment: Segment, placed: Placed) -> list[Record]:
    data = segment.read_at(placed.header.size_bytes, placed.position)
    try:
        return decode_batch(data)
    except CorruptRecordError as error:
        raise segment.damaged(placed.position, error.message) from None


def _found(record: Record, placed: Placed) -> TimestampedOffset:
    return TimestampedOffset(record.offset, record.timestamp_ms, placed.header.leader_epoch)
