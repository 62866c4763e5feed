from __future__ import annotations

import pytest

from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id


@pytest.fixture
def driver() -> Driver:
    made = Driver(brokers=4)
    made.create(assignments=[[1, 2, 3]])
    return made


def refusal(result: cluster_pb2.CommandResult) -> tuple[int, str]:
    assert not result.HasField("error"), result
    answer = result.alter_partition.partitions[0]
    return answer.error.code, answer.error.message


def test_a_leader_shrinks_and_grows_its_in_sync_set(driver: Driver) -> None:
    result = driver.alter([1, 2])
    answer = result.alter_partition.partitions[0]
    assert not answer.HasField("error")
    assert list(answer.partition.isr) == [1, 2]
    assert answer.partition.partition_epoch == 1
    assert answer.partition.leader_epoch == 0
    driver.alter([1])
    assert (driver.partition().isr, driver.partition().elr) == ((1,), (2,))
    driver.alter([3, 1])
    assert (driver.partition().isr, driver.partition().elr) == ((1, 3), ())


def test_the_same_in_sync_set_changes_nothing(driver: Driver) -> None:
    result = driver.alter([3, 2, 1])
    assert refusal(result) == (0, "")
    assert driver.partition().partition_epoch == 0


def test_each_answer_tells_the_min_isr_of_the_partition_epoch_that_it_tells(
    driver: Driver,
) -> None:
    def min_isr(result: cluster_pb2.CommandResult) -> int:
        return result.alter_partition.partitions[0].partition.min_insync_replicas

    assert min_isr(driver.alter([1, 2])) == 2, "the default of three replicas"
    body = cluster_pb2.AlterTopicConfigsCommand(topic="orders")
    body.set["min.insync.replicas"] = "3"
    driver.ok(alter_topic_configs=body)
    refused = driver.alter([1], partition_epoch=1)
    assert refusal(refused)[0] == ErrorCode.INVALID_UPDATE_VERSION
    assert min_isr(refused) == 3
    driver.ok(
        alter_topic_configs=cluster_pb2.AlterTopicConfigsCommand(
            topic="orders", remove=["min.insync.replicas"]
        )
    )
    assert min_isr(driver.alter([1, 2, 3])) == 2


def test_the_default_min_isr_comes_with_the_answer_that_makes_the_replica_set_larger(
    driver: Driver,
) -> None:
    driver.create("small", [[1, 2]], number=2)
    moving = driver.move([1, 2, 3], topic=2)
    assert moving.partition.min_insync_replicas == 1, "what is only being added is still empty"
    [answer] = driver.alter([1, 2, 3], topic=2).alter_partition.partitions
    assert not answer.partition.adding_replicas
    assert answer.partition.min_insync_replicas == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": 9, "node": 1}, ErrorCode.UNKNOWN_TOPIC_ID),
        ({"number": 1, "node": 1}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"number": -1, "node": 1}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"leader_epoch": -1}, ErrorCode.FENCED_LEADER_EPOCH),
        ({"leader_epoch": 1}, ErrorCode.UNKNOWN_LEADER_EPOCH),
        ({"node": 2}, ErrorCode.NOT_LEADER),
        ({"partition_epoch": 1}, ErrorCode.INVALID_UPDATE_VERSION),
        ({"partition_epoch": -1}, ErrorCode.INVALID_UPDATE_VERSION),
    ],
)
def test_a_wish_without_authority_is_refused(driver: Driver, changes: dict, code: int) -> None:
    before = driver.partition()
    assert refusal(driver.alter([1, 2], **changes))[0] == code
    assert driver.partition() == before


@pytest.mark.parametrize("member", [1, 2])
def test_a_member_of_another_registration_is_refused(driver: Driver, member: int) -> None:
    before = driver.partition()
    refused = driver.alter([1, 2], epochs={member: 1})
    assert refusal(refused)[0] == ErrorCode.INELIGIBLE_REPLICA
    assert driver.partition() == before._replace(partition_epoch=1)


