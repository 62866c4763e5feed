"""Which transactional batches wait for which question to a transaction's coordinator. Pure.

A leader appends a batch of a transaction that is open in its own log, under the same producer id
and epoch, at once. For any other it asks the coordinator to take the partition into the transaction
first (KIP-890), and the batches of that transaction for the partition wait behind the question in
the order in which they came. Other producers go on unhindered. What happens to a question:

======================================  =======================================================
stimulus                                what becomes of the batches that wait for it
======================================  =======================================================
a batch arrives, and none waits         it is appended when the transaction is open, else asked for
a batch arrives, and others wait        it waits behind them, whatever the log says by now
allowed                                 all are appended, in their order
refused for good                        all are refused with the coordinator's error
refused for now                         asked again after a while
a batch's time is over                  it and all behind it are refused: they could only be out of
                                        order
the leadership ends, or its epoch       all are refused: whoever leads asks for itself
======================================  =======================================================

What an answer is to that nobody waits for any more, or that was asked before the leadership ended,
it is ignored. An answer that comes after the transaction's mark lets batches in that the log itself
refuses, by their epoch.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from penstock.wire.errors import CoordinatorNotAvailableError, PenstockError, RequestTimedOutError
from penstock.wire.ids import TopicIdPartition

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
MAX_WAITING: Final = 10_000
"""So many bytes and batches wait at most; one that is larger alone may wait alone."""

_RETRY_MIN_MS: Final = 20
_RETRY_MAX_MS: Final = 500
_SWEEP_MIN: Final = 64

T = TypeVar("T")


class Question(NamedTuple):
    """Whether this transaction may write to this partition."""

    partition: TopicIdPartition
    transactional_id: str
    producer_id: int
    producer_epoch: int


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Arrived(Generic[T]):
    """A batch is to be appended by ``deadline_ms``.

    ``is_open``: its transaction is open in the log under its producer id and epoch.
    """

    question: Question
    item: T
    is_open: bool
    size_bytes: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The coordinator has answered what was asked as ``attempt``; None: the partition is in it."""

    question: Question
    attempt: int
    error: PenstockError | None


@dataclass(frozen=True, slots=True)
class LeadershipEnded:
    """This broker does not lead the partition any more, or in another epoch."""

    partition: TopicIdPartition
    error: PenstockError


@dataclass(frozen=True, slots=True)
class Stopped:
    """This broker leads nothing any more."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed."""


