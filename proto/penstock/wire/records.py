"""Kafka's record batch, magic 2: the unit that clients send, brokers store and consumers read.

This is the reference codec, in pure Python. The same bytes travel from producer to disk to
consumer; a broker fills in only the first 16 of them (``offset_patch``), which the checksum
leaves out for that reason. Layout (big-endian)::

    0  base offset      int64     23 last offset delta   int32   51 producer epoch  int16
    8  length from 12   int32     27 base timestamp, ms  int64   53 base sequence   int32
    12 leader epoch     int32     35 max timestamp, ms   int64   57 record count    int32
    16 magic (2)        int8      43 producer id         int64   61 records
    17 CRC-32C from 21  uint32
    21 attributes       int16: 0-2 compression, 3 log append time, 4 transactional, 5 control

    record: length varint, attributes int8, timestamp delta varint, offset delta varint,
            key, value (varint length, -1 for null, bytes), header count varint,
            headers (varint length + UTF-8 key, varint length or -1 + value)

Source: KIP-98 and Kafka's ``DefaultRecordBatch``. All functions are pure and safe from any
thread; a ``BatchBuilder`` belongs to one thread at a time. Whatever bytes are given, decoding
raises nothing but CorruptRecordError (``verify_producer_batch`` InvalidRecordError as well).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from penstock.wire.compression import Compression, compress, decompress
from penstock.wire.errors import CorruptRecordError, InvalidRecordError
from penstock.wire.varint import SMALL, SMALL_LIMIT, decode_varint, encode_varint

Buffer = bytes | bytearray | memoryview
Header = tuple[str, bytes | None]

HEADER_BYTES: Final = 61
"""The size of a batch's header, and so of the smallest batch."""

MAX_RECORDS_BYTES: Final = 128 * 1024 * 1024
"""What the records of one batch may decompress to, unless the caller says otherwise."""

MAGIC: Final = 2
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_PATCH: Final = struct.Struct(">qii")
_CRC: Final = struct.Struct(">I")
_TAIL: Final = struct.Struct(">hiqqqhii")  # What the checksum covers of the header.
_LENGTH_END: Final = 12  # The length counts what follows it.
_CRC_AT: Final = 17
_CRC_FROM: Final = 21
_MAX_TIMESTAMP_AT: Final = 35
_MIN_LENGTH: Final = HEADER_BYTES - _LENGTH_END
_MIN_RECORD_BYTES: Final = 7  # Seven fields of a byte each.
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1

_COMPRESSION_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20


class BatchHeader(NamedTuple):
    """A batch's header as it stands in the bytes; -1 stands for none where Kafka's does."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch."""
        return _LENGTH_END + self.batch_length

    @property
    def last_offset(self) -> int:
        """The offset of the last record (kept when compaction removes that record)."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """The offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """The producer's sequence number of the last record; after 2^31 - 1 comes 0. -1: none."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset_delta) & _INT32_MAX

    @property
    def compression(self) -> Compression:
        """How the records are compressed. Raises CorruptRecordError for an id nobody knows."""
        kind = self.attributes & _COMPRESSION_MASK
        if kind > Compression.ZSTD:
            raise CorruptRecordError(
                f"the batch at offset {self.base_offset} names the unknown compression {kind} at "
                f"byte {_CRC_FROM + 1}"
            )
        return Compression(kind)

    @property
    def is_log_append_time(self) -> bool:
        """Whether every record has the batch's ``max_timestamp_ms``, given by the broker."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether the record is a broker's mark (commit or abort) and not for applications."""
        return bool(self.attributes & _CONTROL)


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
    def headers(self) -> Iterable[tuple[str, Buffer | None]]:
        """Names and values, in order; a name may come more than once."""
        ...


class RecordData(NamedTuple):
    """A record that has no offset yet."""

    timestamp_ms: int
    key: Buffer | None
    value: Buffer | None
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


# --- headers -------------------------------------------------------------------------------------


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header of the batch that begins at ``position``. The rest of the batch may be missing.

    Raises CorruptRecordError when fewer than 61 bytes are there, when the magic is not 2 or when
    the length is less than a header's.
    """
    left = len(buffer) - position
    if left < HEADER_BYTES:
        raise CorruptRecordError(
            f"a batch header at byte {position} needs {HEADER_BYTES} bytes, but {max(left, 0)} are "
            "there"
        )
    header = BatchHeader._make(_HEADER.unpack_from(buffer, position))
    if header.magic != MAGIC:
        raise CorruptRecordError(
            f"the batch at byte {position} has magic {header.magic}; only magic {MAGIC} is known"
        )
    if header.batch_length < _MIN_LENGTH:
        raise CorruptRecordError(
            f"the batch at byte {position} has length {header.batch_length}; {_MIN_LENGTH} is the "
            "least"
        )
    return header


