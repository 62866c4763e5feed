"""A ProduceRequest on its way out, whose batches are copied once: into the message as it is sent.

Protocol Buffers' own object would copy each when it is set and again when it is serialised. The
batches are the last field of each partition, and the partitions that of the request, so the bytes
can be laid one after the other (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import Buffer
from penstock.wire.varint import encode_unsigned

_BYTES: Final = 2
"""The wire type of what has its length before it."""


def _tag(number: int) -> bytes:
    return encode_unsigned(number << 3 | _BYTES)


_PARTITIONS: Final = _tag(log_pb2.ProduceRequest.PARTITIONS_FIELD_NUMBER)
_RECORDS: Final = _tag(log_pb2.ProducePartition.RECORDS_FIELD_NUMBER)


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """One partition's part."""

    partition: common_pb2.TopicPartition
    leader_epoch: int
    records: Buffer


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """What a ProduceRequest says."""

    correlation_id: int
    acks: common_pb2.Acks.ValueType
    timeout_ms: int
    batches: tuple[OutgoingBatch, ...]

    def to_bytes(self) -> bytes:
        """The ProduceRequest, serialised."""
        head = log_pb2.ProduceRequest(
            correlation_id=self.correlation_id, acks=self.acks, timeout_ms=self.timeout_ms
        )
        parts: list[Buffer] = [head.SerializeToString()]
        for batch in self.batches:
            place = log_pb2.ProducePartition(
                partition=batch.partition, current_leader_epoch=batch.leader_epoch
            ).SerializeToString()
            before = b"".join((place, _RECORDS, encode_unsigned(len(batch.records))))
            size = encode_unsigned(len(before) + len(batch.records))
            parts += (_PARTITIONS, size, before, batch.records)
        return b"".join(parts)
