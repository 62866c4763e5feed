"""Real nodes get rid of old records: on the leader and on its followers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    ConsumerRecord,
    Producer,
    TopicPartition,
)
from penstock.wire.errors import InvalidRecordError
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"log.retention.check.interval.ms": 50, "log.cleaner.backoff.ms": 50}
    with running_cluster(tmp_path_factory.mktemp("old"), settings=settings) as running:
        yield running


def bytes_kept(cluster: Cluster, topic: str) -> list[int]:
    """What each node has of the topic's only partition."""
    return [held(node.partition_directory(topic, 0)) for node in cluster.nodes.values()]


def held(directory: Path) -> int:
    """The bytes of the segments in ``directory``, of which any may go while this is read."""
    found = 0
    for path in directory.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def test_what_is_too_old_goes_from_every_replica(cluster: Cluster) -> None:
    partition = TopicPartition("aging", 0)
    now_ms = time.time_ns() // 1_000_000
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("aging", 1, 3, {"segment.bytes": "4096", "retention.ms": "3600000"})
        for number in range(20):
            old = producer.send("aging", b"x" * 1000, timestamp_ms=now_ms - 7_200_000 + number)
        producer.flush()
        end = old.result(30).offset + 1

        def earliest() -> int:
            return admin.list_offsets({partition: "earliest"})[partition].offset

        wait_until(lambda: earliest() == end, "the old records are deleted", 30)
        wait_until(lambda: bytes_kept(cluster, "aging") == [0, 0, 0], "and on the followers", 30)
        young = producer.send("aging", b"young", timestamp_ms=now_ms).result(30)
        assert (young.offset, earliest()) == (end, end)


def test_what_is_too_much_goes_from_every_replica(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        configs = {"segment.bytes": "4096", "retention.bytes": "10000"}
        admin.create_topic("growing", 1, 3, configs)
        for _ in range(60):
            producer.send("growing", b"x" * 1000)
            producer.flush()
        wait_until(lambda: max(bytes_kept(cluster, "growing")) < 10_000 + 4096, "few are kept", 30)
        assert min(bytes_kept(cluster, "growing")) >= 10_000 - 4096


# --- compaction ----------------------------------------------------------------------------------

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": "4096",
    "min.cleanable.dirty.ratio": "0.01",
    "min.insync.replicas": "1",
}


def read_to(cluster: Cluster, topic: str, end: int) -> list[ConsumerRecord]:
    """All records of the topic's only partition, up to the one before ``end``."""
    seen: list[ConsumerRecord] = []

    def reached() -> bool:
        seen.extend(consumer.poll(200))
        return bool(seen) and seen[-1].offset == end - 1

    with Consumer(cluster.bootstrap, topics=topic, auto_offset_reset="earliest") as consumer:
        wait_until(reached, "the last record is read", 30)
    return seen


def test_of_each_key_the_last_record_stays_on_every_replica(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("state", 1, 2, COMPACTED)
        with pytest.raises(InvalidRecordError, match="no key"):
            producer.send("state", b"no key").result(30)
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        for number in range(400):
            sent = producer.send("state", b"%d" % number + b"x" * 200, key=b"%d" % (number % 7))
            if number % 5 == 4:
                producer.flush()
        producer.flush()
        end = sent.result(30).offset + 1
        replicas = admin.describe_topics(["state"])[0].partitions[0].replicas
        [newcomer] = set(cluster.nodes) - set(replicas)

        def kept(nodes: tuple[int, ...]) -> list[int]:
            sizes = bytes_kept(cluster, "state")
            return [sizes[node_id - 1] for node_id in nodes]

        wait_until(lambda: max(kept(replicas)) < 20_000, "both replicas are compacted", 60)
        everybody = (*replicas, newcomer)
        partition = TopicPartition("state", 0)
        admin.alter_partition_reassignments({partition: everybody})

        def in_sync() -> int:
            return len(admin.describe_topics(["state"])[0].partitions[0].isr)

        wait_until(lambda: in_sync() == 3, "another broker has copied it", 30)
    records = read_to(cluster, "state", end)
    latest = {record.key: record.value for record in records}
    assert latest == {
        b"%d" % (number % 7): b"%d" % number + b"x" * 200 for number in range(393, 400)
    }
    assert len(records) < 100


def test_groups_go_on_from_what_compaction_left_of_their_offsets(cluster: Cluster) -> None:
    topic = "__consumer_offsets"
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("read", 1, 3)
        producer.send("read", b"x").result(30)
        options = {"group_id": "readers", "topics": "read", "auto_offset_reset": "earliest"}
        with Consumer(cluster.bootstrap, **options) as consumer:
            wait_until(lambda: bool(consumer.poll(200)), "the record is read", 30)
            small = {"segment.bytes": "4096", "max.message.bytes": "4096"}
            admin.alter_configs(topic, small)
            partition = TopicPartition("read", 0)
            for _ in range(150):
                consumer.commit({partition: 1})

        def largest() -> int:
            made = [
                cluster.nodes[node_id].partition_directory(topic, number)
                for node_id in cluster.nodes
                for number in range(4)
            ]
            return max(map(held, made))

        wait_until(lambda: largest() < 9000, "the offsets are compacted", 60)
        for node_id, node in cluster.nodes.items():
            node.kill()
            node.start()
            cluster.wait_ready()
            wait_until(
                lambda: admin.list_group_offsets("readers")[partition].offset == 1,
                f"the offset is known after a crash of {node_id}",
                30,
            )
