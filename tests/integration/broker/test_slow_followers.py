"""A follower that hangs costs the others nothing but the time until it leaves the in-sync set."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.client import AdminClient, Consumer, Producer
from penstock.wire.errors import RecordTooLargeError
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration

LAG_MS = 2_000
RECORD = bytes(range(256)) * 400


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # Only the lag, and no missing heartbeat, gets a follower out of sync here.
    settings = {"replica.lag.time.max.ms": LAG_MS, "broker.session.timeout.ms": 120_000}
    running = Cluster(tmp_path, settings=settings)
    ports = free_ports(3)
    for node, port in zip(running.nodes.values(), ports, strict=True):
        with node.config.open("a") as file:
            file.write(f'metrics.listen = "127.0.0.1:{port}"\n')
    running.metrics_ports = dict(zip(running.nodes, ports, strict=True))  # type: ignore[attr-defined]
    try:
        running.start()
        yield running
    finally:
        for node in running.nodes.values():
            if node.alive:
                node.signal(signal.SIGCONT)
        running.close()


def metric(cluster: Cluster, node_id: int, name: str) -> float:
    port = cluster.metrics_ports[node_id]  # type: ignore[attr-defined]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def rss_mb(cluster: Cluster, node_id: int) -> float:
    process = cluster.nodes[node_id].process
    assert process is not None
    return psutil.Process(process.pid).memory_info().rss / 1e6


def test_a_hanging_follower_leaves_and_holds_no_memory_of_its_leader(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("orders", 1, 3, {"min.insync.replicas": "2"})
        (topic,) = admin.describe_topics(["orders"])
        leader = topic.partitions[0].leader
        controller = admin.describe_cluster().controller_id
        hanging = next(node for node in (1, 2, 3) if node not in (leader, controller))
        with Producer(cluster.nodes[leader].address, acks="all") as producer:
            for _ in range(500):
                producer.send("orders", RECORD)
            producer.flush()
            before_mb = rss_mb(cluster, leader)
            cluster.nodes[hanging].signal(signal.SIGSTOP)
            producer.send("orders", b"waits until it is out").result(60)
            stuck = 'penstock_isr_left_total{reason="stuck"}'
            assert metric(cluster, leader, stuck) >= 1
            now = 'penstock_out_of_sync_followers{reason="stuck"}'
            assert metric(cluster, leader, now) >= 1
            for _ in range(2_000):  # 200 MB that it will lack.
                producer.send("orders", RECORD)
            producer.flush()
            grown_mb = rss_mb(cluster, leader) - before_mb
            assert grown_mb < 64, "the leader keeps for it what it can read from its log"
            cluster.nodes[hanging].signal(signal.SIGCONT)
            wait_until(
                lambda: hanging in admin.describe_topics(["orders"])[0].partitions[0].isr,
                "it has caught up and is in sync again",
                60,
            )
    log = cluster.nodes[leader].log.read_text()
    assert f"{hanging} (stuck)" in log


def test_batches_above_limits_that_were_lowered_flow_and_new_ones_are_refused(
    cluster: Cluster,
) -> None:
    large = {"max.message.bytes": "20000000", "min.insync.replicas": "2"}
    values = [b"a" * 300_000, b"b" * 1_100_000, b"c" * 5_000_000, b"d" * 15_000_000, b"e"]
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("large", 1, 3, large)
        leader = admin.describe_topics(["large"])[0].partitions[0].leader
        away = next(node for node in (1, 2, 3) if node != leader)
        with Producer(cluster.bootstrap, max_request_size=32 * 1024 * 1024) as producer:
            producer.send("large", b"first").result(30)
            cluster.nodes[away].stop()
            for value in values:
                producer.send("large", value).result(60)
            admin.alter_configs("large", {"max.message.bytes": "1000"})
            with pytest.raises(RecordTooLargeError, match=r"--config max\.message\.bytes="):
                producer.send("large", b"f" * 2_000).result(30)
        cluster.nodes[away].start()
        wait_until(
            lambda: away in admin.describe_topics(["large"])[0].partitions[0].isr,
            "the returning replica has copied batches that the topic takes no longer",
            60,
        )
    with Consumer(
        cluster.bootstrap, topics="large", auto_offset_reset="earliest", fetch_max_bytes=1_024,
        max_partition_fetch_bytes=100,
    ) as consumer:  # fmt: skip
        found: list[bytes] = []
        while len(found) <= len(values):
            found += [record.value for record in consumer.poll(10_000)]
    assert found == [b"first", *values]
