"""Which segments of a log are too old or too many (retention.ms, retention.bytes)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.log_start import AT_ONCE, Why
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import CorruptRecordError


def delete_old(log: PartitionLog, *, high_watermark: int, now_ms: int) -> int:
    """Where the log should begin, by its topic's configs; at most AT_ONCE segments further on.

    Whole segments go, oldest first, none that holds what is not committed: those whose records are
    all older than ``retention.ms`` by their timestamps, and those without which the log still has
    ``retention.bytes``. When that is all of it, the active segment is closed first, so that what
    is appended next has a segment of its own. ``now_ms`` is the wall clock's. Nothing else is
    changed here (but why they are to go is noted, for those who count them): moving the log's start
    is for the leader, whose followers then do the same.

    Raises StorageError, DiskFullError or CorruptRecordError.
    """
    if not log.config.deletes:
        return log.log_start_offset
    every = log.files.segments
    # What lies below the start is as good as gone: it is deleted once the start is durable.
    segments = every[every.index(log.files.segment_of(log.log_start_offset)) :]
    due = 0
    for segment, why in _due(log, segments, high_watermark, now_ms):
        log.start.due(segment, why)
        due += 1
    if due == 0:
        return log.log_start_offset
    if due == len(segments):
        log.roll()
        return log.log_end_offset
    return min(segments[due].base_offset, high_watermark)


def _due(
    log: PartitionLog, segments: Sequence[Segment], high_watermark: int, now_ms: int
) -> Iterator[tuple[Segment, Why]]:
    config = log.config
    size_bytes = sum(segment.size_bytes for segment in segments)
    for at, segment in enumerate(segments[:AT_ONCE]):
        is_active = at + 1 == len(segments)
        end = log.log_end_offset if is_active else segments[at + 1].base_offset
        if end > high_watermark or (is_active and not segment.size_bytes):
            return
        size_bytes -= segment.size_bytes
        too_many = 0 <= config.retention_bytes <= size_bytes
        if not too_many and not _is_expired(segment, config.retention_ms, now_ms):
            return
        yield segment, Why.SIZE if too_many else Why.TIME


def _is_expired(segment: Segment, retention_ms: int, now_ms: int) -> bool:
    """Whether all its records are too old. Records without a time count from the last write.

    So do those of which damage hides the time, and that no replica mends: they go some day.
    """
    if retention_ms < 0:
        return False
    newest_ms = -1
    with contextlib.suppress(CorruptRecordError):  # Where it can't be told, it is so as well.
        largest = segment.largest_timestamp()
        newest_ms = -1 if largest is None or segment.is_doubtful else largest.timestamp_ms
    if newest_ms < 0:
        newest_ms = now_ms
        with contextlib.suppress(OSError):
            newest_ms = segment.path.stat().st_mtime_ns // 1_000_000
    return now_ms - newest_ms > retention_ms


def free_what_was_deleted(log: PartitionLog) -> None:
    """Let the last segment of a log go, when all that is in it was deleted.

    The others go when the log's start moves; the one that is appended to can't, before it is
    closed. Followers close theirs at other places than leaders.
    """
    if log.log_start_offset == log.log_end_offset and log.files.active.size_bytes:
        log.roll()
