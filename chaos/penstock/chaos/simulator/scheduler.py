"""Virtual time: whatever happens in a simulation happens as an event of one queue.

Nodes have clocks of their own, which may be wrong, and may be held up as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

_STORY_LINES = 500


class Timer:
    """One event to come."""

    __slots__ = ("action", "cancelled", "node")

    def __init__(self, action: Callable[[], None], node: int) -> None:
        self.action = action
        self.node = node
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
        self.held_until_ms: dict[int, int] = {}  # Nodes whose processes do nothing for a while.
        self._rng = rng
        self._queue: list[tuple[int, float, int, Timer]] = []
        self._count = 0

    def after(self, delay_ms: int, action: Callable[[], None], *, node: int = 0) -> Timer:
        """Let ``action`` happen in ``delay_ms`` milliseconds, on a node if it is one's doing."""
        timer = Timer(action, node)
        self._push(self.now_ms + delay_ms if delay_ms > 0 else self.now_ms, timer)
        return timer

    def _push(self, due_ms: int, timer: Timer) -> None:
        self._count += 1
        heappush(self._queue, (due_ms, self._rng.random(), self._count, timer))

    def note(self, what: str) -> None:
        """Remember what happened now."""
        self.story.append(f"{self.now_ms:6} ms  {what}")

    def run_until(self, end_ms: int, after_step: Callable[[], bool]) -> bool:
        """Let events happen until ``end_ms``, or until ``after_step`` says True; whether it did."""
        queue, held_until = self._queue, self.held_until_ms
        while queue and queue[0][0] <= end_ms:
            due_ms, _, _, timer = heappop(queue)
            if timer.cancelled:
                continue
            if held_until:
                held_until_ms = held_until.get(timer.node, 0)
                if held_until_ms > due_ms:
                    self._push(held_until_ms, timer)
                    continue
            self.now_ms = due_ms
            self.steps += 1
            timer.action()
            if after_step():
                return True
        self.now_ms = end_ms
        return False


class Clock:
    """A node's monotonic clock, by which its processes go. It may leap, or lag behind."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ahead_ms = 0
        self._read_ms = 0

    @property
    def now_ms(self) -> int:
        """What the clock shows: never less than it ever showed."""
        self._read_ms = max(self._read_ms, self._scheduler.now_ms + self._ahead_ms)
        return self._read_ms

    def leap(self, by_ms: int) -> None:
        """Go forward, or (below 0) stand still for so long, as while a machine is suspended."""
        self._ahead_ms += by_ms
