"""What brokers tell the controllers, one request at a time, until it is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0

Request = TypeVar("Request")


class SendLoop(Generic[Request]):
    """Sends what there is, with growing pauses after what was not taken. One event loop.

    ``next_request()`` is the request that is due now, None when there is none; ``send(request)``
    says whether it was taken, and raises nothing. There is a task only while something is due.
    """

    def __init__(
        self,
        next_request: Callable[[], Request | None],
        send: Callable[[Request], Awaitable[bool]],
    ) -> None:
        self._next_request = next_request
        self._send = send
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Something may be due."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        try:
            while (request := self._next_request()) is not None:
                if await self._send(request):
                    backoff_s = _MIN_BACKOFF_S
                else:
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._task = None

    async def stop(self) -> None:
        """Send nothing more of what is due now."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
