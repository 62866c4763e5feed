"""Transactional batches that wait until their coordinator has said that they may be appended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import structlog

from penstock.broker.alarm import Alarm
from penstock.broker.core.verification import (
    Answered,
    Append,
    Arrived,
    Ask,
    Event,
    LeadershipEnded,
    Marked,
    Question,
    Refuse,
    Stopped,
    Tick,
    Verification,
)
from penstock.broker.replication.ports import AskCoordinator
from penstock.wire.errors import PenstockError, UnknownServerError
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()

T = TypeVar("T")


class Verifying(Generic[T]):
    """Carries out what the verification of transactional batches asks for. On one event loop.

    ``append`` is given a batch that may be appended, and whether the coordinator has said so (else
    its transaction is open in the log); ``refuse`` one that may not, with the error. Each batch
    comes to one of them, once, perhaps before ``take`` returns. They must not raise. ``is_behind``
    says of a question whether a transaction before is open in the log now.
    """

    def __init__(
        self,
        ask: AskCoordinator,
        *,
        append: Callable[[T, bool], object],
        refuse: Callable[[T, PenstockError], object],
        is_behind: Callable[[Question], bool],
        clock_ms: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._append = append
        self._refuse = refuse
        self._is_behind = is_behind
        self._clock_ms = clock_ms
        self._core: Verification[T] = Verification()
        self._alarm = Alarm(self._tick)

    def take(
        self, question: Question, item: T, *, is_open: bool, size_bytes: int, timeout_ms: int
    ) -> None:
        """A batch is to be appended; see penstock.broker.core.verification.Arrived."""
        deadline_ms = self._clock_ms() + timeout_ms
        behind = not is_open and self._is_behind(question)
        self._handle(Arrived(question, item, is_open, size_bytes, deadline_ms, behind))

    def marked(self, mark: Marked) -> None:
        """A mark is in the log; what it lets in is appended before this returns."""
        self._handle(mark)

    def leadership_ended(self, partition: TopicIdPartition, error: PenstockError) -> None:
        """Refuse all that waits for the partition."""
        self._handle(LeadershipEnded(partition, error))

    def stop(self, error: PenstockError) -> None:
        """Refuse all that waits."""
        self._handle(Stopped(error))

    def _handle(self, event: Event[T]) -> None:
        for effect in self._core.handle(event, self._clock_ms()):
            match effect:
                case Ask(question, attempt):
                    self._put(question, attempt)
                case Append(item, verified):
                    self._append(item, verified)
                case Refuse(item, error):
                    self._refuse(item, error)
        self._arm()

    def _put(self, question: Question, attempt: int) -> None:
        answered = partial(self._answered, question, attempt)
        try:
            self._ask(question, answered)
        except Exception as error:
            # Who waits must hear of it, and what else there is to be done must be.
            logger.exception("a coordinator was not asked", partition=str(question.partition))
            reason = UnknownServerError(f"the coordinator was not asked: {error!r}")
            asyncio.get_running_loop().call_soon(answered, reason)

    def _answered(self, question: Question, attempt: int, error: PenstockError | None) -> None:
        behind = error is None and self._is_behind(question)
        self._handle(Answered(question, attempt, error, behind))

    def _arm(self) -> None:
        deadline_ms = self._core.next_deadline_ms
        if deadline_ms is None:
            self._alarm.cancel()
            return
        self._alarm.within((deadline_ms - self._clock_ms()) / 1000)  # It looks again then.

    def _tick(self) -> None:
        self._handle(Tick())
