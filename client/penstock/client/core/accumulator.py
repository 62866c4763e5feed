"""Records waiting to be sent: a queue of batches for each partition, within a bound of memory.

Memory is counted by what records take in a batch, uncompressed, from the append until the batch has
its verdict; compression and retries change nothing in the count.

A batch is *full*, and need not linger any more, at ``batch_size_bytes``. While it waits for its
turn all the same, since enough is under way, it goes on growing up to ``max_batch_bytes``: what
comes faster than it can be sent goes in fewer, larger batches, which cost everybody less.

Records that need nothing but to be added to an open batch come through the ``intake``, without the
guard. So an open batch may have grown between any two steps; whoever looks into one, or adds to it
in another way, closes it there before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from penstock.wire.codec import Intake
from penstock.wire.ids import TopicPartition
from penstock.wire.records import HEADER_BYTES, BatchBuilder, Buffer, RecordData, decode_batch


class Splittable(Protocol):
    """What a batch has for the shell: the one place that all its records' verdicts come to."""

    def split(self, middle: int, /) -> tuple[Self, Self]:
        """That of the records before ``middle``, and that of the others."""
        ...


D = TypeVar("D", bound=Splittable)


NEVER_UNHEARD = -2
ANY_LEADER_EPOCH = 2**31
"""Above all leader epochs."""


class Batch(Generic[D]):
    """Records of one partition that are sent, retried and judged together.

    Grows until it is ``closed``. ``encoded`` is set when it is first sent and is what every
    retry sends again, byte for byte, until the sequencer numbers it under another identity.
    ``receipt`` is the shell's.
    ``maybe_written`` says that some attempt may have reached the log unheard.
    ``unheard_epoch`` is the newest leader epoch of an attempt without any answer, NEVER_UNHEARD if
    there is none: a leader of this epoch may have it still unread.
    """

    __slots__ = (
        "attempts",
        "base_sequence",
        "builder",
        "closed",
        "created_ms",
        "deadline_ms",
        "done",
        "encoded",
        "full",
        "last_epoch",
        "last_error",
        "maybe_written",
        "order",
        "order_span",
        "partition",
        "parts",
        "producer_epoch",
        "producer_id",
        "receipt",
        "reserved_bytes",
        "retry_at_ms",
        "unheard_epoch",
    )

    def __init__(
        self, partition: TopicPartition, receipt: D, created_ms: float, deadline_ms: float
    ) -> None:
        self.partition = partition
        self.receipt = receipt
        self.created_ms = created_ms
        self.deadline_ms = deadline_ms
        self.builder = BatchBuilder()
        self.reserved_bytes = 0  # Of the memory; set when it is closed.
        self.full = False
        self.closed = False
        self.done = False  # Has its verdict.
        self.encoded: Buffer | None = None
        self.order = -1  # Its place among the batches ever sent to the partition.
        self.order_span = 0
        self.producer_id = -1
        self.producer_epoch = -1
        self.base_sequence = -1
        self.attempts = 0
        self.retry_at_ms = float("-inf")
        self.last_epoch = -1  # The leader epoch of the last attempt.
        self.parts: tuple[Batch[D], ...] = ()
        self.last_error: Exception | None = None
        self.maybe_written = False
        self.unheard_epoch = NEVER_UNHEARD

    def went_unheard(self, leader_epoch: int) -> None:
        """An attempt, made for this leader epoch (-1: for any), will have no answer."""
        self.maybe_written = True
        self.unheard_epoch = max(
            self.unheard_epoch, leader_epoch if leader_epoch >= 0 else ANY_LEADER_EPOCH
        )

    @property
    def record_count(self) -> int:
        """How many records it has."""
        return self.builder.record_count

    @property
    def size_bytes(self) -> int:
        """Its size as it is sent, or would be without compression."""
        return len(self.encoded) if self.encoded is not None else self.builder.size_bytes

    @property
    def settled(self) -> bool:
        """Whether it, or every part that it was split into, has a verdict."""
        return self.done or (bool(self.parts) and all(part.settled for part in self.parts))

    def split(self) -> tuple[Batch[D], Batch[D]]:
        """Two batches that have its records, its deadline and its memory between them."""
        assert self.record_count > 1
        assert self.encoded is not None
        records = decode_batch(self.encoded)
        middle = self.record_count // 2
        parts = []
        receipts = self.receipt.split(middle)
        for receipt, half in zip(receipts, (records[:middle], records[middle:]), strict=True):
            part: Batch[D] = Batch(self.partition, receipt, self.created_ms, self.deadline_ms)
            part.builder.extend(half)
            part.closed = True
            part.last_error = self.last_error
            part.maybe_written = self.maybe_written
            part.unheard_epoch = self.unheard_epoch
            parts.append(part)
        parts[0].reserved_bytes = self.reserved_bytes // 2
        parts[1].reserved_bytes = self.reserved_bytes - parts[0].reserved_bytes
        self.reserved_bytes = 0
        self.parts = (parts[0], parts[1])
        return parts[0], parts[1]

    def __repr__(self) -> str:
        return (
            f"<Batch {self.partition} order={self.order} sequence={self.base_sequence} "
            f"records={self.record_count} attempts={self.attempts}>"
        )


