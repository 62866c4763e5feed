"""Zig-zag variable-length integers, as Kafka's record batches hold them.

The encoding is Protocol Buffers' ``sint32``/``sint64``: seven bits a byte, low bits first, the
sign in the lowest bit. All functions are pure and safe from any thread.
"""

from __future__ import annotations

from typing import Final

from penstock.wire.errors import CorruptRecordError

MAX_VARINT_BYTES: Final = 10
"""The longest encoding: that of a 64-bit number."""

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1


def _encode(unsigned: int) -> bytes:
    out = bytearray()
    while unsigned > 0x7F:
        out.append((unsigned & 0x7F) | 0x80)
        unsigned >>= 7
    out.append(unsigned)
    return bytes(out)


SMALL_LIMIT: Final = 8192
"""``SMALL[n]`` is the encoding of each n with 0 <= n < SMALL_LIMIT: all that take two bytes."""

SMALL: Final[tuple[bytes, ...]] = tuple(_encode(n << 1) for n in range(SMALL_LIMIT))


def encode_varint(value: int) -> bytes:
    """The encoding of ``value``, 1 to 10 bytes. Raises ValueError outside of 64 bits."""
    if 0 <= value < SMALL_LIMIT:
        return SMALL[value]
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{value} does not fit into 64 bits")
    return _encode((value << 1) ^ (value >> 63))


def size_of_varint(value: int) -> int:
    """How many bytes ``encode_varint(value)`` has."""
    unsigned = (value << 1) ^ (value >> 63)
    return (max(unsigned.bit_length(), 1) + 6) // 7


def decode_varint(buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position after it.

    Raises CorruptRecordError when the buffer ends inside the number or it has more than 64 bits.
    """
    value = 0
    shift = 0
    for at in range(position, min(position + MAX_VARINT_BYTES, len(buffer))):
        byte = buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return (value >> 1) ^ -(value & 1), at + 1
        shift += 7
    else:
        if position + MAX_VARINT_BYTES > len(buffer):
            raise CorruptRecordError(
                f"the data ends at byte {len(buffer)} inside the number that begins at byte "
                f"{position}"
            )
    raise CorruptRecordError(f"the number at byte {position} has more than 64 bits")
