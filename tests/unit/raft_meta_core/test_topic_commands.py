from __future__ import annotations

import pytest

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    AccessForbiddenError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id


def test_a_topic_is_made_with_every_replica_in_sync() -> None:
    driver = Driver(brokers=3)
    made = driver.create(partitions=6, replication_factor=3)
    assert made == topic_id(1)
    topic = driver.image.topic("orders")
    assert topic is not None
    assert sorted(topic.partitions) == list(range(6))
    for partition in topic.partitions.values():
        assert partition.leader == partition.replicas[0]
        assert list(partition.isr) == list(partition.replicas)
        assert (partition.leader_epoch, partition.partition_epoch) == (0, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "a\n", "x" * 250])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidTopicError, match="not allowed"):
        Driver(brokers=1).create(name, partitions=1, replication_factor=1)


@pytest.mark.parametrize("name", ["a", "...", "a.b", "a_b", "-", "__own", "x" * 249])
def test_good_names_are_taken(name: str) -> None:
    Driver(brokers=1).create(name, partitions=1, replication_factor=1)


def test_names_that_differ_in_dot_and_underscore_live_together() -> None:
    driver = Driver(brokers=1)
    driver.create("a.b", partitions=1, replication_factor=1)
    driver.create("a_b", number=2, partitions=1, replication_factor=1)


def test_a_name_is_taken_once_and_a_retry_is_answered_as_the_first_time() -> None:
    driver = Driver(brokers=3)
    first = driver.create(partitions=3, replication_factor=2)
    again = cluster_pb2.CreateTopicCommand(
        name="orders", topic_id=first, partition_count=3, replication_factor=2
    )
    result = driver.ok(create_topic=again).create_topic
    assert len(result.replica_assignments) == 3
    with pytest.raises(TopicAlreadyExistsError, match="'orders' exists"):
        driver.create(number=2, partitions=1, replication_factor=1)
    with pytest.raises(InvalidRequestError, match="draw another"):
        driver.create("other", number=1, partitions=1, replication_factor=1)


def test_a_retry_does_not_bring_a_topic_back_that_was_deleted_since() -> None:
    driver = Driver(brokers=1)
    driver.create(assignments=[[1]])
    driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(topic_id=topic_id(1)))
    for name in ("orders", "other"):
        with pytest.raises(InvalidRequestError, match="was deleted since; draw another"):
            driver.create(name, assignments=[[1]])
    driver.create(number=2, assignments=[[1]])


@pytest.mark.parametrize("count", [0, -1, 10_001])
def test_partition_counts_have_bounds(count: int) -> None:
    with pytest.raises(InvalidPartitionsError, match="1 to 10000"):
        Driver(brokers=1).create(partitions=count, replication_factor=1)


def test_a_replication_factor_needs_live_brokers_and_says_how_many_there_are() -> None:
    driver = Driver(brokers=3)
    driver.fence(3)
    with pytest.raises(InvalidReplicationFactorError, match=r"there are 2 \(node ids: 1, 2\)"):
        driver.create(partitions=1, replication_factor=3)
    driver.shut_down(2)
    with pytest.raises(InvalidReplicationFactorError, match=r"there is 1 \(node ids: 1\)"):
        driver.create(partitions=1, replication_factor=2)
    with pytest.raises(InvalidReplicationFactorError, match="at least 1"):
        driver.create(partitions=1, replication_factor=0)
    with pytest.raises(InvalidReplicationFactorError, match=r"there are 0 \(node ids: none\)"):
        Driver().create(partitions=1, replication_factor=1)


def test_configs_are_checked_by_name_and_value() -> None:
    driver = Driver(brokers=1)
    with pytest.raises(InvalidConfigError, match=r"did you mean 'retention\.ms'"):
        driver.create(partitions=1, replication_factor=1, retention_mss="1")
    with pytest.raises(InvalidConfigError, match="whole number"):
        driver.create(partitions=1, replication_factor=1, retention_ms="soon")
    assert not driver.state.topics


