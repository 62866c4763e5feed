"""Records to bytes and back, in pure Python: what the compiled codec is held to.

It serves where that one was not built. ``_codec`` has the same names with the same results
(tests/unit/wire/test_codec.py), and leaves to these what it finds malformed, so that errors are the
same as well; ``penstock.wire.codec`` chooses. All functions are pure and safe from any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

from penstock.wire.batch import HEADER_BYTES, Buffer
from penstock.wire.columns import BytesColumn, Columns, HeadersColumn
from penstock.wire.errors import CorruptRecordError
from penstock.wire.record import Bounds, Header, Record, RecordLike
from penstock.wire.varint import SMALL, SMALL_LIMIT, decode_varint, encode_varint

MIN_RECORD_BYTES: Final = 7
"""The smallest record: seven fields of a byte each."""

INT32_MAX: Final = 2**31 - 1

RECORD_BOUND_BYTES: Final = 21 + 5 + 5 + 1
"""The most that a record without headers takes beside its key and value: its length, attributes,
timestamp and offset; the lengths of key and value; the number of headers."""

TIMESTAMP_MAX: Final = 2**63 - 1

TupleT = TypeVar("TupleT", bound=tuple[Any, ...])

_new = tuple.__new__  # A NamedTuple's own constructor costs twice as much.


# --- writing -------------------------------------------------------------------------------------


def _encode_bytes(data: Buffer) -> bytes:
    data = bytes(memoryview(data))
    return encode_varint(len(data)) + data


def encode_headers(headers: Sequence[tuple[str, Buffer | None]]) -> bytes:
    """Their count and then they. Raises ValueError for a name that is not text."""
    parts = [encode_varint(len(headers))]
    for name, value in headers:
        parts.append(_encode_bytes(name.encode()))
        parts.append(b"\x01" if value is None else _encode_bytes(value))
    return b"".join(parts)


class RecordsBody:
    """Gathers records as the bytes that follow a batch's header. For one thread at a time."""

    __slots__ = ("_body", "base_timestamp_ms", "max_timestamp_ms", "record_count")

    def __init__(self) -> None:
        self._body = bytearray()
        self.record_count = 0
        self.base_timestamp_ms = -1  # Of the first record; -1 for none, as the next.
        self.max_timestamp_ms = -1

    @property
    def size_bytes(self) -> int:
        """The size of the batch as it stands, header included, uncompressed."""
        return HEADER_BYTES + len(self._body)

    def body(self) -> Buffer:
        """The records' bytes; not to be kept while more are appended."""
        return self._body

    def behind(self, header: bytes) -> Buffer:
        """The batch: the header and the records behind it.

        With the compiled codec they are not copied, and while this is kept no record is appended
        (BufferError). Raises ValueError for a header of another size.
        """
        if len(header) != HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes instead of {HEADER_BYTES}")
        return b"".join((header, self._body))

    def append(
        self,
        timestamp_ms: int,
        key: Buffer | None,
        value: Buffer | None,
        headers: Sequence[tuple[str, Buffer | None]] = (),
    ) -> int:
        """Add a record and return by how many bytes the batch has grown, uncompressed.

        ``timestamp_ms`` is from -1 (none) to 2^63 - 1. Raises ValueError outside of that or for a
        header name that is not text, TypeError for a key or value that is not bytes; the builder
        is then as it was.
        """
        if not -1 <= timestamp_ms <= TIMESTAMP_MAX:
            raise ValueError(f"timestamp {timestamp_ms} ms is out of range")
        count = self.record_count
        base_ms = self.base_timestamp_ms if count else timestamp_ms
        delta = timestamp_ms - base_ms
        if key is not None and key.__class__ is not bytes:
            key = bytes(memoryview(key))  # Refuses by TypeError what is not bytes.
        if value is not None and value.__class__ is not bytes:
            value = bytes(memoryview(value))
        small = SMALL
        record = b"".join(
            (
                b"\x00",
                small[delta] if 0 <= delta < SMALL_LIMIT else encode_varint(delta),
                small[count] if count < SMALL_LIMIT else encode_varint(count),
                b"\x01" if key is None else encode_varint(len(key)),
                b"" if key is None else key,
                b"\x01" if value is None else encode_varint(len(value)),
                b"" if value is None else value,
                encode_headers(headers) if headers else b"\x00",
            )
        )
        size = len(record)
        length = small[size] if size < SMALL_LIMIT else encode_varint(size)
        self._body += length
        self._body += record
        self.base_timestamp_ms = base_ms
        self.record_count = count + 1
        if not count or timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
        return len(length) + size

    def extend(self, records: Iterable[RecordLike]) -> None:
        """Add all of them; those before one that is refused stay."""
        append = self.append
        for record in records:
            append(record.timestamp_ms, record.key, record.value, record.headers)


# --- reading -------------------------------------------------------------------------------------


