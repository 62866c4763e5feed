"""Nodes copy partitions in frames by default, with gRPC where one of two has nothing else."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli.certificates import Authority
from penstock.v1 import common_pb2
from tests.integration import raw
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration


class Metered:
    """A cluster whose nodes show their metrics."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._ports = dict(zip(cluster.nodes, free_ports(len(cluster.nodes)), strict=True))
        for node_id, port in self._ports.items():
            self.configure(node_id, f'metrics.listen = "127.0.0.1:{port}"')

    def configure(self, node_id: int, line: str) -> None:
        """Add a setting to a node's file."""
        with self.cluster.nodes[node_id].config.open("a") as file:
            file.write(f"{line}\n")

    def served(self, node_id: int, transport: str) -> int:
        """Streams that a node began to serve since it was started."""
        url = f"http://127.0.0.1:{self._ports[node_id]}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
        name = f'penstock_replication_streams_total{{transport="{transport}"}}'
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


@contextmanager
def metered(
    directory: Path, authority: Authority | None = None, **settings: object
) -> Iterator[Metered]:
    found = Metered(Cluster(directory, settings=settings, authority=authority))
    try:
        yield found
    finally:
        for node in found.cluster.nodes.values():
            if node.alive:
                node.signal(signal.SIGCONT)
        found.cluster.close()


def commit(cluster: Cluster, topic: str, begin: int, end: int) -> None:
    for number in range(begin, end):
        raw.produce(cluster, topic, [b"%d" % number])


def log_of(cluster: Cluster, node_id: int) -> str:
    return cluster.nodes[node_id].log.read_text()


def assert_all_there(cluster: Cluster, topic: str, count: int) -> None:
    """What was acknowledged is there once; what was not may be there too."""
    found = [int(record.value) for record in raw.read_all(cluster, topic, at_least=count)]
    assert sorted(set(found)) == list(range(count))


@pytest.mark.parametrize("secure", [False, True])
def test_nothing_is_lost_when_either_end_is_killed(tmp_path: Path, secure: bool) -> None:
    with metered(tmp_path, Authority() if secure else None) as found:
        cluster = found.cluster
        cluster.start()
        raw.create_topic(cluster, "orders")
        commit(cluster, "orders", 0, 30)
        leader = cluster.topic("orders").partitions[0].leader
        assert found.served(leader, "frames") == 2
        for killed, first in ((leader, 30), (leader % 3 + 1, 60)):
            cluster.nodes[killed].kill()
            commit(cluster, "orders", first, first + 15)
            cluster.nodes[killed].start()
            cluster.wait_ready()
            commit(cluster, "orders", first + 15, first + 30)
        wait_until(
            lambda: sorted(cluster.topic("orders").partitions[0].isr) == [1, 2, 3],
            "all are in sync again",
            60,
        )
        assert_all_there(cluster, "orders", 90)
        for node in cluster.nodes.values():
            assert found.served(node.node_id, "grpc") == 0
            assert "Traceback" not in node.log.read_text()


def test_a_follower_that_hangs_comes_back_on_a_new_connection(tmp_path: Path) -> None:
    settings = {"replica.lag.time.max.ms": 1000, "broker.session.timeout.ms": 60_000}
    with metered(tmp_path, **settings) as found:
        cluster = found.cluster
        cluster.start()
        raw.create_topic(cluster, "orders")
        commit(cluster, "orders", 0, 5)
        picture = cluster.describe(1)
        assert picture is not None
        leader = cluster.topic("orders").partitions[0].leader
        hanging = min({1, 2, 3} - {leader, picture.controller_id})
        wait_until(
            lambda: sorted(cluster.topic("orders", leader).partitions[0].isr) == [1, 2, 3],
            "all are in sync",
            60,
        )
        before, logged = found.served(leader, "frames"), len(log_of(cluster, leader))
        cluster.nodes[hanging].signal(signal.SIGSTOP)
        address = cluster.nodes[leader].address
        for number in range(5, 10):  # Committed once the lag has put it out of the in-sync set.
            result = raw.produce_at(
                address,
                "orders",
                raw.batch_of([b"%d" % number]),
                acks=common_pb2.ACKS_ALL,
                timeout_ms=30_000,
            )
            assert not result.HasField("error"), result.error.message
        wait_until(
            lambda: hanging not in cluster.topic("orders", leader).partitions[0].isr,
            "the metadata have it out",
            60,
        )
        # It may have been behind before it hung, and be out before its stream has ended.
        given_up = re.compile(rf"a push is unanswered.*follower={hanging}\b")
        wait_until(
            lambda: given_up.search(log_of(cluster, leader)[logged:]) is not None,
            "the leader ends its stream",
            60,
        )
        cluster.nodes[hanging].signal(signal.SIGCONT)
        wait_until(
            lambda: sorted(cluster.topic("orders", leader).partitions[0].isr) == [1, 2, 3],
            "it is in sync again",
            60,
        )
        assert found.served(leader, "frames") > before
        assert_all_there(cluster, "orders", 10)


@pytest.mark.parametrize("secure", [False, True])
def test_a_cluster_whose_nodes_learn_frames_one_by_one_goes_on(
    tmp_path: Path, secure: bool
) -> None:
    with metered(tmp_path, Authority() if secure else None) as found:
        cluster = found.cluster
        for node_id in (2, 3):
            found.configure(node_id, 'replication.transport = "grpc"')
        cluster.start()
        raw.create_topic(cluster, "orders", 3, configs={"min.insync.replicas": "3"})
        for partition in range(3):
            raw.produce(cluster, "orders", [b"a"], partition)
        assert [found.served(node, "frames") for node in (1, 2, 3)] == [0, 0, 0]
        assert all(found.served(node, "grpc") for node in (1, 2, 3))
        for node_id in (2, 3):
            node = cluster.nodes[node_id]
            text = node.config.read_text()
            node.config.write_text(text.replace('replication.transport = "grpc"', ""))
            node.stop()
            node.start()
            cluster.wait_ready()
            for partition in range(3):
                raw.produce(cluster, "orders", [b"b"], partition)
        for partition in range(3):
            records = raw.read_all(cluster, "orders", partition, at_least=3)
            assert [record.value for record in records] == [b"a", b"b", b"b"]
        for node_id in (1, 2, 3):  # Once each leads again what it prefers to.
            wait_until(lambda led=node_id: found.served(led, "frames") > 0, "frames are used", 60)
