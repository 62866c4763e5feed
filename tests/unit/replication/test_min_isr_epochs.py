"""A leader never acts on an in-sync set under the min ISR of another partition epoch.

The controllers' own state machine answers the leader's wishes, and the answers come before the
metadata that say why.
"""

from __future__ import annotations

import pytest

from penstock.broker.core.metadata_image import replication_factor
from penstock.broker.core.partition_events import (
    BrokersChanged,
    BrokerStatus,
    FollowerAcked,
    FollowerPositioned,
    HighWatermarkChanged,
    IsrChanged,
    LogAdvanced,
    MinIsrChanged,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    ProposeIsr,
    Role,
    RoleChanged,
    StatePosition,
    Tick,
)
from penstock.broker.core.replica import Replica
from penstock.raft_meta.core.model import Partition
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.topic_config import effective_min_isr
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id
from tests.unit.replication.model import ModelLog, isr_changed
from tests.unit.replication.test_replica import LAG_MS, append, leader, log_of, state


class LateLeader:
    """Broker 1 leads the only partition, and hears of the metadata when the test says so."""

    def __init__(self, assignment: list[int], **configs: str) -> None:
        self.controllers = Driver(brokers=3)
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
        result = self.controllers.alter(
            sorted(wish.isr),
            node=1,
            epochs=dict(wish.members),
            leader_epoch=wish.leader_epoch,
            partition_epoch=wish.partition_epoch,
        )
        [outcome] = result.alter_partition.partitions
        error = ErrorCode(outcome.error.code) if outcome.HasField("error") else None
        state = PartitionState.from_record(outcome.partition)
        self.replica.handle(ProposalAnswered(wish, error, state, self.now_ms))
        self.replica.validate()
        return error

    def partition(self) -> Partition:
        return self.controllers.partition()


def test_a_refusal_that_overtakes_a_raised_min_isr_brings_it() -> None:
    world = LateLeader([1, 2, 3], min_insync_replicas="1")
    world.append(5)
    for node_id in (2, 3):
        world.position(node_id, 0)
        world.ack(node_id, 5)
    assert world.replica.high_watermark == 5
    world.set_min_isr(2)
    world.append(5)  # The followers hang.
    world.tick(2 * LAG_MS)
    assert world.answer() is ErrorCode.INVALID_UPDATE_VERSION
    world.tick(2 * LAG_MS)
    assert world.answer() is None
    assert world.partition().elr == (2, 3)
    assert world.replica.isr == {1}
    assert world.replica.high_watermark == 5, "an eligible leader would lack what was acknowledged"
    assert world.replica.under_min_isr
    world.hear_metadata()
    assert world.replica.high_watermark == 5


def test_an_answer_that_ends_a_move_brings_the_min_isr_of_the_larger_replica_set() -> None:
    world = LateLeader([1, 2])  # The default: 1 with two replicas, 2 with three.
    world.append(5)
    world.position(2, 0)
    world.ack(2, 5)
    assert world.replica.high_watermark == 5
    world.controllers.move([1, 2, 3])
    world.hear_metadata()
    assert world.replica.min_isr == 1
    world.append(5)  # Broker 2 hangs.
    world.now_ms = LAG_MS - 1
    world.position(3, 5)  # It has all that is committed, and may join.
    assert world.answer() is None
    assert world.partition().replicas == (1, 2, 3)
    assert world.replica.min_isr == 2
    world.tick(2 * LAG_MS)
    assert world.answer() is None
    assert world.partition().elr == (2, 3)
    assert world.replica.high_watermark == 5, "an eligible leader would lack what was acknowledged"


def test_metadata_of_before_an_answer_do_not_bring_back_the_min_isr_of_then() -> None:
    world = LateLeader([1, 2, 3], min_insync_replicas="3")
    topic = world.controllers.image.topic_by_id(topic_id(1))
    assert topic is not None
    before = PartitionState.from_record(topic.partitions[0])
    world.set_min_isr(1)
    world.set_min_isr(2)
    world.append(1)
    world.tick(2 * LAG_MS)
    assert world.answer() is ErrorCode.INVALID_UPDATE_VERSION
    assert world.replica.min_isr == 2
    for late in (3, 1):
        world.replica.handle(PartitionChanged(before, late, world.now_ms))
        assert world.replica.min_isr == 2


# --- What is told, and what is not ------------------------------------------------------------


def under_min_isr(*, told: bool) -> Replica:
    """A leader that is alone in sync where two are wanted, with three records of its own."""
    log = log_of()
    replica = Replica(1, log, high_watermark=0, lag_max_ms=LAG_MS)
    alone = state(isr=(1,), min_isr=2 if told else 0)
    replica.handle(PartitionChanged(alone, 2, 0))
    log.epochs.assign(5, 0)
    append(replica, log, 3)
    log.flush()
    assert replica.handle(LogAdvanced(0)) == []
    return replica


def test_a_min_isr_counts_only_from_the_partition_epoch_that_it_belongs_to() -> None:
    replica = under_min_isr(told=True)
    assert replica.handle(MinIsrChanged(1)) == []
    old = state(version=9, isr=(1, 2, 3), min_isr=1)
    assert replica.handle(PartitionChanged(old, 1, 0)) == []
    assert replica.min_isr == 2


def test_a_min_isr_counts_at_once_where_the_controllers_do_not_say_its_epoch() -> None:
    replica = under_min_isr(told=False)
    assert replica.handle(MinIsrChanged(1)) == [isr_changed(1), HighWatermarkChanged(3)]


@pytest.mark.parametrize("told", [True, False])
def test_a_deposed_leader_commits_nothing_by_a_min_isr_that_came_with_its_successor(
    told: bool,
) -> None:
    replica = under_min_isr(told=told)
    successor = state(2, epoch=6, version=13, isr=(2,), min_isr=1 if told else 0)
    assert replica.handle(PartitionChanged(successor, 1, 0)) == [
        RoleChanged(Role.FOLLOWER, 2, 6),
        StatePosition(),
    ]
    assert replica.high_watermark == 0


def test_an_in_sync_set_without_its_min_isr_is_taken_from_the_metadata_alone() -> None:
    log = log_of()
    replica = leader(log, min_isr=1)
    append(replica, log, 2)
    log.flush()
    [proposal] = replica.handle(Tick(LAG_MS + 1))
    assert isinstance(proposal, ProposeIsr)
    done = state(version=11, isr=(1,), min_isr=0)
    assert replica.handle(ProposalAnswered(proposal.proposal, None, done, 0)) == []
    assert replica.pending == proposal.proposal
    [changed] = replica.handle(PartitionChanged(done, 2, 0))
    assert isinstance(changed, IsrChanged)
    assert changed.under_min_isr
    assert replica.high_watermark == 0
