"""The synchronous clients and their asyncio twins, used by one test alike.

Such a test is a coroutine. Of a synchronous client it blocks the test's own loop, on which nothing
else runs; the client's is another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.client import AsyncConsumer, AsyncProducer, Consumer, Producer
from tests.integration.client.group_members import settle

_PATIENCE_S = 30


@dataclass(frozen=True)
class Form:
    """One kind of clients for one cluster."""

    bootstrap: str
    is_async: bool

    @asynccontextmanager
    async def producer(self, **settings: Any) -> AsyncIterator[Any]:
        """A Producer or AsyncProducer, in its block."""
        if self.is_async:
            async with AsyncProducer(self.bootstrap, **settings) as other:
                yield other
        else:
            with Producer(self.bootstrap, **settings) as producer:
                yield producer

    @asynccontextmanager
    async def consumer(self, **settings: Any) -> AsyncIterator[Any]:
        """A Consumer or AsyncConsumer, in its block."""
        if self.is_async:
            async with AsyncConsumer(self.bootstrap, **settings) as other:
                yield other
        else:
            with Consumer(self.bootstrap, **settings) as consumer:
                yield consumer

    async def read(self, topic: str, count: int, **settings: Any) -> list[Any]:
        """So many records of a topic, from its beginning; fails if there are more."""
        async with self.consumer(
            topics=topic, auto_offset_reset="earliest", **settings
        ) as consumer:
            found: list[Any] = []
            while len(found) < count:
                records = await settle(consumer.poll(_PATIENCE_S * 1_000))
                assert records, f"{len(found)} of {count} records"
                found += records
            found += await settle(consumer.poll(50))
        assert len(found) == count
        return found


async def verdict(sent: Any) -> Any:
    """What became of a ``send``, or of its future: where it is, or the error raised."""
    future = await sent if inspect.iscoroutine(sent) else sent
    if isinstance(future, concurrent.futures.Future):
        return future.result(_PATIENCE_S)
    return await asyncio.wait_for(future, _PATIENCE_S)
