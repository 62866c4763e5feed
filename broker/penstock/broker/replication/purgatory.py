"""Futures that wait for an offset to be passed."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable


class OffsetWaiters:
    """Requests that wait until a mark (a durable offset, a high watermark) reaches an offset.

    A heap by offset: raising the mark costs nothing but for those that it releases. Used on one
    event loop.
    """

    __slots__ = ("_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return sum(not future.done() for _, _, future in self._heap)

    def add(self, offset: int) -> asyncio.Future[None]:
        """A future that is done once the mark is at ``offset`` or above. It may be cancelled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._heap, (offset, self._sequence, future))
        return future

    def release(self, mark: int) -> None:
        """The mark is at ``mark`` now."""
        heap = self._heap
        while heap and heap[0][0] <= mark:
            future = heapq.heappop(heap)[2]
            if not future.done():
                future.set_result(None)

    def fail(self, error: Callable[[], Exception]) -> None:
        """End every wait, each with an error of its own."""
        heap, self._heap = self._heap, []
        for _, _, future in heap:
            if not future.done():
                future.set_exception(error())
