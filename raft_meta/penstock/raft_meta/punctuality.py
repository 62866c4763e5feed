"""Whether an event loop runs when it should: what a busy or stopped process does not notice itself.

What comes in waits in sockets while the loop is late, so that silence in that time is no sign of
anything about others. Whoever judges others by their silence is told.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

LATE_S: Final = 0.1
"""Beyond so long a delay a process counts as having stood still."""
BEAT_S: Final = 0.1
"""So often it is looked at: of a spell at most this much goes unnoticed."""


class Punctuality:
    """Calls ``on_late(since_s)`` on the loop after each spell in which the loop stood still.

    ``since_s`` is a time of the loop's clock, which is the monotonic one, at which the loop was to
    run, and did not until now. Whoever is about to judge by what waited meanwhile asks for it with
    :meth:`look`, since timers come in no order with it. One event loop; ``late_since_s`` is for any
    thread.
    """

    def __init__(self, on_late: Callable[[float], None]) -> None:
        self._on_late = on_late
        self._due_s = math.inf  # When the loop is to run next; never while nobody looks.
        self._timer: asyncio.TimerHandle | None = None
        self._is_telling = False

    def start(self) -> None:
        """Begin, or go on from now."""
        self.stop()
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + BEAT_S
        self._timer = loop.call_later(BEAT_S, self._beat)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = math.inf

    def late_since_s(self, now_s: float) -> float | None:
        """Since when the loop stands still, if it does so now, by the monotonic clock."""
        due_s = self._due_s
        return due_s if now_s - due_s > LATE_S else None

    def look(self) -> None:
        """Tell of the spell that ended just now, if one did, before anything else is done.

        Each moment is told of once; nothing is while this is stopped, or tells already.
        """
        now_s, due_s = asyncio.get_running_loop().time(), self._due_s
        if self._is_telling or now_s - due_s <= LATE_S:
            return
        self._is_telling = True
        try:
            self._on_late(due_s)
        finally:
            self._is_telling = False
        # Only now: other threads see a loop that is late until somebody was told of it.
        if self._timer is not None:
            self._due_s = now_s + BEAT_S

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._timer = loop.call_later(BEAT_S, self._beat)
        self.look()
        if self._timer is not None:
            self._due_s = now_s + BEAT_S
