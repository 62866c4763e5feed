"""Which transactional batches wait for which question to a transaction's coordinator. Pure.

A leader appends a batch of a transaction that is open in its own log, under the same producer id
and epoch, at once; so it does where a mark has told it that the partition is in that transaction
(core/kept_words.py). For any other it asks the coordinator to take the partition into the
transaction first (KIP-890). The batches of that transaction for the partition wait behind the
question in the order in which they came. Other producers go on unhindered.

A batch that overtakes the mark of its producer's transaction before, which is open in the log,
waits for it first: the mark may say all that there is to be asked.

======================================  =======================================================
stimulus                                what becomes of the batches that wait for it
======================================  =======================================================
a batch arrives, and none waits         it is appended when the transaction is open, or a word says
                                        so; it waits for the mark where one before is open; else it
                                        is asked for
a batch arrives, and others wait        it waits behind them, whatever the log says by now
a mark that says it is in the next one  all of that one are appended, in their order
another mark of the producer            who waited for it alone is asked for; who was allowed is
                                        appended
no mark for MARK_PATIENCE_MS            asked for
allowed, and the mark is not there      they wait on: the log takes nothing before the mark
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
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from penstock.broker.core.kept_words import MAX_WORDS, KeptWords
from penstock.broker.core.ports import KnownProducers
from penstock.broker.core.transactions import Marker
from penstock.wire.errors import CoordinatorNotAvailableError, PenstockError, RequestTimedOutError
from penstock.wire.ids import TopicIdPartition

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
MAX_WAITING: Final = 10_000
"""So many bytes and batches wait at most; one that is larger alone may wait alone."""

MARK_PATIENCE_MS: Final = 500
"""A mark that is on its way comes sooner, but where machines are overloaded. Then the coordinator
is asked: another producer may have the id."""

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


def is_behind(producers: KnownProducers, producer_id: int, producer_epoch: int) -> bool:
    """Whether a transaction of the producer before that one is open in the log.

    Then the log takes nothing of this one: the mark that ends the other is missing.
    """
    entry = producers.entry(producer_id)
    is_newer = entry is not None and entry.producer_epoch < producer_epoch
    return is_newer and producer_id in producers.transactions


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Arrived(Generic[T]):
    """A batch is to be appended by ``deadline_ms``.

    ``is_open``: its transaction is open in the log under its producer id and epoch. ``is_behind``:
    one before it is, see the function of that name.
    """

    question: Question
    item: T
    is_open: bool
    size_bytes: int
    deadline_ms: int
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The coordinator has answered what was asked as ``attempt``; None: the partition is in it.

    ``is_behind``: a transaction before is open in the log now.
    """

    question: Question
    attempt: int
    error: PenstockError | None
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark is in the log of a partition that is led here, since now or before.

    ``kept``: whoever sent it says that the partition is in the transaction of this epoch already.
    ``newest_epoch`` is the producer's in the log, which a mark that comes late is behind.
    """

    partition: TopicIdPartition
    producer_id: int
    producer_epoch: int
    kept: bool
    newest_epoch: int

    @classmethod
    def of(
        cls,
        producers: KnownProducers,
        partition: TopicIdPartition,
        marker: Marker,
        *,
        kept: bool,
    ) -> Marked:
        """A marker that is in the log of which these are the producers."""
        known = producers.entry(marker.producer_id)
        newest = marker.producer_epoch if known is None else known.producer_epoch
        return cls(partition, marker.producer_id, marker.producer_epoch, kept, newest)


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


Event = Arrived[T] | Answered | Marked | LeadershipEnded | Stopped | Tick


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Put the question to the coordinator, and say ``Answered`` with this attempt, once."""

    question: Question
    attempt: int


@dataclass(frozen=True, slots=True)
class Append(Generic[T]):
    """Append the batch now.

    ``verified``: the coordinator has said that it may be, itself or by a mark; else it is open.
    """

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


class _Phase(Enum):
    """What a queue waits for."""

    MARK = auto()  # Of the transaction before.
    ANSWER = auto()
    PAUSE = auto()  # Refused for now; then the next answer.
    MARK_ALONE = auto()  # The coordinator has allowed it.


