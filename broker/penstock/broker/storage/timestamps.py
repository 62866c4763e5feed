"""Finding records by time over the segments of a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
    unknown = [one for one in files.segments if one.base_offset < below and needs_time(one)]
    if not unknown:
        return None

    def learn() -> None:
        own = DataDirectory(home.path, home.settings, home.clock_ms, disk=home.disk)
        for segment in unknown:
            _learn_time(segment, own)

    return learn


def needs_time(segment: Segment) -> bool:
    """Whether ``largest_timestamp`` would have to look into files."""
    return (
        segment.max_timestamp is None
        and segment.index is None
        and segment.learned_time is None
        and segment.size_bytes > 0
    )


class _Detached(Segment):
    """A segment whose files are looked at beside the log. Nothing of it is made anew."""

    __slots__ = ()

    def mend_index(self) -> MemoryIndex:
        raise IndexDamagedError(f"{self.index_path} is damaged")


def _learn_time(segment: Segment, home: DataDirectory) -> None:
    """Find the largest timestamp for the log's thread, in any other; raises nothing.

    ``home`` is one of that thread's own. What is damaged is left for ``largest_timestamp``; but
    all is read here that it needs for an index made anew.
    """
    size, base_offset = segment.size_bytes, segment.base_offset
    copy = _Detached(home, segment.directory, segment.name, base_offset, size_bytes=size)
    twin = Segment(home, segment.directory, segment.name, base_offset, size_bytes=size)
    try:
        segment.learned_time = size, copy.largest_in_file()
    except IndexDamagedError:
        with contextlib.suppress(PenstockError, OSError):  # The search itself will say so.
            segment.prepare(twin)
    except PenstockError:
        return
    finally:
        copy.close_file()
        twin.close_file()


class Span(NamedTuple):
    """Where to search: from ``start`` to below ``below``, in a log that ends at ``end``.

    ``holes`` are offsets that are known to be missing, one of each hole.
    """

    start: int
    below: int
    end: int
    holes: Sequence[int] = ()


def first_at_or_after(files: LogFiles, timestamp_ms: int, span: Span) -> TimestampedOffset | None:
    """The first record in ``span`` whose time is at or after the one given.

    Raises SegmentDamagedError for a damaged batch on the way, and for one that is missing: nobody
    knows whether that is the one. So too where an index must be made anew for which much is read.
    """
    for segment in files.segments:
        if segment.base_offset >= span.below:
            break
        largest_entry = segment.largest_timestamp(quickly=True)
        if largest_entry is None or largest_entry.timestamp_ms < timestamp_ms:
            _refuse_holes(files, segment, span)
            continue
        end = segment.base_offset
        for placed in segment.walk_from_time(timestamp_ms):
            header = placed.header
            end = header.next_offset
            if header.base_offset >= span.below:
                break
            if header.max_timestamp_ms < timestamp_ms or header.last_offset < span.start:
                continue
            for record in _records(segment, placed):
                if record.timestamp_ms >= timestamp_ms and _is_in(span, record):
                    return _found(record, placed)
        _refuse_holes(files, segment, span, end)
    return None


def largest(files: LogFiles, span: Span) -> TimestampedOffset | None:
    """The record with the largest time in ``span``; the first of several.

    Raises as ``first_at_or_after``.
    """
    best: _Best | None = None
    for segment in files.segments:
        if segment.base_offset >= span.below:
            break
        _refuse_holes(files, segment, span)
        entry = segment.largest_timestamp(quickly=True)
        if entry is None or (best is not None and entry.timestamp_ms <= best.timestamp_ms):
            continue
        found = _largest_of(segment, span.start, span.below)
        if found is not None and (best is None or found.timestamp_ms > best.timestamp_ms):
            best = found
    if best is None:
        return None
    for record in _records(best.segment, best.placed):
        if record.timestamp_ms >= best.timestamp_ms and _is_in(span, record):
            return _found(record, best.placed)
    return None  # The header promised a time that no record has.


def _is_in(span: Span, record: Record) -> bool:
    return span.start <= record.offset < span.below


def _refuse_holes(files: LogFiles, segment: Segment, span: Span, end: int | None = None) -> None:
    """Raise SegmentDamagedError where the search would pass over a hole of a segment.

    ``end`` is where its batches were seen to end. An index that was made anew knows nothing of what
    is missing, so where there was one those are not passed by unseen either.
    """
    following = files.end_of(segment, span.end)
    missing = [hole for hole in span.holes if segment.base_offset <= hole < following]
    if end is None and segment.was_made_anew:
        end = segment.end_offset()
    if end is not None and end < following:
        missing.append(max(end, span.start))
    for offset in missing:
        if span.start <= offset < min(following, span.below):
            what = f"batches at and behind offset {offset} are missing, one may be looked for"
            raise segment.damaged(segment.size_bytes, what, offset)


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
