"""The records in Kafka's record batches: the reference codec, in pure Python.

``penstock.wire.batch`` has the header's layout and is exported from here too. The records follow
the header, together compressed or not::

    length varint, attributes int8, timestamp delta varint, offset delta varint,
    key, value (varint length, -1 for null, bytes), header count varint,
    headers (varint length + UTF-8 key, varint length or -1 + value)

Source: KIP-98 and Kafka's ``DefaultRecord``. All functions are pure and safe from any thread; a
``BatchBuilder`` belongs to one thread at a time. Whatever bytes are given, decoding raises nothing
but CorruptRecordError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from penstock.wire.batch import (
    CONTROL,
    CRC,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    MIN_LENGTH,
    PATCH,
    TAIL,
    TRANSACTIONAL,
    BatchHeader,
    Buffer,
    iter_batches,
    offset_patch,
    parse_header,
    set_log_append_time,
    verify_batch,
    verify_producer_batch,
)
from penstock.wire.compression import Compression, compress, decompress
from penstock.wire.errors import CorruptRecordError
from penstock.wire.varint import SMALL, SMALL_LIMIT, decode_varint, encode_varint

__all__ = [
    "HEADER_BYTES",
    "MAX_RECORDS_BYTES",
    "BatchBuilder",
    "BatchHeader",
    "Buffer",
    "Compression",
    "Header",
    "Record",
    "RecordData",
    "RecordLike",
    "decode_batch",
    "encode_batch",
    "iter_batches",
    "offset_patch",
    "parse_header",
    "record_size_bound",
    "set_log_append_time",
    "verify_batch",
    "verify_producer_batch",
]

Header = tuple[str, bytes | None]

MAX_RECORDS_BYTES: Final = 128 * 1024 * 1024
"""What the records of one batch may decompress to, unless the caller says otherwise."""

_MIN_RECORD_BYTES: Final = 7  # Seven fields of a byte each.
_TIMESTAMP_MAX: Final = 2**63 - 1


class RecordLike(Protocol):
    """What can be encoded: a Record, a RecordData, or anything that has their fields."""

    @property
    def timestamp_ms(self) -> int:
        """When the record was made, in milliseconds since 1970; -1 for none."""
        ...

    @property
    def key(self) -> Buffer | None:
        """The key, or None."""
        ...

    @property
    def value(self) -> Buffer | None:
        """The value, or None (which a compacted topic takes for a deletion)."""
        ...

    @property
    def headers(self) -> Sequence[tuple[str, Buffer | None]]:
        """Names and values, in order; a name may come more than once."""
        ...


class RecordData(NamedTuple):
    """A record that has no offset yet."""

    timestamp_ms: int
    key: Buffer | None
    value: Buffer | None
    headers: tuple[Header, ...] = ()


class Record(NamedTuple):
    """A record as it was read; a value, like RecordData."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


_new = tuple.__new__  # A NamedTuple's own constructor costs twice as much.


# --- writing -------------------------------------------------------------------------------------


def _encode_bytes(data: Buffer) -> bytes:
    data = bytes(memoryview(data))
    return encode_varint(len(data)) + data


def _encode_headers(headers: Sequence[tuple[str, Buffer | None]]) -> bytes:
    parts = [encode_varint(len(headers))]
    for name, value in headers:
        parts.append(_encode_bytes(name.encode()))
        parts.append(b"\x01" if value is None else _encode_bytes(value))
    return b"".join(parts)


def record_size_bound(
    key: Buffer | None, value: Buffer | None, headers: Sequence[tuple[str, Buffer | None]] = ()
) -> int:
    """The most bytes that a batch grows by when the record is appended, uncompressed."""
    size = 21 + 5 + 5  # Length, attributes, timestamp, offset; lengths of key and value.
    if key is not None:
        size += memoryview(key).nbytes
    if value is not None:
        size += memoryview(value).nbytes
    return size + len(_encode_headers(headers) if headers else b"\x00")