@dataclass(slots=True)
class _Queue(Generic[T]):
    """What waits for one question. It is never empty between events."""

    attempt: int
    phase: _Phase
    ask_at_ms: int | None  # In MARK and PAUSE.
    waiting: deque[_Waiting[T]] = field(default_factory=deque)
    first_deadline_ms: int = 0
    failures: int = 0
    why: str = "the coordinator has not answered"  # Why it waits still.

    @property
    def due_ms(self) -> int:
        """When something is to be done about it."""
        if self.ask_at_ms is None:
            return self.first_deadline_ms
        return min(self.ask_at_ms, self.first_deadline_ms)

    def enter(self, phase: _Phase, ask_at_ms: int | None = None) -> None:
        """Wait for this from now on."""
        self.phase = phase
        self.ask_at_ms = ask_at_ms


class Verification(Generic[T]):
    """The questions of one broker, and the batches (of any type) that wait for them.

    ``handle`` is the only mutator. Times are those of one monotonic clock.
    """

    def __init__(
        self,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_waiting: int = MAX_WAITING,
        max_words: int = MAX_WORDS,
    ) -> None:
        self._max_bytes = max_waiting_bytes
        self._max_count = max_waiting
        self._queues: dict[Question, _Queue[T]] = {}
        # By partition and producer id: a mark is about one, and the end of a leadership about all.
        self._questions: dict[TopicIdPartition, dict[int, set[Question]]] = {}
        self.words = KeptWords(max_words)
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
            case Marked():
                return self._marked(event)
            case LeadershipEnded():
                self.words.leadership_ended(event.partition)
                by_producer = self._questions.get(event.partition, {})
                of_all = [one for questions in by_producer.values() for one in questions]
                effects: list[Effect[T]] = []
                for question in self._in_order(of_all):
                    effects += self._refuse_all(question, event.error)
                return effects
            case Stopped():
                self.words.clear()
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
        questions: dict[TopicIdPartition, dict[int, set[Question]]] = {}
        for question, queue in self._queues.items():
            by_producer = questions.setdefault(question.partition, {})
            by_producer.setdefault(question.producer_id, set()).add(question)
            assert queue.first_deadline_ms == min(one.deadline_ms for one in queue.waiting)
            assert (queue.ask_at_ms is not None) == (queue.phase in (_Phase.MARK, _Phase.PAUSE))
        assert questions == self._questions
        self.words.validate()
        watched = {entry[2] for entry in self._heap if self._counts(entry)}
        assert watched == self._queues.keys()
        assert len(self._heap) <= 2 * len(self._queues) + _SWEEP_MIN + 1

    # ------------------------------------------------------------------ events

    def _arrived(self, event: Arrived[T], now_ms: int) -> list[Effect[T]]:
        question = event.question
        queue = self._queues.get(question)
        if queue is None and (event.is_open or self._has_word(question)):
            return [Append(event.item, verified=not event.is_open)]
        if event.deadline_ms <= now_ms:
            return [Refuse(event.item, _too_late(question, "it came too late"))]
        if not self._has_room(event.size_bytes):
            return [Refuse(event.item, self._no_room())]
        effects: list[Effect[T]] = []
        if queue is None:
            queue = self._open_queue(question, event, now_ms)
            if queue.phase is _Phase.ANSWER:
                effects.append(Ask(question, queue.attempt))
        is_first = not queue.waiting
        queue.waiting.append(_Waiting(event.item, event.size_bytes, event.deadline_ms))
        self.waiting_count += 1
        self.waiting_bytes += event.size_bytes
        if is_first or event.deadline_ms < queue.first_deadline_ms:
            queue.first_deadline_ms = event.deadline_ms
            self._watch(question, queue)
        return effects

    def _has_word(self, question: Question) -> bool:
        """Whether a mark has said that the partition is in the transaction."""
        return self.words.holds(question.partition, question.producer_id, question.producer_epoch)

    def _open_queue(self, question: Question, event: Arrived[T], now_ms: int) -> _Queue[T]:
        queue: _Queue[T] = _Queue(next(self._attempts), _Phase.ANSWER, None)
        if event.is_behind:
            queue.enter(_Phase.MARK, now_ms + MARK_PATIENCE_MS)
            queue.why = _NO_MARK
        self._queues[question] = queue
        by_producer = self._questions.setdefault(question.partition, {})
        by_producer.setdefault(question.producer_id, set()).add(question)
        return queue

    def _marked(self, event: Marked) -> list[Effect[T]]:
        if event.producer_epoch < event.newest_epoch:
            return []  # It comes late, and is about what is over.
        partition, producer_id = event.partition, event.producer_id
        self.words.marked(partition, producer_id, event.producer_epoch, kept=event.kept)
        effects: list[Effect[T]] = []
        for question in self._in_order(self._questions.get(partition, {}).get(producer_id, ())):
            queue = self._queues[question]
            if self._has_word(question) or queue.phase is _Phase.MARK_ALONE:
                effects += self._append_all(question)
            elif queue.phase is _Phase.MARK:
                effects.append(self._ask(question, queue))
                self._watch(question, queue)
        return effects

    def _answered(self, event: Answered, now_ms: int) -> list[Effect[T]]:
        queue = self._queues.get(event.question)
        if queue is None or queue.attempt != event.attempt or queue.phase is not _Phase.ANSWER:
            return []
        error = event.error
        if error is None and not event.is_behind:
            return self._append_all(event.question)
        if error is None:
            queue.enter(_Phase.MARK_ALONE)
            queue.why = _NO_MARK
        elif not error.retriable:
            return self._refuse_all(event.question, error)
        else:
            queue.why = f"{error.code.name}: {error.message}"
            wait_ms = min(_RETRY_MIN_MS << min(queue.failures, 10), _RETRY_MAX_MS)
            queue.enter(_Phase.PAUSE, now_ms + wait_ms)
            queue.failures += 1
        self._watch(event.question, queue)
        return []

    def _ask(self, question: Question, queue: _Queue[T]) -> Ask:
        queue.enter(_Phase.ANSWER)
        queue.attempt = next(self._attempts)
        return Ask(question, queue.attempt)

    def _tick(self, now_ms: int) -> list[Effect[T]]:
        effects: list[Effect[T]] = []
        while (due_ms := self.next_deadline_ms) is not None and due_ms <= now_ms:
            question = heapq.heappop(self._heap)[2]
            queue = self._queues[question]
            if queue.first_deadline_ms <= now_ms:
                effects += self._expire(question, queue, now_ms)
                if not queue.waiting:
                    continue
            if queue.ask_at_ms is not None and queue.ask_at_ms <= now_ms:
                effects.append(self._ask(question, queue))
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

    def _in_order(self, questions: Iterable[Question]) -> list[Question]:
        """As they came, or were asked last, which a set does not keep."""
        return sorted(questions, key=lambda one: self._queues[one].attempt)

    def _append_all(self, question: Question) -> list[Effect[T]]:
        return [Append(one.item, verified=True) for one in self._take(question)]

    def _refuse_all(self, question: Question, error: PenstockError) -> list[Effect[T]]:
        return [Refuse(one.item, error) for one in self._take(question)]

    def _take(self, question: Question) -> list[_Waiting[T]]:
        """All that waits for a question; it is over."""
        queue = self._queues.pop(question)
        by_producer = self._questions[question.partition]
        of_producer = by_producer[question.producer_id]
        of_producer.discard(question)
        if not of_producer:
            del by_producer[question.producer_id]
            if not by_producer:
                del self._questions[question.partition]
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


_NO_MARK: Final = (
    "the mark that ends the transaction before it, which is open in the partition, has not come; "
    "if that lasts, look for it with `penstock transactions hanging`"
)


def _too_late(question: Question, why: str) -> PenstockError:
    return RequestTimedOutError(
        f"transactional id {question.transactional_id[:64]!r} was not let write to the partition "
        f"in the request's time; the last reason was: {why}; nothing was appended, send it again"
    )
