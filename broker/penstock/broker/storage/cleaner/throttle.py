"""Keeps what all threads of the cleaner read and write together below a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """``spend`` returns once so many bytes more are within the rate. Safe from any thread.

    ``wait`` is called with the seconds to wait; it may return sooner, when the cleaner stops.
    """

    def __init__(
        self,
        bytes_per_second: int,
        wait: Callable[[float], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = bytes_per_second
        self._wait = wait
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._free_at_s = clock_s()  # When all that was spent so far is within the rate.

    def spend(self, size_bytes: int) -> None:
        """Wait as long as the rate asks for."""
        with self._lock:
            now_s = self._clock_s()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._rate
            delay_s = self._free_at_s - now_s
        if delay_s > 0:
            self._wait(delay_s)