def test_explicit_assignments_are_taken_as_they_are() -> None:
    driver = Driver(brokers=3)
    driver.fence(3)
    driver.create(assignments=[[3, 1], [2, 3]])
    assert (driver.partition(0).leader, driver.partition(0).isr) == (1, (1,))
    assert (driver.partition(1).leader, driver.partition(1).isr) == (2, (2,))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ([[1, 1]], "different replicas"),
        ([[1, 2], [1]], "needs 2 different"),
        ([[1, 9]], r"not registered: \[9\]"),
        ([[3]], "none of these brokers is alive"),
        ([[1], []], "needs 1 different"),
    ],
)
def test_bad_assignments_are_refused(assignments: list[list[int]], message: str) -> None:
    driver = Driver(brokers=3)
    driver.fence(3)
    with pytest.raises(InvalidReplicaAssignmentError, match=message):
        driver.create(assignments=assignments)
    assert not driver.state.topics


def test_counts_and_assignments_exclude_each_other() -> None:
    driver = Driver(brokers=2)
    with pytest.raises(InvalidRequestError, match="not both"):
        driver.create(assignments=[[1]], partitions=1)


def test_a_topic_needs_a_drawn_id() -> None:
    driver = Driver(brokers=1)
    for bad in (b"", b"short", bytes(16)):
        body = cluster_pb2.CreateTopicCommand(
            name="t", topic_id=bad, partition_count=1, replication_factor=1
        )
        with pytest.raises(InvalidRequestError, match="16 bytes"):
            driver.ok(create_topic=body)


def test_checking_only_changes_nothing() -> None:
    driver = Driver(brokers=3)
    body = cluster_pb2.CreateTopicCommand(
        name="t",
        topic_id=topic_id(5),
        partition_count=2,
        replication_factor=2,
        validate_only=True,
    )
    assert len(driver.ok(create_topic=body).create_topic.replica_assignments) == 2
    assert not driver.state.topics
    driver.create(partitions=1, replication_factor=1)
    grow = cluster_pb2.CreatePartitionsCommand(topic="orders", total_count=4, validate_only=True)
    driver.ok(create_partitions=grow)
    alter = cluster_pb2.AlterTopicConfigsCommand(
        topic="orders", set={"retention.ms": "1"}, validate_only=True
    )
    driver.ok(alter_topic_configs=alter)
    assert driver.state.partition_count == 1
    assert not driver.state.topics[topic_id(1)].configs


def test_deletion_by_name_and_by_id() -> None:
    driver = Driver(brokers=1)
    driver.create("one", number=1, partitions=2, replication_factor=1)
    driver.create("two", number=2, partitions=2, replication_factor=1)
    driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="one"))
    assert driver.image.topic("one") is None
    wrong = cluster_pb2.DeleteTopicCommand(name="one", topic_id=topic_id(2))
    with pytest.raises(InvalidRequestError, match="'two'"):
        driver.ok(delete_topic=wrong)
    driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(topic_id=topic_id(2)))
    assert driver.state.partition_count == 0
    assert driver.state.leader_count(1) == 0
    with pytest.raises(UnknownTopicIdError):
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(topic_id=topic_id(2)))
    driver.create("one", number=3, partitions=1, replication_factor=1)
    driver.state.validate()


def test_an_unknown_topic_suggests_the_near_name() -> None:
    driver = Driver(brokers=1)
    driver.create(partitions=1, replication_factor=1)
    with pytest.raises(UnknownTopicOrPartitionError, match="did you mean 'orders'"):
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="order"))
    with pytest.raises(UnknownTopicOrPartitionError, match=r"exist$"):
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="quite different"))


def test_suggesting_stays_cheap_with_many_topics() -> None:
    driver = Driver(brokers=1)
    for number in range(600):
        name = f"topic-{number}" if number else "orders"
        driver.create(name, number=number + 1, partitions=1, replication_factor=1)
    with pytest.raises(UnknownTopicOrPartitionError, match="did you mean 'orders'"):
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="order"))


