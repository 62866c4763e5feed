"""Nodes killed, their files damaged, and started in a loop while records are written.

Every acknowledged record is there all the time, and every replica is mended by itself. By default
a few rounds; as many as one likes with FLIP_ROUNDS (``make flip-loop``). FLIP_SEED chooses who is
killed and which bits flip; a failure prints it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.client import AdminClient, Consumer
from tests.integration.broker.test_kill_loop import (
    NODES,
    PARTITIONS,
    TIMEOUT_S,
    TOPIC,
    Writer,
    assert_identical,
    assert_kept,
    in_sync,
    progress,
    segments,
)
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

ROUNDS = int(os.environ.get("FLIP_ROUNDS", "2"))
SEED = int(os.environ.get("FLIP_SEED", "1"))
FLIPS = int(os.environ.get("FLIP_BITS", "3"))
"""So many bits flip in the closed segments of each partition, and as many in the active one."""

POLICY = os.environ.get("FLIP_POLICY", "commit")


ROUND_S = 60
"""What a round may take, on a slow machine; the program is given up after all of that."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = {
        "flush.policy": POLICY,
        "scrub.interval.ms": 1_000,
        "leader.imbalance.check.interval.ms": 1_000,
    }
    with running_cluster(tmp_path, settings=settings) as made:
        yield made


@pytest.mark.timeout(120 + ROUNDS * ROUND_S)
def test_nothing_acknowledged_is_lost_while_bits_flip_on_the_disks(cluster: Cluster) -> None:
    chance = random.Random(SEED)
    with AdminClient(cluster.bootstrap) as admin:
        configs = {"min.insync.replicas": "2", "segment.bytes": "16384"}
        admin.create_topic(TOPIC, PARTITIONS, 3, configs)
        writer = Writer(cluster.bootstrap)
        try:
            for number in range(ROUNDS):
                beat(cluster, admin, writer, chance, f"round {number} of FLIP_SEED={SEED}")
            rolled(cluster)
        finally:
            writer.stop()
        wait_until(lambda: mended(cluster, admin), "all is mended and in sync", TIMEOUT_S)
    assert not writer.failures, writer.failures[:3]
    assert_kept(cluster, writer.acknowledged)
    assert_identical(cluster)


def beat(
    cluster: Cluster, admin: AdminClient, writer: Writer, chance: random.Random, where: str
) -> None:
    """Kill a node, flip bits on its disk, and see it in sync again and all that was written."""
    victim = chance.choice(NODES)
    progress(writer, f"{where}: writes go on before {victim} is killed")
    cluster.nodes[victim].kill()
    for partition in range(PARTITIONS):
        flip_some(cluster, victim, partition, chance)
    progress(writer, f"{where}: writes go on without {victim}")
    cluster.nodes[victim].start()
    wait_until(lambda: in_sync(admin), f"{where}: {victim} came back", TIMEOUT_S)
    progress(writer, f"{where}: writes go on after {victim} came back")
    assert not writer.failures, (where, writer.failures[:3])
    assert_kept_so_far(cluster, dict(writer.acknowledged), where)


def assert_kept_so_far(
    cluster: Cluster, acknowledged: dict[tuple[int, int], bytes], where: str
) -> None:
    """As ``assert_kept``, while more is written."""
    found: dict[tuple[int, int], bytes | None] = {}
    with Consumer(cluster.bootstrap, topics=TOPIC, auto_offset_reset="earliest") as consumer:

        def all_read() -> bool:
            for record in consumer.poll(200):
                assert (record.partition, record.offset) not in found
                found[record.partition, record.offset] = record.value
            return acknowledged.keys() <= found.keys()

        wait_until(all_read, f"{where}: all that was acknowledged is read", TIMEOUT_S)
    others = {at: value for at, value in acknowledged.items() if found[at] != value}
    assert not others, f"{where}: {len(others)} are others: {list(others.items())[:5]}"


def flip_some(cluster: Cluster, node_id: int, partition: int, chance: random.Random) -> None:
    *closed, active = files(cluster, node_id, partition)
    for _ in range(FLIPS):
        if closed:
            flip(chance.choice(closed), chance)
        flip(active, chance)


def files(cluster: Cluster, node_id: int, partition: int) -> Sequence[Path]:
    """The segments, oldest first."""
    return sorted(cluster.nodes[node_id].partition_directory(TOPIC, partition).glob("*.log"))


def flip(path: Path, chance: random.Random) -> None:
    """Any bit of the file."""
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


def rolled(cluster: Cluster) -> None:
    """Every segment that bits flipped in is closed by now, so that the scrubbers come to it."""
    damaged = {
        (node_id, partition): files(cluster, node_id, partition)[-1].name
        for node_id in NODES
        for partition in range(PARTITIONS)
    }

    def all_closed() -> bool:
        return all(files(cluster, *at)[-1].name > name for at, name in damaged.items())

    wait_until(all_closed, "new segments are appended to", TIMEOUT_S)


def mended(cluster: Cluster, admin: AdminClient) -> bool:
    return in_sync(admin) and all(
        segments(cluster, node_id, partition) == segments(cluster, NODES[0], partition)
        for node_id in NODES
        for partition in range(PARTITIONS)
    )
