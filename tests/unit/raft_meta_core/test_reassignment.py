"""Partitions move: the new replicas are in sync before the old ones leave (KIP-455)."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode, InvalidConfigError
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id


@pytest.fixture
def driver() -> Driver:
    made = Driver(brokers=6)
    made.create(assignments=[[1, 2, 3]])
    return made


def test_a_move_keeps_the_old_replicas_until_the_new_ones_are_in_sync(driver: Driver) -> None:
    answer = driver.move([4, 5, 6])
    assert not answer.HasField("error")
    now = driver.partition()
    assert now.replicas == (1, 2, 3, 4, 5, 6)
    assert (now.adding, now.removing, now.target) == ((4, 5, 6), (1, 2, 3), (4, 5, 6))
    assert (now.isr, now.leader, now.leader_epoch, now.partition_epoch) == ((1, 2, 3), 1, 0, 1)
    assert list(answer.partition.target_replicas) == [4, 5, 6]
    driver.alter([1, 2, 3, 4, 5])
    assert driver.partition().replicas == (1, 2, 3, 4, 5, 6)
    assert driver.partition().leader == 1


def test_a_move_ends_when_all_that_come_are_in_sync(driver: Driver) -> None:
    driver.move([4, 5, 6])
    result = driver.alter([1, 2, 3, 4, 5, 6])
    answer = result.alter_partition.partitions[0]
    assert answer.error.code == ErrorCode.NEW_LEADER_ELECTED
    assert "handed its replica over" in answer.error.message
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader) == ((4, 5, 6), (4, 5, 6), 4)
    assert (now.adding, now.removing, now.target, now.elr) == ((), (), (), ())
    assert (now.leader_epoch, now.partition_epoch) == (1, 2)
    assert driver.state.leader_count(1) == 0
    assert driver.state.not_preferred_count == 0


def test_a_leader_that_stays_gets_a_new_epoch_for_whoever_left(driver: Driver) -> None:
    driver.move([1, 2, 4])
    result = driver.alter([1, 2, 3, 4])
    assert not result.alter_partition.partitions[0].HasField("error")
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader) == ((1, 2, 4), (1, 2, 4), 1)
    assert (now.leader_epoch, now.partition_epoch) == (1, 2)


def test_old_replicas_may_be_dead_when_the_new_ones_take_over(driver: Driver) -> None:
    driver.fence(2)
    driver.fence(3)
    driver.move([1, 4, 5])
    driver.alter([1, 4])
    assert driver.partition().target == (1, 4, 5)
    driver.alter([1, 4, 5])
    assert driver.partition().replicas == (1, 4, 5)


def test_a_move_waits_for_enough_in_sync_replicas_that_stay(driver: Driver) -> None:
    """Of the target 2, 3, 4 only 4 would be in sync: fewer than min.insync.replicas."""
    driver.alter([1])
    driver.move([2, 3, 4])
    driver.alter([1, 4])
    assert driver.partition().target == (2, 3, 4)
    driver.alter([1, 2, 4])
    assert driver.partition().replicas == (2, 3, 4)
    assert driver.partition().leader == 2


def test_fewer_replicas_and_another_order_are_there_at_once(driver: Driver) -> None:
    driver.move([3, 2, 1])
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader) == ((3, 2, 1), (3, 2, 1), 1)
    assert (now.leader_epoch, now.partition_epoch) == (0, 1)
    assert driver.state.not_preferred_count == 1
    driver.move([3])
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader) == ((3,), (3,), 3)
    assert (now.leader_epoch, now.partition_epoch) == (1, 2)


def test_more_replicas_do_not_raise_the_wanted_in_sync_set_before_they_are_there() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1]])
    driver.move([1, 2, 3])
    assert driver.partition().replication_factor == 1
    driver.alter([1, 2])
    driver.alter([1, 2, 3])
    now = driver.partition()
    assert (now.replicas, now.replication_factor) == ((1, 2, 3), 3)
    assert (now.leader_epoch, now.partition_epoch) == (0, 3)


def test_a_cancelled_move_restores_the_replicas_in_their_order(driver: Driver) -> None:
    driver.move([4, 2, 5])
    driver.alter([1, 2, 3, 4])
    assert not driver.move([]).HasField("error")
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader) == ((1, 2, 3), (1, 2, 3), 1)
    assert (now.adding, now.removing, now.target) == ((), (), ())
    assert now.leader_epoch == 1, "what the leader knew of 4 counts no more"


def test_a_cancelled_move_takes_the_leadership_from_a_new_replica(driver: Driver) -> None:
    driver.move([4, 5, 6])
    driver.alter([1, 2, 4])
    driver.fence(1)
    driver.fence(2)
    assert driver.partition().leader == 4
    answer = driver.move([])
    assert answer.error.code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert "wait until one of [1, 2, 3] is" in answer.error.message
    driver.unfence(2)
    driver.alter([2, 4])
    assert not driver.move([]).HasField("error")
    assert driver.partition().leader == 2
    assert driver.partition().isr == (2,)


def test_a_move_under_way_can_lead_elsewhere(driver: Driver) -> None:
    driver.move([4, 5, 6])
    driver.alter([1, 2, 3, 4, 5])
    driver.move([1, 5, 6])
    now = driver.partition()
    assert (now.replicas, now.isr) == ((1, 2, 3, 5, 6), (1, 2, 3, 5))
    assert (now.adding, now.removing, now.target) == ((5, 6), (2, 3), (1, 5, 6))
    assert now.leader_epoch == 1
    driver.move([1, 5])
    assert (driver.partition().replicas, driver.partition().isr) == ((1, 5), (1, 5))


def test_the_same_move_again_changes_nothing(driver: Driver) -> None:
    driver.move([4, 5, 6])
    before = driver.partition()
    driver.move([4, 5, 6])
    assert driver.partition() == before
    driver.move([1, 2, 3])
    assert driver.partition().target == ()
    before = driver.partition()
    driver.move([1, 2, 3])
    assert driver.partition() == before


def test_nobody_leaves_while_nobody_leads() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]])
    driver.alter([2, 1])
    driver.fence(1)
    driver.fence(2)
    driver.move([2])
    assert driver.partition().target == (2,)
    driver.unfence(2)
    assert (driver.partition().replicas, driver.partition().leader) == ((2,), 2)


def test_no_unclean_election_takes_an_empty_replica_unless_an_operator_orders_it() -> None:
    """It would end the move, and the old replica would delete all that there is, coming back."""
    driver = Driver(brokers=2)
    driver.create(assignments=[[1]], unclean_leader_election_enable="true")
    driver.move([2])
    driver.fence(1)
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader, now.recovering) == ((1, 2), (1,), -1, False)
    driver.unfence(1)
    assert driver.partition().leader == 1
    driver.fence(1)
    body = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_UNCLEAN)
    body.partitions.add(topic_id=topic_id(1), partition=0)
    driver.ok(elect_leaders=body)
    now = driver.partition()
    assert (now.replicas, now.isr, now.leader, now.recovering) == ((2,), (2,), 2, True)


def test_a_partition_is_moved_once_by_one_command(driver: Driver) -> None:
    body = cluster_pb2.AlterReassignmentsCommand()
    for replicas in ([4, 5, 6], [1, 2, 5]):
        body.partitions.add(topic_id=topic_id(1), partition=0, replicas=replicas)
    first, second = driver.ok(alter_reassignments=body).alter_reassignments.partitions
    assert not first.HasField("error")
    assert second.error.code == ErrorCode.INVALID_REQUEST
    assert "orders-0 is named twice" in second.error.message
    assert (driver.partition().target, driver.partition().partition_epoch) == ((4, 5, 6), 1)


def test_a_growing_partition_cannot_be_asked_for_more_than_it_has_if_it_is_cancelled() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1]])
    driver.move([1, 2, 3])
    body = cluster_pb2.AlterTopicConfigsCommand(topic="orders", set={"min.insync.replicas": "2"})
    with pytest.raises(InvalidConfigError, match="replication factor 1"):
        driver.ok(alter_topic_configs=body)
    driver.alter([1, 2, 3])
    driver.ok(alter_topic_configs=body)


def test_lower_wanted_in_sync_replicas_may_end_a_move(driver: Driver) -> None:
    driver.create("payments", [[1, 2, 3]], number=2, min_insync_replicas="2")
    driver.alter([1], topic=2)
    driver.move([2, 3, 4], topic=2)
    driver.alter([1, 4], topic=2)
    assert driver.partition(topic=2).target
    driver.ok(
        alter_topic_configs=cluster_pb2.AlterTopicConfigsCommand(
            topic="payments", set={"min.insync.replicas": "1"}
        )
    )
    now = driver.partition(topic=2)
    assert (now.replicas, now.isr, now.leader) == ((2, 3, 4), (4,), 4)


def test_a_check_only_changes_nothing(driver: Driver) -> None:
    before = driver.partition()
    assert not driver.move([4, 5, 6], validate_only=True).HasField("error")
    refused = driver.move([4, 4], validate_only=True)
    assert refused.error.code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert driver.partition() == before


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ([4, 4, 5], "twice"),
        ([4, 9], "not registered: [9]"),
        ([-1], "not registered"),
    ],
)
def test_an_impossible_move_is_refused(driver: Driver, replicas: list[int], said: str) -> None:
    before = driver.partition()
    answer = driver.move(replicas)
    assert answer.error.code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert said in answer.error.message
    assert driver.partition() == before


def test_a_move_below_the_wanted_in_sync_replicas_is_refused(driver: Driver) -> None:
    driver.create("payments", [[1, 2, 3]], number=2, min_insync_replicas="2")
    answer = driver.move([4], topic=2)
    assert answer.error.code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert "min.insync.replicas=2" in answer.error.message


def test_what_does_not_move_or_is_not_there_cannot_be_cancelled(driver: Driver) -> None:
    assert driver.move([]).error.code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    assert driver.move([], topic=9).error.code == ErrorCode.UNKNOWN_TOPIC_ID
    assert driver.move([1], number=9).error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_move_survives_a_snapshot(driver: Driver) -> None:
    driver.move([4, 5, 6])
    driver.alter([1, 2, 3, 4])
    restored = ClusterState.restore(driver.state.snapshot())
    assert restored.snapshot() == driver.state.snapshot()
    assert list(restored.all_partitions()) == list(driver.state.all_partitions())
    restored.validate()


def test_a_deleted_topic_takes_its_move_along(driver: Driver) -> None:
    driver.move([4, 5, 6])
    driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="orders"))
    driver.state.validate()
    driver.create(assignments=[[1, 2, 3]], number=2)
    assert driver.partition(topic=2).target == ()
