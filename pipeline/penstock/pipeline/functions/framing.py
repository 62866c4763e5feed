"""The few bytes that Confluent's serialisers put before a message: which schema it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.pipeline.errors import ConverterError

FRAMINGS: Final = ("plain", "confluent")
_HEADER_BYTES: Final = 5


def check_framing(framing: str) -> bool:
    """Whether it is Confluent's. Raises ConverterError for what is neither."""
    if framing not in FRAMINGS:
        raise ConverterError(f"framing='{framing}' is none of {', '.join(FRAMINGS)}")
    return framing == "confluent"


def split_frame(data: bytes) -> tuple[int, bytes]:
    """The schema's id and what follows it. Raises ConverterError where the header is none."""
    if len(data) < _HEADER_BYTES or data[0] != 0:
        raise ConverterError(
            f"{len(data)} bytes begin with {data[:_HEADER_BYTES].hex() or 'nothing'} and not with "
            "a zero and a schema's id; next: read them with framing='plain'"
        )
    return int.from_bytes(data[1:_HEADER_BYTES], "big"), data[_HEADER_BYTES:]


def frame(schema_id: int) -> bytes:
    """The header of a message of this schema (0 to 2^32 - 1)."""
    if not 0 <= schema_id < 2**32:
        raise ConverterError(f"a schema's id is a number of 32 bits, and {schema_id} is not")
    return b"\0" + schema_id.to_bytes(4, "big")


def skip_indexes(payload: bytes) -> bytes:
    """A protobuf message without the way to its type in the schema's file that stands before it."""
    count, at = _zigzag(payload, 0)
    for _ in range(count):
        _, at = _zigzag(payload, at)
    return payload[at:]


def indexes(way: Sequence[int]) -> bytes:
    """The way to a message's type: its place in the file, then in the message around it, ...

    That of the first type is shortened to one zero.
    """
    if list(way) == [0]:
        return b"\0"
    return b"".join(_varint(2 * number) for number in (len(way), *way))


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        number |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise ConverterError("the way to the message's type is torn; next: check what wrote it")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
