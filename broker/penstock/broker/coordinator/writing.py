"""A coordinator's records on their way into the log, and the answers that wait for them."""

from __future__ import annotations

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
    """Records that are appended together, and the answers held back until they are committed."""

    changes: list[Any] = field(default_factory=list)  # Each a Change; the shard knows more of it.
    subjects: set[str] = field(default_factory=set)  # What the changes are about.
    held: list[Held] = field(default_factory=list)


class WriteQueue:
    """At most one write in flight and one being gathered.

    What arrives while a write is in flight goes into the next one together. An answer about a
    subject (a group, a transaction) is held until the last of its changes so far is committed, so
    that nobody is told what a crash might undo, and in order.
    """

    def __init__(self) -> None:
        self.in_flight: Write | None = None
        self._gathered = Write()

    @property
    def pending_count(self) -> int:
        """How many records wait to be written."""
        return len(self._gathered.changes)

    def add(self, subject: str, changes: Sequence[Change]) -> None:
        """Gather records about a subject for the next write."""
        self._gathered.changes += changes
        self._gathered.subjects.add(subject)

    def hold(self, subject: str | None, held: Held) -> None:
        """Deliver now, or when what the subject (None: any) waits for is committed."""
        for write in (self._gathered, self.in_flight):
            if write is not None and (
                subject in write.subjects or (subject is None and write.subjects)
            ):
                write.held.append(held)
                return
        held.deliver()

    def next(self) -> Write | None:
        """What to write now; None when there is nothing, or a write is in flight."""
        if self.in_flight is not None or not self._gathered.changes:
            return None
        self.in_flight, self._gathered = self._gathered, Write()
        return self.in_flight

    def committed(self) -> None:
        """The write in flight is committed: deliver its answers."""
        write, self.in_flight = self.in_flight, None
        assert write is not None
        for held in write.held:
            held.deliver()

    def drop(self) -> tuple[list[Any], list[Held]]:
        """Forget all writes; their changes in order, and the answers to fail."""
        writes = [write for write in (self.in_flight, self._gathered) if write is not None]
        self.in_flight, self._gathered = None, Write()
        changes = [change for write in writes for change in write.changes]
        return changes, [held for write in writes for held in write.held]


def encode(changes: Sequence[Change], timestamp_ms: int) -> bytes:
    """The record batches of some changes, in order."""
    batches: list[bytes] = []
    builder = BatchBuilder()
    for change in changes:
        size = len(change.key) + len(change.value or b"")
        if builder.record_count and builder.size_bytes + size > _BATCH_BYTES:
            batches.append(builder.build())
            builder = BatchBuilder()
        builder.append(timestamp_ms, change.key, change.value)
    batches.append(builder.build())
    return b"".join(batches)
