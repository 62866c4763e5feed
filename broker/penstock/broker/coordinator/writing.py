"""A coordinator's records on their way into the log, and the answers that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.wire.errors import PenstockError
from penstock.wire.records import BatchBuilder

_BATCH_BYTES: Final = 256 * 1024
"""A batch is closed at this size, so that it stays below the topic's max.message.bytes."""


class Change(Protocol):
    """One record to append; a ``value`` of None is a tombstone."""

    @property
    def key(self) -> bytes:
        """Its key."""
        ...

    @property
    def value(self) -> bytes | None:
        """Its value."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """An answer: ``deliver`` it when what it tells is committed, or ``fail`` it."""

    deliver: Callable[[], None]
    fail: Callable[[PenstockError], None]


@dataclass(slots=True)
class Write:
    """Records that are appended together, and the answers held back until they are committed.

    With a ``producer`` (id and epoch) they are of its transaction. ``number`` counts the writes.
    """

    number: int
    producer: tuple[int, int] | None = None
    changes: list[Any] = field(default_factory=list)  # Each a Change; the shard knows more of it.
    subjects: set[str] = field(default_factory=set)  # What the changes are about.
    held: list[Held] = field(default_factory=list)


class WriteQueue:
    """At most one write in flight and others being gathered.

    What arrives while a write is in flight goes into the next one together, but for what is of
    another transaction than what was gathered last. An answer about a
    subject (a group, a transaction) is held until the last of its changes so far is committed, so
    that nobody is told what a crash might undo, and in order.
    """

    def __init__(self) -> None:
        self.in_flight: Write | None = None
        self._gathered: deque[Write] = deque()
        self.last_number = 0  # Of the writes there were.

    @property
    def pending_count(self) -> int:
        """How many records wait to be written."""
        return sum(len(write.changes) for write in self._gathered)

    def add(
        self,
        subject: str,
        changes: Sequence[Change],
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Gather records about a subject, of a producer's transaction or of none."""
        if not self._gathered or self._gathered[-1].producer != producer:
            self.last_number += 1
            self._gathered.append(Write(self.last_number, producer))
        write = self._gathered[-1]
        write.changes += changes
        write.subjects.add(subject)

    def hold(self, subject: str | None, held: Held) -> None:
        """Deliver now, or when what the subject (None: any) waits for is committed."""
        for write in (*reversed(self._gathered), self.in_flight):
            if write is not None and (
                subject in write.subjects or (subject is None and write.subjects)
            ):
                write.held.append(held)
                return
        held.deliver()

    def next(self) -> Write | None:
        """What to write now; None when there is nothing, or a write is in flight."""
        if self.in_flight is not None or not self._gathered:
            return None
        self.in_flight = self._gathered.popleft()
        return self.in_flight

    def committed(self) -> None:
        """The write in flight is committed: deliver its answers."""
        write, self.in_flight = self.in_flight, None
        assert write is not None
        for held in write.held:
            held.deliver()

    def drop(self) -> list[Write]:
        """Forget all writes; what they were, the one in flight first."""
        in_flight = [] if self.in_flight is None else [self.in_flight]
        writes = [*in_flight, *self._gathered]
        self.in_flight = None
        self._gathered.clear()
        return writes


def encode(write: Write, timestamp_ms: int) -> bytes:
    """The record batches of a write's changes, in order."""
    batches: list[bytes] = []
    builder = BatchBuilder()
    for change in write.changes:
        size = len(change.key) + len(change.value or b"")
        if builder.record_count and builder.size_bytes + size > _BATCH_BYTES:
            batches.append(_build(builder, write.producer))
            builder = BatchBuilder()
        builder.append(timestamp_ms, change.key, change.value)
    batches.append(_build(builder, write.producer))
    return b"".join(batches)


def _build(builder: BatchBuilder, producer: tuple[int, int] | None) -> bytes:
    if producer is None:
        return builder.build()
    producer_id, producer_epoch = producer
    return builder.build(
        producer_id=producer_id, producer_epoch=producer_epoch, is_transactional=True
    )
