"""A coordinator's records on their way into the log, and what waits for them to be committed.

As penstock.broker.coordinator.writing does in production.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.wire.errors import ErrorCode
from penstock.wire.records import RecordData, encode_batch


@dataclass(frozen=True, slots=True)
class Held:
    """``deliver`` when all about the subject is committed, or ``fail``."""

    deliver: Callable[[], None]
    fail: Callable[[ErrorCode], None]


@dataclass(slots=True)
class Write:
    """Records that are appended together, and what is held back until they are committed."""

    changes: list[Any] = field(default_factory=list)
    subjects: set[str] = field(default_factory=set)
    held: list[Held] = field(default_factory=list)

    def records(self, now_ms: int) -> bytes:
        """One batch of all of them."""
        return encode_batch(
            [RecordData(now_ms, change.key, change.value) for change in self.changes]
        )


class WriteQueue:
    """At most one write in flight, and one being gathered."""

    def __init__(self) -> None:
        self.in_flight: Write | None = None
        self._gathered = Write()

    def add(self, subject: str, change: Any) -> None:
        """Gather a record for the next write."""
        self._gathered.changes.append(change)
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
        """The write in flight is committed."""
        write, self.in_flight = self.in_flight, None
        assert write is not None
        for held in write.held:
            held.deliver()

    def drop(self) -> tuple[list[Any], list[Held]]:
        """Forget all writes: their changes in order, and what is to fail."""
        writes = [write for write in (self.in_flight, self._gathered) if write is not None]
        self.in_flight, self._gathered = None, Write()
        changes = [change for write in writes for change in write.changes]
        return changes, [held for write in writes for held in write.held]
