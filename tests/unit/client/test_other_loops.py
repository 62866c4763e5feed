"""An asyncio client belongs to one event loop, and says so on any other one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.client import (
    AsyncAdminClient,
    AsyncConsumer,
    AsyncProducer,
    InvalidRequestError,
    RecordMetadata,
    TopicPartition,
)
from tests.unit.client.conftest import Background

P0 = TopicPartition("t", 0)

REFUSED = "belongs to the event loop on which it was first used"


async def sent(producer: AsyncProducer) -> RecordMetadata:
    return await producer.send_and_wait("t", b"v")


@pytest.mark.parametrize(
    "use",
    [
        sent,
        lambda producer: producer.send_many("t", [b"v"]),
        lambda producer: producer.flush(),
        lambda producer: producer.partitions_for("t"),
        lambda producer: producer.close(),
    ],
)
def test_a_producer_is_refused_on_a_second_loop(
    background: Background, use: Callable[[AsyncProducer], Awaitable[object]]
) -> None:
    background.cluster.add_topic("t")
    producer = AsyncProducer(background.cluster.bootstrap, linger_ms=60_000)

    async def on_another() -> None:
        with pytest.raises(InvalidRequestError, match=REFUSED):
            await use(producer)

    async def first() -> None:
        # Lingers, and so its batch is open: the next could be added in one step.
        await producer.send("t", b"v")
        await asyncio.to_thread(asyncio.run, on_another())
        await producer.close()

    asyncio.run(first())
    assert background.cluster.values("t", 0) == [b"v"]


def test_a_consumer_is_refused_on_a_second_loop(background: Background) -> None:
    background.cluster.add_topic("t")
    consumer = AsyncConsumer(background.cluster.bootstrap)

    async def on_another() -> None:
        for use in (consumer.poll(10), consumer.position(P0), consumer.close()):
            with pytest.raises(InvalidRequestError, match=REFUSED):
                await use

    async def first() -> None:
        await consumer.assign([P0])
        await consumer.poll(0)
        await asyncio.to_thread(asyncio.run, on_another())
        await consumer.close()

    asyncio.run(first())


def test_an_admin_client_is_refused_on_a_second_loop(background: Background) -> None:
    admin = AsyncAdminClient(background.cluster.bootstrap)

    async def first() -> None:
        await admin.list_topics()

    async def second() -> None:
        for use in (admin.list_topics(), admin.list_groups(), admin.close()):
            with pytest.raises(InvalidRequestError, match=REFUSED):
                await use

    async def both() -> None:
        await first()
        await asyncio.to_thread(asyncio.run, second())
        await admin.close()

    asyncio.run(both())


def test_what_is_made_and_subscribed_outside_of_a_loop_belongs_to_none_yet(
    background: Background,
) -> None:
    background.cluster.add_topic("t")
    consumer = AsyncConsumer(background.cluster.bootstrap)
    consumer.subscribe(["t"])

    async def read() -> None:
        async with consumer:
            await consumer.poll(10)

    asyncio.run(read())
