"""Futures that wait for an offset to be passed."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

MIN_SWEEP: Final = 64
"""So many entries at least before it is looked which of them are given up."""


class Call:
    """Stands in a future's place where the end of a wait is acted on at once, not at the event
    loop's next turn. ``on_end`` is called once, with None or with why the wait failed; it must
    not raise.
    """

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[BaseException | None], object]) -> None:
        self._on_end: Callable[[BaseException | None], object] | None = on_end

    def done(self) -> bool:
        """Whether the wait is over."""
        return self._on_end is None

    def cancel(self) -> None:
        """Wait no longer; nothing is called."""
        self._on_end = None

    def set_result(self, _: None) -> None:
        """The offset was passed."""
        self._finish(None)

    def set_exception(self, error: BaseException) -> None:
        """It will not be."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error)


class OffsetWaiters:
    """Requests that wait until a mark (a durable offset, a high watermark) reaches an offset.

    A heap by offset: raising the mark costs nothing but for those that it releases. Used on one
    event loop.

    A mark may rest for as long as the in-sync set is too small, so those who gave up waiting are
    swept out: there are never more entries than MIN_SWEEP, or twice those left by the last sweep.
    """

    __slots__ = ("_heap", "_sequence", "_sweep_at")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, asyncio.Future[None] | Call]] = []
        self._sequence = 0
        self._sweep_at = MIN_SWEEP

    def __len__(self) -> int:
        return sum(not future.done() for _, _, future in self._heap)

    def add(self, offset: int) -> asyncio.Future[None]:
        """A future that is done once the mark is at ``offset`` or above. It may be cancelled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._push(offset, future)
        return future

    def call(self, offset: int, on_end: Callable[[BaseException | None], object]) -> Call:
        """The same for who wants to be called; see Call."""
        call = Call(on_end)
        self._push(offset, call)
        return call

    def _push(self, offset: int, waiter: asyncio.Future[None] | Call) -> None:
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self._sequence += 1
        heapq.heappush(self._heap, (offset, self._sequence, waiter))

    def _sweep(self) -> None:
        """Drop what was given up. The heap doubles between two sweeps, so they cost O(1) a wait."""
        self._heap = [entry for entry in self._heap if not entry[2].done()]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

    def release(self, mark: int) -> None:
        """The mark is at ``mark`` now."""
        heap = self._heap
        while heap and heap[0][0] <= mark:
            future = heapq.heappop(heap)[2]
            if not future.done():
                future.set_result(None)

    def fail(self, error: Callable[[], Exception]) -> None:
        """End every wait, each with an error of its own."""
        heap, self._heap, self._sweep_at = self._heap, [], MIN_SWEEP
        for _, _, future in heap:
            if not future.done():
                future.set_exception(error())
