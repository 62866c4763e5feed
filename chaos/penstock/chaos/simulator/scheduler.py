"""Virtual time: whatever happens in a simulation happens as an event of one queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random

_STORY_LINES = 500


class Timer:
    """One event to come."""

    __slots__ = ("action", "cancelled")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        """It will not happen."""
        self.cancelled = True


class Scheduler:
    """Runs events in the order of their times; those of one millisecond in an order by chance.

    The chance is that of the seed, so that a run can be repeated event by event.
    """

    def __init__(self, rng: Random) -> None:
        self.now_ms = 0
        self.steps = 0
        self.story: deque[str] = deque(maxlen=_STORY_LINES)  # What happened last, for people.
        self._rng = rng
        self._queue: list[tuple[int, float, int, Timer]] = []
        self._count = 0

    def after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Let ``action`` happen in ``delay_ms`` milliseconds."""
        timer = Timer(action)
        self._count += 1
        due_ms = self.now_ms + max(delay_ms, 0)
        heapq.heappush(self._queue, (due_ms, self._rng.random(), self._count, timer))
        return timer

    def note(self, what: str) -> None:
        """Remember what happened now."""
        self.story.append(f"{self.now_ms:6} ms  {what}")

    def run_until(self, end_ms: int, after_step: Callable[[], bool]) -> bool:
        """Let events happen until ``end_ms``, or until ``after_step`` says True; whether it did."""
        queue = self._queue
        while queue and queue[0][0] <= end_ms:
            due_ms, _, _, timer = heapq.heappop(queue)
            if timer.cancelled:
                continue
            self.now_ms = due_ms
            self.steps += 1
            timer.action()
            if after_step():
                return True
        self.now_ms = end_ms
        return False
