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
    """One event to come. ``action`` is None when it will not happen."""

    __slots__ = ("action", "node")

    def __init__(self, action: Callable[[], None], node: int) -> None:
        self.action: Callable[[], None] | None = action
        self.node = node

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Scheduler:
    """Runs events in the order of their times; those of one millisecond in an order by chance.

    The chance is that of the seed, so that a run can be repeated event by event. ``steps`` counts
    the events that happened.
    """

    def __init__(self, rng: Random) -> None:
        self.now_ms = 0
        self.steps = 0
        self.story: deque[str] = deque(maxlen=_STORY_LINES)  # What happened last, for people.
        self.held_until_ms: dict[int, int] = {}  # Nodes whose processes do nothing for a while.
        self._random = rng.random
        self._due_ms: list[int] = []  # A heap of the times at which there is something.
        self._timers: dict[int, list[Timer]] = {}  # By these times.

    def after(self, delay_ms: int, action: Callable[[], None], *, node: int = 0) -> Timer:
        """Let ``action`` happen in ``delay_ms`` milliseconds, on a node if it is one's doing."""
        timer = Timer(action, node)
        due_ms = self.now_ms + delay_ms if delay_ms > 0 else self.now_ms
        timers = self._timers.get(due_ms)
        if timers is None:
            self._push(due_ms, timer)
        else:
            timers.append(timer)
        return timer

    def _push(self, due_ms: int, timer: Timer) -> None:
        timers = self._timers.get(due_ms)
        if timers is None:
            self._timers[due_ms] = [timer]
            heappush(self._due_ms, due_ms)
        else:
            timers.append(timer)

    def note(self, what: str) -> None:
        """Remember what happened now."""
        self.story.append(f"{self.now_ms:6} ms  {what}")

    def run_until(self, end_ms: int, after_step: Callable[[], bool]) -> bool:
        """Let events happen until ``end_ms``, or until ``after_step`` says True; whether it did."""
        due, held_until, draw = self._due_ms, self.held_until_ms, self._random
        while due and due[0] <= end_ms:
            due_ms = due[0]
            timers = self._timers[due_ms]
            while timers:
                timer = timers.pop()
                if timers:  # Any of them is the next: the last one takes the place of that.
                    place = int(draw() * (len(timers) + 1))
                    if place < len(timers):
                        timer, timers[place] = timers[place], timer
                action = timer.action
                if action is None:
                    continue
                if held_until and held_until.get(timer.node, 0) > due_ms:
                    self._push(held_until[timer.node], timer)
                    continue
                self.now_ms = due_ms
                self.steps += 1
                action()
                if after_step():
                    return True
            # What an event adds to its own millisecond is in the list by now.
            del self._timers[due_ms]
            heappop(due)
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
        now_ms = self._scheduler.now_ms + self._ahead_ms
        self._read_ms = max(self._read_ms, now_ms)
        return self._read_ms

    def leap(self, by_ms: int) -> None:
        """Go forward, or (below 0) stand still for so long, as while a machine is suspended."""
        self._ahead_ms += by_ms
