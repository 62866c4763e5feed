"""Whether a node lives, has started, and is ready: what the probes of its HTTP port are told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

LIVE_S: Final = 10.0
"""An event loop that has not turned for so long is taken for dead."""
PULSE_S: Final = 1.0
ANSWER_S: Final = 2.0
"""So long a probe waits for the event loop."""

WhyNot = Callable[[], str]
"""Why something is not as it should be, in words; empty when it is. Called on the event loop."""


class LoopBusyError(Exception):
    """The event loop did not answer in time, or is closed."""


class NodeHealth:
    """Made on the event loop. ``live``, ``startup``, ``ready`` and ``ask`` for other threads."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._loop = asyncio.get_running_loop()
        self._turned_at_s = clock_s()
        self._checks: list[WhyNot] = []
        self._is_started = threading.Event()
        self._is_stopping = threading.Event()
        self._pulse = self._loop.create_task(self._beat(), name="pulse")

    async def _beat(self) -> None:
        while True:
            self._turned_at_s = self._clock_s()
            await asyncio.sleep(PULSE_S)

    def require(self, why_not: WhyNot) -> None:
        """Be ready only while ``why_not`` finds nothing."""
        self._checks.append(why_not)

    def started(self) -> None:
        """Recovery is over, and all parts run."""
        self._is_started.set()

    def stopping(self) -> None:
        """The node is about to stop: it is not ready any more."""
        self._is_stopping.set()

    async def stop(self) -> None:
        """End the pulse."""
        self._pulse.cancel()
        with suppress(asyncio.CancelledError):
            await self._pulse

    def live(self) -> str:
        """Why the process should be killed; empty while its event loop turns."""
        still_s = self._clock_s() - self._turned_at_s
        if still_s < LIVE_S:
            return ""
        return f"the event loop has stood still for {still_s:.0f} s"

    def startup(self) -> str:
        """Why the node is not through its start; empty once it is, for ever."""
        if self._is_started.is_set():
            return ""
        return "the node starts: it opens its directories and recovers its logs"

    def ready(self) -> str:
        """Why the node should be sent nobody; empty when it serves."""
        if self._is_stopping.is_set():
            return "the node stops"
        if reason := self.startup():
            return reason
        try:
            return self.ask(self._why_not_ready, ANSWER_S)
        except LoopBusyError as error:
            return str(error)

    def state(self) -> str:
        """How the node is, in words. On the event loop alone."""
        if self._is_stopping.is_set():
            return "the node stops"
        return self.startup() or self._reasons() or "the node serves"

    async def _why_not_ready(self) -> str:
        return self._reasons()

    def _reasons(self) -> str:
        return "; ".join(reason for check in self._checks if (reason := check()))

    def ask(self, question: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """What the event loop answers. Raises LoopBusyError when it does not in time."""
        work = question()
        try:
            asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise LoopBusyError("the node has stopped") from None
        try:
            return asked.result(timeout_s)
        except (TimeoutError, CancelledError):
            asked.cancel()
            raise LoopBusyError(f"no answer within {timeout_s:g} s: the node is busy") from None