@dataclass(frozen=True, slots=True)
class Appended(Generic[D]):
    """A record was taken: which of its batch's it is. ``wake``: the sender has something to do."""

    receipt: D
    index: int
    wake: bool


class Accumulator(Generic[D]):
    """The queues. Appends may come from any thread; ``guard`` is the lock they hold."""

    def __init__(
        self,
        *,
        batch_size_bytes: int,
        max_batch_bytes: int,
        linger_ms: float,
        delivery_timeout_ms: float,
        guard: AbstractContextManager[object],
        intake: Intake[D, Any],
        receipt_for: Callable[[TopicPartition], D],
    ) -> None:
        self._batch_size_bytes = batch_size_bytes
        self._max_batch_bytes = max(batch_size_bytes, max_batch_bytes)
        self._linger_ms = linger_ms
        self._delivery_timeout_ms = delivery_timeout_ms
        self._guard = guard
        self._intake = intake
        self._receipt_for = receipt_for
        self._queues: dict[TopicPartition, deque[Batch[D]]] = {}
        self._starved = False  # Somebody waits for memory.

    @property
    def used_bytes(self) -> int:
        """How much of the memory is taken."""
        return self._intake.used_bytes

    @property
    def records_waiting(self) -> int:
        """How many records are in batches that were not taken out."""
        return sum(batch.record_count for batch in self.waiting())

    def append(
        self,
        partition: TopicPartition,
        partition_count: int,
        record: RecordData,
        size_bound: int,
        now_ms: float,
    ) -> Appended[D] | None:
        """Take one record; None (and nothing taken) when memory is full.

        The caller holds the guard. A record larger than the whole memory is taken when nothing
        else is there, so that it does not wait for ever.
        """
        intake = self._intake
        used_bytes = intake.used_bytes
        if used_bytes + size_bound > intake.buffer_memory_bytes and used_bytes:
            self._starved = True
            return None
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = deque()
        intake.close(*partition)
        batch: Batch[D] | None = queue[-1] if queue else None
        wake = False
        if batch is None or batch.builder.size_bytes + size_bound > self._max_batch_bytes:
            # The batch before stays as it is, and this one is not in the queue while it is empty.
            wake = True
            batch = Batch(
                partition,
                self._receipt_for(partition),
                now_ms,
                now_ms + self._delivery_timeout_ms,
            )
        intake.charge(batch.builder.append(*record))
        if wake:
            if queue:
                self._close(queue[-1])
            queue.append(batch)
        if not batch.full and batch.builder.size_bytes >= self._batch_size_bytes:
            wake = batch.full = True
        taken = Appended(batch.receipt, batch.record_count - 1, wake)
        limit = self._max_batch_bytes if batch.full else self._batch_size_bytes
        intake.open(
            *partition,
            partition_count=partition_count,
            body=batch.builder,
            receipt=batch.receipt,
            limit_bytes=limit,
        )
        return taken

    def _close(self, batch: Batch[D]) -> None:
        """Nothing is added to the batch any more, the last of its partition's."""
        self._intake.close(*batch.partition)
        batch.closed = True
        batch.reserved_bytes = batch.builder.size_bytes - HEADER_BYTES

    def ready_at_ms(self, partition: TopicPartition, *, hurry: bool) -> float:
        """When the partition's first batch may go: at once (minus infinity) when it is full or
        in a hurry, else when it has lingered; infinity when there is none.
        """
        queue = self._queues.get(partition)
        return self._ready_at_ms(queue, hurry=hurry) if queue else float("inf")

    def _ready_at_ms(self, queue: deque[Batch[D]], *, hurry: bool) -> float:
        first = queue[0]
        if hurry or self._starved or len(queue) > 1 or first.full:
            return float("-inf")
        return first.created_ms + self._linger_ms

    def can_grow(self, partition: TopicPartition) -> bool:
        """Whether records may still enter the partition's first batch, which must be there, and
        nobody waits for the memory that it takes.
        """
        queue = self._queues[partition]
        return len(queue) == 1 and not queue[0].closed and not self._starved

    def first_created_ms(self, partition: TopicPartition) -> float:
        """When the partition's first batch was begun, which must be there."""
        return self._queues[partition][0].created_ms

    def first_size(self, partition: TopicPartition) -> int:
        """The size in bytes, uncompressed, of the partition's first batch, which must be there."""
        return self._queues[partition][0].size_bytes

    def pop(self, partition: TopicPartition) -> Batch[D]:
        """Take the partition's first batch out of its queue and close it."""
        with self._guard:
            return self._take_first(self._queues[partition])

    def pop_expired(self, now_ms: float) -> list[Batch[D]]:
        """Take out what has waited longer than the delivery timeout."""
        with self._guard:
            expired: list[Batch[D]] = []
            for queue in self._queues.values():
                while queue and queue[0].deadline_ms <= now_ms:
                    expired.append(self._take_first(queue))
            return expired

    def pop_topic(self, topic: str) -> list[Batch[D]]:
        """Take out everything of a topic (which does not exist)."""
        with self._guard:
            found: list[Batch[D]] = []
            for partition, queue in self._queues.items():
                while partition.topic == topic and queue:
                    found.append(self._take_first(queue))
            return found

    def pop_all(self) -> list[Batch[D]]:
        """Take out everything."""
        with self._guard:
            found: list[Batch[D]] = []
            for queue in self._queues.values():
                while queue:
                    found.append(self._take_first(queue))
            return found

    def _take_first(self, queue: deque[Batch[D]]) -> Batch[D]:
        batch = queue.popleft()
        if not batch.closed:
            self._close(batch)
        return batch

    def release(self, batch: Batch[D]) -> bool:
        """Give back a judged batch's memory; whether somebody waits for it."""
        with self._guard:
            self._intake.charge(-batch.reserved_bytes)
            batch.reserved_bytes = 0
            starved, self._starved = self._starved, False
            return starved

    def partitions(self) -> list[TopicPartition]:
        """The partitions that have something waiting."""
        with self._guard:
            return [partition for partition, queue in self._queues.items() if queue]

    def waiting(self) -> Iterator[Batch[D]]:
        """Every batch that waits (for tests and snapshots of what to flush)."""
        with self._guard:
            return iter([batch for queue in self._queues.values() for batch in queue])

    def earliest_deadline_ms(self) -> float:
        """When the first waiting batch expires; infinity when none waits."""
        with self._guard:
            firsts = [queue[0].deadline_ms for queue in self._queues.values() if queue]
        return min(firsts, default=float("inf"))

    def validate(self, in_flight: Iterable[Batch[D]] = ()) -> None:
        """Assert what always holds (for tests); ``in_flight`` are the batches popped, unjudged."""
        waiting = list(self.waiting())
        reserved = sum(
            batch.reserved_bytes if batch.closed else batch.builder.size_bytes - HEADER_BYTES
            for batch in [*waiting, *in_flight]
        )
        assert self.used_bytes == reserved
        for queue in self._queues.values():
            for batch in list(queue)[:-1]:
                assert batch.closed
            for batch in queue:
                small = batch.builder.size_bytes <= self._max_batch_bytes
                assert small or batch.record_count == 1
