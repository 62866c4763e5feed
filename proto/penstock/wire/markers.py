"""The marks that end a transaction: Kafka's control records.

A control batch has one record. Its key says what it marks, its value which coordinator wrote it::

    key:   version int16 (0), type int16 (0 abort, 1 commit)
    value: version int16 (0), coordinator epoch int32

Source: KIP-98 and Kafka's ``ControlRecordType`` and ``EndTransactionMarker``. All functions are
pure and safe from any thread.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from penstock.wire.batch import Buffer
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import BatchHeader, RecordData, decode_batch, encode_batch

_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")
_VERSION: Final = 0


class MarkerType(enum.IntEnum):
    """How a transaction ended."""

    ABORT = 0
    COMMIT = 1


def encode_marker(
    kind: MarkerType,
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp_ms: int,
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """The control batch that ends the producer's transaction in a partition."""
    record = RecordData(
        timestamp_ms, _KEY.pack(_VERSION, kind), _VALUE.pack(_VERSION, coordinator_epoch)
    )
    return encode_batch(
        [record],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=True,
        is_control=True,
    )


def marker_type(batch: Buffer) -> MarkerType:
    """What a control batch of a producer marks; the batch is verified.

    Later versions of the key may have more fields, as in Kafka. Raises CorruptRecordError when it
    is not sound, or is no such mark.
    """
    return decode_marker(batch).type


def mark_of(header: BatchHeader, batch: Buffer) -> MarkerType | None:
    """What a verified batch marks: None when it is no mark, or one of a kind not known here."""
    if not header.is_control or header.producer_id < 0:
        return None
    try:
        return marker_type(batch)
    except CorruptRecordError:
        return None


class DecodedMarker(NamedTuple):
    """What a mark says; ``coordinator_epoch`` is -1 where it does not say who wrote it."""

    type: MarkerType
    coordinator_epoch: int


def decode_marker(batch: Buffer) -> DecodedMarker:
    """All that a mark says. Raises as ``marker_type``."""
    records = decode_batch(batch)
    key = records[0].key if records else None
    if key is None or len(key) < _KEY.size:
        raise CorruptRecordError("a control batch has no record whose key says what it marks")
    version, kind = _KEY.unpack_from(key)
    if version < 0 or kind not in (MarkerType.ABORT, MarkerType.COMMIT):
        raise CorruptRecordError(
            f"a control record at offset {records[0].offset} has the unknown version {version} or "
            f"type {kind}"
        )
    value = records[0].value or b""
    epoch = _VALUE.unpack_from(value)[1] if len(value) >= _VALUE.size else -1
    return DecodedMarker(MarkerType(kind), epoch)
