"""The committed state and the draft of one command: all of a command takes effect, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Final

from penstock.raft_meta.core import election, reassignment
from penstock.raft_meta.core.encoding import PartitionEncoder
from penstock.raft_meta.core.model import NO_LEADER, Broker, Partition, Topic
from penstock.v1 import cluster_pb2

PartitionKey = tuple[bytes, int]

MAX_DELETED_TOPICS: Final = 10_000
"""So many ids of deleted topics are kept, for brokers that were down when they were deleted."""


class Tables:
    """Brokers, topics and partitions as committed, with the counts that decisions need.

    Written by Draft.commit (and restore) alone. 100,000 partitions cost some 20 MB: a partition
    is one tuple, and equal replica lists are one object.
    """

    def __init__(self) -> None:
        self.brokers: dict[int, Broker] = {}
        self.topics: dict[bytes, Topic] = {}
        self.topic_ids: dict[str, bytes] = {}  # Exactly the names of topics.
        self.partitions: dict[bytes, list[Partition]] = {}  # By topic id, by number.
        self.next_producer_id = 0
        self.metadata_version = 1
        self.cluster_configs: Mapping[str, str] = {}  # Replaced whole.
        self.deleted_topics: dict[bytes, None] = {}  # Ids, the latest last.
        self.leaders: Counter[int] = Counter()  # Partitions that a node leads now.
        self.preferred: Counter[int] = Counter()  # Partitions that a node leads by preference.
        self.replicas: Counter[int] = Counter()  # Partitions that a node has a replica of.
        self.not_preferred = 0  # Partitions that another than the preferred leader leads.
        self.leaderless = 0  # Partitions that nobody leads.
        self.partition_count = 0
        self.encoder = PartitionEncoder()
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def frozen(self) -> Tables:
        """These tables as they are now; nobody changes them any more. On any thread."""
        copied = copy(self)
        for name, table in vars(self).items():
            if isinstance(table, dict | list | set):
                setattr(copied, name, table.copy())
        copied.partitions = {topic_id: kept.copy() for topic_id, kept in self.partitions.items()}
        copied.encoder = PartitionEncoder()
        return copied

    def put_topic(self, topic: Topic) -> None:
        """Add the topic or replace its configs."""
        self.topics[topic.topic_id] = topic
        self.topic_ids[topic.name] = topic.topic_id
        self.partitions.setdefault(topic.topic_id, [])

    def remove_topic(self, topic_id: bytes) -> None:
        """Take away the topic with its partitions."""
        topic = self.topics.pop(topic_id)
        del self.topic_ids[topic.name]
        for partition in self.partitions.pop(topic_id):
            self._count(partition, -1)

    def keep_deleted(self, topic_id: bytes) -> None:
        """Know the topic for a deleted one, and forget the one deleted longest ago."""
        self.deleted_topics[topic_id] = None
        if len(self.deleted_topics) > MAX_DELETED_TOPICS:
            del self.deleted_topics[next(iter(self.deleted_topics))]

    def put_partition(self, key: PartitionKey, partition: Partition) -> None:
        """Replace the partition, or add it after the topic's last."""
        topic_id, number = key
        kept = self.partitions[topic_id]
        partition = self.share(partition)
        if number < len(kept):
            before = kept[number]
            kept[number] = partition
            if before.replicas is partition.replicas:
                if before.leader != partition.leader:
                    self._count_leader(before, -1)
                    self._count_leader(partition, 1)
                return
            self._count(before, -1)
        elif number == len(kept):
            kept.append(partition)
        else:
            raise ValueError(f"partition {number} follows a topic of {len(kept)} partitions")
        self._count(partition, 1)

    def share(self, partition: Partition) -> Partition:
        """The partition with lists of nodes that equal ones have in common; itself if it has."""
        shared = self._shared
        replicas, isr, elr = partition[:3]
        own = (
            shared.setdefault(replicas, replicas),
            shared.setdefault(isr, isr),
            shared.setdefault(elr, elr),
        )
        if own[0] is replicas and own[1] is isr and own[2] is elr:
            return partition
        return tuple.__new__(Partition, own + partition[3:])

    def _count(self, partition: Partition, step: int) -> None:
        self.partition_count += step
        self.preferred[partition.replicas[0]] += step
        for node in partition.replicas:
            self.replicas[node] += step
        self._count_leader(partition, step)

    def _count_leader(self, partition: Partition, step: int) -> None:
        self.not_preferred += step * (partition.leader != partition.replicas[0])
        if partition.leader != NO_LEADER:
            self.leaders[partition.leader] += step
        else:
            self.leaderless += step

    def all_partitions(self) -> Iterator[tuple[PartitionKey, Partition]]:
        """Every partition, by topic id and number: the same order on every node."""
        for topic_id in sorted(self.partitions):
            for number, partition in enumerate(self.partitions[topic_id]):
                yield (topic_id, number), partition


