"""Nodes on a disk that is really full: they live on, say so, and lose nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.datadir import format_directory
from penstock.client import (
    AdminClient,
    Consumer,
    ConsumerRecord,
    DiskFullError,
    PenstockError,
    Producer,
)
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.small_disk import fill, small_disk, small_disks_can_be_made
from tests.support import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not small_disks_can_be_made(), reason="this machine lets no test mount a file system"
    ),
]

_VALUE_BYTES = 20_000
_DISK_MB = 40
_RESERVE_BYTES = 4 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", _DISK_MB) as path:
        yield path


def produce(
    producer: Producer, acknowledged: set[bytes], count: int, partition: int | None = None
) -> list[PenstockError]:
    """Send so many records; what became of those that were not acknowledged."""
    values = [os.urandom(_VALUE_BYTES) for _ in range(count)]
    futures = [producer.send("t", value, partition=partition) for value in values]
    errors: list[PenstockError] = []
    for value, future in zip(values, futures, strict=True):
        error = future.exception(60)
        if error is None:
            acknowledged.add(value)
        else:
            assert isinstance(error, PenstockError)
            errors.append(error)
    return errors


def produce_until_refused(producer: Producer, acknowledged: set[bytes]) -> PenstockError:
    """Send until there is no room; the first refusal."""
    for _ in range(_DISK_MB * 1_000_000 // _VALUE_BYTES // 20):
        errors = produce(producer, acknowledged, 20)
        if errors:
            return errors[0]
    raise AssertionError("more was acknowledged than fits")


def read_all(cluster: Cluster, acknowledged: set[bytes]) -> set[bytes]:
    seen: set[bytes] = set()

    def more(records: list[ConsumerRecord]) -> bool:
        seen.update(record.value or b"" for record in records)
        return acknowledged <= seen

    with Consumer(cluster.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        wait_until(lambda: more(consumer.poll(500)), "everything acknowledged is read", 60)
    return seen


def assert_all_alive(cluster: Cluster) -> None:
    assert all(node.alive for node in cluster.nodes.values()), cluster.log_tails()


def reported(cluster: Cluster, what: str) -> int:
    return sum(node.log.read_text().count(what) for node in cluster.nodes.values())


def test_writes_are_refused_below_the_reserve_and_all_else_goes_on(disk: Path) -> None:
    settings = {"log.min.free.bytes": _RESERVE_BYTES}
    acknowledged: set[bytes] = set()
    with running_cluster(disk, settings=settings) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic("t", 3, 3, {"min.insync.replicas": "2"})
        filler = fill(disk, leaving_bytes=_RESERVE_BYTES + 12_000_000)
        with Producer(cluster.bootstrap) as producer:
            refusal = produce_until_refused(producer, acknowledged)
            assert isinstance(refusal, DiskFullError)
            assert "broker " in refusal.message
            assert f"{disk}/node-" in refusal.message
            assert "log.min.free.bytes" in refusal.message
            assert acknowledged
            assert produce(producer, acknowledged, 20), "and so are those that come later"
            assert_all_alive(cluster)
            # Groups and metadata have the reserve.
            with Consumer(cluster.bootstrap, topics="t", group_id="g") as consumer:
                wait_until(
                    lambda: not consumer.poll(100) and len(consumer.assignment()) == 3,
                    "the group is served",
                )
                consumer.commit()
            with AdminClient(cluster.bootstrap) as admin:
                admin.create_topic("other", 3, 3)
            read_all(cluster, acknowledged)
            filler.unlink()
            wait_until(lambda: not produce(producer, acknowledged, 5), "writes succeed again", 30)
            assert_all_alive(cluster)
            assert read_all(cluster, acknowledged)
        assert reported(cluster, "data_directory_full") <= 2 * 3, cluster.log_tails()
        assert reported(cluster, "data_directory_failed") == 0


def test_a_follower_without_room_leaves_the_in_sync_set_and_comes_back(
    disk: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, settings={"replica.lag.time.max.ms": 1_000})
    follower = cluster.nodes[3]
    format_directory(disk / "logs", cluster.cluster_id, follower.node_id)
    with follower.config.open("a") as config:
        config.write(f'log.dirs = "{disk}/logs"\n')

    def in_sync(partition: int) -> int:
        return len(cluster.topic("t", 1).partitions[partition].isr)

    try:
        cluster.start()
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic("t", 3, 3, {"min.insync.replicas": "2"})
        led = next(one.partition for one in cluster.topic("t").partitions if one.leader != 3)
        acknowledged: set[bytes] = set()
        with Producer(cluster.bootstrap) as producer:
            assert not produce(producer, acknowledged, 5, led)
            filler = fill(disk)
            # Acknowledged without the follower, once that has left the in-sync set.
            assert not produce(producer, acknowledged, 20, led)
            assert in_sync(led) == 2
            filler.unlink()
            wait_until(lambda: in_sync(led) == 3, "the follower is in sync again", 30)
            assert not produce(producer, acknowledged, 5, led)
        lines = follower.log.read_text()
        partition = f"t-{led}"
        for event in ("replica cannot follow", "replica follows again"):
            told = [line for line in lines.splitlines() if event in line and partition in line]
            assert len(told) == 1, lines
        assert_all_alive(cluster)
    finally:
        cluster.close()


def test_nodes_without_a_byte_left_live_on_and_recover(disk: Path) -> None:
    acknowledged: set[bytes] = set()
    with running_cluster(disk, settings={"log.min.free.bytes": 0}) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic("t", 3, 3, {"min.insync.replicas": "2"})
        with Producer(cluster.bootstrap, delivery_timeout_ms=5_000) as producer:
            assert not produce(producer, acknowledged, 50)
            filler = fill(disk)
            for _ in range(3):
                assert produce(producer, acknowledged, 10)
            with (
                AdminClient(cluster.bootstrap, default_api_timeout_ms=3_000) as admin,
                contextlib.suppress(PenstockError),  # The controllers may have room or not.
            ):
                admin.create_topic("later", 6, 3)
            assert_all_alive(cluster)
            filler.unlink()
            wait_until(lambda: not produce(producer, acknowledged, 5), "writes succeed again", 60)
            with AdminClient(cluster.bootstrap) as admin:
                if "later" not in [topic.name for topic in admin.list_topics()]:
                    admin.create_topic("later", 6, 3)
            for partition in range(6):
                with Producer(cluster.bootstrap) as other:
                    other.send("later", b"x", partition=partition).result(60)
        read_all(cluster, acknowledged)
        assert_all_alive(cluster)
        assert reported(cluster, "data_directory_failed") == 0, cluster.log_tails()
        statuses = [node.stop() for node in cluster.nodes.values()]
        assert statuses == [0, 0, 0], cluster.log_tails()
        cluster.start()
        assert read_all(cluster, acknowledged)
