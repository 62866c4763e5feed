"""A leader whose metadata are late, and the controllers' own state machine, which answers it."""

from __future__ import annotations

from penstock.broker.core.metadata_image import replication_factor
from penstock.broker.core.partition_events import (
    BrokersChanged,
    BrokerStatus,
    FollowerAcked,
    FollowerPositioned,
    IsrProposal,
    LogAdvanced,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    Tick,
)
from penstock.broker.core.replica import Replica
from penstock.raft_meta.core.model import Partition
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.topic_config import effective_min_isr
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id
from tests.unit.replication.model import ModelLog
from tests.unit.replication.test_replica import LAG_MS


class LateLeader:
    """Broker 1 leads the only partition, and hears of the metadata when the test says so."""

    def __init__(
        self, assignment: list[int], *, metadata_version: int = METADATA_VERSION, **configs: str
    ) -> None:
        self.controllers = Driver(brokers=3, metadata_version=metadata_version)
        self.controllers.create(assignments=[assignment], **configs)
        self.log = ModelLog()
        self.replica = Replica(1, self.log, high_watermark=0, lag_max_ms=LAG_MS)
        self.now_ms = 0
        self.hear_metadata()
        self.log.epochs.assign(self.replica.leader_epoch, 0)

    def hear_metadata(self) -> None:
        brokers = {
            node_id: BrokerStatus(broker.broker_epoch, broker.usable)
            for node_id, broker in self.controllers.state.brokers.items()
        }
        self.replica.handle(BrokersChanged(brokers, self.now_ms))
        topic = self.controllers.image.topic_by_id(topic_id(1))
        assert topic is not None
        record = topic.partitions[0]
        min_isr = effective_min_isr(topic.record.configs, replication_factor(record))
        state = PartitionState.from_record(record)
        self.replica.handle(PartitionChanged(state, min_isr, self.now_ms))

    def set_min_isr(self, number: int) -> None:
        body = cluster_pb2.AlterTopicConfigsCommand(topic="orders")
        body.set["min.insync.replicas"] = str(number)
        self.controllers.ok(alter_topic_configs=body)

    def append(self, count: int) -> None:
        self.log.append([(self.replica.leader_epoch, 0)] * count)
        self.log.flush()
        self.replica.handle(LogAdvanced(self.now_ms))

    def position(self, node_id: int, end: int) -> None:
        broker_epoch = self.controllers.state.brokers[node_id].broker_epoch
        epoch = self.replica.leader_epoch
        last_epoch = epoch if end else -1
        self.replica.handle(
            FollowerPositioned(
                node_id, node_id, broker_epoch, epoch, end, last_epoch, 0, self.now_ms
            )
        )

    def ack(self, node_id: int, end: int) -> None:
        epoch = self.replica.leader_epoch
        self.replica.handle(FollowerAcked(node_id, node_id, epoch, end, 0, self.now_ms))

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.replica.handle(Tick(now_ms))

    def answer(self) -> ErrorCode | None:
        """The controllers answer the wish; the metadata come later, if ever."""
        wish = self.replica.pending
        assert wish is not None
        error, state = self.send(wish)
        self.replica.handle(ProposalAnswered(wish, error, state, self.now_ms))
        self.replica.validate()
        return error

    def send(self, wish: IsrProposal) -> tuple[ErrorCode | None, PartitionState]:
        """The controllers take a wish, and nobody waits for what they answer."""
        result = self.controllers.alter(
            sorted(wish.isr),
            node=1,
            epochs=dict(wish.members),
            leader_epoch=wish.leader_epoch,
            partition_epoch=wish.partition_epoch,
        )
        [outcome] = result.alter_partition.partitions
        error = ErrorCode(outcome.error.code) if outcome.HasField("error") else None
        return error, PartitionState.from_record(outcome.partition)

    def partition(self) -> Partition:
        return self.controllers.partition()
