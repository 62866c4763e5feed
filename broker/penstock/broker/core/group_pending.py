"""Positions of a group in transactions that have not ended (KIP-98), ordered as they were written.

A position counts once its transaction commits, and only if nothing was written about its partition
after it: whatever is, from inside or outside of a transaction that commits, drops what is pending
from before. So what is here is newer than what the group has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.broker.core.group_values import CommittedOffset, Producer
from penstock.wire.ids import TopicPartition


class WriteOrder:
    """Numbers what is written to a partition of ``__consumer_offsets`` in transactions.

    ``last`` is the number given last, ``appended`` that of what is in the log so far; the rest is
    on its way there, or was refused.
    """

    __slots__ = ("appended", "last")

    def __init__(self) -> None:
        self.last = 0
        self.appended = 0

    def next(self) -> int:
        """A number above all before."""
        self.last += 1
        return self.last


@dataclass(frozen=True, slots=True)
class PendingOffset:
    """A position; ``number`` is its place in the order of writes."""

    offset: CommittedOffset
    producer: Producer
    number: int


class PendingOffsets:
    """By partition the positions in open transactions, the oldest first."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, tuple[PendingOffset, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_partition)

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._by_partition)

    def of(self, partition: TopicPartition) -> tuple[PendingOffset, ...]:
        """Those of a partition."""
        return self._by_partition.get(partition, ())

    def producer_ids(self) -> set[int]:
        """Whose transactions they are in."""
        return {
            pending.producer.producer_id
            for waiting in self._by_partition.values()
            for pending in waiting
        }

    def put(self, partition: TopicPartition, pending: PendingOffset, order: WriteOrder) -> None:
        """Note the newest position of all.

        An earlier one of its transaction counts only where a mark comes between the two: it is
        forgotten once another one of them is in the log.
        """
        waiting = self.of(partition)
        newest = max(
            (
                one.number
                for one in waiting
                if one.producer == pending.producer and one.number <= order.appended
            ),
            default=0,
        )
        kept = [one for one in waiting if one.producer != pending.producer or one.number >= newest]
        self._by_partition[partition] = (*kept, pending)

    def drop(self, partition: TopicPartition, *, before: int | None = None) -> None:
        """Forget what is pending of a partition: all, or what was written before a number."""
        left = [one for one in self.of(partition) if before is not None and one.number > before]
        self.restore(partition, tuple(left))

    def restore(self, partition: TopicPartition, waiting: tuple[PendingOffset, ...]) -> None:
        """Have of a partition exactly this."""
        self._by_partition.pop(partition, None)
        if waiting:
            self._by_partition[partition] = waiting

    def take(self, ended: Producer, up_to: int) -> list[tuple[TopicPartition, PendingOffset]]:
        """Remove what a mark ends: the producer's positions of epochs before the mark's, as far as
        they were written before it, which is up to a number. The last of each partition.
        """
        taken = []
        for partition, waiting in list(self._by_partition.items()):
            ends = [
                one
                for one in waiting
                if one.producer.producer_id == ended.producer_id
                and one.producer.producer_epoch < ended.producer_epoch
                and one.number <= up_to
            ]
            if ends:
                self.restore(partition, tuple(one for one in waiting if one not in ends))
                taken.append((partition, ends[-1]))
        return taken

    def copy(self) -> dict[TopicPartition, list[tuple[Producer, CommittedOffset]]]:
        """By partition the producers and the last position of each, in their order. For tests."""
        found: dict[TopicPartition, list[tuple[Producer, CommittedOffset]]] = {}
        for partition, waiting in self._by_partition.items():
            last = {one.producer: one for one in waiting}
            in_order = sorted(last.values(), key=lambda one: one.number)
            found[partition] = [(one.producer, one.offset) for one in in_order]
        return found

    def validate(self) -> None:
        """Assert what must hold between events."""
        for waiting in self._by_partition.values():
            numbers = [pending.number for pending in waiting]
            assert numbers
            assert numbers == sorted(set(numbers))