def _decode_headers(data: bytes, position: int, end: int) -> tuple[tuple[Header, ...], int]:
    count, position = decode_varint(data, position)
    if not 0 <= count <= (end - position) // 2:
        raise CorruptRecordError(f"it claims {count} headers in {end - position} bytes")
    headers: list[Header] = []
    for _ in range(count):
        start = position
        name_bytes, position = _decode_bytes(data, start, end, "header name")
        if name_bytes is None:
            raise CorruptRecordError(f"its header name at byte {start} is null")
        try:
            name = name_bytes.decode()
        except UnicodeDecodeError:
            raise CorruptRecordError(f"its header name at byte {start} is not UTF-8") from None
        value, position = _decode_bytes(data, position, end, "header value")
        headers.append((name, value))
    return tuple(headers), position


def _decode_bytes(data: bytes, position: int, end: int, what: str) -> tuple[bytes | None, int]:
    """A nullable byte string that must end by ``end``, and the position after it."""
    length, start = decode_varint(data, position)
    after = start + length
    if length >= 0 and after <= end:
        return data[start:after], after
    if length == -1:
        return None, start
    raise CorruptRecordError(
        f"its {what} at byte {position} has length {length}, but {end - start} bytes are left"
    )


def parse_records(data: Buffer, bounds: Bounds) -> list[Record]:
    """The records that ``data`` is, exactly, with offsets that rise.

    Raises CorruptRecordError, which names the first record that is not sound.
    """
    record_count, base_offset, last_delta, base_ms, scale = bounds
    data = bytes(data)  # Slices of which are bytes.
    # This loop is what reading costs. Per record it makes no object but the result; what most
    # records have (no key, no headers, short numbers) it reads in place.
    size = len(data)
    records: list[Record] = []
    at = start = least_delta = 0
    try:
        for _ in range(record_count):
            start = at
            length, at = decode_varint(data, at)
            end = at + length
            if length < MIN_RECORD_BYTES - 1 or end > size:
                raise CorruptRecordError(f"its length is {length}, but {size - at} bytes follow")
            # The record's attributes come first; none is in use.
            delta_ms, at = decode_varint(data, at + 1)
            timestamp_ms = base_ms + delta_ms * scale
            delta, at = decode_varint(data, at)
            if not (least_delta <= delta <= last_delta and -1 <= timestamp_ms <= TIMESTAMP_MAX):
                raise CorruptRecordError(
                    f"its timestamp is {timestamp_ms} ms and its offset delta {delta}, where "
                    f"{least_delta} to {last_delta} is allowed"
                )
            least_delta = delta + 1
            key, at = (None, at + 1) if data[at] == 1 else _decode_bytes(data, at, end, "key")
            value, at = _decode_bytes(data, at, end, "value")
            headers, at = ((), at + 1) if data[at] == 0 else _decode_headers(data, at, end)
            if at != end:
                raise CorruptRecordError(f"its fields end at byte {at}, but its length says {end}")
            records.append(_new(Record, (base_offset + delta, timestamp_ms, key, value, headers)))
    except (CorruptRecordError, IndexError) as error:
        reason = error.message if isinstance(error, CorruptRecordError) else "it is cut short"
        raise CorruptRecordError(
            f"record {len(records)} of {record_count} at byte {start} of the records of the "
            f"batch at offset {base_offset}: {reason}"
        ) from None
    if at != size:
        raise CorruptRecordError(
            f"{size - at} bytes follow the last record of the batch at offset {base_offset}, at "
            f"byte {at} of its records"
        )
    return records


def parse_records_as(  # noqa: PLR0917 - the compiled one takes no names.
    data: Buffer,
    bounds: Bounds,
    least_offset: int,
    kind: type[TupleT],
    before: tuple[Any, ...],
    after: tuple[Any, ...],
) -> list[TupleT]:
    """The records from ``least_offset`` on, each as a ``kind``, which is a NamedTuple.

    Its fields are ``before``, then a Record's own, then ``after``: what all of them share, which
    must be able to be in no cycle (numbers, texts, bytes), as no collector may look for one.
    Raises what ``parse_records`` raises, for records before ``least_offset`` as well.
    """
    return [
        _new(kind, (*before, *record, *after))
        for record in parse_records(data, bounds)
        if record.offset >= least_offset
    ]


