"""Closing a producer ends every send and every record."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from penstock.client import (
    AsyncProducer,
    ClientClosedError,
)
from penstock.client.cluster import Cluster
from penstock.client.config import ProducerConfig
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.v1 import log_pb2
from tests.unit.client.fake_broker import FakeCluster, FakeNode


async def test_a_send_that_waits_for_metadata_ends_with_the_producer(cluster: FakeCluster) -> None:
    asked = asyncio.Event()

    async def hang(node: FakeNode) -> None:
        asked.set()
        await asyncio.Event().wait()

    producer = AsyncProducer(cluster.bootstrap)
    await producer.start()
    cluster.add_topic("t")
    cluster.on_describe = hang
    sending = asyncio.ensure_future(producer.send("t", b"v"))
    await asked.wait()
    await producer.close()
    with pytest.raises(ClientClosedError):
        await asyncio.wait_for(sending, 5)


async def test_a_send_that_waits_for_the_first_broker_ends_with_the_producer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        producer = AsyncProducer(f"127.0.0.1:{silent.getsockname()[1]}")
        sending = asyncio.ensure_future(producer.send("t", b"v"))
        await asyncio.sleep(0)  # It has begun.
        await producer.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(sending, 5)


async def test_nothing_is_queued_into_a_closed_producer(cluster: FakeCluster) -> None:
    """The answer on the topic and the close come in the same turn of the loop."""
    cluster.add_topic("t")
    producer = AsyncProducer(cluster.bootstrap)
    engine = producer._engine
    await_topic = engine.await_topic

    async def answered_while_closing(topic: str, *more: Any) -> int:
        count = await await_topic(topic, *more)
        await producer.close()
        return count

    engine.await_topic = answered_while_closing  # type: ignore[method-assign]
    with pytest.raises(ClientClosedError):
        await producer.send("t", b"v")
    assert engine.accumulator.used_bytes == 0


async def test_a_closed_keeper_asks_nothing_and_lets_nobody_wait(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    client = Cluster(ProducerConfig.load(cluster.bootstrap, {}))
    keeper = MetadataKeeper(client, lambda: None)
    assert await keeper.await_topic("t", 5_000) == 1
    await keeper.close()
    tasks = asyncio.all_tasks()
    keeper.request()
    assert asyncio.all_tasks() == tasks
    with pytest.raises(ClientClosedError):
        await keeper.updated(60_000)
    with pytest.raises(ClientClosedError):
        await keeper.await_topic("other", 60_000)
    await keeper.close()
    await client.close()


async def test_an_interrupted_close_leaves_no_record_without_a_verdict(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    reached = asyncio.Event()

    async def silent(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        reached.set()
        return "drop"

    cluster.on_produce = silent
    producer = AsyncProducer(cluster.bootstrap)
    sent = await producer.send("t", b"sent")
    await asyncio.wait_for(reached.wait(), 5)
    queued = await producer.send("t", b"queued")
    closing = asyncio.ensure_future(producer.close())
    await asyncio.sleep(0)  # It waits for the verdicts.
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, 5)
    for future in (sent, queued):
        assert isinstance(future.exception(), ClientClosedError)
    assert producer._engine.accumulator.used_bytes == 0
