"""Sends that wait for room while their topic is deleted and made anew."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.client import AsyncProducer, InvalidPartitionsError, Producer, UnknownTopicIdError
from penstock.client.core.partitioner import partition_for_key
from penstock.wire.errors import PenstockError
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode

SMALL: dict[str, Any] = {
    "retry_backoff_ms": 10,
    "retry_backoff_max_ms": 50,
    "buffer_memory": 40_000,
    "batch_size": 16_000,
    "max_request_size": 20_000,
}
KEYS = [b"key%d" % number for number in range(24)]


class Remade:
    """Appends are answered only when the topic was made anew."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.done = asyncio.Event()
        cluster.on_produce = self._answer

    async def _answer(self, node: FakeNode, request: Any) -> Any:
        await self.done.wait()
        return None

    async def make(self, producer: AsyncProducer | Producer, partitions: int) -> None:
        self.cluster.delete_topic("t")
        self.cluster.add_topic("t", partitions, leader=1)
        await self.cluster.wake()
        metadata = producer._engine.metadata
        await eventually(lambda: metadata.partition_count("t") == partitions)
        self.done.set()


async def send_all(producer: AsyncProducer, outcomes: dict[bytes, Any], **where: Any) -> None:
    async def one(key: bytes) -> None:
        try:
            outcomes[key] = await producer.send_and_wait("t", b"v" * 4_000, key=key, **where)
        except PenstockError as error:
            outcomes[key] = error

    await asyncio.gather(*(one(key) for key in KEYS))


async def is_full(producer: AsyncProducer | Producer) -> None:
    await eventually(lambda: producer._engine.accumulator._starved)


async def test_a_send_that_waited_for_room_goes_where_the_new_topic_has_its_key(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 1, leader=1)
    remade = Remade(cluster)
    async with AsyncProducer(cluster.bootstrap, **SMALL) as producer:
        await producer.partitions_for("t")
        outcomes: dict[bytes, Any] = {}
        sending = asyncio.ensure_future(send_all(producer, outcomes))
        await is_full(producer)
        await remade.make(producer, 8)
        await asyncio.wait_for(sending, 20)
    placed = {key: found for key, found in outcomes.items() if not isinstance(found, Exception)}
    assert len(placed) > 10
    assert {key: found.partition for key, found in placed.items()} == {
        key: partition_for_key(key, 8) for key in placed
    }
    assert all(
        isinstance(found, UnknownTopicIdError)
        for key, found in outcomes.items()
        if key not in placed
    )


async def test_a_send_that_waited_for_room_is_refused_a_partition_that_is_gone(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 8, leader=1)
    remade = Remade(cluster)
    async with AsyncProducer(cluster.bootstrap, **SMALL) as producer:
        await producer.partitions_for("t")
        outcomes: dict[bytes, Any] = {}
        sending = asyncio.ensure_future(send_all(producer, outcomes, partition=7))
        await is_full(producer)
        await remade.make(producer, 2)
        await asyncio.wait_for(sending, 20)
    kinds = [type(found) for found in outcomes.values()]
    assert set(kinds) == {UnknownTopicIdError, InvalidPartitionsError}
    assert kinds.count(InvalidPartitionsError) > 10


async def test_a_thread_that_waited_for_room_chooses_its_partition_anew(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 1, leader=1)
    remade = Remade(cluster)
    outcomes: dict[bytes, Any] = {}
    producer = await asyncio.to_thread(Producer, cluster.bootstrap, **SMALL)

    def send_everything() -> None:
        futures = {key: producer.send("t", b"v" * 4_000, key=key) for key in KEYS}
        for key, future in futures.items():
            outcomes[key] = future.exception(20) or future.result()

    try:
        sending = asyncio.ensure_future(asyncio.to_thread(send_everything))
        await is_full(producer)
        await remade.make(producer, 8)
        await asyncio.wait_for(sending, 25)
    finally:
        remade.done.set()
        await asyncio.to_thread(producer.close)
    placed = {key: found for key, found in outcomes.items() if not isinstance(found, Exception)}
    assert len(placed) > 10
    assert all(found.partition == partition_for_key(key, 8) for key, found in placed.items())


async def test_waiting_for_room_alone_moves_no_partitioner_on(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 4, leader=1)
    chosen: list[bytes | None] = []

    def choose(topic: str, key: Any, value: Any, count: int, available: Any) -> int:
        chosen.append(key)
        return 0

    remade = Remade(cluster)
    async with AsyncProducer(cluster.bootstrap, partitioner=choose, **SMALL) as producer:
        await producer.partitions_for("t")
        outcomes: dict[bytes, Any] = {}
        sending = asyncio.ensure_future(send_all(producer, outcomes))
        await is_full(producer)
        remade.done.set()
        await asyncio.wait_for(sending, 20)
    assert sorted(filter(None, chosen)) == sorted(KEYS)