def test_a_wish_refused_for_a_member_is_judged_only_once(driver: Driver) -> None:
    driver.alter([1, 2])
    driver.fence(3)
    before = driver.partition()
    refused = driver.alter([1, 2, 3])
    assert refusal(refused)[0] == ErrorCode.INELIGIBLE_REPLICA
    used_up = before._replace(partition_epoch=before.partition_epoch + 1)
    assert driver.partition() == used_up
    answered = refused.alter_partition.partitions[0].partition
    assert answered.partition_epoch == used_up.partition_epoch, "so the leader knows at once"
    driver.unfence(3)
    late = driver.alter([1, 2, 3], partition_epoch=before.partition_epoch)
    assert refusal(late)[0] == ErrorCode.INVALID_UPDATE_VERSION
    assert driver.partition() == used_up
    assert refusal(driver.alter([1, 2, 3])) == (0, "")


def test_of_one_command_each_partition_has_its_own_refusal(driver: Driver) -> None:
    driver.create("other", [[1, 2, 4]], number=2)
    driver.fence(3)
    body = cluster_pb2.AlterPartitionCommand(**driver.about(1))
    for topic, isr in ((1, [1, 2, 3]), (2, [1, 2])):
        entry = body.partitions.add(
            topic_id=topic_id(topic),
            partition=0,
            partition_epoch=driver.partition(topic=topic).partition_epoch,
        )
        for node in isr:
            epoch = driver.state.brokers[node].broker_epoch
            entry.new_isr.add(node_id=node, broker_epoch=epoch)
    answers = driver.ok(alter_partition=body).alter_partition.partitions
    assert [answer.error.code for answer in answers] == [ErrorCode.INELIGIBLE_REPLICA, 0]
    assert (driver.partition().isr, driver.partition().partition_epoch) == ((1, 2), 2)
    assert (driver.partition(topic=2).isr, driver.partition(topic=2).partition_epoch) == ((1, 2), 1)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_before_metadata_version_4_a_refusal_changes_nothing(level: int) -> None:
    driver = Driver(brokers=3, metadata_version=level)
    driver.create(assignments=[[1, 2, 3]])
    driver.fence(3)
    before = driver.state.snapshot()
    refused = driver.alter([1, 2, 3])
    assert refusal(refused)[0] == ErrorCode.INELIGIBLE_REPLICA
    after = cluster_pb2.ClusterSnapshot.FromString(driver.state.snapshot())
    was = cluster_pb2.ClusterSnapshot.FromString(before)
    assert after.metadata.partitions == was.metadata.partitions


@pytest.mark.parametrize("isr", [[], [2, 3], [1, 1], [1, 4], [1, 2, 2, 3]])
def test_a_malformed_in_sync_set_is_refused(driver: Driver, isr: list[int]) -> None:
    assert refusal(driver.alter(isr))[0] == ErrorCode.INVALID_REQUEST
    assert driver.partition().isr == (1, 2, 3)


def test_a_stale_leader_broker_is_refused_as_a_whole(driver: Driver) -> None:
    result = driver.alter([1, 2], broker_epoch=0)
    assert result.error.code == ErrorCode.STALE_BROKER_EPOCH


def test_fenced_reregistered_and_stopping_replicas_stay_out() -> None:
    # At version 1 a broker can be unregistered with its replicas.
    driver = Driver(brokers=4, metadata_version=1)
    driver.create(assignments=[[1, 2, 3]])
    old = driver.state.brokers[2].broker_epoch
    driver.fence(2)
    code, message = refusal(driver.alter([1, 2, 3]))
    assert code == ErrorCode.INELIGIBLE_REPLICA
    assert "is fenced" in message
    driver.start(2, life=2)
    code, message = refusal(driver.alter([1, 2, 3], epochs={2: old}))
    assert code == ErrorCode.INELIGIBLE_REPLICA
    assert f"not {old}" in message
    driver.shut_down(3)
    code, message = refusal(driver.alter([1, 3]))
    assert code == ErrorCode.INELIGIBLE_REPLICA
    assert "shuts down" in message
    assert refusal(driver.alter([1, 2])) == (0, "")
    driver.fence(3)
    driver.ok(unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=3))
    code, message = refusal(driver.alter([1, 2, 3]))
    assert code == ErrorCode.INELIGIBLE_REPLICA
    assert "not registered" in message


