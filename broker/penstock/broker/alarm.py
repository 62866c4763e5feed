"""One call to come, at the earliest of the times that it was wanted at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Used on one event loop. What a loop returns for a time that is here already may have no
    ``when()`` (uvloop's has none), so the time is kept beside it.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._when_s = 0.0  # Of the loop's clock; means something while there is a handle.

    def within(self, seconds: float) -> None:
        """Call in so many seconds, or earlier if that is already to be."""
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(seconds, 0.0)
        if self._handle is not None:
            if self._when_s <= when_s:
                return
            self._handle.cancel()
        self._when_s = when_s
        self._handle = loop.call_at(when_s, self._ring)

    def cancel(self) -> None:
        """Do not call. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()