def test_internal_topics_are_the_clusters_own() -> None:
    driver = Driver(brokers=1)
    body = cluster_pb2.CreateTopicCommand(
        name="__offsets",
        topic_id=topic_id(1),
        partition_count=1,
        replication_factor=1,
        internal=True,
    )
    driver.ok(create_topic=body)
    with pytest.raises(AccessForbiddenError, match="cannot be deleted"):
        driver.ok(delete_topic=cluster_pb2.DeleteTopicCommand(name="__offsets"))
    grow = cluster_pb2.CreatePartitionsCommand(topic="__offsets", total_count=4)
    with pytest.raises(AccessForbiddenError, match="more partitions"):
        driver.ok(create_partitions=grow)


def test_partitions_are_added_with_the_topics_replication_factor() -> None:
    driver = Driver(brokers=3)
    driver.create(partitions=3, replication_factor=2)
    driver.ok(create_partitions=cluster_pb2.CreatePartitionsCommand(topic="orders", total_count=6))
    leaders = [driver.partition(number).leader for number in range(6)]
    assert sorted(leaders) == [1, 1, 2, 2, 3, 3]
    assert all(len(driver.partition(number).replicas) == 2 for number in range(6))
    for total in (6, 5):
        with pytest.raises(InvalidPartitionsError, match="not more"):
            driver.ok(
                create_partitions=cluster_pb2.CreatePartitionsCommand(
                    topic="orders", total_count=total
                )
            )
    explicit = cluster_pb2.CreatePartitionsCommand(topic="orders", total_count=7)
    explicit.replica_assignments.add(replicas=[3, 1])
    driver.ok(create_partitions=explicit)
    assert driver.partition(6).replicas == (3, 1)
    explicit.total_count = 9
    with pytest.raises(InvalidReplicaAssignmentError, match="2 partitions are added, but 1 assign"):
        driver.ok(create_partitions=explicit)
    bad = cluster_pb2.CreatePartitionsCommand(topic="orders", total_count=8)
    bad.replica_assignments.add(replicas=[3, 1, 2])
    with pytest.raises(InvalidReplicaAssignmentError, match="needs 2"):
        driver.ok(create_partitions=bad)


def test_one_partition_is_spoken_of_as_one() -> None:
    driver = Driver(brokers=1)
    driver.create(partitions=1, replication_factor=1)
    body = cluster_pb2.CreatePartitionsCommand(topic="orders", total_count=1)
    with pytest.raises(InvalidPartitionsError, match="has 1 partition; 1 is not more"):
        driver.ok(create_partitions=body)


def test_configs_are_set_and_reset_all_or_none() -> None:
    driver = Driver(brokers=1)
    driver.create(partitions=1, replication_factor=1, retention_ms="1000")

    def alter(remove: list[str], **settings: str) -> None:
        configs = {key.replace("_", "."): text for key, text in settings.items()}
        driver.ok(
            alter_topic_configs=cluster_pb2.AlterTopicConfigsCommand(
                topic="orders", set=configs, remove=remove
            )
        )

    alter(["retention.ms"], segment_bytes="1048576")
    assert driver.state.topics[topic_id(1)].configs == {"segment.bytes": "1048576"}
    assert driver.partition().partition_epoch == 0
    with pytest.raises(InvalidConfigError, match="did you mean"):
        alter(["retention.m"], segment_bytes="2097152")
    with pytest.raises(InvalidConfigError, match="both"):
        alter(["segment.bytes"], segment_bytes="2097152")
    with pytest.raises(InvalidConfigError, match="unknown"):
        alter([], nonsense="1")
    assert driver.state.topics[topic_id(1)].configs == {"segment.bytes": "1048576"}


