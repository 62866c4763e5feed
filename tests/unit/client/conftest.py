"""Clusters to test clients against, on the test's own loop and on one in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import pytest

from penstock.client import Producer
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.transactional import Sync

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


@pytest.fixture(params=[Producer, Sync], ids=["sync", "asyncio"])
def make(request: pytest.FixtureRequest, background: Background) -> Callable[..., Any]:
    """Makes transactional producers of a kind, for the fake brokers' topics a and b."""
    background.cluster.add_topic("a", 2)
    background.cluster.add_topic("b")

    def make_one(transactional_id: str | None = "t", **settings: Any) -> Any:
        settings = {"linger_ms": 0, "retry_backoff_ms": 10, **settings}
        return request.param(
            background.cluster.bootstrap, transactional_id=transactional_id, **settings
        )

    return make_one


@pytest.fixture
def fake(background: Background) -> FakeTransactions:
    return background.cluster.transactions
