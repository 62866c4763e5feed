"""Clients of a topic that is deleted, and perhaps made anew under its name, while they run."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from penstock.client import (
    AsyncConsumer,
    AsyncProducer,
    NoOffsetError,
    OffsetAndMetadata,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.v1 import groups_pb2
from penstock.wire.errors import PenstockError
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.reading import T0, T1, fill, numbers, read, values

QUICK: dict[str, Any] = {
    "retry_backoff_ms": 10,
    "retry_backoff_max_ms": 50,
    "fetch_max_wait_ms": 100,
}

PRODUCER: dict[str, Any] = {"retry_backoff_ms": 10, "retry_backoff_max_ms": 50}


async def make_anew(cluster: FakeCluster, count: int, partitions: int = 1) -> None:
    """Delete the topic and make it anew, and fill its first partition, before anybody notices."""
    cluster.delete_topic("t")
    cluster.add_topic("t", partitions)
    fill(cluster, "t", 0, numbers(0, count))
    await cluster.wake()


async def noticed(consumer: AsyncConsumer, cluster: FakeCluster) -> None:
    """Wait until the client has heard of the new topic, though nobody polls."""
    metadata = consumer._engine._cluster.metadata
    new_id = cluster.topics["t"].topic_id
    await eventually(lambda: metadata.topic_id("t") == new_id)


@pytest.mark.parametrize("count", [3, 5, 20], ids=["shorter", "as long", "longer"])
@pytest.mark.parametrize("by_hand", [True, False])
async def test_a_new_topic_is_read_from_its_start(
    cluster: FakeCluster, count: int, by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    topics = None if by_hand else "t"
    async with AsyncConsumer(
        cluster.bootstrap, topics=topics, auto_offset_reset="earliest", **QUICK
    ) as consumer:
        if by_hand:
            await consumer.assign([T0])
        assert values(await read(consumer, 5)) == numbers(0, 5)
        await make_anew(cluster, count)
        with caplog.at_level(logging.WARNING, "penstock.client"):
            assert values(await read(consumer, count)) == numbers(0, count)
        assert await consumer.position(T0) == count
    # The servers that the test plays have loggers of their own, as has the loop.
    [line] = [
        record.getMessage() for record in caplog.records if record.name.startswith("penstock.")
    ]
    assert "topic t was deleted and made anew" in line
    assert "'earliest'" in line


async def test_records_kept_for_the_application_are_not_mixed_with_the_new_ones(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 50))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        found = []
        async with asyncio.timeout(15):
            async for record in consumer:
                found.append(record.value)
                if len(found) == 10:
                    await make_anew(cluster, 5)
                    await noticed(consumer, cluster)
                if found[10:] == numbers(0, 5):
                    break
    assert found[:10] == numbers(0, 10)


async def test_a_position_is_found_at_once_when_it_is_asked_for(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        await make_anew(cluster, 7)
        async with asyncio.timeout(60):
            while await consumer.position(T0) != 0:
                await consumer.end_offsets([T0])
        assert values(await read(consumer, 7)) == numbers(0, 7)


@pytest.mark.parametrize("group", [None, "g"])
async def test_reset_none_says_that_the_topic_was_made_anew(
    cluster: FakeCluster, group: str | None
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, group_id=group, auto_offset_reset="none", **QUICK
    ) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 0)
        await read(consumer, 5)
        await make_anew(cluster, 3)
        with pytest.raises(NoOffsetError, match=r"'t' was deleted and made anew.*t-0.*seek\(\)"):
            await read(consumer, 1)
        await consumer.seek(T0, 1)
        assert values(await read(consumer, 2)) == numbers(1, 3)


async def test_a_group_member_goes_on_in_the_new_topic_and_commits_there(
    cluster: FakeCluster,
) -> None:
    old = cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    commits: list[tuple[bytes, int]] = []

    def note(request: groups_pb2.CommitOffsetsRequest) -> PenstockError | None:
        commits.extend(
            (entry.partition.topic_id, entry.offset)
            for entry in request.offsets
            if entry.partition.partition == 0
        )
        return None

    cluster.on_commit = note
    async with AsyncConsumer(
        cluster.bootstrap,
        topics="t",
        group_id="g",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=20,
        **QUICK,
    ) as consumer:
        assert values(await read(consumer, 5)) == numbers(0, 5)
        assert await consumer.poll(0) == []
        await eventually(lambda: (old.topic_id, 5) in commits)
        await make_anew(cluster, 3, 2)
        assert values(await read(consumer, 3)) == numbers(0, 3)
        await consumer.poll(0)
        new_id = cluster.topics["t"].topic_id
        await eventually(lambda: (new_id, 3) in commits)
    assert {entry for entry in commits if entry[0] == new_id} <= {(new_id, n) for n in range(4)}


async def test_a_group_member_comes_back_to_a_topic_that_was_gone_for_a_while(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", group_id="g", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        await read(consumer, 5)
        cluster.delete_topic("t")
        async with asyncio.timeout(60):
            while consumer.assignment():
                await consumer.poll(20)
        cluster.add_topic("t", 2)
        fill(cluster, "t", 0, numbers(0, 3))
        fill(cluster, "t", 1, numbers(0, 3))
        found = await read(consumer, 6)
        assert values(found, 0) == values(found, 1) == numbers(0, 3)


async def test_a_committed_position_in_the_old_topic_is_not_applied_to_the_new_one(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, group_id="g") as consumer:
        await consumer.commit({T0: 4})
    await make_anew(cluster, 6)
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", group_id="g", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        assert values(await read(consumer, 6)) == numbers(0, 6)


async def test_a_committed_position_in_the_new_topic_goes_before_the_reset_policy(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, group_id="g", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        await make_anew(cluster, 6)
        cluster.groups["g"].offsets[T0] = groups_pb2.OffsetCommit(offset=2)
        named = cluster.groups["g"].offsets[T0].partition
        named.topic, named.topic_id = "t", cluster.topics["t"].topic_id
        assert values(await read(consumer, 4)) == numbers(2, 6)


async def test_a_commit_of_an_old_position_is_refused(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, group_id="g", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        await make_anew(cluster, 3)
        with pytest.raises(UnknownTopicIdError):
            await asyncio.wait_for(consumer.commit(), 5)
        assert cluster.groups["g"].offsets == {}
        await read(consumer, 3)
        await consumer.commit()
        assert cluster.groups["g"].offsets[T0].offset == 3
        assert (await consumer.committed(T0))[T0] == OffsetAndMetadata(3, 0)


async def poll_for_ever(consumer: AsyncConsumer) -> None:
    """Until it raises: on a busy machine an answer may take longer than one poll."""
    async with asyncio.timeout(15):
        while True:
            assert await consumer.poll(100) == []


@pytest.mark.parametrize("by_hand", [True, False])
async def test_a_deleted_topic_is_an_error_of_each_poll_until_it_exists_again(
    cluster: FakeCluster, by_hand: bool
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap,
        topics=None if by_hand else "t",
        auto_offset_reset="earliest",
        **QUICK | {"retry_backoff_max_ms": 10_000},
    ) as consumer:
        if by_hand:
            await consumer.assign([T0])
        await read(consumer, 5)
        cluster.delete_topic("t")
        await cluster.wake()
        with pytest.raises(UnknownTopicOrPartitionError, match="no topic 't'"):
            await read(consumer, 1)
        started = time.monotonic()
        for _ in range(5):
            with pytest.raises(UnknownTopicOrPartitionError, match="no topic 't'"):
                await poll_for_ever(consumer)
        assert time.monotonic() - started >= 0.5
        cluster.add_topic("t")
        fill(cluster, "t", 0, numbers(0, 7))
        found: list[bytes] = []
        async with asyncio.timeout(15):
            while len(found) < 7:
                try:
                    found += values(await consumer.poll(100))
                except UnknownTopicOrPartitionError:
                    continue
        assert found == numbers(0, 7)


async def test_iteration_hears_that_its_topic_is_gone_and_goes_on_when_it_is_back(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        assert await consumer.poll(50) == []
        cluster.delete_topic("t")
        await cluster.wake()
        with pytest.raises(UnknownTopicOrPartitionError):
            await asyncio.wait_for(anext(consumer), 10)
        cluster.add_topic("t")
        fill(cluster, "t", 0, [b"new"])
        async with asyncio.timeout(60):
            while True:
                try:
                    assert (await anext(consumer)).value == b"new"
                    break
                except UnknownTopicOrPartitionError:
                    continue


async def test_a_topic_made_anew_with_fewer_partitions_is_read_without_a_group(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 3)
    fill(cluster, "t", 2, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        await read(consumer, 5)
        await make_anew(cluster, 4, 2)
        assert values(await read(consumer, 4)) == numbers(0, 4)
        assert consumer.assignment() == {T0, T1}


async def test_a_seek_in_the_new_topic_stands(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        await make_anew(cluster, 6)
        await noticed(consumer, cluster)
        assert await consumer.beginning_offsets([T0]) == {T0: 0}
        await consumer.seek(T0, 4)
        assert values(await read(consumer, 2)) == numbers(4, 6)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_producer_goes_on_in_the_new_topic(cluster: FakeCluster, idempotent: bool) -> None:
    cluster.add_topic("t", 2)
    async with AsyncProducer(
        cluster.bootstrap, enable_idempotence=idempotent, retry_backoff_ms=10
    ) as producer:
        for number in range(10):
            await producer.send_and_wait("t", b"%d" % number, partition=0)
        await make_anew(cluster, 0, 2)
        for number in range(3):
            await asyncio.wait_for(producer.send_and_wait("t", b"%d" % number, partition=0), 60)
    assert cluster.values("t") == numbers(0, 3)


async def test_a_producer_fails_fast_while_the_topic_is_gone_and_goes_on_afterwards(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 2)
    async with AsyncProducer(cluster.bootstrap, linger_ms=0, **PRODUCER) as producer:
        await producer.send_and_wait("t", b"old", partition=0)
        cluster.delete_topic("t")
        for _ in range(20):
            with pytest.raises(UnknownTopicOrPartitionError, match="no topic 't'"):
                await asyncio.wait_for(producer.send_and_wait("t", b"lost", partition=0), 60)
        cluster.add_topic("t", 2)
        async with asyncio.timeout(60):
            await producer.send_and_wait("t", b"new", partition=0)
    assert cluster.values("t") == [b"new"]


async def test_a_producer_says_what_the_deleted_topic_may_have_had(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    broken = asyncio.Event()

    async def lose_the_answer(node: FakeNode, request: Any) -> Any:
        if broken.is_set():
            return None
        broken.set()
        node.cluster.find(request.partitions[0].partition, node).append(
            request.partitions[0].records
        )
        cluster.delete_topic("t")
        cluster.add_topic("t", leader=1)
        return "break"

    cluster.on_produce = lose_the_answer
    async with AsyncProducer(cluster.bootstrap, **PRODUCER) as producer:
        with pytest.raises(UnknownTopicIdError, match="may have been written to the deleted"):
            await asyncio.wait_for(producer.send_and_wait("t", b"once"), 10)
        await asyncio.wait_for(producer.send_and_wait("t", b"new"), 10)
    assert cluster.values("t") == [b"new"]


@pytest.mark.parametrize(("key", "partition"), [(b"k", None), (None, None), (None, 0)])
async def test_a_topic_that_goes_while_a_record_is_placed_is_a_typed_refusal(
    cluster: FakeCluster, key: bytes | None, partition: int | None
) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, **PRODUCER) as producer:
        path = producer._path

        def offer() -> None:
            record = path.prepare(
                "t", value=b"v", key=key, headers=(), partition=partition, timestamp_ms=None
            )
            path.offer(record)

        await producer.partitions_for("t")
        known = producer._engine.metadata.topics
        offer()
        assert producer._engine.accumulator.partitions() == [T0]
        producer._engine.metadata.forget("t")
        with pytest.raises(UnknownTopicOrPartitionError, match="'t' was deleted"):
            offer()
        producer._engine.metadata.topics = known
