"""Strangers at the ports for nodes alone, which without TLS they reach: they are bounded there, and
hold up neither the quorum nor clients.

Figures are printed (``pytest -s``), since docs/operating/limits.md tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from penstock.v1 import controller_pb2, controller_pb2_grpc
from penstock.wire.transport import CHANNEL_OPTIONS, NODE_CONNECTIONS_MAX
from tests.integration.broker.test_abuse import (
    HONEST,
    MIB,
    REFUSED_STREAM,
    UNFINISHED_MAX,
    Abused,
    HonestClient,
    highest_rss,
    tell,
)
from tests.integration.broker.test_unfinished_requests import hoarders
from tests.integration.cluster import running_cluster
from tests.integration.hostile import PREFACE, SETTINGS, Hostile, frame
from tests.integration.raw import create_topic
from tests.support import wait_until

pytestmark = pytest.mark.integration

EXCHANGE, EXECUTE = "/penstock.v1.Raft/Exchange", "/penstock.v1.Controller/ExecuteAdmin"
HEARTBEAT, WATCH = "/penstock.v1.Controller/Heartbeat", "/penstock.v1.Controller/WatchMetadata"


def leadership(addresses: Iterable[str]) -> tuple[int, int]:
    """The quorum's leader and its term, as a majority confirms them."""
    for address in addresses:
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            stub = controller_pb2_grpc.ControllerStub(channel)
            told = stub.DescribeQuorum(controller_pb2.DescribeQuorumRequest(), timeout=10)
            if told.confirmed:
                return told.leader_id, told.term
    return -1, -1


def described_at_once(address: str, count: int) -> list[object]:
    """Answers to that many questions for the quorum, asked at once, or why there was none."""

    async def ask() -> list[object]:
        async with grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS]) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            request = controller_pb2.DescribeQuorumRequest()
            calls = (stub.DescribeQuorum(request, timeout=60) for _ in range(count))
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(ask())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Abused]:
    cluster = Abused(tmp_path)
    try:
        cluster.start()
        create_topic(cluster, HONEST, replication_factor=1)
        yield cluster
    finally:
        cluster.close()


@pytest.mark.parametrize(("count", "streams", "path"), [(1, 40, EXCHANGE), (10, 4, EXECUTE)])
def test_requests_in_part_to_a_controller_are_bounded(
    cluster: Abused, count: int, streams: int, path: str
) -> None:
    with HonestClient(cluster.address) as honest:
        honest.served_more()
        before = cluster.rss_bytes()
        honest.begin()
        with hoarders(count, cluster.controller_addresses[1], path, streams) as some:
            highest = highest_rss(cluster, lambda: all(one.done for one in some), 60)
            tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most")
            wait_until(
                lambda: cluster.metric("penstock_unfinished_bytes") <= UNFINISHED_MAX, "bounded"
            )
            assert any(one.hostile.closed.is_set() for one in some)
        honest.served_more()
    tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most; {honest.told()}")
    assert highest - before < UNFINISHED_MAX + 700 * MIB
    assert cluster.metric("penstock_overfull_clients_total") >= 1
    assert not honest.failed


