"""A leader never acts on an in-sync set under the min ISR of another partition epoch.

The controllers' own state machine answers the leader's wishes, and the answers come before the
metadata that say why.
"""

from __future__ import annotations

import pytest

from penstock.broker.core.partition_events import (
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
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import topic_id
from tests.unit.replication.late_leader import LateLeader
from tests.unit.replication.model import isr_changed
from tests.unit.replication.test_replica import LAG_MS, append, leader, log_of, state


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
