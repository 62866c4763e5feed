"""Which logs are to be cleaned, how far, and which of their segments together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.broker.storage.index import RELATIVE_OFFSET_MAX
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment


@dataclass(frozen=True, slots=True)
class Plan:
    """A log that may be cleaned: its closed segments up to ``end_offset``, oldest first.

    ``dirty_offset``: from here on keys may be there twice. ``is_overdue``: a record has waited for
    ``max.compaction.lag.ms``.
    """

    log: PartitionLog
    segments: tuple[Segment, ...]
    ends: tuple[int, ...]  # Where each of them ends.
    dirty_offset: int
    clean_bytes: int
    dirty_bytes: int
    is_overdue: bool

    @property
    def end_offset(self) -> int:
        """Up to here it may be cleaned."""
        return self.ends[-1]

    @property
    def dirty_ratio(self) -> float:
        """How much of it is dirty."""
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is worth it."""
        if not self.dirty_bytes:
            return False
        return self.is_overdue or self.dirty_ratio >= self.log.config.min_cleanable_dirty_ratio

    def dirty_segments(self) -> Iterator[tuple[Segment, int]]:
        """Those that hold offsets from ``dirty_offset`` on, with their ends."""
        for segment, end in zip(self.segments, self.ends, strict=True):
            if end > self.dirty_offset:
                yield segment, end

    def groups(self, end_offset: int) -> Iterator[list[tuple[Segment, int]]]:
        """The segments below ``end_offset``, those together that make one of ``segment.bytes``."""
        group: list[tuple[Segment, int]] = []
        size_bytes = 0
        for segment, end in zip(self.segments, self.ends, strict=True):
            if segment.base_offset >= end_offset:
                break
            fits = (
                size_bytes + segment.size_bytes <= self.log.config.segment_bytes
                and group
                and end - group[0][0].base_offset <= RELATIVE_OFFSET_MAX
            )
            if group and not fits:
                yield group
                group, size_bytes = [], 0
            group.append((segment, end))
            size_bytes += segment.size_bytes
        if group:
            yield group


def plan_for(log: PartitionLog, *, high_watermark: int, now_ms: int) -> Plan | None:
    """What may be cleaned of a log; None for nothing.

    Closed segments alone, which are on the disk, committed to their ends and below the last stable
    offset, and whose records are all older than ``min.compaction.lag.ms``; up to the first that is
    not. ``now_ms`` is the wall
    clock's. Raises StorageError or CorruptRecordError.
    """
    segments = _cleanable(log, high_watermark, now_ms)
    if not segments:
        return None
    following = log.files.segments[len(segments)]
    ends = (*(segment.base_offset for segment in segments[1:]), following.base_offset)
    dirty_offset = max(log.cleaned_offset, log.log_start_offset)
    clean_bytes = dirty_bytes = 0
    oldest_ms: int | None = None
    for segment, end in zip(segments, ends, strict=True):
        if end <= dirty_offset:
            clean_bytes += segment.size_bytes
            continue
        dirty_bytes += segment.size_bytes
        oldest_ms = segment.roll_timestamp_ms() if oldest_ms is None else oldest_ms
    lag_ms = log.config.max_compaction_lag_ms
    return Plan(
        log=log,
        segments=tuple(segments),
        ends=ends,
        dirty_offset=dirty_offset,
        clean_bytes=clean_bytes,
        dirty_bytes=dirty_bytes,
        is_overdue=oldest_ms is not None and now_ms - oldest_ms > lag_ms,
    )


def _cleanable(log: PartitionLog, high_watermark: int, now_ms: int) -> Sequence[Segment]:
    segments = log.files.segments
    limit = min(log.last_stable_offset(high_watermark), log.recovery_point)
    lag_ms = log.config.min_compaction_lag_ms
    for at, segment in enumerate(segments[:-1]):
        end = segments[at + 1].base_offset
        if end > limit or not log.files.is_flushed(segment):
            return segments[:at]
        if lag_ms > 0:
            newest = segment.largest_timestamp()
            if newest is not None and now_ms - newest.timestamp_ms < lag_ms:
                return segments[:at]
    return segments[:-1]


def close_overdue(log: PartitionLog, now_ms: int) -> None:
    """Close the active segment when its first record has waited for ``max.compaction.lag.ms``.

    Raises StorageError, DiskFullError or CorruptRecordError.
    """
    started_ms = log.files.active.roll_timestamp_ms()
    if started_ms is not None and now_ms - started_ms > log.config.max_compaction_lag_ms:
        log.roll()