class ColumnsBuilder:
    """Gathers the records of batches as columns. For one thread at a time."""

    __slots__ = ("_built", "_records", "_size_bytes")

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._size_bytes = 0
        self._built = False

    @property
    def record_count(self) -> int:
        """How many there are."""
        return len(self._records)

    @property
    def last_offset(self) -> int:
        """That of the last record; -1 when there is none."""
        return self._records[-1].offset if self._records else -1

    def add(self, data: Buffer, bounds: Bounds, least_offset: int, most: int) -> int:
        """Add up to ``most`` records from ``least_offset`` on; how many were too many.

        Raises what ``parse_records`` raises, for whatever record of the batch, and OverflowError
        where all would be more than 2 GB; the builder is then as it was.
        """
        if self._built:
            raise ValueError("the columns were built")
        if len(data) > INT32_MAX - self._size_bytes:
            raise OverflowError("columns hold no more than 2 GB")
        found = [one for one in parse_records(data, bounds) if one.offset >= least_offset]
        self._records += found[:most]
        self._size_bytes += len(data)
        return max(0, len(found) - most)

    def build(self) -> Columns:
        """The columns; nothing can be added after that."""
        self._built = True
        return _columns(self._records)


def parse_columns(data: Buffer, bounds: Bounds) -> Columns:
    """What ``parse_records`` gives, as columns; raises what it raises."""
    return _columns(parse_records(data, bounds))


def _columns(records: list[Record]) -> Columns:
    headers = [record.headers for record in records]
    return Columns(
        len(records),
        array("q", [record.offset for record in records]).tobytes(),
        array("q", [record.timestamp_ms for record in records]).tobytes(),
        column_of([record.key for record in records]),
        column_of([record.value for record in records]),
        _headers_column(headers) if any(headers) else None,
    )


def column_of(strings: Sequence[bytes | None]) -> BytesColumn:
    """These strings as a column."""
    present = [b"" if one is None else one for one in strings]
    validity = bytearray((len(strings) + 7) // 8)
    for place, one in enumerate(strings):
        validity[place >> 3] |= (one is not None) << (place & 7)
    null_count = sum(one is None for one in strings)
    return BytesColumn(
        validity if null_count else None,
        null_count,
        _running_total(len(one) for one in present),
        b"".join(present),
    )


def _headers_column(headers: Sequence[tuple[Header, ...]]) -> HeadersColumn:
    return HeadersColumn(
        _running_total(len(some) for some in headers),
        column_of([name.encode() for some in headers for name, _ in some]),
        column_of([value for some in headers for _, value in some]),
    )


def _running_total(lengths: Iterable[int]) -> bytes:
    return array("i", accumulate(lengths, initial=0)).tobytes()


class Strings(Sequence[bytes | None]):
    """So many strings of a column, from number ``first`` on; None where one is null.

    The column's buffers must stay as they are. Raises ValueError where the strings are not all
    there, or one is not within the data. ``longest`` is how many bytes the longest one has.
    """

    __slots__ = ("_strings", "longest")

    def __init__(self, column: BytesColumn, first: int, count: int) -> None:
        self._strings = _byte_strings(column, first, count)
        self.longest = max((len(one) for one in self._strings if one is not None), default=0)

    def __len__(self) -> int:
        return len(self._strings)

    def __getitem__(self, number: Any) -> Any:
        """One of them. Raises IndexError."""
        if not 0 <= number < len(self._strings):
            raise IndexError(f"there is no string {number} of {len(self._strings)}")
        return self._strings[number]


def _byte_strings(column: BytesColumn, first: int, count: int) -> list[bytes | None]:
    offsets = memoryview(column.offsets).cast("B")
    ends = offsets[: len(offsets) // 4 * 4].cast("i")
    data = memoryview(column.data).cast("B")
    validity = None if column.validity is None else memoryview(column.validity).cast("B")
    last = first + count
    # A validity of no bytes is one all the same: it is there, and too short.
    most = len(ends) - 1 if validity is None else min(len(ends) - 1, 8 * len(validity))
    if first < 0 or count < 0 or last > most:
        raise ValueError(f"there are not {count} strings from number {first} on")
    strings: list[bytes | None] = []
    for place in range(first, last):
        start, end = ends[place], ends[place + 1]
        if not 0 <= start <= end <= len(data):
            raise ValueError(f"string {place} is from byte {start} to {end} of {len(data)}")
        there = validity is None or validity[place >> 3] >> (place & 7) & 1
        strings.append(bytes(data[start:end]) if there else None)
    return strings


def join_headers(offsets: Buffer, names: Strings, values: Strings) -> Strings | None:
    """The headers of each record as they stand in a batch, their count first.

    Those of record i are the names and values from ``offsets[i]`` (int32, one more than there are
    records) to ``offsets[i + 1]``. None where that is not so, and where a name is null or no text.
    """
    ends = memoryview(offsets).cast("B").cast("i").tolist()
    if not ends or ends[0] != 0 or ends != sorted(ends):
        return None
    if not ends[-1] == len(names) == len(values):
        return None
    found: list[bytes | None] = []
    try:
        for start, end in pairwise(ends):
            some = [(names[number].decode(), values[number]) for number in range(start, end)]
            found.append(encode_headers(some))
    except (AttributeError, UnicodeDecodeError):
        return None
    return Strings(column_of(found), 0, len(found))
