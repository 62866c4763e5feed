"""What a crash can do to batches that were not flushed, and what it can't.

A write that a power cut interrupts leaves some sectors as they were. In a file that only grows they
held nothing, so they are zeros, or the file ends before them. It never leaves a sector of other
bytes than were written. A batch that is there in all its sectors and is not sound was therefore
whole once, and may have been flushed and acknowledged; something else has changed it since.
"""

from __future__ import annotations

import re
from typing import Final

from crc32c import crc32c

from penstock.broker.storage.batches import next_header
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, parse_header, verify_batch

SECTOR_BYTES: Final = 512
"""No disk writes less than that, and files are laid out in whole ones."""

LOOKED_AT_BYTES: Final = 16 * 1024 * 1024
"""So much of a file is looked at: a batch of more can't be told from one that the file cuts off."""

MAX_CHECKED_BYTES: Final = 4 * LOOKED_AT_BYTES
"""So many bytes are checked in search of a batch, which may be made to look like many of them."""

_CRC_END: Final = 21  # The checksum of a batch is of all that comes after it.
_OFFSET_BYTES: Final = 8
_SHARED_BYTES: Final = 5  # So much of a base offset is as in the one before, or one more.


def was_whole(data: bytes, position: int, offset: int) -> bool:
    """Whether what should be the batch at ``offset``, and is not, was written in all its sectors.

    ``data`` is what the file has from ``position`` on, as far as LOOKED_AT_BYTES. False where it
    can't be told: a batch with a sector of zeros may be a torn one.
    """
    end = _end(data, offset)
    return end is not None and not _has_gap(data, position, end, offset)


def _end(data: bytes, offset: int) -> int | None:
    """Where the batch at the beginning of ``data`` ended when it was written, if that is known."""
    if len(data) < HEADER_BYTES:
        return None  # It is the file that ends.
    try:
        return next_header(data, 0, offset, len(data)).size_bytes
    except CorruptRecordError:
        pass
    following = _next_batch(data, offset)
    if following is not None:
        return following
    try:
        header = next_header(data, 0, offset, 1 << 62)
    except CorruptRecordError:
        return HEADER_BYTES  # Not even that is as it was written.
    # Its length, which no checksum covers, says that it goes on behind the end of the file.
    is_last = crc32c(memoryview(data)[_CRC_END:]) == header.crc
    return len(data) if is_last else None


def _beginnings(offset: int) -> re.Pattern[bytes]:
    """What a batch begins like that is not far behind ``offset``."""
    after = offset + (1 << 8 * (_OFFSET_BYTES - _SHARED_BYTES))
    shared = [re.escape(one.to_bytes(_OFFSET_BYTES)[:_SHARED_BYTES]) for one in (offset, after)]
    return re.compile(b"(?=(?:%b|%b).{11}\x02)" % (shared[0], shared[1]), re.DOTALL)


def _next_batch(data: bytes, offset: int) -> int | None:
    """Where in ``data`` a sound batch of a later offset begins; None when none was found."""
    left = MAX_CHECKED_BYTES
    for found in _beginnings(offset).finditer(data, 1):
        at = found.start()
        try:
            header = parse_header(data, at)
            if header.base_offset > offset and header.size_bytes <= len(data) - at:
                left -= header.size_bytes
                if left < 0:
                    return None
                verify_batch(memoryview(data)[at : at + header.size_bytes])
                return at
        except CorruptRecordError:
            continue
    return None


def last_end(data: bytes, offset: int) -> int:
    """Where the last sound batch in ``data`` ends that is behind ``offset``, or ``offset``."""
    begins = _beginnings(offset)
    end, at, left = offset, 0, MAX_CHECKED_BYTES
    while (found := begins.search(data, at)) is not None and left > 0:
        at = found.start()
        try:
            header = parse_header(data, at)
            if header.size_bytes <= len(data) - at:
                left -= header.size_bytes
                verify_batch(memoryview(data)[at : at + header.size_bytes])
                end = max(end, header.next_offset)
                at += header.size_bytes
                continue
        except CorruptRecordError:
            pass
        at += 1
    return end


def _has_gap(data: bytes, position: int, end: int, offset: int) -> bool:
    """Whether a sector of the first ``end`` bytes of ``data`` holds nothing.

    The last sector is looked at as a whole: what else is in it was written with it or later.
    """
    at = 0
    while at < end:
        after = at + SECTOR_BYTES - (position + at) % SECTOR_BYTES
        part = data[at:after]
        # A base offset begins with zeros.
        is_meant = at == 0 and offset.to_bytes(_OFFSET_BYTES).startswith(part)
        if not any(part) and not is_meant:
            return True
        at = after
    return False
