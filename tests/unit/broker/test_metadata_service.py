"""The metadata service of a broker: what it tells of topics, once and to those who watch."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from penstock.broker.core.group_partition import partition_for_group
from penstock.broker.core.metadata_image import ImageChange, MetadataImage, Topic
from penstock.broker.service import metadata, watching
from penstock.broker.service.metadata import MetadataServicer
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import cluster_pb2, metadata_pb2
from penstock.wire.errors import (
    ClusterNotFoundedError,
    CoordinatorNotAvailableError,
    ErrorCode,
)
from penstock.wire.ids import TopicIdPartition
from tests.unit.broker.test_services import image_with


async def no_internal_topic(_name: str) -> Topic:
    raise CoordinatorNotAvailableError("needs 3 brokers")


async def founded() -> None:
    pass


class EndedCallError(Exception):
    """What a call that is ended by its status raises."""


class OneCall:
    """The context of a call, as far as it is ended."""

    def __init__(self, left_s: float | None = None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        raise EndedCallError(status, details)


async def test_before_it_has_heard_of_topics_a_broker_does_not_say_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "_PATIENCE_S", 0.01)
    request = metadata_pb2.DescribeTopicsRequest(all_topics=True)
    servicer = MetadataServicer(7, MetadataImage(), no_internal_topic, founded)
    with pytest.raises(EndedCallError, match=r"UNAVAILABLE.*broker 7 has heard nothing"):
        await servicer.DescribeTopics(request, OneCall())

    async def unfounded() -> None:
        raise ClusterNotFoundedError("controller 1 waits for 2")

    servicer = MetadataServicer(7, MetadataImage(), no_internal_topic, unfounded)
    answer = await servicer.DescribeTopics(request, OneCall())
    assert answer.error.code == ErrorCode.CLUSTER_NOT_FOUNDED


async def test_whoever_gives_little_time_is_told_within_it_why_there_are_no_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "_PATIENCE_S", 3_600.0)  # Nobody waits that long.

    async def unfounded() -> None:
        raise ClusterNotFoundedError("controller 1 waits for 2")

    servicer = MetadataServicer(7, MetadataImage(), no_internal_topic, unfounded)
    request = metadata_pb2.DescribeTopicsRequest(topics=["t"])
    answer = await servicer.DescribeTopics(request, OneCall(left_s=0.01))
    assert answer.error.code == ErrorCode.CLUSTER_NOT_FOUNDED


async def test_who_asks_before_the_broker_has_heard_of_topics_waits_for_them() -> None:
    image = MetadataImage()
    servicer = MetadataServicer(7, image, no_internal_topic, founded)
    request = metadata_pb2.DescribeTopicsRequest(all_topics=True)
    asked = asyncio.create_task(servicer.DescribeTopics(request, OneCall()))
    stream = servicer.Watch(metadata_pb2.WatchRequest(), None)
    watched = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # Both have begun.
    snapshot = cluster_pb2.MetadataDelta(
        index=4, topics=[cluster_pb2.TopicRecord(name="t", topic_id=b"t" * 16)]
    )
    servicer.on_change(image.apply(snapshot))
    for answer in await asyncio.gather(asked, watched):
        assert [topic.name for topic in answer.topics] == ["t"]
        assert answer.metadata_index == 4


async def test_an_unknown_topic_names_the_near_one() -> None:
    servicer = MetadataServicer(1, image_with("orders"), no_internal_topic, founded)
    request = metadata_pb2.DescribeTopicsRequest(topics=["ordres", "orders"])
    answer = await servicer.DescribeTopics(request, None)
    assert "did you mean 'orders'?" in answer.topics[0].error.message
    assert answer.topics[1].partitions[0].leader == 1
    assert [broker.node_id for broker in answer.brokers] == [1, 2, 3]


async def test_why_replicas_are_out_of_sync_is_said_where_it_is_asked() -> None:
    image = image_with("orders")
    topic = image.topic("orders")
    assert topic is not None
    record = cluster_pb2.PartitionRecord()
    record.CopyFrom(topic.partitions[0])
    del record.isr[:]
    record.isr.append(1)
    record.replicas[:] = [1, 2, 3]
    image.apply(cluster_pb2.MetadataDelta(index=2, partitions=[record]))
    asked = []

    def why(key: TopicIdPartition) -> dict[int, metadata_pb2.OutOfSyncReason.ValueType]:
        asked.append(key)
        # The metadata have it in sync by now, and the leader has not acted on that yet.
        behind = {1: metadata_pb2.OUT_OF_SYNC_REASON_BOOTSTRAPPING}
        return {**behind, 3: metadata_pb2.OUT_OF_SYNC_REASON_SLOW}

    servicer = MetadataServicer(1, image, no_internal_topic, founded, why)
    request = metadata_pb2.DescribeTopicsRequest(topics=["orders"])
    answer = await servicer.DescribeTopics(request, None)
    assert not answer.topics[0].partitions[0].out_of_sync
    assert asked == []
    request.out_of_sync = True
    answer = await servicer.DescribeTopics(request, None)
    [one] = answer.topics[0].partitions[0].out_of_sync
    assert (one.node_id, one.reason) == (3, metadata_pb2.OUT_OF_SYNC_REASON_SLOW)
    assert asked == [TopicIdPartition(topic.topic_id, 0)]


async def test_internal_topics_are_hidden_unless_asked_for() -> None:
    image = image_with("orders")
    image.apply(
        cluster_pb2.MetadataDelta(
            index=2,
            topics=[cluster_pb2.TopicRecord(name="__x", topic_id=b"x" * 16, internal=True)],
        )
    )
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    plain = metadata_pb2.DescribeTopicsRequest(all_topics=True)
    every = metadata_pb2.DescribeTopicsRequest(all_topics=True, include_internal=True)
    assert [t.name for t in (await servicer.DescribeTopics(plain, None)).topics] == ["orders"]
    assert len((await servicer.DescribeTopics(every, None)).topics) == 2


async def test_a_coordinator_is_the_leader_of_the_groups_partition() -> None:
    servicer = MetadataServicer(1, image_with("__consumer_offsets"), no_internal_topic, founded)
    request = metadata_pb2.FindCoordinatorRequest(
        type=metadata_pb2.COORDINATOR_TYPE_GROUP, key="billing"
    )
    answer = await servicer.FindCoordinator(request, None)
    assert (answer.coordinator.node_id, answer.coordinator.port) == (1, 1)


@pytest.mark.parametrize("key", ["orders-writer", "query-1", "__attempt/1/2/3/query-1"])
async def test_the_coordinator_of_a_transactional_id_is_the_leader_of_its_partition(
    key: str,
) -> None:
    image = image_with("orders")
    topic_id = b"t" * 16
    keeper = partition_for_group("query-1" if "query-1" in key else key, 8)
    broker = cluster_pb2.BrokerRecord(node_id=2, host="n2", port=2)
    image.apply(
        cluster_pb2.MetadataDelta(
            index=image.index + 1,
            brokers=[broker],
            topics=[cluster_pb2.TopicRecord(name=TRANSACTIONS_TOPIC, topic_id=topic_id)],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=topic_id, partition=number, leader=2 if number == keeper else 1
                )
                for number in range(8)
            ],
        )
    )
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    request = metadata_pb2.FindCoordinatorRequest(
        type=metadata_pb2.COORDINATOR_TYPE_TRANSACTION, key=key
    )
    answer = await servicer.FindCoordinator(request, None)
    assert (answer.coordinator.node_id, answer.coordinator.port) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (metadata_pb2.COORDINATOR_TYPE_GROUP, ErrorCode.INVALID_GROUP_ID),
        (metadata_pb2.COORDINATOR_TYPE_TRANSACTION, ErrorCode.INVALID_TRANSACTIONAL_ID),
        (metadata_pb2.COORDINATOR_TYPE_UNSPECIFIED, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_a_coordinator_of_nothing_is_a_typed_error(kind: Any, expected: ErrorCode) -> None:
    servicer = MetadataServicer(1, image_with("orders"), no_internal_topic, founded)
    request = metadata_pb2.FindCoordinatorRequest(type=kind)
    assert (await servicer.FindCoordinator(request, None)).error.code == expected


async def test_a_coordinator_that_cannot_be_made_is_a_typed_error() -> None:
    servicer = MetadataServicer(1, image_with("orders"), no_internal_topic, founded)
    request = metadata_pb2.FindCoordinatorRequest(
        type=metadata_pb2.COORDINATOR_TYPE_GROUP, key="billing"
    )
    answer = await servicer.FindCoordinator(request, None)
    assert answer.error.code == ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_a_watcher_is_told_what_is_and_what_changes() -> None:
    image = image_with("orders", "bills")
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    stream = servicer.Watch(metadata_pb2.WatchRequest(topics=["orders"]), None)
    first = await anext(stream)
    assert [topic.name for topic in first.topics] == ["orders"]
    for name, index in (("bills", 2), ("orders", 3)):
        known = image.topic(name)
        assert known is not None
        record = cluster_pb2.PartitionRecord(topic_id=known.topic_id, partition=0, leader=2)
        change = image.apply(cluster_pb2.MetadataDelta(index=index, partitions=[record]))
        assert change is not None
        servicer.on_change(change)
    second = await anext(stream)
    assert second.metadata_index == 3
    assert second.topics[0].partitions[0].leader == 2
    await stream.aclose()  # type: ignore[attr-defined]


def lead(servicer: MetadataServicer, image: MetadataImage, name: str, index: int) -> None:
    """The topic's partition is led by another broker."""
    known = image.topic(name)
    assert known is not None
    record = cluster_pb2.PartitionRecord(topic_id=known.topic_id, partition=0, leader=index)
    change = image.apply(cluster_pb2.MetadataDelta(index=index, partitions=[record]))
    assert change is not None
    servicer.on_change(change)


