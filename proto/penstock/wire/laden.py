"""Messages whose record batches lie beside them, so that they are not copied with them.

Protocol Buffers' own objects copy bytes when a message is parsed, each time that they are asked for
them, when they are set, and again when the message is serialised. Of megabytes of records that is
most of what a message costs. All messages that carry records have them in the same shape: in the
bytes field ``records`` of each entry of one repeated field. Here that field is cut out of the bytes
that came before the rest is parsed, and laid between what was serialised when a message goes out
(https://protobuf.dev/programming-guides/encoding).

Everything here is pure and safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from penstock.v1 import log_pb2, replication_pb2
from penstock.wire.batch import Buffer
from penstock.wire.varint import encode_unsigned

M = TypeVar("M", bound=Message)

_SMALL_BYTES: Final = 16 * 1024
"""A message up to here is cheaper copied than looked through for what not to copy."""

_SMALL_ENTRY_BYTES: Final = 2 * 1024
"""The same of an entry in a larger message."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Laden(Generic[M]):
    """A message, and beside it the records of each of its entries, in their order.

    ``records`` has one buffer for each entry, an empty one where there are none. Buffers that were
    parsed are views of what came: it stays in memory for as long as one of them does. What the
    entries themselves have in the field is not to be relied on. ``parsed_bytes`` is the size of
    what was parsed, 0 if nothing was.
    """

    __slots__ = ("message", "parsed_bytes", "records")

    def __init__(self, message: M, records: list[Buffer], parsed_bytes: int = 0) -> None:
        self.message = message
        self.records = records
        self.parsed_bytes = parsed_bytes

    @property
    def records_bytes(self) -> int:
        """The size of all its records."""
        return sum(map(len, self.records))


class LadenType(Generic[M]):
    """One kind of message that carries records; ``entries`` is its repeated field."""

    def __init__(self, kind: type[M], entries: str) -> None:
        field = kind.DESCRIPTOR.fields_by_name[entries]
        entry: Any = field.message_type  # Not None: the field's kind is a message.
        records = entry.fields_by_name["records"]
        self._kind = kind
        self._entries = entries
        self._entries_tag = field.number << 3 | _BYTES
        self._records_tag = records.number << 3 | _BYTES
        self._entry_head = encode_unsigned(self._entries_tag)
        self._records_head = encode_unsigned(self._records_tag)

    def parse(self, data: bytes) -> Laden[M]:
        """What these bytes say. Raises DecodeError when they are no such message."""
        if len(data) > _SMALL_BYTES:
            try:
                rest, found = self._cut_out(data)
            except _UnclearError:
                pass  # Protocol Buffers says what is wrong, or takes what it alone knows to take.
            else:
                message = self._kind.FromString(rest)
                pairs = zip(self._entries_of(message), found, strict=True)
                return Laden(
                    message,
                    [entry.records if cut is None else cut for entry, cut in pairs],
                    len(data),
                )
        laden = self.beside(self._kind.FromString(data))
        laden.parsed_bytes = len(data)
        return laden

    def beside(self, message: M) -> Laden[M]:
        """The message and a copy of the records that are in it."""
        return Laden(message, [entry.records for entry in self._entries_of(message)])

    def parts(self, laden: Laden[M]) -> list[Buffer]:
        """Pieces that, one after the other, are the message as bytes."""
        entries = self._entries_of(laden.message)
        head: M = self._kind()
        head.CopyFrom(laden.message)
        head.ClearField(self._entries)
        parts: list[Buffer] = [head.SerializeToString()]
        for entry, records in zip(entries, laden.records, strict=True):
            self.add_entry(parts, entry.SerializeToString(), records)
        return parts

    def add_entry(self, parts: list[Buffer], entry: bytes, records: Buffer) -> None:
        """Lay one more entry, which was serialised without its records, behind the others."""
        if records:
            entry += self._records_head + encode_unsigned(len(records))
        size = encode_unsigned(len(entry) + len(records))
        if len(records) <= _SMALL_BYTES:
            parts.append(b"".join((self._entry_head, size, entry, records)))
        else:
            parts += (self._entry_head + size + entry, records)

    def to_bytes(self, laden: Laden[M]) -> bytes:
        """The message as bytes, in which the records were copied once."""
        return b"".join(self.parts(laden))

    def whole(self, laden: Laden[M]) -> M:
        """The message with its records in it: a copy, for who takes nothing else."""
        return self._kind.FromString(self.to_bytes(laden))

    def _entries_of(self, message: M) -> Sequence[Any]:
        entries: Sequence[Any] = getattr(message, self._entries)
        return entries

    def _cut_out(self, data: bytes) -> tuple[bytes, list[Buffer | None]]:
        """The bytes of the message without records, and those; None for an entry left whole."""
        view = memoryview(data)
        kept: list[Buffer] = []
        found: list[Buffer | None] = []
        at, end = 0, len(data)
        while at < end:
            begin = at
            tag, at = _number(data, at)
            if tag != self._entries_tag:
                at = _skip(data, tag, at, end)
                kept.append(view[begin:at])
                continue
            size, at = _number(data, at)
            if size <= _SMALL_ENTRY_BYTES:
                kept.append(view[begin : at + size])
                found.append(None)
            else:
                entry, records = self._split_entry(data, view[at : at + size], at, at + size)
                kept += (self._entry_head, encode_unsigned(len(entry)), entry)
                found.append(records)
            at += size
        if at > end:
            raise _UnclearError
        return b"".join(kept), found

    def _split_entry(
        self, data: bytes, entry: memoryview, at: int, end: int
    ) -> tuple[bytes, Buffer]:
        """An entry without its records, and those. It lies in ``data`` from ``at`` to ``end``;
        where that is behind the end of all of it, the caller notices.
        """
        first, kept = at, []
        records: Buffer = b""
        copied = at
        while at < end:
            begin = at
            tag, at = _number(data, at)
            if tag != self._records_tag:
                at = _skip(data, tag, at, end)
                continue
            size, at = _number(data, at)
            kept.append(entry[copied - first : begin - first])
            records = entry[at - first : at - first + size]  # Of several the last one counts.
            at += size
            copied = at
        if at > end:
            raise _UnclearError
        kept.append(entry[copied - first :])
        return b"".join(kept), records


class _UnclearError(Exception):
    """The bytes are not laid out as ours are."""


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The plain varint at ``at``, and the position after it."""
    try:
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        number = byte & 0x7F
        for shift in range(7, 70, 7):
            at += 1
            byte = data[at]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at + 1
    except IndexError:
        pass
    raise _UnclearError


def _skip(data: bytes, tag: int, at: int, end: int) -> int:
    """The position after the field of which the tag ends at ``at``."""
    wire_type = tag & 7
    if wire_type == _VARINT:
        _, at = _number(data, at)
    elif wire_type == _BYTES:
        size, at = _number(data, at)
        at += size
    elif wire_type == _FIXED64:
        at += 8
    elif wire_type == _FIXED32:
        at += 4
    else:
        raise _UnclearError  # Groups; nothing of ours has them.
    if at > end:
        raise _UnclearError
    return at


PRODUCE_REQUEST: Final = LadenType(log_pb2.ProduceRequest, "partitions")
FETCH_RESPONSE: Final = LadenType(log_pb2.FetchResponse, "partitions")
REPLICATION_PUSH: Final = LadenType(replication_pb2.ReplicationFetchResponse, "pushes")
