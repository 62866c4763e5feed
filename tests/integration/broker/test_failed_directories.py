"""Nodes with several data directories of which one fails: the rest of the node goes on."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    ConsumerRecord,
    OutOfSyncReplica,
    Producer,
)
from penstock.client.descriptions import PartitionDescription
from tests.integration.cluster import Cluster, NodeProcess
from tests.integration.failing_disk import fail, mend
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
PARTITIONS = 6


class Disks(Cluster):
    """Three nodes with two data directories each, which fail on demand."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, settings={"leader.imbalance.enable": False})
        self.metrics: dict[int, str] = {}
        for node, port in zip(self.nodes.values(), free_ports(3), strict=True):
            node.module = "tests.integration.failing_disk"
            self.metrics[node.node_id] = f"127.0.0.1:{port}"
            with node.config.open("a") as config:
                config.write(f'log.dirs = "{disk(node, "a")},{disk(node, "b")}"\n')
                config.write(f'metrics.listen = "{self.metrics[node.node_id]}"\n')

    def metric(self, node_id: int, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.metrics[node_id]}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def disk(node: NodeProcess, name: str) -> Path:
    return node.directory / name


def held(node: NodeProcess, name: str, topic: str) -> set[int]:
    """The partitions of the topic that a data directory holds."""
    return {int(path.name.rpartition("-")[2]) for path in disk(node, name).glob(f"{topic}-*")}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Disks]:
    running = Disks(tmp_path)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture
def admin(cluster: Disks) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


def partitions(admin: AdminClient, topic: str = "t") -> tuple[PartitionDescription, ...]:
    return admin.describe_topics([topic])[0].partitions


def offline_on(admin: AdminClient, node_id: int, topic: str = "t") -> set[int]:
    return {entry.partition for entry in partitions(admin, topic) if node_id in entry.offline}


def all_in_sync(admin: AdminClient, topic: str = "t") -> bool:
    return all(set(entry.isr) == {1, 2, 3} for entry in partitions(admin, topic))


def produce(producer: Producer, values: set[bytes], prefix: str, topic: str = "t") -> None:
    """A record to each partition, acknowledged by all in sync."""
    sent = {
        partition: producer.send(topic, f"{prefix}-{partition}".encode(), partition=partition)
        for partition in range(PARTITIONS)
    }
    for partition, future in sent.items():
        future.result(TIMEOUT_S)
        values.add(f"{prefix}-{partition}".encode())


def read_all(cluster: Disks, values: set[bytes], topic: str = "t") -> None:
    seen: set[bytes] = set()

    def more(records: list[ConsumerRecord]) -> bool:
        seen.update(record.value or b"" for record in records)
        return values <= seen

    with Consumer(cluster.bootstrap, topics=topic, auto_offset_reset="earliest") as consumer:
        wait_until(lambda: more(consumer.poll(500)), "everything acknowledged is read", TIMEOUT_S)