class BatchBuilder:
    """Gathers records and then makes one batch of them.

    Producer id and sequence are given to ``build``, so that a batch waits without them; ``build``
    may be called again, as for a new producer epoch, and more records may follow.
    """

    __slots__ = ("_base_timestamp_ms", "_body", "_count", "_max_timestamp_ms")

    def __init__(self) -> None:
        self._body = bytearray()
        self._count = 0
        self._base_timestamp_ms = -1
        self._max_timestamp_ms = -1

    @property
    def size_bytes(self) -> int:
        """The size of the batch as it stands, header included, uncompressed."""
        return HEADER_BYTES + len(self._body)

    @property
    def record_count(self) -> int:
        """How many records were appended."""
        return self._count

    @property
    def max_timestamp_ms(self) -> int:
        """The largest timestamp appended; -1 for none."""
        return self._max_timestamp_ms

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
        if not -1 <= timestamp_ms <= _TIMESTAMP_MAX:
            raise ValueError(f"timestamp {timestamp_ms} ms is out of range")
        count = self._count
        if not count:
            self._base_timestamp_ms = timestamp_ms
        delta = timestamp_ms - self._base_timestamp_ms
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
                _encode_headers(headers) if headers else b"\x00",
            )
        )
        size = len(record)
        length = small[size] if size < SMALL_LIMIT else encode_varint(size)
        self._body += length
        self._body += record
        self._count = count + 1
        if not count or timestamp_ms > self._max_timestamp_ms:
            self._max_timestamp_ms = timestamp_ms
        return len(length) + size

    def build(
        self,
        *,
        base_offset: int = 0,
        compression: Compression = Compression.NONE,
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
        leader_epoch: int = -1,
        is_transactional: bool = False,
        is_control: bool = False,
        log_append_time_ms: int | None = None,
    ) -> bytes:
        """The batch. Records get the offsets from ``base_offset`` on, in the order appended.

        Where compression would save nothing the records stay plain, and the header says so.
        Raises ValueError when no record was appended.
        """
        if not self._count:
            raise ValueError("a batch needs at least one record")
        records: Buffer = self._body
        attributes = 0
        if compression is not Compression.NONE:
            compressed = compress(compression, records)
            if len(compressed) < len(records):
                records = compressed
                attributes = int(compression)
        max_timestamp_ms = self._max_timestamp_ms
        if log_append_time_ms is not None:
            attributes |= LOG_APPEND_TIME
            max_timestamp_ms = log_append_time_ms
        if is_transactional:
            attributes |= TRANSACTIONAL
        if is_control:
            attributes |= CONTROL
        tail = TAIL.pack(
            attributes,
            self._count - 1,
            self._base_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            self._count,
        )
        head = PATCH.pack(base_offset, MIN_LENGTH + len(records), leader_epoch)
        crc = CRC.pack(crc32c(records, crc32c(tail)))
        return b"".join((head, b"\x02", crc, tail, records))


def encode_batch(
    records: Sequence[RecordLike],
    *,
    base_offset: int = 0,
    compression: Compression = Compression.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    leader_epoch: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    log_append_time_ms: int | None = None,
) -> bytes:
    """One batch of all ``records``; see BatchBuilder. Offsets that the records have are ignored."""
    builder = BatchBuilder()
    append = builder.append
    for record in records:
        append(record.timestamp_ms, record.key, record.value, record.headers)
    return builder.build(
        base_offset=base_offset,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        leader_epoch=leader_epoch,
        is_transactional=is_transactional,
        is_control=is_control,
        log_append_time_ms=log_append_time_ms,
    )


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


def _decode_records(data: bytes, header: BatchHeader) -> list[Record]:
    # This loop is what reading costs. Per record it makes no object but the result; what most
    # records have (no key, no headers, short numbers) it reads in place.
    base_offset, last_delta = header.base_offset, header.last_offset_delta
    base_ms, scale = header.base_timestamp_ms, 1
    if header.is_log_append_time:
        base_ms, scale = header.max_timestamp_ms, 0
    size = len(data)
    records: list[Record] = []
    at = start = least_delta = 0
    try:
        for _ in range(header.record_count):
            start = at
            length, at = decode_varint(data, at)
            end = at + length
            if length < _MIN_RECORD_BYTES - 1 or end > size:
                raise CorruptRecordError(f"its length is {length}, but {size - at} bytes follow")
            # The record's attributes come first; none is in use.
            delta_ms, at = decode_varint(data, at + 1)
            timestamp_ms = base_ms + delta_ms * scale
            delta, at = decode_varint(data, at)
            if not (least_delta <= delta <= last_delta and -1 <= timestamp_ms <= _TIMESTAMP_MAX):
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
            f"record {len(records)} of {header.record_count} at byte {start} of the records of the "
            f"batch at offset {base_offset}: {reason}"
        ) from None
    if at != size:
        raise CorruptRecordError(
            f"{size - at} bytes follow the last record of the batch at offset {base_offset}, at "
            f"byte {at} of its records"
        )
    return records


def _record_data(batch: Buffer, header: BatchHeader, max_bytes: int) -> bytes:
    """The records' bytes, decompressed; raises when they cannot hold as many as the header says."""
    view = memoryview(batch)[HEADER_BYTES:]
    try:
        data = decompress(header.compression, view, max_bytes=max_bytes)
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"the records of the batch at offset {header.base_offset}, from byte {HEADER_BYTES}: "
            f"{error.message}"
        ) from None
    if header.record_count * _MIN_RECORD_BYTES > len(data):
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} says at byte 57 that it has "
            f"{header.record_count} records, which {len(data)} bytes cannot hold"
        )
    return data


def decode_batch(batch: Buffer, *, max_bytes: int = MAX_RECORDS_BYTES) -> list[Record]:
    """The records of one whole batch, after ``verify_batch``.

    Raises CorruptRecordError also when the records do not fill the batch exactly, when their
    offsets do not rise within the batch's, or when they decompress to more than ``max_bytes``.
    Byte positions within records count from the first record, decompressed.
    """
    header = verify_batch(batch)
    return _decode_records(_record_data(batch, header, max_bytes), header)
