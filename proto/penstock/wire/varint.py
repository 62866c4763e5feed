"""Zig-zag variable-length integers, as Kafka's record batches hold them.

The encoding is Protocol Buffers' ``sint32``/``sint64``: seven bits a byte, low bits first, the
sign in the lowest bit. All functions are pure and safe from any thread.
"""

from __future__ import annotations

from typing import Final

from penstock.wire.errors import CorruptRecordError

MAX_VARINT_BYTES: Final = 10
"""The longest encoding: that of a 64-bit number."""

_SHIFTS: Final = range(7, 7 * MAX_VARINT_BYTES, 7)
_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1


def encode_unsigned(unsigned: int) -> bytes:
    """The plain encoding of a number from 0 on: Protocol Buffers' ``uint64``."""
    out = bytearray()
    while unsigned > 0x7F:
        out.append((unsigned & 0x7F) | 0x80)
        unsigned >>= 7
    out.append(unsigned)
    return bytes(out)


SMALL_LIMIT: Final = 8192
"""``SMALL[n]`` is the encoding of each n with 0 <= n < SMALL_LIMIT: all that take two bytes."""

SMALL: Final[tuple[bytes, ...]] = tuple(encode_unsigned(n << 1) for n in range(SMALL_LIMIT))


def encode_varint(value: int) -> bytes:
    """The encoding of ``value``, 1 to 10 bytes. Raises ValueError outside of 64 bits."""
    if 0 <= value < SMALL_LIMIT:
        return SMALL[value]
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{value} does not fit into 64 bits")
    return encode_unsigned((value << 1) ^ (value >> 63))


def size_of_varint(value: int) -> int:
    """How many bytes ``encode_varint(value)`` has."""
    unsigned = (value << 1) ^ (value >> 63)
    return (max(unsigned.bit_length(), 1) + 6) // 7


def decode_varint(buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """The number at ``position`` (>= 0) and the position after it.

    Raises CorruptRecordError when the buffer ends inside the number or it has more than 64 bits.
    """
    try:
        byte = buffer[position]
        if byte < 0x80:
            return (byte >> 1) ^ -(byte & 1), position + 1
        value = byte & 0x7F
        for shift in _SHIFTS:
            position += 1
            byte = buffer[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                return (value >> 1) ^ -(value & 1), position + 1
    except IndexError:
        raise CorruptRecordError(f"the data ends inside a number, at byte {len(buffer)}") from None
    raise CorruptRecordError(f"the number that ends at byte {position} has more than 64 bits")
