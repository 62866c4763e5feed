"""A coordinator's records on their way into its log, and what waits for them to be committed. Pure.

One write is in flight, and others are gathered behind it. What arrives while one is in flight goes
into the next one together, but for what is of another transaction than what was gathered last. What
tells of a subject (a group, a transactional id) is held until the last of its changes so far is
committed, so that nobody is told what a crash might undo, and in order.

The state of a coordinator is ahead of its log: each change was made of what those before had left.
So a write that surely wrote nothing takes all back that waits behind it. The exception is a record
that is too large, which is refused for itself, as often as it is tried: a write that is refused
with one is cut in two again and again until that one is alone. Then all about its subject is taken
back, and nothing else, since no change is made of what another subject has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from penstock.wire.records import BatchBuilder

_BATCH_BYTES: Final = 256 * 1024
"""A batch is closed at this size, so that it stays below the topic's max.message.bytes."""

T = TypeVar("T")


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


class _Entry(NamedTuple):
    """What was added at once, about one subject: never torn apart."""

    subject: str
    changes: tuple[Any, ...]


class _Waiting(NamedTuple, Generic[T]):
    """What is held until the entry at this place of its write is committed; see ``hold``."""

    place: int
    subject: str | None
    item: T


@dataclass(slots=True)
class Write(Generic[T]):
    """Records that are appended together, and what is held until they are committed.

    With a ``producer`` (id and epoch) they are of its transaction. ``number`` counts the writes;
    the parts of one that was cut share theirs.
    """

    number: int
    producer: tuple[int, int] | None = None
    entries: list[_Entry] = field(default_factory=list)
    held: list[_Waiting[T]] = field(default_factory=list)
    count: int = 0  # Of records.

    @property
    def changes(self) -> list[Any]:
        """The records, in order. Each is a Change; whose they are knows more of it."""
        return [change for entry in self.entries for change in entry.changes]

    def append(self, entry: _Entry) -> None:
        """Put an entry behind the others."""
        self.entries.append(entry)
        self.count += len(entry.changes)


class TakenBack(NamedTuple, Generic[T]):
    """What is not written, and is to be taken back.

    ``changes`` are in the order in which they were made. ``refused`` waited for the write that was
    refused, and ``others`` for what was behind it. With ``for_itself`` it was refused for what it
    is, and what ``refused`` are told is not true of ``others``: they may try again. ``number`` is
    that of the write that was refused.
    """

    number: int
    changes: list[Any]
    refused: list[T]
    others: list[T]
    for_itself: bool


