"""A ProduceRequest on its way out, whose batches are copied once: into what is sent."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import Buffer
from penstock.wire.laden import PRODUCE_REQUEST


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
    transactional_id: str = ""

    def to_bytes(self) -> bytes:
        """The ProduceRequest, serialised."""
        head = log_pb2.ProduceRequest(
            correlation_id=self.correlation_id,
            acks=self.acks,
            timeout_ms=self.timeout_ms,
            transactional_id=self.transactional_id,
        )
        parts: list[Buffer] = [head.SerializeToString()]
        for batch in self.batches:
            place = log_pb2.ProducePartition(
                partition=batch.partition, current_leader_epoch=batch.leader_epoch
            )
            PRODUCE_REQUEST.add_entry(parts, place.SerializeToString(), batch.records)
        return b"".join(parts)
