from __future__ import annotations

import itertools

import pytest

from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    ErrorCode,
    InvalidRequestError,
    StaleBrokerEpochError,
    UnsupportedMetadataVersionError,
)
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, Driver, incarnation, topic_id


def test_a_broker_epoch_is_the_index_of_its_registration_and_starts_fenced() -> None:
    driver = Driver()
    epoch = driver.register(4, rack="r1")
    broker = driver.state.brokers[4]
    assert epoch == driver.index == broker.broker_epoch
    assert broker.fenced
    assert (broker.rack, broker.host, broker.port) == ("r1", "127.0.0.1", 9004)


def test_the_same_process_registering_again_is_answered_as_the_first_time() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    before = driver.state.brokers[1]
    assert driver.register(1) == before.broker_epoch
    assert driver.state.brokers[1] is before
    assert driver.partition().leader == 1


def registration(**changes: object) -> cluster_pb2.RegisterBrokerCommand:
    fields = {
        "node_id": 1,
        "incarnation_id": incarnation(1),
        "cluster_id": CLUSTER,
        "host": "h",
        "port": 1,
        **changes,
    }
    return cluster_pb2.RegisterBrokerCommand(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_id": -1}, "negative"),
        ({"incarnation_id": b"short"}, "5 bytes"),
        ({"host": ""}, "broker.advertised"),
        ({"host": "h" * 256}, "256 characters"),
        ({"port": 0}, "port 0"),
        ({"port": 65536}, "port 65536"),
        ({"rack": "r" * 250}, "rack"),
    ],
)
def test_a_malformed_registration_says_what_is_wrong(changes: dict, message: str) -> None:
    result = Driver().run(register_broker=registration(**changes))
    assert result.error.code == ErrorCode.INVALID_REQUEST
    assert message in result.error.message


def test_a_broker_of_another_cluster_is_refused() -> None:
    result = Driver().run(register_broker=registration(cluster_id="other"))
    assert result.error.code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "'other'" in result.error.message


def test_fencing_moves_leadership_and_leaves_the_in_sync_set() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    driver.fence(1)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (2, (2, 3), ())
    assert (partition.leader_epoch, partition.partition_epoch) == (1, 1)
    driver.fence(3)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (2, (2,), (3,))
    assert (partition.leader_epoch, partition.partition_epoch) == (1, 2)


def test_the_last_in_sync_replica_stays_without_leading_and_leads_when_back() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    for node in (1, 2, 3):
        driver.fence(node)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (-1, (3,), (2,))
    driver.unfence(1)
    assert driver.partition().leader == -1, "1 left while enough were in sync: it may lack records"
    driver.unfence(3)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (3, (3,), (2,))


def test_an_eligible_replica_leads_when_the_last_in_sync_one_is_gone() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    for node in (1, 2, 3):
        driver.fence(node)
    driver.unfence(2)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (2, (2,), (3,))
    assert not partition.recovering


def test_fencing_twice_and_unfencing_twice_change_nothing() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]])
    before = driver.state.metadata().brokers[0]
    driver.unfence(1)
    assert driver.state.metadata().brokers[0] == before
    driver.fence(1)
    epoch = driver.partition().partition_epoch
    driver.fence(1)
    assert driver.partition().partition_epoch == epoch


@pytest.mark.parametrize("kind", ["fence_broker", "unfence_broker", "controlled_shutdown"])
def test_commands_about_another_registration_are_stale(kind: str) -> None:
    driver = Driver(brokers=1)
    classes = {
        "fence_broker": cluster_pb2.FenceBrokerCommand,
        "unfence_broker": cluster_pb2.UnfenceBrokerCommand,
        "controlled_shutdown": cluster_pb2.ControlledShutdownCommand,
    }
    stale = classes[kind](node_id=1, broker_epoch=1)
    with pytest.raises(StaleBrokerEpochError, match="not 1"):
        driver.ok(**{kind: stale})
    with pytest.raises(BrokerIdNotRegisteredError):
        driver.ok(**{kind: classes[kind](node_id=9, broker_epoch=1)})


