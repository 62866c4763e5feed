"""The records in Kafka's record batches: written, and read as values or as columns.

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
from typing import Any, Final

from crc32c import crc32c

from penstock.wire import codec
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
from penstock.wire.columns import Columns
from penstock.wire.compression import Compression, compress, decompress
from penstock.wire.errors import CorruptRecordError
from penstock.wire.record import Bounds, Header, Record, RecordData, RecordLike
from penstock.wire.reference import MIN_RECORD_BYTES, RECORD_BOUND_BYTES, TupleT, encode_headers

__all__ = [
    "HEADER_BYTES",
    "MAX_RECORDS_BYTES",
    "BatchBuilder",
    "BatchHeader",
    "Buffer",
    "Columns",
    "Compression",
    "Header",
    "Record",
    "RecordData",
    "RecordLike",
    "add_to_columns",
    "decode_batch",
    "decode_batch_as",
    "decode_columns",
    "encode_batch",
    "iter_batches",
    "offset_patch",
    "parse_header",
    "record_size_bound",
    "set_log_append_time",
    "verify_batch",
    "verify_producer_batch",
]

MAX_RECORDS_BYTES: Final = 128 * 1024 * 1024
"""What the records of one batch may decompress to, unless the caller says otherwise."""


# --- writing -------------------------------------------------------------------------------------


def record_size_bound(
    key: Buffer | None, value: Buffer | None, headers: Sequence[tuple[str, Buffer | None]] = ()
) -> int:
    """The most bytes that a batch grows by when the record is appended, uncompressed."""
    size = RECORD_BOUND_BYTES
    if key is not None:
        size += memoryview(key).nbytes
    if value is not None:
        size += memoryview(value).nbytes
    return size + len(encode_headers(headers)) if headers else size


class BatchBuilder(codec.RecordsBody):
    """Gathers records and then makes one batch of them.

    Producer id and sequence are given to ``build``, so that a batch waits without them; ``build``
    may be called again, as for a new producer epoch, and more records may follow.
    """

    __slots__ = ()

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
        attributes, records = self._packed(compression)
        if is_transactional:
            attributes |= TRANSACTIONAL
        if is_control:
            attributes |= CONTROL
        header = self._header(
            records,
            attributes,
            base_offset=base_offset,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            leader_epoch=leader_epoch,
            log_append_time_ms=log_append_time_ms,
        )
        return b"".join((header, records))

    def seal(
        self,
        *,
        compression: Compression = Compression.NONE,
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
        is_transactional: bool = False,
    ) -> Buffer:
        """``build`` of a producer's batch, which may be the builder's own memory (``behind``)."""
        packing, records = self._packed(compression)
        attributes = packing | TRANSACTIONAL if is_transactional else packing
        header = self._header(
            records,
            attributes,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
        if packing:
            return b"".join((header, records))
        del records  # While it is there the batch is in use.
        return self.behind(header)

    def _packed(self, compression: Compression) -> tuple[int, Buffer]:
        """The attributes that say how, and the records, compressed where that saves anything."""
        if not self.record_count:
            raise ValueError("a batch needs at least one record")
        records = self.body()
        if compression is not Compression.NONE:
            compressed = compress(compression, records)
            if len(compressed) < len(records):
                return int(compression), compressed
        return 0, records

    def _header(
        self,
        records: Buffer,
        attributes: int,
        *,
        base_offset: int = 0,
        producer_id: int,
        producer_epoch: int,
        base_sequence: int,
        leader_epoch: int = -1,
        log_append_time_ms: int | None = None,
    ) -> bytes:
        max_timestamp_ms = self.max_timestamp_ms
        if log_append_time_ms is not None:
            attributes |= LOG_APPEND_TIME
            max_timestamp_ms = log_append_time_ms
        tail = TAIL.pack(
            attributes,
            self.record_count - 1,
            self.base_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            self.record_count,
        )
        head = PATCH.pack(base_offset, MIN_LENGTH + len(records), leader_epoch)
        return b"".join((head, b"\x02", CRC.pack(crc32c(records, crc32c(tail))), tail))


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
    builder.extend(records)
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


def _record_data(batch: Buffer, header: BatchHeader, max_bytes: int) -> Buffer:
    """The records' bytes, decompressed; raises when they cannot hold as many as the header says."""
    data: Buffer = memoryview(batch)[HEADER_BYTES:]
    try:
        if header.compression is not Compression.NONE or len(data) > max_bytes:
            data = decompress(header.compression, data, max_bytes=max_bytes)
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"the records of the batch at offset {header.base_offset}, from byte {HEADER_BYTES}: "
            f"{error.message}"
        ) from None
    if header.record_count * MIN_RECORD_BYTES > len(data):
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
    return codec.parse_records(_record_data(batch, header, max_bytes), _bounds(header))


def decode_batch_as(
    batch: Buffer,
    least_offset: int,
    kind: type[TupleT],
    before: tuple[Any, ...] = (),
    after: tuple[Any, ...] = (),
    *,
    max_bytes: int = MAX_RECORDS_BYTES,
) -> tuple[BatchHeader, list[TupleT]]:
    """The batch's header, and its records from ``least_offset`` on, each as a ``kind``.

    That is a NamedTuple, made of ``before``, a Record's fields and ``after``. What all records
    share must be able to be in no cycle: numbers, texts, bytes. Raises what ``decode_batch`` does.
    """
    header = verify_batch(batch)
    data = _record_data(batch, header, max_bytes)
    bounds = _bounds(header)
    return header, codec.parse_records_as(data, bounds, least_offset, kind, before, after)


def decode_columns(batch: Buffer, *, max_bytes: int = MAX_RECORDS_BYTES) -> Columns:
    """What ``decode_batch`` gives, as columns; raises what it raises."""
    header = verify_batch(batch)
    return codec.parse_columns(_record_data(batch, header, max_bytes), _bounds(header))


def add_to_columns(
    columns: codec.ColumnsBuilder,
    batch: Buffer,
    least_offset: int,
    most: int,
    *,
    max_bytes: int = MAX_RECORDS_BYTES,
) -> tuple[BatchHeader, int, int]:
    """The batch's header, how many of its records were left out as they were too many, and how
    large all of them are decompressed, in bytes.

    Up to ``most`` are added, from ``least_offset`` on. Raises what ``decode_batch`` does, and
    OverflowError where the columns would have more than 2 GB; they are then as they were.
    """
    header = verify_batch(batch)
    data = _record_data(batch, header, max_bytes)
    return header, columns.add(data, _bounds(header), least_offset, most), len(data)


def _bounds(header: BatchHeader) -> Bounds:
    by_broker = header.is_log_append_time
    return Bounds(
        header.record_count,
        header.base_offset,
        header.last_offset_delta,
        header.max_timestamp_ms if by_broker else header.base_timestamp_ms,
        0 if by_broker else 1,
    )
