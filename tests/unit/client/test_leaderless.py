"""Partitions without a leader: what a consumer reads beside them, and what it says."""

from __future__ import annotations

import logging
import re

import pytest

from penstock.client import AsyncConsumer, LeaderNotAvailableError, TopicPartition
from penstock.client.core.leader_watch import PATIENCE_MS, LeaderWatch
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, T1, fill, numbers, read, values

NONE: frozenset[TopicPartition] = frozenset()


def test_a_partition_is_told_of_once_it_has_had_no_leader_for_a_while() -> None:
    watch = LeaderWatch()
    assert watch.look(frozenset({T0}), 0) == ""
    assert watch.due_in_ms(500) == PATIENCE_MS - 500
    assert watch.look(frozenset({T0}), PATIENCE_MS - 1) == ""
    told = watch.look(frozenset({T0}), PATIENCE_MS)
    assert told.startswith("partition t-0 has no leader")
    assert "; next: start the brokers that hold it" in told
    assert "`penstock topics describe t`" in told
    assert watch.look(frozenset({T0}), 10 * PATIENCE_MS) == ""
    assert watch.due_in_ms(10 * PATIENCE_MS) == float("inf")


def test_an_election_is_no_news() -> None:
    watch = LeaderWatch()
    assert watch.look(frozenset({T0}), 0) == ""
    assert watch.look(NONE, 600) == ""
    assert watch.look(frozenset({T0}), 700) == ""
    assert watch.look(frozenset({T0}), PATIENCE_MS) == ""


def test_it_is_told_again_when_it_changes() -> None:
    watch = LeaderWatch()
    watch.look(frozenset({T0, T1}), 0)
    assert "partitions t-0, t-1 have no leader" in watch.look(frozenset({T0, T1}), PATIENCE_MS)
    assert "partition t-1 has no leader" in watch.look(frozenset({T1}), PATIENCE_MS + 1)
    assert watch.look(NONE, PATIENCE_MS + 2) == "every partition that is read has a leader again"
    assert watch.look(NONE, PATIENCE_MS + 3) == ""


def test_of_many_three_are_named() -> None:
    watch = LeaderWatch()
    many = frozenset(TopicPartition("t", number) for number in range(9))
    watch.look(many, 0)
    assert "partitions t-0, t-1, t-2 and 6 more have no leader" in watch.look(many, PATIENCE_MS)


async def test_partitions_with_a_leader_are_read_beside_one_without(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    for number in (0, 2):
        fill(cluster, "t", number, numbers(0, 3))
    cluster.move("t", 1, -1)
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        found = await read(consumer, 6)
        assert values(found, 0) == values(found, 2) == numbers(0, 3)
        trouble = await consumer.trouble()
        assert isinstance(trouble, LeaderNotAvailableError)
        assert "partition t-1 has no leader" in trouble.message
        fill(cluster, "t", 1, numbers(0, 2))
        cluster.move("t", 1, 2)
        assert values(await read(consumer, 2), 1) == numbers(0, 2)
        while await consumer.trouble() is not None:
            await consumer.poll(20)


async def test_a_consumer_says_once_which_partition_has_no_leader(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.client.core.leader_watch.PATIENCE_MS", 30.0)
    caplog.set_level(logging.WARNING, "penstock.client")
    cluster.add_topic("t", 2)
    cluster.move("t", 1, -1)

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "has no leader" in r.getMessage()]

    async with AsyncConsumer(cluster.bootstrap, topics="t") as consumer:
        while not told():
            await consumer.poll(20)
        for _ in range(5):
            await consumer.poll(20)
        assert len(told()) == 1
        cluster.move("t", 1, 2)
        while "has a leader again" not in caplog.text:
            await consumer.poll(20)


async def test_a_partition_whose_position_is_not_found_yet_is_trouble(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, topics="t") as consumer:
        assert await consumer.trouble() is None  # Nothing is to be read yet.
        await consumer.poll(0)
        trouble = await consumer.trouble()
        assert trouble is not None
        assert "where reading partition t-0 begins was not found yet" in trouble.message
        await consumer.position(T0)
        assert await consumer.trouble() is None


async def test_a_leader_that_cannot_be_reached_is_named_while_a_position_is_looked_for(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=2)
    await cluster.nodes[2].stop()
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        while True:
            await consumer.poll(20)
            trouble = await consumer.trouble()
            assert trouble is not None
            if "its leader" in trouble.message:
                break
    assert re.search(
        r"partition t-0 begins was not found yet: its leader, broker 2 .*could not be reached for "
        r"Log.ListOffsets.*; next: ",
        trouble.message,
    )