def test_thousands_of_streams_and_calls_at_a_controller_move_no_leader(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        create_topic(cluster, HONEST, configs={"min.insync.replicas": "2"})
        addresses = cluster.controller_addresses
        before = leadership(addresses.values())
        leads = cluster.nodes[before[0]]
        assert leads.process is not None
        process = psutil.Process(leads.process.pid)
        partition = cluster.topic(HONEST).partitions[0]
        with HonestClient(cluster.nodes[partition.leader].address) as honest:
            honest.served_more()
            honest.begin()
            had = process.memory_info().rss
            watch = controller_pb2.WatchMetadataRequest(cluster_id=cluster.cluster_id, node_id=9)
            with Hostile(addresses[before[0]]) as hostile:
                for _ in range(330):
                    hostile.call(HEARTBEAT, None)
                    hostile.call(EXCHANGE, None)
                    hostile.call(WATCH, watch.SerializeToString())
                honest.served_more(20)
                streams = process.memory_info().rss - had
                tell(f"990 streams: {streams / MIB:.0f} MiB; {honest.told()}")
                assert hostile.refused == []
                for _ in range(3_200):
                    hostile.call(EXCHANGE, None)
                wait_until(lambda: REFUSED_STREAM in hostile.refused, "no more are taken")
                begun_s = time.monotonic()
                answers = described_at_once(addresses[before[0]], 3_000)
                took_s = time.monotonic() - begun_s
                honest.served_more(20)
            lost = [answer for answer in answers if isinstance(answer, BaseException)]
            grown = process.memory_info().rss - had
            tell(f"and 3,000 calls in {took_s:.1f} s: {grown / MIB:.0f} MiB; {honest.told()}")
        assert lost == []
        assert not honest.failed
        assert leadership(addresses.values()) == before
        assert grown < 200 * MIB


def test_metadata_that_nobody_takes_of_a_controller_are_bounded(cluster: Abused) -> None:
    """Whoever knows the cluster's id gets them, as a broker does."""
    for number in range(3):
        create_topic(cluster, f"wide{number}", partitions=1_500, replication_factor=1)
    watch = controller_pb2.WatchMetadataRequest(cluster_id=cluster.cluster_id, node_id=9)
    address = cluster.controller_addresses[1]
    before, term = cluster.rss_bytes(), leadership([address])
    with HonestClient(cluster.address) as honest, Hostile(address) as hostile:
        honest.begin()
        for _ in range(3_000):
            hostile.call(WATCH, watch.SerializeToString())
        highest = highest_rss(cluster, hostile.closed.is_set, 60)
        honest.served_more()
    tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most; {honest.told()}")
    assert highest - before < 250 * MIB
    assert cluster.metric("penstock_stalled_clients_total") >= 1
    wait_until(lambda: cluster.metric("penstock_unsent_bytes") < MIB, "all is free again")
    assert leadership([address]) == term


def test_connections_that_ask_for_nothing_keep_no_controller_out(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster, contextlib.ExitStack() as stack:
        leader = leadership(cluster.controller_addresses.values())[0]
        other = next(node for node in cluster.nodes if node != leader)
        at = cluster.nodes[leader]
        assert at.process is not None
        process = psutil.Process(at.process.pid)
        descriptors = process.num_fds()
        host, _, port = cluster.controller_addresses[leader].rpartition(":")
        cluster.nodes[other].kill()
        for _ in range(NODE_CONNECTIONS_MAX + 100):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(OSError):  # Those beyond the limit are closed at once.
                one.sendall(PREFACE + frame(SETTINGS, 0, 0))
        assert process.num_fds() < descriptors + NODE_CONNECTIONS_MAX + 20
        cluster.nodes[other].start()
        cluster.wait_ready()
        told = "connections that asked for nothing were closed"
        wait_until(lambda: told in at.log.read_text(), "room is made", 15)
        assert process.num_fds() < descriptors + NODE_CONNECTIONS_MAX * 4 // 5
    assert leader > 0


def test_a_controller_without_a_broker_is_bounded_too(tmp_path: Path) -> None:
    cluster = Abused(tmp_path)
    with cluster.node.config.open("a") as settings:
        settings.write('node.roles = "controller"\n')
    address = cluster.controller_addresses[1]
    try:
        cluster.node.start()
        wait_until(lambda: leadership([address])[0] == 1, "it leads", 30)
        before, term = cluster.rss_bytes(), leadership([address])
        with hoarders(4, address, EXECUTE, 10) as some:
            highest = highest_rss(cluster, lambda: all(one.done for one in some), 60)
            assert any(one.hostile.closed.is_set() for one in some)
        tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most")
        assert highest - before < UNFINISHED_MAX + 700 * MIB
        assert leadership([address]) == term
    finally:
        cluster.close()
