"""A consumer is read by one thread, or task, at a time; another one hears of it at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.client import AsyncConsumer, ConcurrentUseError, Consumer, Producer
from penstock.client.one_poller import OnePoller
from tests.support import eventually, wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, fill, numbers


def test_a_second_thread_is_refused_and_the_first_one_reads_on(background: Background) -> None:
    background.cluster.add_topic("t")
    with Consumer(
        background.cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        found: list[bytes] = []

        def read() -> None:
            found.append(next(consumer).value)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: bool(consumer._polling._inside), "the reader reads")
        for attempt in (
            lambda: consumer.poll(0),
            lambda: consumer.poll_batch(0),
            lambda: next(consumer),
        ):
            with pytest.raises(ConcurrentUseError, match="another thread or task"):
                attempt()
        with Producer(background.cluster.bootstrap) as producer:
            producer.send("t", b"0", partition=0)
        reader.join()
        assert found == [b"0"]
        assert consumer.poll(0) == []
        assert consumer.position(T0) == 1


async def test_a_second_task_is_refused_and_the_first_one_reads_on(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        reader = asyncio.create_task(consumer.poll(60_000))
        await eventually(lambda: bool(consumer._polling._inside))
        with pytest.raises(ConcurrentUseError):
            await consumer.poll(0)
        with pytest.raises(ConcurrentUseError):
            await anext(consumer)
        fill(cluster, "t", 0, numbers(0, 1))
        await cluster.wake()
        assert [record.value for record in await reader] == numbers(0, 1)
        reader = asyncio.create_task(consumer.poll(60_000))
        await eventually(lambda: bool(consumer._polling._inside))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await consumer.poll(0) == [], "who was cancelled is out"


def test_whoever_is_in_may_go_in_again() -> None:
    who = "one"
    polling = OnePoller(lambda: who)
    with polling:
        with polling:
            pass
        who = "two"
        with pytest.raises(ConcurrentUseError), polling:
            pass
    with polling:
        who = "one"
        with pytest.raises(ConcurrentUseError), polling:
            pass
