"""A receipt for tests of the pure cores, and what they append to: names of records in a list."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from penstock.client.core.accumulator import Accumulator, Appended
from penstock.wire.codec import Claim, Intake, Receipt
from penstock.wire.ids import TopicPartition
from penstock.wire.records import RecordData, record_size_bound


class Names(Receipt):
    """The names of a batch's records, in their order."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(*partition, tuple)
        self.names: list[int] = []

    def split(self, middle: int) -> tuple[Names, Names]:
        partition = TopicPartition(self.topic, self.partition)
        parts = Names(partition), Names(partition)
        parts[0].names, parts[1].names = self.names[:middle], self.names[middle:]
        return parts


def accumulator_of_names(
    *,
    batch_size: int,
    memory: int,
    linger_ms: float,
    timeout_ms: float,
    max_batch: int = 0,
) -> Accumulator[Names]:
    intake: Intake[Names, Any] = Intake(
        Claim, buffer_memory_bytes=memory, max_record_bytes=10**6, hashes_keys=True
    )
    return Accumulator(
        batch_size_bytes=batch_size,
        max_batch_bytes=max_batch,
        linger_ms=linger_ms,
        delivery_timeout_ms=timeout_ms,
        guard=nullcontext(),
        intake=intake,
        receipt_for=Names,
    )


def append(
    accumulator: Accumulator[Names],
    partition: TopicPartition,
    value: bytes,
    name: int,
    now_ms: float,
) -> Appended[Names] | None:
    """Append a record, and note its name."""
    record = RecordData(1, None, value)
    bound = record_size_bound(None, value)
    taken = accumulator.append(partition, 10, record, bound, now_ms)
    if taken is not None:
        assert taken.index == len(taken.receipt.names)
        taken.receipt.names.append(name)
    return taken
