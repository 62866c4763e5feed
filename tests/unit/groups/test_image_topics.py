"""What groups hear of changes of a broker's picture of the cluster."""

from __future__ import annotations

from typing import Any

from penstock.broker.core.group_events import TopicsChanged
from penstock.broker.core.image_topics import ImageTopics
from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

T, U = TopicId(b"t" * 16), TopicId(b"u" * 16)
RACKS = {1: "east", 2: "", 3: "west"}


class World:
    """Topic t with two partitions on nodes 1 and 3, and what groups hear of what comes after."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self.topics = ImageTopics(self.image)
        self.change(brokers=[broker(node_id, rack) for node_id, rack in RACKS.items()])
        self.change(
            topics=[cluster_pb2.TopicRecord(topic_id=T, name="t")],
            partitions=[partition(0, [1, 2, 9]), partition(1, [1, 3])],
        )

    def change(self, **parts: Any) -> TopicsChanged | None:
        delta = cluster_pb2.MetadataDelta(index=self.image.index + 1, cluster_id="c", **parts)
        change = self.image.apply(delta)
        assert change is not None
        return self.topics.news(change)

    def racks(self, number: int) -> frozenset[str]:
        return self.topics.racks(TopicIdPartition(T, number))


def broker(node_id: int, rack: str) -> cluster_pb2.BrokerRecord:
    return cluster_pb2.BrokerRecord(node_id=node_id, rack=rack)


def partition(
    number: int, replicas: list[int], *, leader: int = 1, topic_id: TopicId = T
) -> cluster_pb2.PartitionRecord:
    return cluster_pb2.PartitionRecord(
        topic_id=topic_id, partition=number, replicas=replicas, leader=leader
    )


def moved(*names: str) -> TopicsChanged:
    return TopicsChanged(frozenset(), moved=frozenset(names))


def test_racks_are_those_of_the_brokers_that_have_replicas() -> None:
    world = World()
    assert world.racks(0) == {"east"}
    assert world.racks(1) == {"east", "west"}
    assert world.racks(2) == frozenset()


def test_replicas_in_other_racks_are_news_and_other_leaders_are_none() -> None:
    world = World()
    assert world.change(partitions=[partition(1, [1, 3], leader=3)]) is None
    assert world.change(partitions=[partition(1, [3, 1])]) is None
    assert world.change(partitions=[partition(1, [2, 3])]) == moved("t")
    assert world.racks(1) == {"west"}


def test_a_broker_that_is_in_another_rack_now_is_news_of_its_topics() -> None:
    world = World()
    world.change(
        topics=[cluster_pb2.TopicRecord(topic_id=U, name="u")],
        partitions=[partition(0, [1], topic_id=U)],
    )
    assert world.change(brokers=[broker(3, "west")]) is None
    assert world.change(brokers=[broker(3, "north")]) == moved("t")
    assert world.racks(1) == {"east", "north"}
    assert world.change(removed_brokers=[1]) == moved("t", "u")


def test_topics_that_come_grow_and_go_are_news() -> None:
    world = World()
    news = world.change(partitions=[partition(2, [3])])
    assert news == TopicsChanged(frozenset({"t"}))
    assert world.racks(2) == {"west"}
    news = world.change(removed_topics=[T])
    assert news == TopicsChanged(frozenset({"t"}), removed=frozenset({T}))
    assert world.racks(0) == frozenset()


def test_a_snapshot_is_news_only_where_it_differs() -> None:
    world = World()
    same: Any = {
        "brokers": [broker(node_id, rack) for node_id, rack in RACKS.items()],
        "topics": [cluster_pb2.TopicRecord(topic_id=T, name="t")],
    }
    partitions = [partition(0, [1, 2, 9]), partition(1, [1, 3])]
    assert world.change(snapshot=True, partitions=partitions, **same) is None
    partitions = [partition(0, [1, 2, 9]), partition(1, [1])]
    assert world.change(snapshot=True, partitions=partitions, **same) == moved("t")
