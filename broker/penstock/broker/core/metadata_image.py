"""The broker's picture of the cluster: what the controllers committed, up to one index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.v1 import cluster_pb2
from penstock.wire.errors import MetadataDivergedError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

MAX_DELETED_TOPICS: Final = 10_000
"""So many ids of deleted topics are kept; the controllers keep as many."""


def replication_factor(record: cluster_pb2.PartitionRecord) -> int:
    """How many replicas a partition has but for those that a reassignment is only adding.

    The default of ``min.insync.replicas`` goes by it, as in penstock.raft_meta.core.model.
    """
    return len(record.replicas) - len(record.adding_replicas)


@dataclass(slots=True)
class Topic:
    """One topic with its partitions by number. Read only; replaced parts are replaced whole."""

    record: cluster_pb2.TopicRecord
    partitions: dict[int, cluster_pb2.PartitionRecord] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.record.name

    @property
    def topic_id(self) -> TopicId:
        """The topic's id."""
        return TopicId(self.record.topic_id)


@dataclass(frozen=True, slots=True)
class ImageChange:
    """What one delta changed, for those who act on changes. Removed topics come as they were."""

    index: int
    snapshot: bool
    partitions: tuple[cluster_pb2.PartitionRecord, ...]
    topics: tuple[TopicId, ...]
    removed_topics: tuple[Topic, ...]
    brokers: tuple[int, ...]
    cluster_configs: bool = False
    """The settings that the whole cluster shares are others."""


