"""What was sent on a stream and is not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Unanswered:
    """The messages of one stream that wait for an answer, by their sequence.

    Calls ``on_overdue(sequence, age_ms)`` once the oldest has waited for ``max_ms``. While nothing
    is unanswered there is no timer. Used on one event loop.
    """

    __slots__ = ("_clock_ms", "_max_ms", "_on_overdue", "_sent_ms", "_timer")

    def __init__(
        self, clock_ms: Callable[[], int], max_ms: int, on_overdue: Callable[[int, int], None]
    ) -> None:
        self._clock_ms = clock_ms
        self._max_ms = max_ms
        self._on_overdue = on_overdue
        self._sent_ms: dict[int, int] = {}  # The oldest first.
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sent_ms)

    def sent(self, sequence: int) -> None:
        """The message goes out now."""
        self._sent_ms[sequence] = self._clock_ms()
        if self._timer is None:
            self._set_timer()

    def answered(self, sequence: int) -> None:
        """Its answer has come. Nothing happens when it was answered before, or never sent."""
        if self._sent_ms.pop(sequence, None) is not None:
            self._set_timer()

    def clear(self) -> None:
        """Wait for nothing any more."""
        self._sent_ms.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent_ms:
            oldest_ms = next(iter(self._sent_ms.values()))
            delay_ms = max(oldest_ms + self._max_ms - self._clock_ms(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        sequence, sent_ms = next(iter(self._sent_ms.items()))
        age_ms = self._clock_ms() - sent_ms
        if age_ms < self._max_ms:
            self._set_timer()  # The loop's clock rounds otherwise.
        else:
            self._on_overdue(sequence, age_ms)