class WriteQueue(Generic[T]):
    """At most one write in flight, others being gathered, and items held until these are committed.

    Adding and holding cost the same however much waits.
    """

    def __init__(self) -> None:
        self.in_flight: Write[T] | None = None
        self.pending_count = 0
        """How many records wait to be written, without those in flight."""
        self.last_number = 0
        """Of the writes that there were."""
        self._gathered: deque[Write[T]] = deque()
        self._last: dict[str, tuple[Write[T], int]] = {}  # By subject its last entry.

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
        self._last[subject] = write, len(write.entries)
        write.append(_Entry(subject, tuple(changes)))
        self.pending_count += len(changes)

    def hold(self, subject: str | None, item: T) -> bool:
        """Hold what tells of a subject (None: of any) until all about it is committed.

        False where nothing of it is on its way: then it may be told now.
        """
        if subject is None:
            write = self._gathered[-1] if self._gathered else self.in_flight
            found = None if write is None else (write, len(write.entries) - 1)
        else:
            found = self._last.get(subject)
        if found is None:
            return False
        write, place = found
        write.held.append(_Waiting(place, subject, item))
        return True

    def next(self) -> Write[T] | None:
        """What to write now; None when there is nothing, or a write is in flight."""
        if self.in_flight is not None or not self._gathered:
            return None
        self.in_flight = self._gathered.popleft()
        self.pending_count -= self.in_flight.count
        return self.in_flight

    def committed(self) -> list[T]:
        """The write in flight is committed; what may be told now, in order."""
        write = self._land()
        self._forget(write)
        return [waiting.item for waiting in write.held]

    def refused(self, *, too_large: bool = False) -> TakenBack[T] | None:
        """The write in flight was refused, and surely nothing of it is in the log.

        None where it is to be tried again, in parts: only one with ``too_large`` records, which is
        what ``next`` gives then.
        """
        write = self._land()
        alone = too_large and write.producer is None
        if alone and len(write.entries) > 1:
            self._cut(write)
            return None
        self._forget(write)
        if alone:
            return self._take_back_subject(write)
        behind = list(self._gathered)
        self._clear()
        return TakenBack(
            write.number,
            [change for one in (write, *behind) for change in one.changes],
            [waiting.item for waiting in write.held],
            [waiting.item for one in behind for waiting in one.held],
            for_itself=write.producer is not None,
        )

    def drop(self) -> list[T]:
        """Forget all writes; what was held until they are committed."""
        in_flight = [] if self.in_flight is None else [self.in_flight]
        held = [waiting.item for one in (*in_flight, *self._gathered) for waiting in one.held]
        self.in_flight = None
        self._clear()
        return held

    # ------------------------------------------------------------------ inside

    def _land(self) -> Write[T]:
        write, self.in_flight = self.in_flight, None
        assert write is not None, "no write is in flight"
        return write

    def _clear(self) -> None:
        self._gathered.clear()
        self._last.clear()
        self.pending_count = 0

    def _forget(self, write: Write[T]) -> None:
        for entry in write.entries:
            if self._last.get(entry.subject, (None, 0))[0] is write:
                del self._last[entry.subject]

    def _index(self, write: Write[T]) -> None:
        """Note the write's entries as those that came last, so far."""
        for place, entry in enumerate(write.entries):
            self._last[entry.subject] = write, place

    def _cut(self, write: Write[T]) -> None:
        """Put the two halves of a write in front of what is gathered."""
        half = len(write.entries) // 2
        for low, high in ((half, len(write.entries)), (0, half)):
            part: Write[T] = Write(write.number, write.producer)
            for entry in write.entries[low:high]:
                part.append(entry)
            part.held += [
                waiting._replace(place=waiting.place - low)
                for waiting in write.held
                if low <= waiting.place < high
            ]
            self._gathered.appendleft(part)
            self.pending_count += part.count
        for one in self._gathered:
            self._index(one)

    def _take_back_subject(self, write: Write[T]) -> TakenBack[T]:
        """Take back the one entry of a write, and what came after it about its subject.

        What is held about any subject would tell of it.
        """
        [(subject, changes)] = write.entries
        taken = TakenBack[T](write.number, [*changes], [], [], for_itself=True)
        for waiting in write.held:
            (taken.others if waiting.subject is None else taken.refused).append(waiting.item)
        gathered = list(self._gathered)
        self._clear()
        for one in gathered:
            left = self._without(one, subject, taken)
            if left.entries:
                self._gathered.append(left)
                self._index(left)
                self.pending_count += left.count
        return taken

    def _without(self, write: Write[T], subject: str, taken: TakenBack[T]) -> Write[T]:
        """What is left of a write without a subject, which ``taken`` gets."""
        left: Write[T] = Write(write.number, write.producer)
        places: dict[int, int] = {}
        for place, entry in enumerate(write.entries):
            if entry.subject == subject:
                taken.changes.extend(entry.changes)
                continue
            places[place] = len(left.entries)
            left.append(entry)
        for waiting in write.held:
            if waiting.subject is None or waiting.subject == subject:
                taken.others.append(waiting.item)
            else:
                left.held.append(waiting._replace(place=places[waiting.place]))
        return left


def encode(write: Write[Any], timestamp_ms: int) -> bytes:
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