def iter_batches(
    buffer: Buffer, *, allow_torn_tail: bool = False
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Each whole batch with its header, as a view into ``buffer``. Checksums are not checked.

    A batch that is cut off at the end raises CorruptRecordError, or ends the iteration when
    ``allow_torn_tail`` (a fetch answer may end in the middle of a batch). A bad header always
    raises.
    """
    view = memoryview(buffer)
    end = len(view)
    position = 0
    while position < end:
        if allow_torn_tail and end - position < HEADER_BYTES:
            return
        header = parse_header(view, position)
        after = position + _LENGTH_END + header.batch_length
        if after > end:
            if allow_torn_tail:
                return
            raise CorruptRecordError(
                f"the batch at byte {position} has {after - position} bytes, but the data ends "
                f"after {end - position}"
            )
        yield header, view[position:after]
        position = after


def verify_batch(batch: Buffer) -> BatchHeader:
    """Check that ``batch`` is exactly one batch with sound header fields and checksum.

    Raises CorruptRecordError. The records themselves are not read.
    """
    header = parse_header(batch)
    if header.size_bytes != len(batch):
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} says at byte 8 that it has "
            f"{header.size_bytes} bytes, but it has {len(batch)}"
        )
    view = memoryview(batch)
    crc = crc32c(view[_CRC_FROM:])
    if crc != header.crc:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} says at byte {_CRC_AT} that its CRC-32C is "
            f"{header.crc:#010x}, but it is {crc:#010x}"
        )
    _ = header.compression
    if header.base_offset < 0 or header.last_offset_delta < 0 or header.last_offset > _INT64_MAX:
        raise CorruptRecordError(
            f"the batch has offsets {header.base_offset} to {header.last_offset} (bytes 0 and 23)"
        )
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} says at byte 57 that it has "
            f"{header.record_count} records for {header.last_offset_delta + 1} offsets"
        )
    return header


def verify_producer_batch(batch: Buffer) -> BatchHeader:
    """``verify_batch``, and what holds for a batch straight from a producer.

    It has a record for each offset, producer id, epoch and sequence all or not at all, a producer
    id when it is transactional, and no marks that only brokers write. Raises CorruptRecordError
    or, where the bytes are sound but not allowed, InvalidRecordError.
    """
    header = verify_batch(batch)
    if header.record_count != header.last_offset_delta + 1:
        raise CorruptRecordError(
            f"a producer's batch says at byte 57 that it has {header.record_count} records, and at "
            f"byte 23 that it has {header.last_offset_delta + 1}"
        )
    if header.is_control:
        raise InvalidRecordError("a producer may not write control batches; clear attribute bit 5")
    if header.producer_id >= 0:
        if header.producer_epoch < 0 or header.base_sequence < 0:
            raise InvalidRecordError(
                f"the batch of producer {header.producer_id} has epoch {header.producer_epoch} and "
                f"base sequence {header.base_sequence}; neither may be negative"
            )
    elif header.is_transactional:
        raise InvalidRecordError("a transactional batch needs a producer id; ask InitProducerId")
    return header


def offset_patch(batch: BatchHeader | Buffer, base_offset: int, leader_epoch: int) -> bytes:
    """The 16 bytes that stand before ``batch[16:]`` once a leader has given it its offset.

    They are base offset, length and leader epoch; the checksum does not cover them, so nothing
    else changes and the rest is written as it came.
    """
    header = batch if isinstance(batch, BatchHeader) else parse_header(batch)
    return _PATCH.pack(base_offset, header.batch_length, leader_epoch)


def set_log_append_time(batch: Buffer, now_ms: int) -> bytes:
    """A copy of the batch whose records all have the time ``now_ms``, with a new checksum."""
    header = parse_header(batch)
    out = bytearray(batch)
    struct.pack_into(">h", out, _CRC_FROM, header.attributes | _LOG_APPEND_TIME)
    struct.pack_into(">q", out, _MAX_TIMESTAMP_AT, now_ms)
    _CRC.pack_into(out, _CRC_AT, crc32c(memoryview(out)[_CRC_FROM:]))
    return bytes(out)


# --- writing -------------------------------------------------------------------------------------


def _encode_headers(headers: Iterable[tuple[str, Buffer | None]]) -> bytes:
    parts: list[Buffer] = []
    count = 0
    for name, value in headers:
        name_bytes = name.encode()
        parts += (encode_varint(len(name_bytes)), name_bytes)
        if value is None:
            parts.append(b"\x01")
        else:
            parts += (encode_varint(len(value)), value)
        count += 1
    return encode_varint(count) + b"".join(parts)


def record_size_bound(
    key: Buffer | None, value: Buffer | None, headers: Iterable[tuple[str, Buffer | None]] = ()
) -> int:
    """The most bytes that a batch grows by when the record is appended, uncompressed."""
    size = 21 + 5 + 5  # Length, attributes, timestamp, offset; lengths of key and value.
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
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
        headers: Iterable[tuple[str, Buffer | None]] = (),
    ) -> int:
        """Add a record and return by how many bytes the batch has grown, uncompressed.

        ``timestamp_ms`` is from -1 (none) to 2^63 - 1. Raises ValueError outside of that or for a
        header name that is not text, TypeError for a key or value that is not bytes; the builder
        is then as it was.
        """
        if not -1 <= timestamp_ms <= _INT64_MAX:
            raise ValueError(f"timestamp {timestamp_ms} ms is out of range")
        count = self._count
        if not count:
            self._base_timestamp_ms = timestamp_ms
        delta = timestamp_ms - self._base_timestamp_ms
        small = SMALL
        parts: tuple[Buffer, ...] = (
            b"\x00",
            small[delta] if 0 <= delta < SMALL_LIMIT else encode_varint(delta),
            small[count] if count < SMALL_LIMIT else encode_varint(count),
            b"\x01" if key is None else encode_varint(len(key)),
            b"" if key is None else key,
            b"\x01" if value is None else encode_varint(len(value)),
            b"" if value is None else value,
            _encode_headers(headers) if headers else b"\x00",
        )
        record = b"".join(parts)
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
            attributes |= _LOG_APPEND_TIME
            max_timestamp_ms = log_append_time_ms
        if is_transactional:
            attributes |= _TRANSACTIONAL
        if is_control:
            attributes |= _CONTROL
        tail = _TAIL.pack(
            attributes,
            self._count - 1,
            self._base_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            self._count,
        )
        head = _PATCH.pack(base_offset, _MIN_LENGTH + len(records), leader_epoch)
        crc = _CRC.pack(crc32c(records, crc32c(tail)))
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


def _decode_headers(
    data: bytes, position: int, count: int, end: int
) -> tuple[tuple[Header, ...], int]:
    if count < 0 or count * 2 > end - position:
        raise CorruptRecordError(f"it claims {count} headers at byte {position}")
    headers: list[Header] = []
    for _ in range(count):
        length, start = decode_varint(data, position)
        position = start + length
        if length < 0 or position > end:
            raise CorruptRecordError(f"a header name at byte {start} has length {length}")
        try:
            name = data[start:position].decode()
        except UnicodeDecodeError:
            raise CorruptRecordError(f"the header name at byte {start} is not UTF-8") from None
        length, start = decode_varint(data, position)
        if length == -1:
            headers.append((name, None))
            position = start
            continue
        position = start + length
        if length < 0 or position > end:
            raise CorruptRecordError(f"a header value at byte {start} has length {length}")
        headers.append((name, data[start:position]))
    return tuple(headers), position


def _decode_bytes(data: bytes, position: int, end: int, what: str) -> tuple[bytes | None, int]:
    length, start = decode_varint(data, position)
    if length == -1:
        return None, start
    after = start + length
    if length < 0 or after > end:
        raise CorruptRecordError(f"its {what} at byte {start} has length {length}")
    return data[start:after], after


def _decode_record(
    data: bytes, position: int, header: BatchHeader, least_delta: int
) -> tuple[Record, int]:
    """The record at ``position`` and where the next one begins."""
    length, start = decode_varint(data, position)
    end = start + length
    if length < _MIN_RECORD_BYTES - 1 or end > len(data):
        raise CorruptRecordError(f"its length is {length}, but {len(data) - start} bytes follow")
    timestamp_delta, at = decode_varint(data, start + 1)  # No attribute of a record is in use.
    offset_delta, at = decode_varint(data, at)
    if not least_delta <= offset_delta <= header.last_offset_delta:
        raise CorruptRecordError(
            f"its offset delta {offset_delta} is outside of {least_delta} to "
            f"{header.last_offset_delta}"
        )
    timestamp_ms = header.base_timestamp_ms + timestamp_delta
    if header.is_log_append_time:
        timestamp_ms = header.max_timestamp_ms
    elif not -1 <= timestamp_ms <= _INT64_MAX:
        raise CorruptRecordError(f"its timestamp {timestamp_ms} ms is out of range")
    key, at = _decode_bytes(data, at, end, "key")
    value, at = _decode_bytes(data, at, end, "value")
    header_count, at = decode_varint(data, at)
    headers: tuple[Header, ...] = ()
    if header_count:
        headers, at = _decode_headers(data, at, header_count, end)
    if at != end:
        raise CorruptRecordError(f"its fields end at byte {at}, but its length says {end}")
    return Record(header.base_offset + offset_delta, timestamp_ms, key, value, headers), end


def _record_data(batch: Buffer, header: BatchHeader, max_bytes: int) -> bytes:
    """The records' bytes, decompressed; raises when they cannot hold as many as the header says."""
    compression = header.compression
    view = memoryview(batch)[HEADER_BYTES:]
    try:
        data = decompress(compression, view, max_bytes=max_bytes)
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
    offsets do not rise, or when they decompress to more than ``max_bytes``. Byte positions in the
    message count from the first record, decompressed.
    """
    header = verify_batch(batch)
    data = _record_data(batch, header, max_bytes)
    records: list[Record] = []
    position = 0
    delta = 0
    for index in range(header.record_count):
        try:
            record, position = _decode_record(data, position, header, delta)
        except CorruptRecordError as error:
            raise CorruptRecordError(
                f"record {index} of {header.record_count} at byte {position} of the records of the "
                f"batch at offset {header.base_offset}: {error.message}"
            ) from None
        records.append(record)
        delta = record.offset - header.base_offset + 1
    if position != len(data):
        raise CorruptRecordError(
            f"{len(data) - position} bytes follow the last record of the batch at offset "
            f"{header.base_offset}, at byte {position} of its records"
        )
    return records