class MetadataImage:
    """The picture. One owner applies deltas in order; everybody on the same loop may read.

    Records handed out must not be changed by the reader.
    """

    def __init__(self) -> None:
        self.index = -1  # Deltas up to this index are applied; it never goes back.
        self.version = 0  # Another one with every delta that was taken over.
        self.controller_epoch = -1
        self.controller_id = -1
        self.cluster_id = ""
        self.metadata_version = 1
        self.cluster_configs: dict[str, str] = {}  # Replaced whole.
        self.brokers: dict[int, cluster_pb2.BrokerRecord] = {}
        self.offline_counts: Counter[int] = Counter()  # Replicas that a live broker can't serve.
        self.leader_counts: Counter[int] = Counter()  # Partitions by the node that leads them.
        self._deleted: dict[bytes, None] = {}  # Ids, the latest last.
        self._topics: dict[TopicId, Topic] = {}
        self._ids: dict[str, TopicId] = {}  # Exactly the names of _topics.

    def apply(self, delta: cluster_pb2.MetadataDelta) -> ImageChange | None:
        """Take over one delta and say what changed; None when it was known already.

        A snapshot replaces everything, and reports every topic that it no longer has as removed.
        A snapshot older than the picture is ignored: a lagging controller sent it. So is what is of
        an older controller epoch, whatever its index: it is of a history that was given up.

        Raises MetadataDivergedError, and changes nothing, where that is the picture's own history.
        """
        self._check_history(delta)
        is_older = delta.controller_epoch < self.controller_epoch or delta.index < self.index
        if is_older or (delta.index == self.index and not delta.snapshot):
            return None
        self.version += 1
        self.index = delta.index
        self.controller_epoch = delta.controller_epoch
        self.controller_id = delta.controller_id
        self.cluster_id = delta.cluster_id or self.cluster_id
        self.metadata_version = delta.metadata_version or self.metadata_version
        reconfigured = self._take_configs(delta)
        gone = list(delta.removed_topics)
        if delta.snapshot:
            self._deleted.clear()
            kept = {topic.topic_id for topic in delta.topics}
            gone += [topic_id for topic_id in self._topics if topic_id not in kept]
            self.brokers.clear()
        self._remember_deleted(delta)
        removed = [self._remove(TopicId(topic_id)) for topic_id in gone]
        for node_id in delta.removed_brokers:
            self.brokers.pop(node_id, None)
        for broker in delta.brokers:
            self.brokers[broker.node_id] = broker
        for record in delta.topics:
            self._put_topic(record)
        for partition in delta.partitions:
            self._put_partition(partition)
        return ImageChange(
            index=delta.index,
            snapshot=delta.snapshot,
            partitions=tuple(delta.partitions),
            topics=tuple(TopicId(record.topic_id) for record in delta.topics),
            removed_topics=tuple(topic for topic in removed if topic is not None),
            brokers=(
                *(broker.node_id for broker in delta.brokers),
                *delta.removed_brokers,
            ),
            cluster_configs=reconfigured,
        )

    def _check_history(self, delta: cluster_pb2.MetadataDelta) -> None:
        """Whether the controllers went on from what this picture is of.

        In one history a later index never has an older controller epoch, and the index of this
        picture is that of a command. It is another one, too, if a partition's epoch went back:
        that shows where a snapshot skips the place at which the two part.
        """
        if delta.controller_epoch < self.controller_epoch:
            return  # Not newer than this picture, and no judge of it.
        is_newer = delta.controller_epoch > self.controller_epoch
        if (
            (is_newer and 0 < self.index >= delta.index)
            or 0 < delta.after_index < self.index < delta.index
            or (is_newer and delta.snapshot and self._is_undone_by(delta))
        ):
            raise MetadataDivergedError(
                f"the metadata up to index {self.index}, of controller epoch "
                f"{self.controller_epoch}, are not those that the controllers go on with at index "
                f"{delta.index}, of epoch {delta.controller_epoch}: a part of them was given up "
                "(penstock quorum recover), and this broker has acted on it; next: start it again, "
                "and it takes all of them anew"
            )

    def _is_undone_by(self, snapshot: cluster_pb2.MetadataDelta) -> bool:
        for record in snapshot.partitions:
            topic = self._topics.get(TopicId(record.topic_id))
            known = None if topic is None else topic.partitions.get(record.partition)
            if known is not None and known.partition_epoch > record.partition_epoch:
                return True
        return False

    def _take_configs(self, delta: cluster_pb2.MetadataDelta) -> bool:
        if not delta.HasField("cluster_configs"):
            return False
        before, self.cluster_configs = self.cluster_configs, dict(delta.cluster_configs.configs)
        return before != self.cluster_configs

    def _remember_deleted(self, delta: cluster_pb2.MetadataDelta) -> None:
        self._deleted.update(dict.fromkeys((*delta.deleted_topics, *delta.removed_topics)))
        while len(self._deleted) > MAX_DELETED_TOPICS:
            del self._deleted[next(iter(self._deleted))]

    def was_deleted(self, topic_id: TopicId) -> bool:
        """The controllers know that there was this topic, and that it was deleted since.

        False for what they do not know, and for what was deleted very long ago.
        """
        return topic_id in self._deleted

    def _put_topic(self, record: cluster_pb2.TopicRecord) -> None:
        topic_id = TopicId(record.topic_id)
        known = self._topics.get(topic_id)
        if known is None:
            self._topics[topic_id] = Topic(record)
        else:
            known.record = record
        self._ids[record.name] = topic_id

    def _put_partition(self, record: cluster_pb2.PartitionRecord) -> None:
        kept = self._topics[TopicId(record.topic_id)].partitions
        before = kept.get(record.partition)
        if before is not None:
            self._count(before, -1)
        self._count(record, 1)
        kept[record.partition] = record

    def _count(self, record: cluster_pb2.PartitionRecord, step: int) -> None:
        for node_id in record.offline_replicas:
            self.offline_counts[node_id] += step
        if record.leader >= 0:
            self.leader_counts[record.leader] += step

    def _remove(self, topic_id: TopicId) -> Topic | None:
        topic = self._topics.pop(topic_id, None)
        for record in () if topic is None else topic.partitions.values():
            self._count(record, -1)
        if topic is not None and self._ids.get(topic.name) == topic_id:
            del self._ids[topic.name]
        return topic

    def topics(self) -> Iterator[Topic]:
        """Every topic, in no particular order."""
        return iter(self._topics.values())

    def topic(self, name: str) -> Topic | None:
        """The topic of this name. On any thread."""
        topic_id = self._ids.get(name)
        # While one goes, another thread may find its name still.
        return None if topic_id is None else self._topics.get(topic_id)

    def topic_by_id(self, topic_id: TopicId) -> Topic | None:
        """The topic of this id."""
        return self._topics.get(topic_id)

    def partition(self, topic: str, partition: int) -> cluster_pb2.PartitionRecord | None:
        """The partition as people name it."""
        found = self.topic(topic)
        return None if found is None else found.partitions.get(partition)

    def partition_by_id(self, key: TopicIdPartition) -> cluster_pb2.PartitionRecord | None:
        """The partition as nodes name it."""
        found = self._topics.get(key.topic_id)
        return None if found is None else found.partitions.get(key.partition)

    def named(self, key: TopicIdPartition) -> TopicPartition | None:
        """The name of a partition that nodes know by id."""
        found = self._topics.get(key.topic_id)
        return None if found is None else TopicPartition(found.name, key.partition)
