"""The header of Kafka's record batch, magic 2: what brokers read of a batch and what they set.

Layout (big-endian)::

    0  base offset      int64     23 last offset delta   int32   51 producer epoch  int16
    8  length from 12   int32     27 base timestamp, ms  int64   53 base sequence   int32
    12 leader epoch     int32     35 max timestamp, ms   int64   57 record count    int32
    16 magic (2)        int8      43 producer id         int64   61 records
    17 CRC-32C from 21  uint32
    21 attributes       int16: 0-2 compression, 3 log append time, 4 transactional, 5 control,
                               6 delete horizon (KIP-534)

The same bytes travel from producer to disk to consumer; a broker fills in only the first 16 of
them (``offset_patch``), which the checksum leaves out for that reason.

Source: KIP-98 and Kafka's ``DefaultRecordBatch``. All functions are pure and safe from any
thread. Whatever bytes are given, they raise nothing but CorruptRecordError
(``verify_producer_batch`` InvalidRecordError as well).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.wire.compression import Compression
from penstock.wire.errors import CorruptRecordError, InvalidRecordError

Buffer = bytes | bytearray | memoryview

HEADER_BYTES: Final = 61
"""The size of a batch's header, and so of the smallest batch."""

MAGIC: Final = 2
"""The version of the batch format; older ones have not been written since Kafka 0.11."""

MIN_LENGTH: Final = HEADER_BYTES - 12
"""The least that a batch's length field can say: it counts what follows it."""

LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40
"""Bits of ``attributes``; the three lowest are the compression."""

OFFSET_MAX: Final = 2**63 - 1
PATCH: Final = struct.Struct(">qii")
"""What a leader sets: base offset, length and leader epoch."""

CRC: Final = struct.Struct(">I")
TAIL: Final = struct.Struct(">hiqqqhii")
"""What the checksum covers of the header: attributes to record count."""

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH_END: Final = 12
_CRC_AT: Final = 17
_CRC_FROM: Final = 21
_MAX_TIMESTAMP_AT: Final = 35
_COMPRESSION_MASK: Final = 0x07
_COMPRESSIONS: Final = tuple(Compression)  # By their numbers: looked up for every batch.
_SEQUENCE_MASK: Final = 2**31 - 1


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
        return (self.base_sequence + self.last_offset_delta) & _SEQUENCE_MASK

    @property
    def compression(self) -> Compression:
        """How the records are compressed. Raises CorruptRecordError for an id nobody knows."""
        kind = self.attributes & _COMPRESSION_MASK
        if kind >= len(_COMPRESSIONS):
            raise CorruptRecordError(
                f"the batch at offset {self.base_offset} names the unknown compression {kind} at "
                f"byte {_CRC_FROM + 1}"
            )
        return _COMPRESSIONS[kind]

    @property
    def is_log_append_time(self) -> bool:
        """Whether every record has the batch's ``max_timestamp_ms``, given by the broker."""
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether the record is a broker's mark (commit or abort) and not for applications."""
        return bool(self.attributes & CONTROL)

    @property
    def delete_horizon_ms(self) -> int | None:
        """When the batch's tombstones may go, once compaction has come past them (KIP-534).

        It stands in place of the base timestamp; the records' own count from it as they do from
        any other.
        """
        return self.base_timestamp_ms if self.attributes & DELETE_HORIZON else None


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
    if header.batch_length < MIN_LENGTH:
        raise CorruptRecordError(
            f"the batch at byte {position} has length {header.batch_length}; {MIN_LENGTH} is the "
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
    if header.base_offset < 0 or header.last_offset_delta < 0 or header.last_offset > OFFSET_MAX:
        raise CorruptRecordError(
            f"the batch has offsets {header.base_offset} to {header.last_offset} (bytes 0 and 23)"
        )
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} says at byte 57 that it has "
            f"{header.record_count} records for {header.last_offset_delta + 1} offsets"
        )
    return header


def checksum_of(batch: Buffer) -> int:
    """The CRC-32C that the batch's header should name."""
    return crc32c(memoryview(batch)[_CRC_FROM:])


def checksum(data: Buffer, before: int = 0) -> int:
    """The CRC-32C of ``data``, or of what has the checksum ``before`` and ``data`` behind it."""
    return crc32c(data, before)


def verify_producer_batch(batch: Buffer, *, sequenced: bool = True) -> BatchHeader:
    """``verify_batch``, and what holds for a batch straight from a producer.

    It has a record for each offset, producer id, epoch and sequence all or not at all, a producer
    id when it is transactional, and no marks that only brokers write. Unless batches are to be
    ``sequenced``, one that is transactional may have no sequence (-1), as a group coordinator
    writes offsets. Raises CorruptRecordError or, where the bytes are sound but not allowed,
    InvalidRecordError.
    """
    header = verify_batch(batch)
    if header.record_count != header.last_offset_delta + 1:
        raise CorruptRecordError(
            f"a producer's batch says at byte 57 that it has {header.record_count} records, and at "
            f"byte 23 that it has {header.last_offset_delta + 1}"
        )
    if header.is_control:
        raise InvalidRecordError("a producer may not write control batches; clear attribute bit 5")
    if header.delete_horizon_ms is not None:
        raise InvalidRecordError("a producer may set no delete horizon; clear attribute bit 6")
    if header.producer_id >= 0:
        least = 0 if sequenced or not header.is_transactional else -1
        if header.producer_epoch < 0 or header.base_sequence < least:
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
    return PATCH.pack(base_offset, header.batch_length, leader_epoch)


def set_log_append_time(batch: Buffer, now_ms: int) -> bytes:
    """A copy of the batch whose records all have the time ``now_ms``, with a new checksum."""
    header = parse_header(batch)
    out = bytearray(batch)
    struct.pack_into(">h", out, _CRC_FROM, header.attributes | LOG_APPEND_TIME)
    struct.pack_into(">q", out, _MAX_TIMESTAMP_AT, now_ms)
    CRC.pack_into(out, _CRC_AT, crc32c(memoryview(out)[_CRC_FROM:]))
    return bytes(out)
