"""What records hold: their producer and their number, and padding that tells of any damage.

``producer|number|checksum|padding``: the checksum is CRC-32 of all but itself. Whoever reads a
record knows from its value alone who wrote it and in which place.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Final

DAMAGED: Final = "?damaged"
"""How the producer of a record is called that nobody of us wrote as it is."""
_SEPARATOR: Final = b"|"


class ValueMaker:
    """The values of one producer."""

    def __init__(self, producer: str, size_bytes: int) -> None:
        assert "|" not in producer
        self._prefix: Final = producer.encode() + _SEPARATOR
        room = size_bytes - len(self._prefix) - len("4294967295|12345678|")
        self._padding: Final = b"." * max(room, 0)

    def values(self, first: int, count: int) -> list[bytes]:
        """Of so many records from a number on."""
        return [self._value(number) for number in range(first, first + count)]

    def _value(self, number: int) -> bytes:
        head = b"%s%d|" % (self._prefix, number)
        checksum = zlib.crc32(self._padding, zlib.crc32(head))
        return b"%s%08x|%s" % (head, checksum, self._padding)


def parse_value(value: bytes | None) -> tuple[str, int]:
    """Producer and number of a record.

    What nobody of us wrote, or what is damaged, has a producer that none is called, made of its
    digest, and the number 0: so it is found as a record that was never written.
    """
    try:
        assert value is not None
        producer, number, checksum, padding = value.split(_SEPARATOR, 3)
        head = b"%s|%s|" % (producer, number)
        # As text: read as a number, a checksum of other letters would be the same.
        if checksum == b"%08x" % zlib.crc32(padding, zlib.crc32(head)):
            return producer.decode(), int(number)
    except (AssertionError, ValueError):
        pass
    digest = hashlib.sha256(value or b"").hexdigest()[:16]
    return f"{DAMAGED}:{len(value or b'')} bytes:{digest}", 0


def runs_of(records: Iterable[tuple[int, int, bytes | None]]) -> list[list[object]]:
    """``[partition, offset, producer, first, count]`` of (partition, offset, value) in order.

    Records are in one run where partition and producer are the same, and offsets and numbers both
    go up by one.
    """
    runs: list[list[object]] = []
    partition, producer = -1, ""
    base = first = count = 0
    for at, offset, value in records:
        name, number = parse_value(value)
        if (
            count
            and at == partition
            and name == producer
            and offset == base + count
            and number == first + count
        ):
            count += 1
            continue
        if count:
            runs.append([partition, base, producer, first, count])
        partition, base, producer, first, count = at, offset, name, number, 1
    if count:
        runs.append([partition, base, producer, first, count])
    return runs