def test_a_new_process_fences_the_one_before() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    epoch = driver.register(1, life=2)
    broker = driver.state.brokers[1]
    assert broker.fenced
    assert broker.broker_epoch == epoch
    assert (driver.partition().leader, driver.partition().isr) == (2, (2, 3))


def test_an_unclean_restart_ends_eligibility_and_a_clean_one_keeps_it() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    driver.fence(3)
    driver.fence(2)
    assert driver.partition().elr == (2,)
    clean_epoch = driver.state.brokers[2].broker_epoch
    newer = driver.start(2, life=2, previous=clean_epoch)
    driver.fence(2)
    assert driver.partition().elr == (2,)
    driver.register(2, life=3, previous=clean_epoch)
    assert driver.partition().elr == (), "it shut down cleanly, but not in its last registration"
    assert newer > clean_epoch


def test_an_unclean_restart_of_a_leader_below_min_isr_is_not_eligible() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]], min_insync_replicas="2")
    driver.register(1, life=2)
    assert (driver.partition().isr, driver.partition().elr) == ((2,), ())
    other = Driver(brokers=2)
    other.create(assignments=[[1, 2]], min_insync_replicas="2")
    other.register(1, life=2, previous=other.state.brokers[1].broker_epoch)
    assert (other.partition().isr, other.partition().elr) == ((2,), (1,))


def test_all_nodes_killed_at_once_come_back_with_the_last_in_sync_one_leading() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    for node in (2, 1, 3):
        driver.register(node, life=2)
    assert (driver.partition().leader, driver.partition().isr) == (-1, (3,))
    driver.unfence(1)
    assert driver.partition().leader == -1
    driver.unfence(3)
    assert (driver.partition().leader, driver.partition().isr) == (3, (3,))


def test_an_unclean_last_member_waits_for_an_eligible_replica_that_kept_everything() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]], min_insync_replicas="2")
    for node in (3, 2, 1):
        driver.fence(node)
    assert (driver.partition().isr, driver.partition().elr) == ((1,), (2,))
    clean_epoch = driver.state.brokers[2].broker_epoch
    driver.start(1, life=2)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (-1, (2,), ())
    driver.start(3, life=2)
    assert driver.partition() == partition
    driver.start(2, life=2, previous=clean_epoch)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (2, (2,), ())
    assert not partition.recovering


def test_an_unclean_last_member_may_lead_by_an_unclean_election_meanwhile() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]], min_insync_replicas="2")
    driver.fence(2)
    driver.fence(1)
    driver.start(1, life=2)
    assert driver.partition().leader == -1
    command = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_UNCLEAN)
    command.partitions.add(topic_id=topic_id(1), partition=0)
    driver.ok(elect_leaders=command)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (1, (1,), ())
    assert partition.recovering


def test_an_eligible_replica_that_lives_leads_instead_of_an_unclean_last_member() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]], min_insync_replicas="3")
    driver.fence(2)
    driver.fence(3)
    driver.unfence(3)
    assert (driver.partition().isr, driver.partition().elr) == ((1,), (2, 3))
    driver.register(1, life=2)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (3, (3,), (2,))


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
@pytest.mark.parametrize("fenced", [(), (3,), (3, 2), (3, 2, 1)])
def test_after_a_power_loss_of_all_some_replica_that_was_complete_leads(
    order: tuple[int, ...], fenced: tuple[int, ...]
) -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]], min_insync_replicas="2")
    for node in fenced:
        driver.fence(node)
    complete = {*driver.partition().isr, *driver.partition().elr}
    for node in order:
        driver.start(node, life=2)
    partition = driver.partition()
    assert partition.leader in complete
    assert not partition.recovering


def test_controlled_shutdown_moves_what_others_can_lead() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3], [2, 1, 3]])
    driver.create("alone", assignments=[[1]], number=2)
    assert driver.shut_down(1) == 1
    assert (driver.partition(0).leader, driver.partition(0).isr) == (2, (2, 3))
    assert (driver.partition(1).leader, driver.partition(1).isr) == (2, (2, 3))
    assert (driver.partition(0, topic=2).leader, driver.partition(0, topic=2).isr) == (1, (1,))
    assert driver.shut_down(1) == 1
    driver.fence(1)
    assert driver.partition(0, topic=2).leader == -1
    with pytest.raises(InvalidRequestError, match="register anew"):
        driver.unfence(1)
    driver.start(1, life=2, previous=driver.state.brokers[1].broker_epoch)
    assert driver.partition(0, topic=2).leader == 1


