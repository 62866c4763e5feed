"""Each reason for which a consumer makes no progress, and that it says so."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import (
    AsyncConsumer,
    Consumer,
    ConsumerStalledError,
    PenstockError,
    StallReason,
)
from penstock.v1 import log_pb2
from penstock.wire.errors import (
    AccessForbiddenError,
    CoordinatorNotAvailableError,
    CorruptRecordError,
    InvalidGroupIdError,
    NotLeaderError,
    UnknownTopicOrPartitionError,
)
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.reading import T0, fill, numbers

SETTINGS: Any = {"auto_offset_reset": "earliest"}


async def trouble_of(consumer: AsyncConsumer, reason: StallReason) -> PenstockError:
    """The trouble, once the consumer has this one; it may have another at first."""
    for _ in range(400):
        await consumer.poll(20)
        trouble = await consumer.trouble()
        if trouble is not None and trouble.reason is reason:
            return trouble
    raise AssertionError(f"it never was {reason}: {trouble!r}")


def refuse_fetches(cluster: FakeCluster, error: PenstockError) -> None:
    async def refuse(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        if not request.partitions:
            return None
        response = log_pb2.FetchResponse()
        response.partitions.add(partition=request.partitions[0].partition, error=error.to_proto())
        return response

    cluster.on_fetch = refuse


async def test_no_leader(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=-1)
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        trouble = await trouble_of(consumer, StallReason.NO_LEADER)
        assert trouble.retriable
        cluster.move("t", 0, 1)
        fill(cluster, "t", 0, numbers(0, 1))
        assert (await anext(consumer)).value == b"0"
        assert await consumer.trouble() is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptRecordError("a bit flipped"), StallReason.DAMAGED),
        (NotLeaderError("moved"), StallReason.NO_LEADER),
    ],
)
async def test_what_brokers_refuse_for_now(
    cluster: FakeCluster, error: PenstockError, reason: StallReason
) -> None:
    cluster.add_topic("t")
    refuse_fetches(cluster, error)
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        await trouble_of(consumer, reason)


async def test_a_broker_that_cannot_be_reached(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=2)
    fill(cluster, "t", 0, numbers(0, 1))
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        assert (await anext(consumer)).value == b"0"
        await cluster.nodes[2].stop()
        await trouble_of(consumer, StallReason.UNREACHABLE)
        cluster.move("t", 0, -1)  # The controllers have seen it as well.
        await trouble_of(consumer, StallReason.NO_LEADER)


async def test_a_position_that_is_not_found(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=2)
    await cluster.nodes[2].stop()
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        await trouble_of(consumer, StallReason.WAITING_FOR_POSITION)


async def test_a_topic_that_is_gone(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        await consumer.poll(20)
        refuse_fetches(cluster, UnknownTopicOrPartitionError("no t"))
        await trouble_of(consumer, StallReason.TOPIC_ABSENT)


async def test_a_coordinator_that_is_not_there_and_a_group_that_says_nothing(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    cluster.on_find_coordinator = lambda request: CoordinatorNotAvailableError("none now")
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", group_id="g", request_timeout_ms=200, **SETTINGS
    ) as consumer:
        await trouble_of(consumer, StallReason.WAITING_FOR_REBALANCE)
        await trouble_of(consumer, StallReason.COORDINATOR_UNAVAILABLE)
        cluster.on_find_coordinator = None
        fill(cluster, "t", 0, numbers(0, 1))
        assert (await anext(consumer)).value == b"0"
        assert await consumer.trouble() is None


async def test_a_transaction_that_is_open(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.client.core.fetcher._HELD_BACK_MS", 0.0)
    monkeypatch.setattr("penstock.client.stalls._STALL_MS", 50.0)
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    partition = cluster.topics["t"].partitions[0]
    partition.open_at = 1
    committed: Any = {**SETTINGS, "isolation_level": "read_committed"}
    async with AsyncConsumer(cluster.bootstrap, topics="t", **committed) as consumer:
        assert (await anext(consumer)).value == b"0"
        trouble = await trouble_of(consumer, StallReason.OPEN_TRANSACTION)
        assert trouble.retriable
        assert "partition t-0" in trouble.message
        assert "last stable offset 1 " in trouble.message
        assert await consumer.poll(400) == []
        assert "no record for" in caplog.text
        assert trouble.message.partition(" for ")[0] in caplog.text
        partition.open_at = None
        assert (await anext(consumer)).value == b"1"
        assert await consumer.trouble() is None
    async with AsyncConsumer(cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        partition.open_at = 1
        assert [(await anext(consumer)).value for _ in range(3)] == numbers(0, 3)
        await consumer.poll(20)
        assert await consumer.trouble() is None  # It reads what is not decided too.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AccessForbiddenError("not yours"), StallReason.UNAUTHORISED),
        (InvalidGroupIdError("no such name"), StallReason.REFUSED),
    ],
)
async def test_what_will_not_mend_is_raised_with_its_reason(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    error: PenstockError,
    reason: StallReason,
) -> None:
    monkeypatch.setattr("penstock.client.stalls._STALL_MS", 100.0)
    cluster.add_topic("t")
    cluster.on_find_coordinator = lambda request: error
    async with AsyncConsumer(cluster.bootstrap, topics="t", group_id="g", **SETTINGS) as consumer:
        await trouble_of_refusal(consumer, error, reason)


async def trouble_of_refusal(
    consumer: AsyncConsumer, error: PenstockError, reason: StallReason
) -> None:
    with pytest.raises(ConsumerStalledError, match=error.message) as raised:
        await consumer.poll(15_000)
    assert raised.value.reason is reason


def test_the_synchronous_consumer_says_it_too(background: Background) -> None:
    background.cluster.add_topic("t", leader=-1)
    with Consumer(background.cluster.bootstrap, topics="t", **SETTINGS) as consumer:
        consumer.poll(50)
        trouble = consumer.trouble()
        assert trouble is not None
        assert trouble.reason is StallReason.NO_LEADER
        assert consumer.assignment() == {T0}
