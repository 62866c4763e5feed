"""Topics, settings and brokers that come, change and go while others are down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.client import (
    AdminClient,
    BrokerIdNotRegisteredError,
    Consumer,
    InvalidRequestError,
    NetworkError,
    Producer,
    TopicPartition,
    UnsupportedMetadataVersionError,
)
from penstock.raft_meta.core.versions import METADATA_VERSION
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("changes"), 4) as running:
        yield running


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


def everything_in(cluster: Cluster, where: TopicPartition, count: int) -> list[bytes]:
    found: list[bytes] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([where])

        def read() -> bool:
            found.extend(record.value for record in consumer.poll(500))
            return len(found) >= count

        wait_until(read, f"{count} records of {where}", TIMEOUT_S)
    return found


def test_a_topic_made_anew_while_a_broker_was_down_has_none_of_the_old_records(
    cluster: Cluster, admin: AdminClient
) -> None:
    where = TopicPartition("anew", 0)
    admin.create_topic("anew", replica_assignments=[[1, 2, 3]])
    with Producer(cluster.bootstrap) as producer:
        for _ in range(5):
            producer.send("anew", b"old").result(TIMEOUT_S)
    cluster.nodes[3].kill()
    admin.delete_topic("anew")
    admin.create_topic("anew", replica_assignments=[[1, 2, 3]])
    with Producer(cluster.bootstrap) as producer:
        producer.send("anew", b"new").result(TIMEOUT_S)
    cluster.start()
    wait_until(
        lambda: len(admin.describe_topics(["anew"])[0].partitions[0].isr) == 3,
        "all replicas are in sync",
        TIMEOUT_S,
    )
    admin.alter_partition_reassignments({where: [3, 1, 2]})
    admin.elect_leaders([where])
    assert admin.describe_topics(["anew"])[0].partitions[0].leader == 3
    assert everything_in(cluster, where, 1) == [b"new"]
    logs = cluster.nodes[3].directory / "logs"
    assert not list(logs.glob("anew-*.stray")), "what was deleted is not kept"


def test_a_topic_deleted_while_a_broker_was_down_is_removed_there(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("gone", replica_assignments=[[1, 2, 3], [2, 3, 1]])
    directories = [cluster.nodes[3].partition_directory("gone", number) for number in (0, 1)]
    wait_until(lambda: all(path.exists() for path in directories), "the replicas", TIMEOUT_S)
    cluster.nodes[3].kill()
    admin.delete_topic("gone")
    cluster.start()
    logs = directories[0].parent
    wait_until(lambda: not list(logs.glob("gone-*")), "nothing is left of it", TIMEOUT_S)


def test_partitions_are_added_while_a_replica_of_the_topic_is_down(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("growing", partitions=1, replication_factor=3)
    cluster.nodes[4].stop()
    admin.create_partitions("growing", 4)
    with Producer(cluster.bootstrap) as producer:
        for number in range(4):
            producer.send("growing", b"%d" % number, partition=number).result(TIMEOUT_S)
    cluster.start()
    for number in range(4):
        assert everything_in(cluster, TopicPartition("growing", number), 1) == [b"%d" % number]


def test_shared_settings_take_effect_on_brokers_and_controller(
    cluster: Cluster, admin: AdminClient
) -> None:
    def lag_on(node: int) -> tuple[str, str]:
        entries = {entry.key: entry for entry in admin.describe_node_configs(node)}
        entry = entries["replica.lag.time.max.ms"]
        return entry.value, entry.source

    assert lag_on(2) == ("10000", "default")
    admin.alter_cluster_configs({"replica.lag.time.max.ms": 9000, "leader.imbalance.enable": False})
    for node in cluster.nodes:
        wait_until(lambda node=node: lag_on(node) == ("9000", "cluster"), "it is known", TIMEOUT_S)
    admin.create_topic("leaning", replica_assignments=[[2, 1, 3]])
    leader = lambda: admin.describe_topics(["leaning"])[0].partitions[0].leader  # noqa: E731 - short.
    cluster.nodes[2].stop()
    wait_until(lambda: leader() == 1, "another leads", TIMEOUT_S)
    cluster.start()
    wait_until(
        lambda: 2 in admin.describe_topics(["leaning"])[0].partitions[0].isr, "in sync", TIMEOUT_S
    )

    def has_it_again() -> bool:
        try:
            return lag_on(2) == ("9000", "cluster")
        except NetworkError:
            return False  # gRPC remembers for some seconds that nobody listened there.

    wait_until(has_it_again, "a restarted node takes them from the metadata", TIMEOUT_S)
    assert leader() == 1
    admin.alter_cluster_configs({"leader.imbalance.check.interval.ms": 200})
    admin.alter_cluster_configs(remove=["leader.imbalance.enable", "replica.lag.time.max.ms"])
    wait_until(lambda: leader() == 2, "the preferred leader leads", TIMEOUT_S)
    wait_until(lambda: lag_on(3) == ("10000", "default"), "reset", TIMEOUT_S)


def test_the_level_of_a_new_cluster_is_the_newest(admin: AdminClient) -> None:
    described = admin.describe_cluster()
    assert described.metadata_version == METADATA_VERSION
    assert {broker.max_metadata_version for broker in described.brokers} == {METADATA_VERSION}
    assert admin.raise_metadata_version() == METADATA_VERSION
    with pytest.raises(UnsupportedMetadataVersionError, match="not every controller knows"):
        admin.raise_metadata_version(METADATA_VERSION + 1)


def test_a_broker_is_forgotten_once_it_is_stopped_and_empty(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("held", replica_assignments=[[4, 1]])
    with pytest.raises(InvalidRequestError, match="is alive"):
        admin.unregister_broker(4)
    cluster.nodes[4].stop()
    with pytest.raises(InvalidRequestError, match="move them to other brokers"):
        admin.unregister_broker(4)
    holding = {
        TopicPartition(topic.name, entry.partition): [
            *(node for node in entry.replicas if node != 4),
            next(node for node in (1, 2, 3) if node not in entry.replicas),
        ]
        for topic in admin.list_topics(include_internal=True)
        for entry in topic.partitions
        if 4 in entry.replicas
    }
    admin.alter_partition_reassignments(holding)
    wait_until(lambda: not admin.list_partition_reassignments(), "it is empty", TIMEOUT_S)
    admin.unregister_broker(4)
    assert 4 not in {broker.node_id for broker in admin.describe_cluster().brokers}
    with pytest.raises(BrokerIdNotRegisteredError):
        admin.unregister_broker(4)
