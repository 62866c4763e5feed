"""Transactions in topics that get rid of old records, on real nodes of which one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    PartitionDescription,
    Producer,
    TopicPartition,
)
from penstock.wire.errors import TransactionAbortableError
from tests.integration.broker.test_old_records import bytes_kept
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

KEYS = 7


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = {"log.retention.check.interval.ms": 50, "log.cleaner.backoff.ms": 50}
    with running_cluster(tmp_path, settings=settings) as running:
        yield running


def key_of(number: int) -> bytes:
    return b"%d" % (number % KEYS)


class Writer:
    """Writes a record of some keys in each transaction; every third one is aborted.

    ``latest``: the value that each key has, by what was committed.
    """

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self.latest: dict[bytes, bytes] = {}
        self.aborted: set[bytes] = set()
        self._count = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            while not self._try():
                pass

    def _try(self) -> bool:
        """False where a node that was killed has cost the transaction: it is to be done again."""
        commit = self._count % 3 != 0
        new = {
            key_of(self._count + at): b"%d/%d " % (self._count, at) + b"x" * 300 for at in range(3)
        }
        self._producer.begin_transaction()
        try:
            for key, value in new.items():
                self._producer.send(self._topic, value, key=key, partition=0)
            self._producer.flush()
            if commit:
                self._producer.commit_transaction()
        except TransactionAbortableError:
            self._producer.abort_transaction()
            return False
        if commit:
            self.latest |= new
        else:
            self._producer.abort_transaction()
            self.aborted |= set(new.values())
        return True


def read_committed(cluster: Cluster, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """All that a reader of committed records is given, from the start to the end."""
    partition = TopicPartition(topic, 0)
    seen: list[tuple[bytes | None, bytes | None]] = []
    with (
        AdminClient(cluster.bootstrap) as admin,
        Consumer(
            cluster.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        ) as consumer,
    ):
        end = admin.list_offsets({partition: "latest"})[partition].offset
        consumer.assign([partition])

        def reached() -> bool:
            seen.extend((record.key, record.value) for record in consumer.poll(200))
            return consumer.position(partition) >= end

        wait_until(reached, f"all of {topic} up to {end} is read", 30)
    return seen


def lead_with(cluster: Cluster, topic: str, node_id: int, *, anew: bool = False) -> None:
    """Have a node lead the topic's only partition; ``anew``: by a log that it has copied since."""
    partition = TopicPartition(topic, 0)
    others = [other for other in cluster.nodes if other != node_id]
    with AdminClient(cluster.bootstrap) as admin:

        def found() -> PartitionDescription:
            return admin.describe_topics([topic])[0].partitions[0]

        def leads() -> bool:
            admin.elect_leaders([partition])
            return found().leader == node_id and len(found().isr) == len(cluster.nodes)

        if anew:
            admin.alter_partition_reassignments({partition: others})
            left = cluster.nodes[node_id].partition_directory(topic, 0)
            wait_until(lambda: sorted(found().replicas) == sorted(others), "it has moved away", 30)
            wait_until(lambda: not left.exists(), f"node {node_id} has deleted its log", 30)
        admin.alter_partition_reassignments({partition: [node_id, *others]})
        wait_until(leads, f"node {node_id} leads {topic}", 30)


def kill_one(cluster: Cluster, topic: str) -> None:
    """The leader dies, and comes back."""
    with AdminClient(cluster.bootstrap) as admin:
        leader = admin.describe_topics([topic])[0].partitions[0].leader
    cluster.nodes[leader].kill()
    cluster.nodes[leader].start()


def test_of_each_key_the_last_committed_value_is_read_from_every_leader(cluster: Cluster) -> None:
    topic = "accounts"
    with AdminClient(cluster.bootstrap) as admin:
        configs = {
            "cleanup.policy": "compact",
            "segment.bytes": "4096",
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": "0",
            "min.insync.replicas": "2",
        }
        admin.create_topic(topic, 1, 3, configs)
    with Producer(cluster.bootstrap, transactional_id="writer") as producer:
        writer = Writer(producer, topic)
        for _ in range(3):
            writer.write(40)
            kill_one(cluster, topic)
            writer.write(1)  # While it is away.
        cluster.wait_ready()
        # Most of what was written, which is 120 KB, can only be gone by compaction.
        wait_until(lambda: max(bytes_kept(cluster, topic)) < 25_000, "all are compacted", 60)
        for node_id, anew in [(node_id, anew) for anew in (False, True) for node_id in (1, 2, 3)]:
            lead_with(cluster, topic, node_id, anew=anew)
            seen = read_committed(cluster, topic)
            assert dict(seen) == writer.latest, f"read from node {node_id}, copied anew: {anew}"
            assert not writer.aborted & {value for _, value in seen}
            assert len(seen) < 120, "most of what was replaced is gone"
            writer.write(4)  # Nothing hangs, and whoever leads knows the producer.
            assert dict(read_committed(cluster, topic)) == writer.latest


def test_transactions_go_with_old_segments_and_those_that_are_left_are_whole(
    cluster: Cluster,
) -> None:
    topic = "events"
    with AdminClient(cluster.bootstrap) as admin:
        configs = {
            "segment.bytes": "4096",
            "retention.bytes": "10000",
            "min.insync.replicas": "2",
        }
        admin.create_topic(topic, 1, 3, configs)
    with Producer(cluster.bootstrap, transactional_id="writer") as producer:
        writer = Writer(producer, topic)
        for _ in range(2):
            writer.write(40)
            kill_one(cluster, topic)
            writer.write(1)
        cluster.wait_ready()
        wait_until(lambda: max(bytes_kept(cluster, topic)) < 10_000 + 2 * 4096, "few are left", 60)
        for node_id in cluster.nodes:
            lead_with(cluster, topic, node_id)
            seen = read_committed(cluster, topic)
            assert not writer.aborted & {value for _, value in seen}
            # The newest of each key was written last, and is there.
            assert dict(seen) == writer.latest, f"read from node {node_id}"
            writer.write(4)