def test_a_leader_that_shuts_down_hands_over_when_a_follower_catches_up() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]])
    driver.fence(2)
    driver.unfence(2)
    assert driver.partition().isr == (1,)
    assert driver.shut_down(1) == 1
    result = driver.alter([1, 2])
    answer = result.alter_partition.partitions[0]
    assert answer.error.code == ErrorCode.NEW_LEADER_ELECTED
    assert answer.partition.leader == 2
    assert (driver.partition().leader, driver.partition().isr) == (2, (2,))
    driver.state.validate()


def test_unregistering_needs_a_fenced_broker() -> None:
    driver = Driver(brokers=2, metadata_version=1)
    driver.create(assignments=[[1, 2]], min_insync_replicas="2")
    body = cluster_pb2.UnregisterBrokerCommand(node_id=2)
    with pytest.raises(InvalidRequestError, match="is alive"):
        driver.ok(unregister_broker=body)
    driver.fence(2)
    assert driver.partition().elr == (2,)
    driver.ok(unregister_broker=body)
    assert driver.partition().elr == ()
    assert 2 not in driver.state.brokers
    assert 2 not in driver.image.brokers
    with pytest.raises(BrokerIdNotRegisteredError):
        driver.ok(unregister_broker=body)


def test_a_broker_that_still_has_replicas_is_not_unregistered() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2], [2, 1]])
    body = cluster_pb2.UnregisterBrokerCommand(node_id=2)
    driver.fence(2)
    with pytest.raises(InvalidRequestError) as refused:
        driver.ok(unregister_broker=body)
    assert refused.value.message == (
        "broker 2 has 2 replicas still (orders-0, orders-1); next: move them to other brokers with "
        "`penstock partitions reassign --from-broker 2`"
    )
    for number in range(2):
        driver.move([1, 3], number=number)
        driver.alter([1, 3], number=number)
    driver.ok(unregister_broker=body)
    assert 2 not in driver.state.brokers
    driver.state.validate()


def test_of_many_replicas_that_hinder_an_unregistration_three_are_named() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[2]] * 5)
    driver.fence(2)
    with pytest.raises(InvalidRequestError, match=r"\(orders-0, orders-1, orders-2 and 2 more\)"):
        driver.ok(unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=2))


def test_a_broker_must_support_the_version_in_force() -> None:
    driver = Driver()
    driver.register(1, supports=METADATA_VERSION)
    driver.register(2)
    driver.register(3, supports=METADATA_VERSION + 5)
    with pytest.raises(UnsupportedMetadataVersionError, match="install a Penstock"):
        driver.register(4, supports=METADATA_VERSION - 1)
    assert sorted(driver.state.brokers) == [1, 2, 3]
    supported = [driver.state.brokers[node].max_version for node in (1, 2, 3)]
    assert supported == [METADATA_VERSION, METADATA_VERSION, METADATA_VERSION + 5]


def test_producer_ids_are_never_handed_out_twice() -> None:
    driver = Driver(brokers=2)
    blocks = []
    for node in (1, 2, 1):
        body = cluster_pb2.AllocateProducerIdsCommand(**driver.about(node))
        block = driver.ok(allocate_producer_ids=body).allocate_producer_ids
        blocks.append(range(block.first_producer_id, block.first_producer_id + block.count))
    ids = [number for block in blocks for number in block]
    assert len(ids) == len(set(ids)) == 3000
    stale = cluster_pb2.AllocateProducerIdsCommand(node_id=1, broker_epoch=0)
    with pytest.raises(StaleBrokerEpochError):
        driver.ok(allocate_producer_ids=stale)


def test_unclean_election_by_topic_config() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]], unclean_leader_election_enable="true")
    driver.fence(2)
    driver.unfence(2)
    driver.fence(1)
    partition = driver.partition()
    assert (partition.leader, partition.isr, partition.elr) == (2, (2,), ())
    assert partition.recovering
    driver.alter([2])
    assert not driver.partition().recovering
