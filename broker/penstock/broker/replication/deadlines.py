"""One timer for the deadlines of all partitions."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from penstock.broker.replication.partition import Partition


class Deadlines:
    """Calls ``on_due`` for each partition once its ``armed_ms`` has come.

    A partition whose deadline moved earlier is simply added again; entries that no longer agree
    with ``armed_ms`` are skipped. While nothing is armed there is no timer.
    """

    def __init__(self, clock_ms: Callable[[], int], on_due: Callable[[Partition], None]) -> None:
        self._clock_ms = clock_ms
        self._on_due = on_due
        self._heap: list[tuple[int, int, Partition]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, partition: Partition) -> None:
        """The partition's ``armed_ms`` was set."""
        assert partition.armed_ms is not None
        self._sequence += 1
        heapq.heappush(self._heap, (partition.armed_ms, self._sequence, partition))
        if self._heap[0][2] is partition:
            self._set_timer()

    def stop(self) -> None:
        """Call nobody any more."""
        self._heap.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay_ms = max(self._heap[0][0] - self._clock_ms(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_ms = self._clock_ms()
        try:
            while self._heap and self._heap[0][0] <= now_ms:
                due_ms, _, partition = heapq.heappop(self._heap)
                if partition.armed_ms == due_ms:
                    partition.armed_ms = None
                    self._on_due(partition)
        finally:  # One partition's fault must not stop the clock of the others.
            self._set_timer()