class Draft:
    """What one command changes, over the tables it read; commit() makes it so.

    A command's handler reads and writes here alone, so that a refusal half-way changes nothing.
    """

    def __init__(self, tables: Tables, index: int) -> None:
        self.index = index  # The command's own.
        self.tables = tables
        self._brokers: dict[int, Broker | None] = {}  # None: unregistered.
        self._topics: dict[bytes, Topic] = {}
        self._removed_topics: list[bytes] = []
        self._partitions: dict[PartitionKey, Partition] = {}
        self._rules: dict[tuple[bytes, int], election.Rules] = {}
        self.next_producer_id = tables.next_producer_id
        self.metadata_version = tables.metadata_version
        self.cluster_configs = tables.cluster_configs

    # Reading: what is drafted over what is committed.

    def broker(self, node_id: int) -> Broker | None:
        """The registration."""
        if node_id in self._brokers:
            return self._brokers[node_id]
        return self.tables.brokers.get(node_id)

    def usable(self, node_id: int) -> bool:
        """The node may be given leaderships and replicas."""
        broker = self.broker(node_id)
        return broker is not None and broker.usable

    def alive(self, node_id: int) -> bool:
        """The node is registered and not fenced."""
        broker = self.broker(node_id)
        return broker is not None and not broker.fenced

    def drained(self, node_id: int) -> bool:
        """The node is to lead only what no other in sync can lead."""
        broker = self.broker(node_id)
        return broker is not None and broker.drained_since_ms > 0

    def partition(self, key: PartitionKey) -> Partition | None:
        """The partition, if the topic is there and has it."""
        drafted = self._partitions.get(key)
        if drafted is not None:
            return drafted
        kept = self.tables.partitions.get(key[0], [])
        return kept[key[1]] if 0 <= key[1] < len(kept) else None

    def rules(self, topic: Topic, replication_factor: int) -> election.Rules:
        """What elections of this topic's partitions rest on, under the configs of ``topic``."""
        return election.Rules(
            usable=self.usable,
            alive=self.alive,
            drained=self.drained,
            min_isr=topic.min_isr(replication_factor),
            unclean=topic.unclean_election,
        )

    def rules_of(self, key: PartitionKey, replication_factor: int) -> election.Rules:
        """What elections of a committed topic's partitions rest on."""
        found = self._rules.get((key[0], replication_factor))
        if found is None:
            found = self.rules(self.tables.topics[key[0]], replication_factor)
            self._rules[key[0], replication_factor] = found
        return found

    # Writing.

    def put_broker(self, broker: Broker) -> None:
        """Register, or change a registration."""
        self._brokers[broker.node_id] = broker

    def remove_broker(self, node_id: int) -> None:
        """Unregister."""
        self._brokers[node_id] = None

    def put_topic(self, topic: Topic) -> None:
        """Add a topic or change its configs."""
        self._topics[topic.topic_id] = topic

    def remove_topic(self, topic_id: bytes) -> None:
        """Delete a topic."""
        self._removed_topics.append(topic_id)

    def put_partition(self, key: PartitionKey, partition: Partition) -> None:
        """Add a partition (in order after the topic's last) or change one.

        One whose reassignment has arrived with this change is put at its target.
        """
        if partition.target:
            partition = self._arrived(key, partition)
        self._partitions[key] = partition

    def _arrived(self, key: PartitionKey, partition: Partition) -> Partition:
        topic = self._topics.get(key[0]) or self.tables.topics[key[0]]
        before = self.partition(key) or partition
        rules = self.rules(topic, len(partition.target))
        if not reassignment.has_arrived(partition, rules.min_isr):
            return partition
        return reassignment.arrive(before, partition, rules)

    def commit(self) -> cluster_pb2.MetadataDelta | None:
        """Write all of it to the tables; the changed records, or None when nothing changed."""
        tables = self.tables
        tables.next_producer_id = self.next_producer_id
        settings = self._commit_settings()
        if not (self._brokers or self._topics or self._removed_topics or self._partitions):
            return settings
        delta = settings or cluster_pb2.MetadataDelta(index=self.index)
        for node_id, broker in sorted(self._brokers.items()):
            if broker is None:
                tables.brokers.pop(node_id, None)
                delta.removed_brokers.append(node_id)
            else:
                tables.brokers[node_id] = broker
                delta.brokers.append(broker.to_proto())
        for topic_id in self._removed_topics:
            tables.remove_topic(topic_id)
            if self.metadata_version >= 2:  # What it keeps is part of the state.
                tables.keep_deleted(topic_id)
            delta.removed_topics.append(topic_id)
        for topic in self._topics.values():
            tables.put_topic(topic)
            delta.topics.append(topic.to_proto())
        for topic_id, changes in groupby(sorted(self._partitions), key=itemgetter(0)):
            numbered = [(key[1], self._partitions[key]) for key in changes]
            for number, partition in numbered:
                tables.put_partition((topic_id, number), partition)
            delta.MergeFromString(tables.encoder.encode(tables.topics[topic_id], numbered))
        return delta

    def _commit_settings(self) -> cluster_pb2.MetadataDelta | None:
        """Write what holds for the whole cluster; None when it is as it was."""
        tables = self.tables
        raised = self.metadata_version != tables.metadata_version
        configured = self.cluster_configs is not tables.cluster_configs
        if not raised and not configured:
            return None
        delta = cluster_pb2.MetadataDelta(index=self.index)
        if raised:
            tables.metadata_version = delta.metadata_version = self.metadata_version
        if configured:
            tables.cluster_configs = self.cluster_configs
            delta.cluster_configs.SetInParent()
            delta.cluster_configs.configs.update(self.cluster_configs)
        return delta
