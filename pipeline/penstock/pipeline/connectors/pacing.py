"""How often a source asks a system that had nothing new: Spark's default trigger asks at once.

Spark asks the sources of a query one after the other, so whoever waits holds up the others too.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep


class Pacing:
    """Of one source. After an answer with nothing new it is due again ``interval_ms`` later; after
    one with something, at once.
    """

    def __init__(
        self,
        interval_ms: int,
        *,
        clock: Callable[[], float] = monotonic,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        self._interval_s = interval_ms / 1000
        self._clock = clock
        self._pause = pause
        self._due_s = float("-inf")

    def wait(self) -> None:
        """Wait until it is due. To answer without asking would be quicker, and tell Spark's
        ``processAllAvailable`` that there is nothing where there may be.
        """
        left_s = self._due_s - self._clock()
        if left_s > 0:
            self._pause(left_s)

    def answered(self, *, is_new: bool) -> None:
        """Take down what the answer was."""
        self._due_s = float("-inf") if is_new else self._clock() + self._interval_s
