"""Where batches and segments stand: what segments say, and are called."""

from __future__ import annotations

from typing import NamedTuple

from penstock.broker.storage.disk import Buffer
from penstock.wire.errors import CorruptRecordError, ErrorCode
from penstock.wire.records import BatchHeader


class Placed(NamedTuple):
    """A batch and where it stands: its header, as it is in the log, and its position."""

    header: BatchHeader
    position: int


class Read(NamedTuple):
    """Whole batches, and what comes after them: its offset and its position."""

    data: Buffer
    next_offset: int
    next_position: int


class Limits(NamedTuple):
    """When a segment is full, and the room that the next one gets in advance.

    The age in milliseconds is by what the batches say of their time (KIP-33). An allocation leaves
    ``reserve_bytes`` free; 0 allocates nothing.
    """

    segment_bytes: int
    segment_ms: int
    allocate_bytes: int = 0
    reserve_bytes: int = 0


class SegmentDamagedError(CorruptRecordError, code=ErrorCode.CORRUPT_MESSAGE, retriable=True):
    """A segment has a batch that is not sound, or lacks one; ``offset`` is one of the segment's."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def file_name(base_offset: int, suffix: str) -> str:
    """``00000000000000000042.log`` for 42 and ``log``."""
    return f"{base_offset:020d}.{suffix}"
