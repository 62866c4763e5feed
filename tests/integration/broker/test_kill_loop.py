"""Nodes killed and started in a loop while records are written: nothing acknowledged is lost.

By default a few rounds; as many as one likes with KILL_ROUNDS (``make kill-loop``). KILL_SEED
chooses who is killed when; a failure prints it.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.client import AdminClient, Consumer, Producer, RecordMetadata
from penstock.wire.errors import PenstockError
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

ROUNDS = int(os.environ.get("KILL_ROUNDS", "4"))
SEED = int(os.environ.get("KILL_SEED", "1"))
PARTITIONS = 4
NODES = (1, 2, 3)
TOPIC = "beaten"
TIMEOUT_S = 90.0
_PACE_S = 0.002
_AT_LEAST_ONCE_A_ROUND = 100


class Writer:
    """Writes numbers with acks=all in a thread of its own until told to stop."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        """By partition and offset. Only grows, and is read when the thread has ended."""
        self.count = 0
        self.failures: list[BaseException] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap,))
        self._thread.start()

    def _run(self, bootstrap: str) -> None:
        try:
            with Producer(bootstrap, acks="all", linger_ms=0) as producer:
                number = 0
                while not self._stop.wait(_PACE_S):
                    value = b"%d" % number
                    future = producer.send(TOPIC, value, partition=number % PARTITIONS)
                    future.add_done_callback(lambda done, value=value: self._done(done, value))
                    number += 1
                producer.flush()
        except BaseException as error:
            self.error = error

    def _done(self, future: object, value: bytes) -> None:
        error = future.exception()  # type: ignore[attr-defined] # concurrent.futures.Future
        if error is not None:
            self.failures.append(error)
            return
        metadata: RecordMetadata = future.result()  # type: ignore[attr-defined] # as above
        at = metadata.partition, metadata.offset
        if self.acknowledged.setdefault(at, value) != value:
            told = f"{self.acknowledged[at]!r} and {value!r} were both acknowledged at {at}"
            self.failures.append(AssertionError(told))
        self.count += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.fixture(params=["os", "commit"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    settings = {"flush.policy": request.param, "leader.imbalance.check.interval.ms": 1_000}
    with running_cluster(tmp_path, settings=settings) as made:
        made.wait_ready()
        yield made


@pytest.mark.timeout(120 + ROUNDS * 60)  # Of which a round takes a few, as a rule.
def test_nothing_acknowledged_is_lost_while_nodes_are_killed(cluster: Cluster) -> None:
    chance = random.Random(SEED)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, PARTITIONS, 3, {"min.insync.replicas": "2"})
        writer = Writer(cluster.bootstrap)
        try:
            for number in range(ROUNDS):
                beat(cluster, admin, writer, chance, f"round {number} of KILL_SEED={SEED}")
        finally:
            writer.stop()
        wait_until(lambda: in_sync(admin), "all replicas are in sync", TIMEOUT_S)
    assert not writer.failures, writer.failures[:3]
    assert_kept(cluster, writer.acknowledged)
    assert_identical(cluster)


def beat(
    cluster: Cluster, admin: AdminClient, writer: Writer, chance: random.Random, where: str
) -> None:
    """Kill one node, two or all; see writes go on where they can, and all in sync in the end."""
    victims = chance.sample(NODES, chance.choice([1, 1, 1, 2, 3]))
    for victim in victims:
        cluster.nodes[victim].kill()
    if len(victims) == 1:
        progress(writer, f"{where}: writes go on without {victims}")
    for victim in victims:
        cluster.nodes[victim].start()
    if chance.random() < 0.3:
        # Once more while it recovers, or is not in sync yet.
        cluster.nodes[victims[0]].kill()
        cluster.nodes[victims[0]].start()
    wait_until(lambda: in_sync(admin), f"{where}: {victims} came back", TIMEOUT_S)
    progress(writer, f"{where}: writes go on after {victims} came back")


def progress(writer: Writer, what: str) -> None:
    before = writer.count
    wait_until(
        lambda: writer.error is not None or writer.count >= before + _AT_LEAST_ONCE_A_ROUND,
        what,
        TIMEOUT_S,
    )


def in_sync(admin: AdminClient) -> bool:
    try:
        (topic,) = admin.describe_topics([TOPIC])
    except PenstockError:
        return False  # Nobody is there to answer; asked again until the deadline.
    return all(len(partition.isr) == len(NODES) for partition in topic.partitions)


def assert_kept(cluster: Cluster, acknowledged: dict[tuple[int, int], bytes]) -> None:
    """What was acknowledged is where its acknowledgement said, once, in the order of writing."""
    found = read_everything(cluster, max(acknowledged.values(), key=int))
    lost = {at: value for at, value in acknowledged.items() if found.get(at) != value}
    assert not lost, f"{len(lost)} of {len(acknowledged)} are not there: {list(lost.items())[:5]}"
    for partition in range(PARTITIONS):
        numbers = [int(value) for (of, _), value in sorted(found.items()) if of == partition]
        assert numbers == sorted(set(numbers)), f"partition {partition}: doubled, or out of order"


def read_everything(cluster: Cluster, last: bytes) -> dict[tuple[int, int], bytes]:
    found: dict[tuple[int, int], bytes] = {}
    with Consumer(cluster.bootstrap, topics=TOPIC, auto_offset_reset="earliest") as consumer:

        def all_read() -> bool:
            for record in consumer.poll(200):
                assert (record.partition, record.offset) not in found
                found[record.partition, record.offset] = record.value or b""
            ends = consumer.end_offsets(consumer.assignment())
            wanted = {(at.partition, end - 1) for at, end in ends.items() if end}
            return len(ends) == PARTITIONS and wanted <= found.keys() and last in found.values()

        wait_until(all_read, "everything is read", TIMEOUT_S)
    return found


def assert_identical(cluster: Cluster) -> None:
    """The replicas are the same, byte for byte."""
    for node in cluster.nodes.values():
        assert node.stop() == 0
    for partition in range(PARTITIONS):
        logs = [segments(cluster, node_id, partition) for node_id in NODES]
        assert logs[0] == logs[1] == logs[2], f"partition {partition}"


def segments(cluster: Cluster, node_id: int, partition: int) -> Sequence[bytes]:
    directory = cluster.nodes[node_id].partition_directory(TOPIC, partition)
    return [path.read_bytes() for path in sorted(directory.glob("*.log"))]
