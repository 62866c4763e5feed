"""Real nodes: what they survive, what they refuse, and what they leave on disk."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.record import MemoryRecords

from penstock.broker.datadir import format_directory
from penstock.v1 import common_pb2
from penstock.wire.errors import ErrorCode
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.ports import free_ports
from tests.integration.raw import (
    batch_of,
    create_topic,
    fetch_at,
    leader_address,
    produce,
    produce_at,
    read_all,
)
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


# ------------------------------------------------------------------------- what is refused


def test_a_corrupt_batch_is_refused_and_nothing_is_appended(cluster: Cluster) -> None:
    create_topic(cluster, "corrupt")
    produce(cluster, "corrupt", [b"before"])
    address = leader_address(cluster, "corrupt")
    good = bytearray(batch_of([b"never to be seen"]))
    good[-1] ^= 1
    result = produce_at(address, "corrupt", bytes(good))
    assert result.error.code == ErrorCode.CORRUPT_MESSAGE
    assert "corrupt-0" in result.error.message
    for garbage in (b"", b"\0", os.urandom(61), os.urandom(500), bytes(good[:70])):
        assert produce_at(address, "corrupt", garbage).HasField("error")
    produce(cluster, "corrupt", [b"after"])
    assert [record.value for record in read_all(cluster, "corrupt")] == [b"before", b"after"]


def test_one_bad_batch_spoils_the_whole_request(cluster: Cluster) -> None:
    create_topic(cluster, "spoilt")
    bad = bytearray(batch_of([b"bad"]))
    bad[-1] ^= 1
    address = leader_address(cluster, "spoilt")
    produce(cluster, "spoilt", [b"first"])
    result = produce_at(address, "spoilt", batch_of([b"good"]) + bytes(bad))
    assert result.error.code == ErrorCode.CORRUPT_MESSAGE
    assert [record.value for record in read_all(cluster, "spoilt")] == [b"first"]


def test_an_oversize_batch_is_refused_with_both_sizes(cluster: Cluster) -> None:
    create_topic(cluster, "small", configs={"max.message.bytes": "1000"})
    produce(cluster, "small", [b"fits"])
    result = produce_at(leader_address(cluster, "small"), "small", batch_of([b"x" * 2000]))
    assert result.error.code == ErrorCode.MESSAGE_TOO_LARGE
    assert "1000" in result.error.message
    assert "max.message.bytes" in result.error.message


def test_an_unknown_topic_names_the_near_one(cluster: Cluster) -> None:
    create_topic(cluster, "payments")
    address = leader_address(cluster, "payments")
    result = produce_at(address, "payment", batch_of([b"x"]))
    assert result.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "payments" in result.error.message


def test_a_wrong_leader_names_the_right_one(cluster: Cluster) -> None:
    create_topic(cluster, "led")
    produce(cluster, "led", [b"x"])
    right = leader_address(cluster, "led")
    wrong = next(node.address for node in cluster.nodes.values() if node.address != right)
    result = produce_at(wrong, "led", batch_of([b"x"]))
    assert result.error.code == ErrorCode.NOT_LEADER
    hint = result.error.current_leader
    assert f"{hint.host}:{hint.port}" == right
    assert fetch_at(wrong, "led", 0).error.code == ErrorCode.NOT_LEADER


@pytest.mark.parametrize("payload", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, os.urandom(4096)])
def test_garbage_on_any_port_disturbs_nobody(cluster: Cluster, payload: bytes) -> None:
    node = cluster.nodes[1]
    controller = next(
        line.split('"')[1] for line in node.config.read_text().splitlines() if "ler.listen" in line
    )
    for address in (node.address, controller):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(payload)
            # Reset instead of closing, as a crashed peer would.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert node.alive
    picture = cluster.describe(1)
    assert picture is not None
    assert len([broker for broker in picture.brokers if not broker.fenced]) == 3


def run_node(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.broker", "--config", str(config), *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = Cluster(tmp_path, 1)
        for key in ("broker.listen", "controller.listen", "metrics.listen"):
            options = [f"--set={key}=127.0.0.1:{port}"]
            ended = run_node(cluster.nodes[1].config, *options)
            # It may be free, or the address there, in a moment: a service is tried again.
            assert ended.returncode == 1
            assert f"127.0.0.1:{port}" in ended.stderr
            assert "Traceback" not in ended.stderr


def test_a_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    format_directory(tmp_path / "node-1" / "logs", "another-cluster-entirely", 1)
    ended = run_node(cluster.nodes[1].config)
    assert ended.returncode == 2
    assert "belongs to cluster another-cluster-entirely" in ended.stderr


def test_an_unknown_setting_suggests_the_near_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, settings={"flush.polcy": "os"})
    ended = run_node(cluster.nodes[1].config)
    assert ended.returncode == 2
    assert "unknown setting 'flush.polcy'; did you mean 'flush.policy'?" in ended.stderr


def test_a_second_process_on_one_directory_is_refused(cluster: Cluster) -> None:
    first, second = free_ports(2)
    ended = run_node(
        cluster.nodes[1].config,
        f"--set=broker.listen=127.0.0.1:{first}",
        f"--set=controller.listen=127.0.0.1:{second}",
    )
    assert ended.returncode == 2
    assert "in use by another process" in ended.stderr


# ------------------------------------------------------------------------- what is survived


def values_of(cluster: Cluster, topic: str, count: int) -> list[tuple[int, bytes]]:
    return [(one.offset, one.value or b"") for one in read_all(cluster, topic, at_least=count)]


def test_a_killed_leader_loses_nothing_and_comes_back_in_sync(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "t")
        expected = []
        for i in range(20):
            result = produce(cluster, "t", [b"%d" % i])
            expected.append((result.base_offset, b"%d" % i))
        address = leader_address(cluster, "t")
        leader = next(node for node in cluster.nodes.values() if node.address == address)
        leader.kill()
        for i in range(20, 40):
            result = produce(cluster, "t", [b"%d" % i])
            expected.append((result.base_offset, b"%d" % i))
        assert values_of(cluster, "t", 40) == expected
        leader.start()
        cluster.wait_ready()
        wait_until(
            lambda: len(cluster.topic("t").partitions[0].isr) == 3, "all replicas are in sync"
        )
        assert values_of(cluster, "t", 40) == expected


def test_all_killed_at_once_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "t", partitions=3)
        expected: dict[int, list[tuple[int, bytes]]] = {0: [], 1: [], 2: []}
        for i in range(30):
            result = produce(cluster, "t", [b"%d" % i], partition=i % 3)
            expected[i % 3].append((result.base_offset, b"%d" % i))
        for node in cluster.nodes.values():
            node.signal(signal.SIGKILL)
        for node in cluster.nodes.values():
            node.kill()
        cluster.start()
        for partition, pairs in expected.items():
            found = read_all(cluster, "t", partition, at_least=len(pairs))
            assert [(one.offset, one.value) for one in found] == pairs


def test_too_few_in_sync_replicas_are_named_and_nothing_is_acknowledged(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "strict", configs={"min.insync.replicas": "3"})
        produce(cluster, "strict", [b"three are there"])
        leader = leader_address(cluster, "strict")
        victim = next(node for node in cluster.nodes.values() if node.address != leader)
        victim.kill()
        wait_until(lambda: len(cluster.topic("strict").partitions[0].isr) == 2, "the dead one left")
        left = sorted(cluster.topic("strict").partitions[0].isr)
        result = produce_at(leader_address(cluster, "strict"), "strict", batch_of([b"no"]))
        assert result.error.code == ErrorCode.NOT_ENOUGH_REPLICAS
        for node_id in left:
            assert str(node_id) in result.error.message
        assert "min.insync.replicas" in result.error.message
        # acks=1 asks for less, and gets it.
        lesser = produce_at(
            leader_address(cluster, "strict"),
            "strict",
            batch_of([b"one"]),
            acks=common_pb2.ACKS_LEADER,
        )
        assert not lesser.HasField("error")
        victim.start()
        cluster.wait_ready()
        produce(cluster, "strict", [b"three again"])


def test_a_planned_stop_is_clean_and_its_leaderships_have_moved(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "t", partitions=3)
        for partition in range(3):
            produce(cluster, "t", [b"x"], partition=partition)
        assert cluster.nodes[1].stop() == 0
        leaders = {partition.leader for partition in cluster.topic("t").partitions}
        assert leaders <= {2, 3}
        for partition in range(3):
            produce(cluster, "t", [b"y"], partition=partition)


def test_one_node_alone_is_a_cluster(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        create_topic(cluster, "t", replication_factor=1)
        produce(cluster, "t", [b"x"])
        cluster.nodes[1].kill()
        cluster.start()
        assert values_of(cluster, "t", 1) == [(0, b"x")]


# ------------------------------------------------------------------------ what is on disk


def test_an_independent_decoder_reads_the_segments(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        create_topic(cluster, "t")
        for i in range(10):
            produce(cluster, "t", [b"a%d" % i, b"b%d" % i])
        expected = [(one.offset, one.value) for one in read_all(cluster, "t")]
        wait_until(
            lambda: len(cluster.topic("t").partitions[0].isr) == 3, "all replicas are in sync"
        )
        assert len(expected) == 20
        directories = [node.partition_directory("t", 0) for node in cluster.nodes.values()]
    for directory in directories:
        found = []
        for segment in sorted(directory.glob("*.log")):
            batches = MemoryRecords(segment.read_bytes())
            while batches.has_next():
                batch = batches.next_batch()
                assert batch.validate_crc()
                found += [(record.offset, record.value) for record in batch]
        assert found == expected
