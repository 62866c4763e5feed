"""Producer ids: each is handed out once in the life of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.v1 import cluster_pb2


class ProducerIds:
    """Hands out producer ids from blocks that the controllers gave to this broker.

    What is left of a block when the process ends is never used. Used on one event loop.
    """

    def __init__(
        self, allocate: Callable[[], Awaitable[cluster_pb2.AllocateProducerIdsResult]]
    ) -> None:
        self._allocate = allocate
        self._next = 0
        self._end = 0  # Ids from _next to below _end are ours to hand out.
        self._lock = asyncio.Lock()

    async def take(self) -> int:
        """An id that nobody had before. Raises PenstockError when no block can be had."""
        async with self._lock:
            if self._next >= self._end:
                block = await self._allocate()
                self._next = block.first_producer_id
                self._end = block.first_producer_id + block.count
            producer_id = self._next
            self._next += 1
            return producer_id
