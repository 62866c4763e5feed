"""Checks of batches as they lie in a file: the header that must follow, the checksum, the epoch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.disk import Buffer
from penstock.broker.storage.placing import Placed
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, BatchHeader, parse_header
from penstock.wire.rewriting import is_filler, trimmed_filler
from penstock.wire.topic_config import MAX_MESSAGE_BYTES

# Base offset, length, leader epoch, magic, CRC, attributes, last offset delta.
_START: Final = struct.Struct(">qiibIhi")
_MIN_LENGTH: Final = HEADER_BYTES - 12
_MAGIC: Final = 2
_CRC_END: Final = 21
_CHUNK_BYTES: Final = 1024 * 1024


class Damage(NamedTuple):
    """What is wrong with the batch at ``position``."""

    position: int
    what: str


class Verified(NamedTuple):
    """The sound batches at the start of some bytes.

    They take ``size_bytes``, and the batch after them begins at ``next_offset``. ``damage`` is
    set when the batch after them is there and is not sound.
    """

    size_bytes: int
    next_offset: int
    damage: Damage | None


def next_header(data: Buffer, at: int, expected_offset: int, room_bytes: int) -> BatchHeader:
    """The header at ``at``, which must begin at ``expected_offset`` and fit into the room left.

    A length that no batch can have, whatever a topic's configs are or were, is damage: nobody is to
    read so much for one bit that flipped, since the checksum tells only once all of it is there.
    Raises CorruptRecordError that says what does not fit, without a place.
    """
    header = parse_header(data, at)
    if header.base_offset != expected_offset or header.last_offset_delta < 0:
        raise CorruptRecordError(
            f"the batch has offsets {header.base_offset} to {header.last_offset}, but "
            f"{expected_offset} comes next"
        )
    if header.size_bytes > MAX_MESSAGE_BYTES:
        raise CorruptRecordError(
            f"the batch at offset {expected_offset} has {header.size_bytes} bytes, but none has "
            f"more than {MAX_MESSAGE_BYTES}"
        )
    if header.size_bytes > room_bytes:
        raise CorruptRecordError(
            f"the batch at offset {expected_offset} has {header.size_bytes} bytes, but only "
            f"{room_bytes} follow"
        )
    return header


def goes_on_behind(header: BatchHeader, position: int, following: int) -> str:
    """What is wrong where another batch begins before the one at ``position`` would end."""
    return (
        f"the batch at offset {header.base_offset} has {header.size_bytes} bytes, but the index "
        f"knows of a batch that begins {following - position} bytes behind its beginning"
    )


class BrokenChainError(Exception):
    """No batch begins at ``position``, where one should."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position
        self.message = message


def check_each(
    read: Callable[[int, int], bytes], size_bytes: int, offset: int
) -> Iterator[tuple[Placed, bool]]:
    """Every batch from the beginning of a file, and whether its checksum holds.

    ``read`` takes a size and a position. Where a batch is not sound all but its place may be
    wrong. Raises BrokenChainError where the next one can't begin.
    """
    position, data, start = 0, b"", 0
    while position < size_bytes:
        left = size_bytes - position
        if position - start + HEADER_BYTES > len(data):
            data, start = read(min(_CHUNK_BYTES, left), position), position
        try:
            header = next_header(data, position - start, offset, left)
        except CorruptRecordError as error:
            raise BrokenChainError(position, error.message) from None
        if position - start + header.size_bytes > len(data):
            data, start = read(min(max(_CHUNK_BYTES, header.size_bytes), left), position), position
        at = position - start
        body = memoryview(data)[at + _CRC_END : at + header.size_bytes]
        yield Placed(header, position), crc32c(body) == header.crc
        position, offset = position + header.size_bytes, header.next_offset


def verify_run(data: bytes, first_offset: int, *, below: int, epochs: EpochHistory) -> Verified:
    """How far whole, sound batches go that lie below offset ``below``.

    A batch's offsets must follow those before it, its leader epoch must be the one that wrote
    there (neither is covered by the checksum), and its checksum must hold. Stops before a batch
    that is cut off by the end of ``data``.
    """
    view = memoryview(data)
    end = len(data)
    at = 0
    offset = first_offset
    epoch, epoch_until = -1, offset  # The epoch of the offsets below epoch_until.
    unpack = _START.unpack_from
    while end - at >= HEADER_BYTES:
        base, length, batch_epoch, magic, crc, _, delta = unpack(data, at)
        last = base + delta
        after = at + 12 + length
        if magic != _MAGIC or length < _MIN_LENGTH or base != offset or delta < 0:
            return Verified(at, offset, Damage(at, _describe(data, at, offset)))
        if after > end or (last >= below and at > 0):
            break
        if last >= epoch_until:
            epoch, epoch_until = epochs.span_at(last)
        if batch_epoch != epoch:
            what = f"the batch at offset {base} has leader epoch {batch_epoch}; {epoch} wrote it"
            return Verified(at, offset, Damage(at, what))
        if crc32c(view[at + 21 : after]) != crc:
            return Verified(at, offset, Damage(at, f"the batch at offset {base} fails its CRC-32C"))
        if last >= below:
            break  # The first batch, whose end is only to be believed once its checksum holds.
        at = after
        offset = last + 1
    return Verified(at, offset, None)


def _describe(data: bytes, at: int, expected_offset: int) -> str:
    try:
        next_header(data, at, expected_offset, len(data))
    except CorruptRecordError as error:
        return error.message
    return "the batch header is damaged"


def from_offset(data: Buffer, offset: int) -> Buffer:
    """Batches of which the first may begin before ``offset``; not if it is there to fill a gap.

    It covers several batches that compaction took away, and a follower that has those, uncleaned,
    may well end between two of them.
    """
    if len(data) >= HEADER_BYTES:
        header = parse_header(data)
        if is_filler(header):
            return b"".join([trimmed_filler(header, offset), data[header.size_bytes :]])
    return data
