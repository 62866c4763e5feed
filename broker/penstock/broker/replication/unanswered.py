"""What was sent on a stream and is not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SLOW_BYTES_PER_SECOND: Final = 1024 * 1024


class Unanswered:
    """The messages of one stream that wait for an answer, by their sequence.

    Calls ``on_overdue(sequence, age_ms)`` once the oldest has waited for ``max_ms``, and as long as
    a slow link (SLOW_BYTES_PER_SECOND) takes to carry it: a large batch that came too late each
    time would be sent for ever. While nothing is unanswered there is no timer. Used on one event
    loop.
    """

    __slots__ = ("_clock_ms", "_due_ms", "_max_ms", "_on_overdue", "_sent_ms", "_timer")

    def __init__(
        self, clock_ms: Callable[[], int], max_ms: int, on_overdue: Callable[[int, int], None]
    ) -> None:
        self._clock_ms = clock_ms
        self._max_ms = max_ms
        self._on_overdue = on_overdue
        self._sent_ms: dict[int, int] = {}  # The oldest first.
        self._due_ms: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._sent_ms)

    def sent(self, sequence: int, size_bytes: int = 0) -> None:
        """The message goes out now."""
        now_ms = self._clock_ms()
        self._sent_ms[sequence] = now_ms
        carried_ms = size_bytes * 1000 // SLOW_BYTES_PER_SECOND
        self._due_ms[sequence] = now_ms + self._max_ms + carried_ms
        if self._timer is None:
            self._set_timer()

    def answered(self, sequence: int) -> None:
        """Its answer has come. Nothing happens when it was answered before, or never sent."""
        if self._sent_ms.pop(sequence, None) is not None:
            del self._due_ms[sequence]
            self._set_timer()

    def clear(self) -> None:
        """Wait for nothing any more."""
        self._sent_ms.clear()
        self._due_ms.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent_ms:
            delay_ms = max(self._due_ms[next(iter(self._sent_ms))] - self._clock_ms(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        sequence, sent_ms = next(iter(self._sent_ms.items()))
        now_ms = self._clock_ms()
        if now_ms < self._due_ms[sequence]:
            self._set_timer()  # The loop's clock rounds otherwise.
        else:
            self._on_overdue(sequence, now_ms - sent_ms)
