"""What the cluster's state is made of: immutable values, small because there are many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.v1 import cluster_pb2
from penstock.wire import topic_config

NO_LEADER: Final = -1
"""The leader of a partition that has none."""


class Broker(NamedTuple):
    """One broker's registration, as BrokerRecord says.

    It works at metadata versions from ``min_version`` to ``max_version``. ``whole_since_epoch``:
    disks that hold all that was acknowledged up to the end of that broker epoch lack nothing,
    since the registrations after it, of processes that lacked nothing, were not let in. It is 0
    once this one was let in, or when its process may lack something: only its own epoch counts.
    """

    node_id: int
    broker_epoch: int
    incarnation_id: bytes
    host: str
    port: int
    rack: str
    fenced: bool
    in_controlled_shutdown: bool
    min_version: int = 1
    max_version: int = 1
    whole_since_epoch: int = 0
    drained_since_ms: int = 0
    """Since when it is to lead only what no other in sync can lead; 0: it is not drained."""
    external_host: str = ""
    """Where clients from outside reach it, with ``external_port``; empty where all others do."""
    external_port: int = 0

    @property
    def usable(self) -> bool:
        """It may be given leaderships and replicas."""
        return not self.fenced and not self.in_controlled_shutdown

    def to_proto(self) -> cluster_pb2.BrokerRecord:
        """The record that brokers and snapshots get."""
        return cluster_pb2.BrokerRecord(
            node_id=self.node_id,
            broker_epoch=self.broker_epoch,
            incarnation_id=self.incarnation_id,
            host=self.host,
            port=self.port,
            rack=self.rack,
            fenced=self.fenced,
            in_controlled_shutdown=self.in_controlled_shutdown,
            min_metadata_version=self.min_version,
            max_metadata_version=self.max_version,
            whole_since_broker_epoch=self.whole_since_epoch,
            drained_since_ms=self.drained_since_ms,
            external_host=self.external_host,
            external_port=self.external_port,
        )

    @classmethod
    def from_proto(cls, record: cluster_pb2.BrokerRecord) -> Broker:
        """The registration that a snapshot holds."""
        return cls(
            record.node_id,
            record.broker_epoch,
            record.incarnation_id,
            record.host,
            record.port,
            record.rack,
            record.fenced,
            record.in_controlled_shutdown,
            max(record.min_metadata_version, 1),
            max(record.max_metadata_version, 1),
            record.whole_since_broker_epoch,
            record.drained_since_ms,
            record.external_host,
            record.external_port,
        )


class Partition(NamedTuple):
    """One partition's assignment and leadership. Its topic and number are where it is kept.

    ``isr``, ``elr`` and ``offline`` are in the order of ``replicas`` and subsets of it; ``elr`` is
    disjoint from both others.
    """

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    recovering: bool = False
    target: tuple[int, ...] = ()
    offline: tuple[int, ...] = ()

    @property
    def replication_factor(self) -> int:
        """How many replicas it has but for those that are only being added.

        ``min.insync.replicas`` goes by it: what is still empty makes nothing safer.
        """
        return len(self.replicas) - len(self.adding)

    def to_proto(self, topic: Topic, number: int) -> cluster_pb2.PartitionRecord:
        """The record that brokers and snapshots get."""
        return cluster_pb2.PartitionRecord(
            topic_id=topic.topic_id,
            partition=number,
            replicas=self.replicas,
            isr=self.isr,
            elr=self.elr,
            leader=self.leader,
            leader_epoch=self.leader_epoch,
            partition_epoch=self.partition_epoch,
            adding_replicas=self.adding,
            removing_replicas=self.removing,
            leader_recovering=self.recovering,
            target_replicas=self.target,
            offline_replicas=self.offline,
            min_insync_replicas=topic.min_isr(self.replication_factor),
        )

    @classmethod
    def from_proto(cls, record: cluster_pb2.PartitionRecord) -> Partition:
        """The partition that a snapshot holds."""
        return cls(
            tuple(record.replicas),
            tuple(record.isr),
            tuple(record.elr),
            record.leader,
            record.leader_epoch,
            record.partition_epoch,
            tuple(record.adding_replicas),
            tuple(record.removing_replicas),
            record.leader_recovering,
            tuple(record.target_replicas),
            tuple(record.offline_replicas),
        )


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic without its partitions. ``configs`` must not be changed by a reader."""

    topic_id: bytes
    name: str
    configs: Mapping[str, str]
    internal: bool

    def min_isr(self, replication_factor: int) -> int:
        """``min.insync.replicas`` in force for a partition of so many replicas."""
        return topic_config.effective_min_isr(self.configs, replication_factor)

    @property
    def unclean_election(self) -> bool:
        """A replica that may lack acknowledged records may lead when no other lives."""
        key = "unclean.leader.election.enable"
        return topic_config.config_value(self.configs, key) == "true"

    def to_proto(self) -> cluster_pb2.TopicRecord:
        """The record that brokers and snapshots get."""
        return cluster_pb2.TopicRecord(
            topic_id=self.topic_id,
            name=self.name,
            configs=dict(self.configs),
            internal=self.internal,
        )

    @classmethod
    def from_proto(cls, record: cluster_pb2.TopicRecord) -> Topic:
        """The topic that a snapshot holds."""
        return cls(record.topic_id, record.name, dict(record.configs), record.internal)
