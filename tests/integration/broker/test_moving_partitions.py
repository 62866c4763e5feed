"""Partitions that move from broker to broker: nothing is lost, and nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.client import AdminClient, Consumer, Producer, TopicPartition
from penstock.client.descriptions import TopicDescription
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("moving"), 4) as running:
        yield running


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


class Load:
    """Writes numbered records with acks=all until it is stopped; counts the acknowledged."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.topic = topic
        self.acknowledged = 0
        self._bootstrap = cluster.bootstrap
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        try:
            with Producer(self._bootstrap, acks="all", linger_ms=2) as producer:
                while not self._over.is_set():
                    first = self.acknowledged
                    sent = [
                        producer.send(self.topic, str(number).encode() * 20, partition=number % 2)
                        for number in range(first, first + 20)
                    ]
                    for future in sent:
                        future.result(TIMEOUT_S)
                    self.acknowledged += len(sent)
        except Exception as error:  # It is raised where the test sees it.
            self._failure = error

    def wait_for_more(self) -> None:
        target = self.acknowledged + 200
        wait_until(
            lambda: self.acknowledged >= target or self._failure is not None, "writes", TIMEOUT_S
        )


def describe(admin: AdminClient, topic: str) -> TopicDescription:
    [found] = admin.describe_topics([topic])
    return found


def wait_moved(admin: AdminClient) -> None:
    wait_until(lambda: not admin.list_partition_reassignments(), "the moves are over", TIMEOUT_S)


def values(cluster: Cluster, topic: str, count: int) -> list[int]:
    found: list[int] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0), TopicPartition(topic, 1)])

        def all_there() -> bool:
            found.extend(
                int(record.value[: len(record.value) // 20]) for record in consumer.poll(500)
            )
            return len(found) >= count

        wait_until(all_there, f"{count} records", TIMEOUT_S)
        found.extend(int(record.value[: len(record.value) // 20]) for record in consumer.poll(300))
    return found


def test_a_topic_moves_under_load_and_loses_nothing(cluster: Cluster, admin: AdminClient) -> None:
    admin.create_topic("busy", replica_assignments=[[1, 2], [2, 1]])
    where = [TopicPartition("busy", number) for number in range(2)]
    with Load(cluster, "busy") as load:
        load.wait_for_more()
        admin.alter_partition_reassignments({where[0]: [3, 4], where[1]: [4, 3]})
        wait_moved(admin)
        load.wait_for_more()
        moved = describe(admin, "busy").partitions
        assert [entry.replicas for entry in moved] == [(3, 4), (4, 3)]
        assert [sorted(entry.isr) for entry in moved] == [[3, 4], [3, 4]]
        assert [entry.leader for entry in moved] == [3, 4]
        admin.alter_partition_reassignments({where[0]: [1, 2, 3]})
        wait_moved(admin)
        load.wait_for_more()
    assert sorted(values(cluster, "busy", load.acknowledged)) == list(range(load.acknowledged))

    def tidy() -> bool:
        return not any(
            cluster.nodes[node].partition_directory("busy", number).exists()
            for number, node in ((0, 4), (1, 1), (1, 2))
        )

    wait_until(tidy, "the files of replicas that moved away are gone", TIMEOUT_S)


def test_a_move_is_cancelled_midway(cluster: Cluster, admin: AdminClient) -> None:
    admin.create_topic("wavering", replica_assignments=[[1, 2], [2, 1]])
    where = TopicPartition("wavering", 0)
    cluster.nodes[4].stop()
    with Load(cluster, "wavering") as load:
        load.wait_for_more()
        admin.alter_partition_reassignments({where: [3, 4]})

        def midway() -> bool:
            [move] = admin.list_partition_reassignments([where])
            return {entry.node_id for entry in move.replicas if entry.in_sync} == {1, 2, 3}

        wait_until(midway, "the living replica is in sync", TIMEOUT_S)
        [move] = admin.list_partition_reassignments()
        assert (move.target, move.adding, move.removing) == ((3, 4), (3, 4), (1, 2))
        progress = {entry.node_id: entry for entry in move.replicas}
        assert progress[3].log_end_offset > 0
        assert progress[4].log_end_offset == -1
        admin.alter_partition_reassignments({where: None})
        assert admin.list_partition_reassignments() == []
        load.wait_for_more()
    [first, _] = describe(admin, "wavering").partitions
    assert first.replicas == (1, 2)
    assert sorted(first.isr) == [1, 2]
    assert sorted(values(cluster, "wavering", load.acknowledged)) == list(range(load.acknowledged))
    directory = cluster.nodes[3].partition_directory("wavering", 0)
    wait_until(lambda: not directory.exists(), "the half-made replica is gone", TIMEOUT_S)
    cluster.start()


def test_a_replica_that_moved_away_while_its_broker_was_down_is_removed(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("absent", replica_assignments=[[1, 3], [3, 1]])
    where = [TopicPartition("absent", number) for number in range(2)]
    with Producer(cluster.bootstrap) as producer:
        producer.send("absent", b"precious", partition=1).result(TIMEOUT_S)
    directory = cluster.nodes[3].partition_directory("absent", 1)
    assert directory.exists()
    cluster.nodes[3].stop()
    admin.alter_partition_reassignments({where[0]: [1, 2], where[1]: [2, 1]})
    wait_moved(admin)
    cluster.start()
    wait_until(lambda: not directory.exists(), "the replica is removed", TIMEOUT_S)
    assert not list(directory.parent.glob("absent-*.stray"))
    admin.alter_partition_reassignments({where[1]: [3, 1]})
    wait_moved(admin)
    assert directory.exists(), "it may come back"
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([where[1]])
        wait_until(
            lambda: any(record.value == b"precious" for record in consumer.poll(500)),
            "the record is there",
            TIMEOUT_S,
        )
