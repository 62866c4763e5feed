"""What was fetched ahead of the application, where the log turns out not to go on behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client import AsyncConsumer
from penstock.v1 import log_pb2
from penstock.wire.errors import OffsetOutOfRangeError
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.reading import T0, fill, numbers, read, values

Answer = Callable[[log_pb2.FetchPartitionResult], None]


def cut_at_six(result: log_pb2.FetchPartitionResult) -> None:
    result.diverging_epoch.leader_epoch = 0
    result.diverging_epoch.end_offset = 6


def out_of_range(result: log_pb2.FetchPartitionResult) -> None:
    result.error.CopyFrom(OffsetOutOfRangeError("it ends at 6").to_proto())


class Told:
    """Eight records, and an answer to the first fetch behind them, once it may be given."""

    def __init__(self, cluster: FakeCluster) -> None:
        cluster.add_topic("t")
        fill(cluster, "t", 0, numbers(0, 8))
        cluster.on_fetch = self.on_fetch
        self.answer: Answer | None = None
        self.may_answer = asyncio.Event()

    async def on_fetch(self, node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        if request.partitions[0].fetch_offset != 8 or self.answer is None:
            return None
        await self.may_answer.wait()
        answer, self.answer = self.answer, None
        response = log_pb2.FetchResponse()
        answer(response.partitions.add(partition=request.partitions[0].partition))
        return response

    async def now(self, consumer: AsyncConsumer) -> None:
        """It is given, and the consumer knows."""
        self.may_answer.set()
        await eventually(lambda: consumer._engine.handout.interrupted)
        self.may_answer.clear()


@pytest.fixture
def told(cluster: FakeCluster) -> Told:
    return Told(cluster)


def reader(cluster: FakeCluster, policy: str = "earliest") -> AsyncConsumer:
    return AsyncConsumer(cluster.bootstrap, auto_offset_reset=policy, fetch_max_wait_ms=50)


async def test_records_before_a_cut_that_nobody_had_yet_are_read(
    cluster: FakeCluster, told: Told
) -> None:
    told.answer = cut_at_six
    async with reader(cluster) as consumer:
        await consumer.assign([T0])
        first = await consumer.poll(5_000, max_records=2)
        await told.now(consumer)
        assert values([*first, *await read(consumer, 6)]) == numbers(0, 8)


async def test_so_are_those_that_iteration_kept(cluster: FakeCluster, told: Told) -> None:
    told.answer = cut_at_six
    async with reader(cluster) as consumer:
        await consumer.assign([T0])
        assert [(await anext(consumer)).offset for _ in range(3)] == [0, 1, 2]
        await told.now(consumer)
        assert [(await anext(consumer)).offset for _ in range(5)] == [3, 4, 5, 6, 7]


async def test_so_are_those_that_were_not_decoded_yet(cluster: FakeCluster, told: Told) -> None:
    told.answer = cut_at_six
    async with reader(cluster) as consumer:
        await consumer.assign([T0])
        assert (await consumer.fetch_arrow(5_000, 3))["offset"].to_pylist() == [0, 1, 2]
        await told.now(consumer)
        assert (await consumer.fetch_arrow(5_000))["offset"].to_pylist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("how", ["poll", "fetch_arrow"])
@pytest.mark.parametrize("policy", ["latest", "none"])
async def test_what_was_fetched_is_handed_out_before_the_policy_says_where_to_go_on(
    cluster: FakeCluster, told: Told, policy: str, how: str
) -> None:
    told.answer = out_of_range
    async with reader(cluster, policy) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 0)
        log = cluster.partition("t")
        if how == "poll":  # All are decoded, and kept.
            found = [record.offset for record in await consumer.poll(5_000, max_records=2)]
            log.batches, log.end = log.batches[:5], 5
            await told.now(consumer)
            found += [record.offset for record in await read(consumer, 6)]
        else:
            found = (await consumer.fetch_arrow(5_000, 2))["offset"].to_pylist()
            log.batches, log.end = log.batches[:5], 5
            told.may_answer.set()
            await eventually(lambda: told.answer is None)
            found += (await consumer.fetch_arrow(5_000))["offset"].to_pylist()
        assert found == list(range(8))
        if policy == "none":
            with pytest.raises(OffsetOutOfRangeError, match=r"ends at 6|offset 8"):
                await consumer.poll(5_000)
        else:
            assert await consumer.poll(200) == []
            assert await consumer.position(T0) == 5


async def test_a_seek_goes_before_a_policy_that_waits_for_what_was_fetched(
    cluster: FakeCluster, told: Told
) -> None:
    told.answer = out_of_range
    async with reader(cluster, "latest") as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 0)
        await consumer.poll(5_000, max_records=2)
        await told.now(consumer)
        await consumer.seek(T0, 3)
        assert values(await read(consumer, 5)) == numbers(3, 8)