Event = Arrived[T] | Answered | LeadershipEnded | Stopped | Tick


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Put the question to the coordinator, and say ``Answered`` with this attempt, once."""

    question: Question
    attempt: int


@dataclass(frozen=True, slots=True)
class Append(Generic[T]):
    """Append the batch now. ``verified``: the coordinator has said that it may be."""

    item: T
    verified: bool


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """Answer for the batch with an error; nothing of it was appended."""

    item: T
    error: PenstockError


Effect = Ask | Append[T] | Refuse[T]


@dataclass(slots=True)
class _Waiting(Generic[T]):
    item: T
    size_bytes: int
    deadline_ms: int


@dataclass(slots=True)
class _Queue(Generic[T]):
    """What waits for one question. It is never empty between events."""

    attempt: int
    waiting: deque[_Waiting[T]] = field(default_factory=deque)
    first_deadline_ms: int = 0
    retry_at_ms: int | None = None  # None while the question is on its way.
    failures: int = 0
    why: str = ""  # Why it was refused for now, the last time.

    @property
    def due_ms(self) -> int:
        """When something is to be done about it."""
        if self.retry_at_ms is None:
            return self.first_deadline_ms
        return min(self.retry_at_ms, self.first_deadline_ms)


class Verification(Generic[T]):
    """The questions of one broker, and the batches (of any type) that wait for them.

    ``handle`` is the only mutator. Times are those of one monotonic clock.
    """

    def __init__(
        self, *, max_waiting_bytes: int = MAX_WAITING_BYTES, max_waiting: int = MAX_WAITING
    ) -> None:
        self._max_bytes = max_waiting_bytes
        self._max_count = max_waiting
        self._queues: dict[Question, _Queue[T]] = {}
        self._by_partition: dict[TopicIdPartition, set[Question]] = {}
        self._attempts = count(1)
        # When to look at which question; an entry counts while it is what the queue says.
        self._heap: list[tuple[int, int, Question]] = []
        self._sequence = count()
        self.waiting_bytes = 0
        self.waiting_count = 0

    @property
    def next_deadline_ms(self) -> int | None:
        """When to handle a Tick, at the latest; None for never."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def handle(self, event: Event[T], now_ms: int) -> list[Effect[T]]:
        """Take one event at a time; the effects are to be carried out in their order."""
        match event:
            case Arrived():
                return self._arrived(event, now_ms)
            case Answered():
                return self._answered(event, now_ms)
            case LeadershipEnded():
                effects: list[Effect[T]] = []
                # In the order in which they were asked, which a set does not keep.
                for question in sorted(
                    self._by_partition.get(event.partition, ()),
                    key=lambda one: self._queues[one].attempt,
                ):
                    effects += self._refuse_all(question, event.error)
                return effects
            case Stopped():
                return [
                    effect
                    for question in list(self._queues)
                    for effect in self._refuse_all(question, event.error)
                ]
            case Tick():
                return self._tick(now_ms)

    def validate(self) -> None:
        """Assert what must hold between events."""
        queues = self._queues.values()
        assert all(queue.waiting for queue in queues)
        assert self.waiting_count == sum(len(queue.waiting) for queue in queues)
        held = sum(one.size_bytes for queue in queues for one in queue.waiting)
        assert self.waiting_bytes == held
        assert self.waiting_count <= self._max_count
        assert self.waiting_bytes <= self._max_bytes or self.waiting_count == 1
        by_partition: dict[TopicIdPartition, set[Question]] = {}
        for question, queue in self._queues.items():
            by_partition.setdefault(question.partition, set()).add(question)
            assert queue.first_deadline_ms == min(one.deadline_ms for one in queue.waiting)
        assert by_partition == self._by_partition
        watched = {entry[2] for entry in self._heap if self._counts(entry)}
        assert watched == self._queues.keys()
        assert len(self._heap) <= 2 * len(self._queues) + _SWEEP_MIN + 1

    # ------------------------------------------------------------------ events

    def _arrived(self, event: Arrived[T], now_ms: int) -> list[Effect[T]]:
        queue = self._queues.get(event.question)
        if queue is None and event.is_open:
            return [Append(event.item, verified=False)]
        if event.deadline_ms <= now_ms:
            return [Refuse(event.item, _too_late(event.question, ""))]
        if not self._has_room(event.size_bytes):
            return [Refuse(event.item, self._no_room())]
        effects: list[Effect[T]] = []
        if queue is None:
            queue = self._queues[event.question] = _Queue(next(self._attempts))
            self._by_partition.setdefault(event.question.partition, set()).add(event.question)
            effects.append(Ask(event.question, queue.attempt))
        is_first = not queue.waiting
        queue.waiting.append(_Waiting(event.item, event.size_bytes, event.deadline_ms))
        self.waiting_count += 1
        self.waiting_bytes += event.size_bytes
        if is_first or event.deadline_ms < queue.first_deadline_ms:
            queue.first_deadline_ms = event.deadline_ms
            self._watch(event.question, queue)
        return effects

    def _answered(self, event: Answered, now_ms: int) -> list[Effect[T]]:
        queue = self._queues.get(event.question)
        if queue is None or queue.attempt != event.attempt or queue.retry_at_ms is not None:
            return []
        error = event.error
        if error is None:
            return [Append(one.item, verified=True) for one in self._take(event.question)]
        if not error.retriable:
            return self._refuse_all(event.question, error)
        queue.why = f"{error.code.name}: {error.message}"
        queue.retry_at_ms = now_ms + min(_RETRY_MIN_MS << min(queue.failures, 10), _RETRY_MAX_MS)
        queue.failures += 1
        self._watch(event.question, queue)
        return []

    def _tick(self, now_ms: int) -> list[Effect[T]]:
        effects: list[Effect[T]] = []
        while (due_ms := self.next_deadline_ms) is not None and due_ms <= now_ms:
            question = heapq.heappop(self._heap)[2]
            queue = self._queues[question]
            if queue.first_deadline_ms <= now_ms:
                effects += self._expire(question, queue, now_ms)
                if not queue.waiting:
                    continue
            if queue.retry_at_ms is not None and queue.retry_at_ms <= now_ms:
                queue.retry_at_ms = None
                queue.attempt = next(self._attempts)
                effects.append(Ask(question, queue.attempt))
            self._watch(question, queue)
        return effects

    def _expire(self, question: Question, queue: _Queue[T], now_ms: int) -> list[Effect[T]]:
        """Refuse the first batch whose time is over, and all behind it."""
        kept: deque[_Waiting[T]] = deque()
        gone: list[_Waiting[T]] = []
        for one in queue.waiting:
            if gone or one.deadline_ms <= now_ms:
                gone.append(one)
            else:
                kept.append(one)
        if kept:
            queue.waiting = kept
            queue.first_deadline_ms = min(one.deadline_ms for one in kept)
            self._release(gone)
        else:
            self._take(question)
        return [Refuse(one.item, _too_late(question, queue.why)) for one in gone]

    # ------------------------------------------------------------------ inside

    def _refuse_all(self, question: Question, error: PenstockError) -> list[Effect[T]]:
        return [Refuse(one.item, error) for one in self._take(question)]

    def _take(self, question: Question) -> list[_Waiting[T]]:
        """All that waits for a question; it is over."""
        queue = self._queues.pop(question)
        of_partition = self._by_partition[question.partition]
        of_partition.discard(question)
        if not of_partition:
            del self._by_partition[question.partition]
        waiting = list(queue.waiting)
        queue.waiting.clear()
        self._release(waiting)
        self._sweep()
        return waiting

    def _release(self, gone: list[_Waiting[T]]) -> None:
        self.waiting_count -= len(gone)
        self.waiting_bytes -= sum(one.size_bytes for one in gone)

    def _has_room(self, size_bytes: int) -> bool:
        if not self.waiting_count:
            return True
        return (
            self.waiting_count < self._max_count
            and self.waiting_bytes + size_bytes <= self._max_bytes
        )

    def _no_room(self) -> PenstockError:
        return CoordinatorNotAvailableError(
            f"{self.waiting_count} batches with {self.waiting_bytes} bytes wait on this broker for "
            "the answers of transaction coordinators, and no more may; nothing was appended, send "
            "it again. If this lasts, look after the brokers that lead __transaction_state"
        )

    def _watch(self, question: Question, queue: _Queue[T]) -> None:
        heapq.heappush(self._heap, (queue.due_ms, next(self._sequence), question))
        self._sweep()

    def _sweep(self) -> None:
        """Keep no more entries than there are questions, by some."""
        if len(self._heap) > 2 * len(self._queues) + _SWEEP_MIN:
            live = {entry[2]: entry for entry in self._heap if self._counts(entry)}
            self._heap = sorted(live.values())

    def _counts(self, entry: tuple[int, int, Question]) -> bool:
        queue = self._queues.get(entry[2])
        return queue is not None and queue.due_ms == entry[0]


def _too_late(question: Question, why: str) -> PenstockError:
    reason = f"; the last reason was {why}" if why else ""
    return RequestTimedOutError(
        "the transaction's coordinator has not said in the request's time that transactional id "
        f"{question.transactional_id[:64]!r} may write to the partition{reason}; nothing was "
        "appended, send it again"
    )
