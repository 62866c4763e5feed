"""A live broker says which of its replicas it can't serve (KIP-112)."""

from __future__ import annotations

import pytest

from penstock.raft_meta.core.model import NO_LEADER
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id

ONLINE = cluster_pb2.REPLICA_STATE_ONLINE
OFFLINE = cluster_pb2.REPLICA_STATE_OFFLINE
DAMAGED = cluster_pb2.REPLICA_STATE_DAMAGED


@pytest.fixture
def driver() -> Driver:
    made = Driver(brokers=4)
    made.create(assignments=[[1, 2, 3], [1, 3, 2], [1, 4, 2]], min_insync_replicas="1")
    return made


def reported(driver: Driver, node: int, state: cluster_pb2.ReplicaState.ValueType) -> None:
    assert not driver.report(node, state).HasField("error")
    driver.state.validate()


def test_an_offline_leader_gives_its_leadership_to_an_in_sync_replica(driver: Driver) -> None:
    reported(driver, 1, OFFLINE)
    now = driver.partition()
    assert (now.leader, now.isr, now.elr, now.offline) == (2, (2, 3), (), (1,))
    assert (now.leader_epoch, now.partition_epoch) == (1, 1)


def test_only_the_partitions_named_are_taken_offline(driver: Driver) -> None:
    driver.ok(
        report_replicas=cluster_pb2.ReportReplicasCommand(
            **driver.about(1),
            replicas=[
                cluster_pb2.ReplicaReport(topic_id=topic_id(1), partition=number, state=OFFLINE)
                for number in (0, 2)
            ],
        )
    )
    assert [driver.partition(number).leader for number in range(3)] == [2, 1, 4]
    assert driver.partition(1).offline == ()


def test_an_offline_follower_leaves_the_in_sync_set_without_a_new_leader_epoch(
    driver: Driver,
) -> None:
    reported(driver, 3, OFFLINE)
    now = driver.partition()
    assert (now.leader, now.isr, now.offline) == (1, (1, 2), (3,))
    assert (now.leader_epoch, now.partition_epoch) == (0, 1)


def test_an_offline_replica_can_not_be_put_in_sync(driver: Driver) -> None:
    reported(driver, 3, OFFLINE)
    answer = driver.alter([1, 2, 3]).alter_partition.partitions[0]
    assert answer.error.code == ErrorCode.INELIGIBLE_REPLICA
    assert "offline" in answer.error.message
    reported(driver, 3, ONLINE)
    assert not driver.alter([1, 2, 3]).alter_partition.partitions[0].HasField("error")


def test_the_last_in_sync_replica_stays_without_leading_until_it_is_online(driver: Driver) -> None:
    driver.alter([1])
    reported(driver, 1, OFFLINE)
    now = driver.partition()
    assert (now.leader, now.isr, now.offline) == (NO_LEADER, (1,), (1,))
    driver.fence(2)
    driver.unfence(2)
    assert driver.partition().leader == NO_LEADER
    reported(driver, 1, ONLINE)
    assert (driver.partition().leader, driver.partition().offline) == (1, ())


@pytest.mark.parametrize("why", ["offline", "fenced"])
def test_who_can_not_lead_now_stands_in_for_nobody_that_is_damaged(
    driver: Driver, why: str
) -> None:
    """It is the last one in sync all the same; what the damaged one has may be needed yet."""
    driver.alter([1])
    if why == "offline":
        reported(driver, 1, OFFLINE)
    else:
        driver.fence(1)
    before = driver.partition()
    reported(driver, 2, DAMAGED)
    assert driver.partition() == before
    if why == "offline":
        reported(driver, 1, ONLINE)
    else:
        driver.unfence(1)
    reported(driver, 2, DAMAGED)
    assert driver.partition().offline == (2,)


def test_an_eligible_replica_leads_in_the_place_of_an_offline_last_one() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2]], min_insync_replicas="2")
    driver.fence(2)
    assert (driver.partition().isr, driver.partition().elr) == ((1,), (2,))
    reported(driver, 1, OFFLINE)
    assert (driver.partition().isr, driver.partition().leader) == ((2,), NO_LEADER)
    driver.unfence(2)
    assert driver.partition().leader == 2


def test_whoever_leaves_offline_is_no_eligible_leader() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2]], min_insync_replicas="2")
    reported(driver, 2, OFFLINE)
    assert (driver.partition().isr, driver.partition().elr) == ((1,), ())


