"""Batches with records taken out, as compaction leaves them.

What stays of a batch keeps its offsets, its timestamps, its leader epoch, its producer and its
sequence: only the records' bytes, their count, the checksum and, where they are what is left, the
times in the header are others. Records are cut out as bytes and never built anew.

All functions are pure and safe from any thread. Whatever bytes are given, they raise nothing but
CorruptRecordError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.wire.batch import (
    CRC,
    DELETE_HORIZON,
    HEADER_BYTES,
    MIN_LENGTH,
    PATCH,
    TAIL,
    BatchHeader,
    Buffer,
)
from penstock.wire.compression import Compression, compress, decompress
from penstock.wire.errors import CorruptRecordError
from penstock.wire.varint import decode_varint, encode_varint

_COMPRESSION_MASK: Final = 0x07
_SPAN_MIN_BYTES: Final = 7  # Seven fields of a byte each.
_MAX_DELTA: Final = 2**31 - 1
_TIMESTAMP_MAX: Final = 2**63 - 1


class Span(NamedTuple):
    """One record among the decompressed ones of its batch: its bytes, and what of them counts.

    Its bytes are those from ``start`` to ``end``; its attributes are at ``attributes_at``, and what
    follows its timestamp begins at ``rest_at``.
    """

    start: int
    attributes_at: int
    rest_at: int
    end: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    has_value: bool


class Records(NamedTuple):
    """The records of a batch, decompressed, and where each one is."""

    data: bytes
    spans: list[Span]


def read_spans(batch: Buffer, header: BatchHeader, *, max_bytes: int) -> Records:
    """Where each record of a whole, verified batch is, without what is in it but its key.

    Raises CorruptRecordError when the records don't fill the batch exactly, when their offsets do
    not rise within the batch's, or when they decompress to more than ``max_bytes``.
    """
    view = memoryview(batch)[HEADER_BYTES:]
    data = decompress(header.compression, view, max_bytes=max_bytes)
    spans: list[Span] = []
    at = 0
    least = header.base_offset
    try:
        for _ in range(header.record_count):
            span = _read_span(data, at, header)
            if not least <= span.offset <= header.last_offset:
                raise CorruptRecordError(f"it has offset {span.offset}, where {least} is the least")
            spans.append(span)
            at, least = span.end, span.offset + 1
    except (CorruptRecordError, IndexError) as error:
        reason = error.message if isinstance(error, CorruptRecordError) else "it is cut short"
        raise CorruptRecordError(
            f"record {len(spans)} of {header.record_count} of the batch at offset "
            f"{header.base_offset}: {reason}"
        ) from None
    if at != len(data):
        raise CorruptRecordError(
            f"{len(data) - at} bytes follow the last record of the batch at offset "
            f"{header.base_offset}"
        )
    return Records(data, spans)


def _read_span(data: bytes, start: int, header: BatchHeader) -> Span:
    length, attributes_at = decode_varint(data, start)
    end = attributes_at + length
    if length < _SPAN_MIN_BYTES - 1 or end > len(data):
        raise CorruptRecordError(f"its length is {length}, but {len(data) - attributes_at} follow")
    delta_ms, rest_at = decode_varint(data, attributes_at + 1)
    timestamp_ms = header.max_timestamp_ms
    if not header.is_log_append_time:
        timestamp_ms = header.base_timestamp_ms + delta_ms
        if not -1 <= timestamp_ms <= _TIMESTAMP_MAX:
            raise CorruptRecordError(f"its timestamp is {timestamp_ms} ms")
    delta, at = decode_varint(data, rest_at)
    key_bytes, at = decode_varint(data, at)
    key = None if key_bytes < 0 else data[at : at + key_bytes]
    value_bytes, at = decode_varint(data, at + max(key_bytes, 0))
    if at + max(value_bytes, 0) >= end:  # A header count follows, of a byte at least.
        raise CorruptRecordError("its key and value are longer than it is")
    return Span(
        start,
        attributes_at,
        rest_at,
        end,
        header.base_offset + delta,
        timestamp_ms,
        key,
        value_bytes >= 0,
    )


def with_only(
    header: BatchHeader,
    records: Records,
    kept: Sequence[Span],
    *,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """The batch with only those of its records; some of them, in their order.

    With ``delete_horizon_ms`` the batch says from now on when its tombstones may go.
    """
    base_ms, attributes = header.base_timestamp_ms, header.attributes
    max_ms = max(span.timestamp_ms for span in kept)
    parts = [records.data[span.start : span.end] for span in kept]
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON
        base_ms = delete_horizon_ms
        if not header.is_log_append_time:  # Else nobody counts from it.
            parts = [_moved(records.data, span, base_ms) for span in kept]
    body: bytes = b"".join(parts)
    compression = header.compression
    attributes &= ~_COMPRESSION_MASK
    if compression is not Compression.NONE:
        compressed = compress(compression, body)
        if len(compressed) < len(body):
            body, attributes = compressed, attributes | compression
    return _batch(header, attributes, (base_ms, max_ms), len(kept), body)


def _moved(data: bytes, span: Span, base_ms: int) -> bytes:
    """The record with its timestamp counted from another base."""
    record = b"".join(
        (
            data[span.attributes_at : span.attributes_at + 1],
            encode_varint(span.timestamp_ms - base_ms),
            data[span.rest_at : span.end],
        )
    )
    return encode_varint(len(record)) + record


def emptied(header: BatchHeader) -> bytes:
    """The batch without any of its records, to remember its producer's sequence by."""
    attributes = header.attributes & ~(_COMPRESSION_MASK | DELETE_HORIZON)
    times = header.max_timestamp_ms, header.max_timestamp_ms
    return _batch(header, attributes, times, 0, b"")


def filler(base_offset: int, last_offset: int, leader_epoch: int, timestamp_ms: int) -> bytes:
    """A batch of nobody's without records, in place of batches that are gone.

    It covers their offsets, so that a log has no gap between batches; all must be of one leader
    epoch. ``timestamp_ms`` is the largest of theirs.
    """
    delta = last_offset - base_offset
    assert 0 <= delta <= _MAX_DELTA, (base_offset, last_offset)
    tail = TAIL.pack(0, delta, timestamp_ms, timestamp_ms, -1, -1, -1, 0)
    return _assembled(base_offset, leader_epoch, tail, b"")


def is_filler(header: BatchHeader) -> bool:
    """Whether the batch is there for its offsets alone."""
    return header.record_count == 0 and header.producer_id < 0 and not header.is_control


def trimmed_filler(header: BatchHeader, base_offset: int) -> bytes:
    """A filler from ``base_offset`` on, which lies within it."""
    last = header.last_offset
    return filler(base_offset, last, header.leader_epoch, header.max_timestamp_ms)


def _batch(
    header: BatchHeader, attributes: int, times: tuple[int, int], count: int, body: bytes
) -> bytes:
    tail = TAIL.pack(
        attributes,
        header.last_offset_delta,
        *times,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        count,
    )
    return _assembled(header.base_offset, header.leader_epoch, tail, body)


def _assembled(base_offset: int, leader_epoch: int, tail: bytes, body: bytes) -> bytes:
    head = PATCH.pack(base_offset, MIN_LENGTH + len(body), leader_epoch)
    crc = CRC.pack(crc32c(body, crc32c(tail)))
    return b"".join((head, b"\x02", crc, tail, body))