def test_a_changed_min_isr_revises_eligibility_and_voids_changes_on_their_way() -> None:
    driver = Driver(brokers=3)
    driver.create(assignments=[[1, 2, 3]])
    driver.fence(2)
    driver.fence(3)
    assert driver.partition().elr == (3,)
    before = driver.partition()

    def set_min_isr(number: int) -> None:
        body = cluster_pb2.AlterTopicConfigsCommand(topic="orders")
        body.set["min.insync.replicas"] = str(number)
        driver.ok(alter_topic_configs=body)

    set_min_isr(1)
    assert driver.partition().elr == (), "the high watermark may now leave 3 behind"
    assert driver.partition().partition_epoch == before.partition_epoch + 1
    set_min_isr(3)
    assert driver.partition().elr == ()
    assert driver.partition().partition_epoch == before.partition_epoch + 2
    assert driver.partition().leader_epoch == before.leader_epoch
    result = driver.alter([1], partition_epoch=before.partition_epoch)
    assert "partition epoch" in result.alter_partition.partitions[0].error.message


def test_allowing_unclean_elections_elects_at_once() -> None:
    driver = Driver(brokers=2)
    driver.create(assignments=[[1, 2]])
    driver.fence(2)
    driver.fence(1)
    driver.unfence(2)
    assert driver.partition().leader == -1
    body = cluster_pb2.AlterTopicConfigsCommand(topic="orders")
    body.set["unclean.leader.election.enable"] = "true"
    driver.ok(alter_topic_configs=body)
    assert driver.partition().leader == 2
    assert driver.partition().recovering


def test_more_in_sync_replicas_than_there_are_replicas_are_refused_where_a_topic_is_made() -> None:
    driver = Driver(brokers=3)
    with pytest.raises(
        InvalidConfigError, match=r"min\.insync\.replicas=4 .* replication factor 3.* at most 3"
    ):
        driver.create(partitions=1, replication_factor=3, min_insync_replicas="4")
    with pytest.raises(InvalidConfigError, match=r"=2 .* replication factor 1.* at most 1"):
        driver.create(assignments=[[1], [2]], min_insync_replicas="2")
    assert not driver.state.topics
    driver.create(partitions=1, replication_factor=3, min_insync_replicas="3")


def test_more_in_sync_replicas_than_there_are_replicas_are_refused_where_a_topic_is_altered() -> (
    None
):
    driver = Driver(brokers=3)
    driver.create(partitions=1, replication_factor=2)

    def alter(*, validate_only: bool = False, **configs: str) -> None:
        body = cluster_pb2.AlterTopicConfigsCommand(topic="orders", validate_only=validate_only)
        body.set.update({key.replace("_", "."): text for key, text in configs.items()})
        driver.ok(alter_topic_configs=body)

    for validate_only in (True, False):
        with pytest.raises(InvalidConfigError, match=r"=3 .* replication factor 2.* at most 2"):
            alter(min_insync_replicas="3", validate_only=validate_only)
    assert driver.state.topics[topic_id(1)].configs == {}
    alter(min_insync_replicas="2")


def test_a_topic_that_asks_for_too_many_already_can_have_its_other_configs_altered() -> None:
    driver = Driver(brokers=3)
    driver.create(partitions=1, replication_factor=3, min_insync_replicas="3")
    whole = cluster_pb2.ClusterSnapshot.FromString(driver.state.snapshot())
    whole.metadata.topics[0].configs["min.insync.replicas"] = "5"
    driver.state = ClusterState.restore(whole.SerializeToString())
    body = cluster_pb2.AlterTopicConfigsCommand(topic="orders")
    body.set["retention.ms"] = "1"
    driver.ok(alter_topic_configs=body)
    assert driver.state.topics[topic_id(1)].configs == {
        "min.insync.replicas": "5",
        "retention.ms": "1",
    }


@pytest.mark.parametrize("replication_factor", [1, 2, 3])
def test_the_default_is_never_more_than_there_are_replicas(replication_factor: int) -> None:
    driver = Driver(brokers=3)
    driver.create(partitions=1, replication_factor=replication_factor)
    assert driver.state.topics[topic_id(1)].min_isr(replication_factor) <= replication_factor