@pytest.mark.parametrize("clean", [True, False])
def test_a_new_registration_begins_with_every_replica_online(driver: Driver, clean: bool) -> None:
    reported(driver, 1, OFFLINE)
    old = driver.state.brokers[1].broker_epoch
    driver.start(1, life=2, previous=old if clean else -1)
    driver.state.validate()
    now = driver.partition()
    assert (now.leader, now.isr, now.elr, now.offline) == (2, (2, 3), (), ())
    assert now.partition_epoch == 2


def test_a_report_of_an_earlier_registration_is_refused(driver: Driver) -> None:
    old = driver.about(1)
    driver.start(1, life=2)
    body = cluster_pb2.ReportReplicasCommand(**old)
    body.replicas.add(topic_id=topic_id(1), partition=0, state=OFFLINE)
    assert driver.run(report_replicas=body).error.code == ErrorCode.STALE_BROKER_EPOCH
    assert driver.partition().offline == ()


def test_the_same_report_again_changes_nothing(driver: Driver) -> None:
    reported(driver, 1, OFFLINE)
    before = driver.partition()
    reported(driver, 1, OFFLINE)
    reported(driver, 2, ONLINE)
    assert driver.partition() == before


def test_what_a_broker_says_of_partitions_that_are_not_its_own_is_passed_over(
    driver: Driver,
) -> None:
    before = [driver.partition(number) for number in range(3)]
    assert not driver.report(4, OFFLINE, 0, 7).HasField("error")
    assert not driver.report(2, OFFLINE, 0, topic=9).HasField("error")
    assert [driver.partition(number) for number in range(3)] == before


@pytest.mark.parametrize("states", [[0], [9], [OFFLINE, ONLINE]])
def test_a_malformed_report_is_refused_as_a_whole(driver: Driver, states: list[int]) -> None:
    body = cluster_pb2.ReportReplicasCommand(**driver.about(1))
    body.replicas.add(topic_id=topic_id(1), partition=1, state=OFFLINE)
    for state in states:
        body.replicas.add(topic_id=topic_id(1), partition=0, state=state)  # type: ignore[arg-type]
    assert driver.run(report_replicas=body).error.code == ErrorCode.INVALID_REQUEST
    assert driver.partition(1).offline == ()


def test_before_metadata_version_3_no_report_is_taken() -> None:
    driver = Driver(brokers=2, metadata_version=2)
    driver.create(assignments=[[1, 2]])
    refused = driver.report(1, OFFLINE)
    assert refused.error.code == ErrorCode.UNSUPPORTED_METADATA_VERSION


def test_an_offline_preferred_leader_is_not_elected(driver: Driver) -> None:
    driver.alter([1])
    reported(driver, 1, OFFLINE)
    body = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_PREFERRED)
    body.partitions.add(topic_id=topic_id(1), partition=0)
    [answer] = driver.ok(elect_leaders=body).elect_leaders.partitions
    assert answer.error.code == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert "can't serve its replica" in answer.error.message


def test_an_ordered_unclean_election_passes_over_the_offline_replica(driver: Driver) -> None:
    driver.alter([1])
    reported(driver, 1, OFFLINE)
    body = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_UNCLEAN)
    body.partitions.add(topic_id=topic_id(1), partition=0)
    assert driver.ok(elect_leaders=body).elect_leaders.partitions[0].leader == 2


def test_an_offline_replica_that_is_moved_away_is_forgotten(driver: Driver) -> None:
    reported(driver, 1, OFFLINE)
    assert not driver.move([4, 2, 3]).HasField("error")
    assert not driver.alter([2, 3, 4]).alter_partition.partitions[0].HasField("error")
    now = driver.partition()
    assert (now.replicas, now.offline, now.leader) == ((4, 2, 3), (), 2)
    driver.state.validate()


def test_a_damaged_replica_leaves_when_another_in_sync_one_can_lead(driver: Driver) -> None:
    reported(driver, 1, DAMAGED)
    now = driver.partition()
    assert (now.leader, now.isr, now.offline) == (2, (2, 3), (1,))


def test_a_damaged_replica_that_alone_is_in_sync_stays(driver: Driver) -> None:
    driver.alter([1])
    before = driver.partition()
    reported(driver, 1, DAMAGED)
    assert driver.partition() == before