async def watched_from(
    servicer: MetadataServicer, known_index: int, topics: tuple[str, ...] = ()
) -> metadata_pb2.WatchResponse:
    request = metadata_pb2.WatchRequest(known_index=known_index, topics=topics)
    stream = servicer.Watch(request, None)
    first = await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    return first


def told_its_picture(servicer: MetadataServicer, image: MetadataImage) -> None:
    """As at the start: the first delta is a snapshot."""
    servicer.on_change(ImageChange(image.index, True, (), (), (), ()))


async def test_a_client_that_watches_again_is_told_what_changed_since() -> None:
    image = image_with("orders", "bills", "users")
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    told_its_picture(servicer, image)
    for index, name in ((2, "orders"), (3, "bills"), (4, "bills")):
        lead(servicer, image, name, index)
    first = await watched_from(servicer, 2)
    assert ([topic.name for topic in first.topics], first.everything) == (["bills"], False)
    assert first.topics[0].partitions[0].leader == 4
    assert first.metadata_index == 4
    assert not first.brokers
    assert [topic.name for topic in (await watched_from(servicer, 1)).topics] == ["bills", "orders"]
    assert not (await watched_from(servicer, 4)).topics
    assert not (await watched_from(servicer, 2, ("users",))).topics


async def test_a_client_that_missed_too_much_is_told_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "KEPT_CHANGES", 2)
    image = image_with("orders", "bills")
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    told_its_picture(servicer, image)
    for index in range(2, 6):
        lead(servicer, image, "orders", index)
    for known in (1, 2, 99):  # Forgotten, forgotten, and ahead of this broker.
        first = await watched_from(servicer, known)
        assert first.everything
        assert [topic.name for topic in first.topics] == ["bills", "orders"]
        assert len(first.brokers) == 3
    assert not (await watched_from(servicer, 3)).everything


async def test_a_watcher_that_does_not_read_costs_its_topics_names_and_no_more() -> None:
    image = image_with("orders", "bills")
    servicer = MetadataServicer(1, image, no_internal_topic, founded)
    stream = servicer.Watch(metadata_pb2.WatchRequest(), None)
    await anext(stream)
    for index in range(2, 5000):
        lead(servicer, image, ("orders", "bills")[index % 2], index)
    told = await anext(stream)
    assert (told.metadata_index, [topic.name for topic in told.topics]) == (
        4999,
        ["bills", "orders"],
    )
    lead(servicer, image, "orders", 5000)
    assert [topic.name for topic in (await anext(stream)).topics] == ["orders"]
    await stream.aclose()  # type: ignore[attr-defined]