def test_a_directory_that_fails_takes_only_its_partitions_offline(
    cluster: Disks, admin: AdminClient
) -> None:
    admin.create_topic("t", replica_assignments=[[1, 2, 3] for _ in range(PARTITIONS)])
    node, values = cluster.nodes[1], set[bytes]()
    broken, sound = held(node, "a", "t"), held(node, "b", "t")
    assert broken
    assert sound
    with Producer(cluster.bootstrap, acks="all") as producer:
        produce(producer, values, "before")
        fail(disk(node, "a"), "sync")
        produce(producer, values, "after")  # Goes on: leaders move, and clients find them.
        wait_until(lambda: offline_on(admin, 1) == broken, "they are offline", TIMEOUT_S)
        produce(producer, values, "later")
        by_number = {entry.partition: entry for entry in partitions(admin)}
        assert {by_number[number].leader for number in broken} == {2}
        assert {by_number[number].leader for number in sound} == {1}, "the others stay"
        assert all(1 not in by_number[number].isr for number in broken)
        [topic] = admin.describe_topics(["t"], out_of_sync=True)
        told = {entry.partition: entry.out_of_sync for entry in topic.partitions}
        assert told == {
            number: (OutOfSyncReplica(1, "offline"),) if number in broken else ()
            for number in by_number
        }
        assert node.alive
        assert cluster.metric(1, "penstock_offline_log_directories") == 1
        assert cluster.metric(1, "penstock_offline_replicas") >= len(broken)
        described = {broker.node_id: broker for broker in admin.describe_cluster().brokers}
        assert described[1].offline_replicas >= len(broken)
        assert described[2].offline_replicas == 0
        said = node.log.read_text()
        assert said.count("data_directory_failed") == 1
        assert str(disk(node, "a")) in said
        assert "the disk is mended and the broker is restarted" in said
        # Mended and restarted, it copies what it missed.
        mend(disk(node, "a"))
        node.stop()
        cluster.start()
        wait_until(lambda: not offline_on(admin, 1), "nothing is offline", TIMEOUT_S)
        wait_until(lambda: all_in_sync(admin), "everything is in sync", TIMEOUT_S)
        produce(producer, values, "mended")
    assert held(node, "a", "t") == broken
    assert cluster.metric(1, "penstock_offline_log_directories") == 0
    # What it copied is whole: it can lead alone.
    cluster.nodes[2].stop()
    cluster.nodes[3].stop()
    for number in (2, 3):
        cluster.nodes[number].start()
    cluster.wait_ready()
    read_all(cluster, values)


def test_a_start_without_one_directory_makes_nothing_of_it_anew(
    cluster: Disks, admin: AdminClient
) -> None:
    admin.create_topic("t", replica_assignments=[[1, 2, 3] for _ in range(PARTITIONS)])
    node, values = cluster.nodes[1], set[bytes]()
    with Producer(cluster.bootstrap, acks="all") as producer:
        produce(producer, values, "before")
        broken, sound = held(node, "a", "t"), held(node, "b", "t")
        node.stop()
        away = disk(node, "a").rename(node.directory / "away")
        disk(node, "a").symlink_to(disk(node, "a"))  # What reads it fails: a loop of links.
        cluster.start()
        wait_until(lambda: offline_on(admin, 1) == broken, "they are offline", TIMEOUT_S)
        produce(producer, values, "without")
        admin.create_topic("u", replica_assignments=[[1, 2, 3] for _ in range(PARTITIONS)])
        produce(producer, set(), "new", "u")
        assert {entry.leader for entry in partitions(admin, "u")} == {1}, "what is new goes on"
        wait_until(
            lambda: {e.partition for e in partitions(admin) if 1 in e.isr} == sound,
            "the other directory is in sync",
            TIMEOUT_S,
        )
        assert held(node, "b", "t") == sound, "nothing was made anew"
        node.stop()
        disk(node, "a").unlink()
        away.rename(disk(node, "a"))
        cluster.start()
        wait_until(lambda: all_in_sync(admin), "everything is in sync", TIMEOUT_S)
        assert not offline_on(admin, 1)
        assert held(node, "b", "t") == sound
    read_all(cluster, values)


def test_a_node_without_any_directory_ends(cluster: Disks, admin: AdminClient) -> None:
    admin.create_topic("t", replica_assignments=[[1, 2, 3] for _ in range(PARTITIONS)])
    node, values = cluster.nodes[1], set[bytes]()
    with Producer(cluster.bootstrap, acks="all") as producer:
        produce(producer, values, "before")
        fail(disk(node, "a"), "sync")
        produce(producer, values, "one")
        assert node.alive
        fail(disk(node, "b"), "sync")
        produce(producer, values, "none")
        wait_until(lambda: not node.alive, "the process ends", TIMEOUT_S)
    assert "no other is left" in node.log.read_text()
    read_all(cluster, values)
