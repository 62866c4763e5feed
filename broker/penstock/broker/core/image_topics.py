"""The topics of a broker's picture of the cluster, as groups see them, and the news of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from penstock.broker.core.group_events import TopicsChanged
from penstock.broker.core.group_topics import TopicInfo
from penstock.broker.core.metadata_image import ImageChange, MetadataImage, Topic
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

_NO_RACKS: Final[frozenset[str]] = frozenset()
_MAX_SHARED: Final = 10_000  # Sets of replicas whose racks are remembered at a time.


class ImageTopics:
    """A TopicView of an image. Call :meth:`news` after each change that was applied to it."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        # By topic id the racks of each partition, to tell a topic that grew, or has replicas in
        # other racks, from one whose leaders changed.
        self._known: dict[TopicId, dict[int, frozenset[str]]] = {}
        self._broker_racks: dict[int, str] = {}
        self._shared: dict[tuple[int, ...], frozenset[str]] = {}  # By the replicas' node ids.

    def find(self, name: str) -> TopicInfo | None:
        """The topic of this name."""
        return _info(self._image.topic(name))

    def find_id(self, topic_id: TopicId) -> TopicInfo | None:
        """The topic of this id."""
        return _info(self._image.topic_by_id(topic_id))

    def racks(self, partition: TopicIdPartition) -> frozenset[str]:
        """The racks of the brokers that have a replica of the partition."""
        return self._known.get(partition.topic_id, {}).get(partition.partition, _NO_RACKS)

    def names(self) -> Iterator[str]:
        """The names of topics that are not internal."""
        return (topic.name for topic in self._image.topics() if not topic.record.internal)

    def news(self, change: ImageChange) -> TopicsChanged | None:
        """What groups are to hear of a change; None where it is nothing to them."""
        changed: set[str] = set()
        moved: set[str] = set()
        removed: set[TopicId] = set()
        for topic in change.removed_topics:
            if self._known.pop(topic.topic_id, None) is not None:
                changed.add(topic.name)
                removed.add(topic.topic_id)
        for topic, records in self._touched(change):
            known = self._known.get(topic.topic_id)
            if known is None:
                known = self._known[topic.topic_id] = {}
                changed.add(topic.name)
            count_before = len(known)
            for record in records:
                racks = self._racks_of(record)
                if known.get(record.partition, racks) != racks:
                    moved.add(topic.name)
                known[record.partition] = racks
            if len(known) != count_before:
                changed.add(topic.name)
        if not changed and not moved:
            return None
        return TopicsChanged(frozenset(changed), frozenset(removed), frozenset(moved))

    def _touched(
        self, change: ImageChange
    ) -> Iterable[tuple[Topic, Iterable[cluster_pb2.PartitionRecord]]]:
        """The topics that may have changed, and those of their partitions that may have."""
        if self._learn_brokers() or change.snapshot:
            return [(topic, topic.partitions.values()) for topic in self._image.topics()]
        records: dict[TopicId, list[cluster_pb2.PartitionRecord]] = {}
        for record in change.partitions:
            records.setdefault(TopicId(record.topic_id), []).append(record)
        for topic_id in change.topics:
            records.setdefault(topic_id, [])
        found = ((self._image.topic_by_id(topic_id), rest) for topic_id, rest in records.items())
        return [(topic, rest) for topic, rest in found if topic is not None]

    def _learn_brokers(self) -> bool:
        """Whether brokers are in other racks than before."""
        racks = {node_id: broker.rack for node_id, broker in self._image.brokers.items()}
        racks = {node_id: rack for node_id, rack in racks.items() if rack}
        if racks == self._broker_racks:
            return False
        self._broker_racks = racks
        self._shared.clear()
        return True

    def _racks_of(self, record: cluster_pb2.PartitionRecord) -> frozenset[str]:
        if not self._broker_racks:
            return _NO_RACKS
        replicas = tuple(record.replicas)
        racks = self._shared.get(replicas)
        if racks is None:
            found = (self._broker_racks.get(node_id) for node_id in replicas)
            if len(self._shared) >= _MAX_SHARED:
                self._shared.clear()
            racks = self._shared[replicas] = frozenset(rack for rack in found if rack)
        return racks


def _info(topic: Topic | None) -> TopicInfo | None:
    return None if topic is None else TopicInfo(topic.name, topic.topic_id, len(topic.partitions))
