"""Stopping what was started, in reverse, within a time that is bounded as a whole."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

log = structlog.get_logger()

Stop = Callable[[], Awaitable[None]]

RESERVE_S: Final = 0.25
"""So much is left to each part that is yet to be stopped, and each has it in any case."""


async def stop_all(parts: list[Stop], end_s: float) -> None:
    """Stop the last of ``parts`` first, each once, and take it off the list.

    By ``end_s`` of the running loop's clock all have been stopped or given up, but for RESERVE_S
    for each that was left no time at all. One that fails, or takes longer than the others can
    spare, is logged: the rest must be closed properly whatever became of it.
    """
    loop = asyncio.get_running_loop()
    while parts:
        stop = parts.pop()
        latest_s = max(end_s - RESERVE_S * len(parts), loop.time() + RESERVE_S)
        try:
            async with asyncio.timeout_at(latest_s):
                await stop()
        except Exception:
            log.exception("a part did not stop cleanly", part=_name(stop))


def _name(stop: Stop) -> str:
    return getattr(stop, "__qualname__", repr(stop))


class ForcedEnd:
    """Ends the process with ``status`` should it not have stopped in time.

    A thread that a disk holds up has the interpreter wait for it, for as long as that takes.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self._timer: threading.Timer | None = None

    def by(self, timeout_s: float) -> None:
        """End it in so long, unless that is called off. The first call counts."""
        if self._timer is not None:
            return
        self._timer = threading.Timer(timeout_s, self._end, (timeout_s,))
        self._timer.daemon = True
        self._timer.start()

    def now(self, status: int) -> None:
        """End it at once: all is stopped but what threads do, and that may end anywhere."""
        os._exit(status)

    def called_off(self) -> None:
        """All has stopped by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, timeout_s: float) -> None:
        # Recovery is made for a process that ends anywhere.
        log.error("the node did not stop in time, and ends as it is", timeout_s=timeout_s)
        os._exit(self._status)
