"""Clusters to test clients against, on the test's own loop and on one in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import pytest

from tests.unit.client.fake_broker import FakeCluster

T = TypeVar("T")


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(3) as fake:
        yield fake


class Background:
    """A fake cluster on a loop and thread of its own, for the synchronous clients."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # gRPC wakes every loop of the process; the loser of the race has nothing to read.
        self.loop.set_exception_handler(lambda loop, context: None)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.cluster = FakeCluster(3)
        self.run(self.cluster.start)

    def run(self, function: Callable[[], object]) -> None:
        async def call() -> None:
            result = function()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(20)

    def close(self) -> None:
        self.run(self.cluster.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def background() -> Iterator[Background]:
    found = Background()
    yield found
    found.close()