def test_a_second_wish_for_one_partition_in_one_command_is_based_on_the_first(
    driver: Driver,
) -> None:
    body = cluster_pb2.AlterPartitionCommand(**driver.about(1))
    for isr in ([1, 2], [1]):
        entry = body.partitions.add(topic_id=topic_id(1), partition=0)
        for node in isr:
            epoch = driver.state.brokers[node].broker_epoch
            entry.new_isr.add(node_id=node, broker_epoch=epoch)
    answers = driver.ok(alter_partition=body).alter_partition.partitions
    assert not answers[0].HasField("error")
    assert answers[1].error.code == ErrorCode.INVALID_UPDATE_VERSION
    assert list(answers[1].partition.isr) == [1, 2]


def elect(driver: Driver, kind: int, number: int = 0, topic: int = 1) -> tuple[int, int]:
    body = cluster_pb2.ElectLeadersCommand(type=kind)  # type: ignore[arg-type]
    body.partitions.add(topic_id=topic_id(topic), partition=number)
    answer = driver.ok(elect_leaders=body).elect_leaders.partitions[0]
    return answer.error.code, answer.leader


def test_preferred_elections(driver: Driver) -> None:
    preferred = cluster_pb2.ELECTION_TYPE_PREFERRED
    assert elect(driver, preferred) == (ErrorCode.ELECTION_NOT_NEEDED, 1)
    driver.fence(1)
    assert elect(driver, preferred) == (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, 2)
    driver.unfence(1)
    assert elect(driver, preferred) == (ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, 2)
    assert driver.state.not_preferred_count == 1
    driver.alter([1, 2, 3])
    epoch = driver.partition().leader_epoch
    assert elect(driver, preferred) == (0, 1)
    assert driver.partition().leader_epoch == epoch + 1
    assert driver.state.not_preferred_count == 0


def test_unclean_elections(driver: Driver) -> None:
    unclean = cluster_pb2.ELECTION_TYPE_UNCLEAN
    assert elect(driver, unclean) == (ErrorCode.ELECTION_NOT_NEEDED, 1)
    for node in (3, 2, 1):
        driver.fence(node)
    assert elect(driver, unclean) == (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, -1)
    driver.unfence(3)
    assert driver.partition().leader == -1
    assert elect(driver, unclean) == (0, 3)
    partition = driver.partition()
    assert (partition.isr, partition.elr, partition.recovering) == ((3,), (), True)


def test_elections_of_what_is_not_there(driver: Driver) -> None:
    preferred = cluster_pb2.ELECTION_TYPE_PREFERRED
    assert elect(driver, preferred, topic=9) == (ErrorCode.UNKNOWN_TOPIC_ID, -1)
    assert elect(driver, preferred, number=9) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
    for kind in (0, 17):
        body = cluster_pb2.ElectLeadersCommand(type=kind)  # type: ignore[arg-type]
        assert driver.run(elect_leaders=body).error.code == ErrorCode.INVALID_REQUEST


def why_not(driver: Driver, kind: int) -> str:
    body = cluster_pb2.ElectLeadersCommand(type=kind)  # type: ignore[arg-type]
    body.partitions.add(topic_id=topic_id(1), partition=0)
    return driver.ok(elect_leaders=body).elect_leaders.partitions[0].error.message


def test_a_refused_election_says_what_would_help(driver: Driver) -> None:
    preferred, unclean = cluster_pb2.ELECTION_TYPE_PREFERRED, cluster_pb2.ELECTION_TYPE_UNCLEAN
    driver.shut_down(1)
    driver.alter([2, 3])
    driver.fence(1)
    assert "is not alive; next: start it" in why_not(driver, preferred)
    driver.start(1, life=2)
    assert "is not in sync; next: wait until it is among `Isr`" in why_not(driver, preferred)
    driver.alter([1, 2, 3])
    for node in (1, 2, 3):
        driver.fence(node)
    assert "is alive; next: start one of these brokers" in why_not(driver, unclean)
