"""Clients that abuse a real node: it serves the others, within bounds, and it stops in time.

Figures are printed (``pytest -s``), since docs/operating/limits.md tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from penstock.cli.certificates import Authority
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    common_pb2,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    replication_pb2,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.transport import CHANNEL_OPTIONS
from tests.integration.cluster import Cluster, open_channel
from tests.integration.hostile import FETCH, Hostile, fetch_request
from tests.integration.ports import free_ports
from tests.integration.raw import batch_of, create_topic, frames_address, produce
from tests.support import wait_until

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
UNSENT_MAX = 64 * MIB
UNFINISHED_MAX = 128 * MIB
ABUSED, HONEST = "abused", "honest"
REFUSED_STREAM = 7


def tell(figures: str) -> None:
    sys.stdout.write(f"\n{figures}\n")


class Abused(Cluster):
    """One node with an HTTP port, small limits, and a topic of 24 MiB."""

    def __init__(self, directory: Path, authority: Authority | None = None) -> None:
        [self.http_port] = free_ports(1)
        settings = {
            "metrics.listen": f"127.0.0.1:{self.http_port}",
            "unsent.max.bytes": UNSENT_MAX,
            "unsent.connection.max.bytes": UNSENT_MAX // 2,
            "unsent.stalled.ms": 12_000,
            "unfinished.max.bytes": UNFINISHED_MAX,
        }
        super().__init__(directory, 1, settings, authority)
        self.node = self.nodes[1]

    @property
    def address(self) -> str:
        return self.node.address

    @property
    def process(self) -> psutil.Process:
        assert self.node.process is not None
        return psutil.Process(self.node.process.pid)

    def rss_bytes(self) -> int:
        return self.process.memory_info().rss

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=15)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        )

    def told(self, text: str) -> int:
        return self.node.log.read_text(errors="replace").count(text)


class HonestClient:
    """Writes a record and reads it again, over and over, on one connection of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.took_s: list[float] = []
        self.failed: list[str] = []

    def __enter__(self) -> HonestClient:
        self._thread.start()
        wait_until(lambda: len(self.took_s) > 5 or bool(self.failed), "it is served")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self) -> None:
        """Count from here on."""
        self.took_s.clear()

    def served_more(self, count: int = 10) -> None:
        """Wait until it was served so often again."""
        before = len(self.took_s)
        wait_until(lambda: len(self.took_s) >= before + count or bool(self.failed), "it is served")
        assert not self.failed

    def told(self) -> str:
        ordered = sorted(self.took_s)
        return (
            f"write and read {len(ordered)} times: median {ordered[len(ordered) // 2] * 1000:.0f} "
            f"ms, worst {ordered[-1] * 1000:.0f} ms"
        )

    def _work(self) -> None:
        with open_channel(self._address, None) as channel:
            stub = log_pb2_grpc.LogStub(channel)
            while not self._over.wait(0.02):  # A steady load, not a flood.
                begun_s = time.monotonic()
                try:
                    self._once(stub)
                except (grpc.RpcError, AssertionError) as error:
                    self.failed.append(repr(error))
                    return
                self.took_s.append(time.monotonic() - begun_s)

    def _once(self, stub: log_pb2_grpc.LogStub) -> None:
        where = common_pb2.TopicPartition(topic=HONEST, partition=0)
        partition = log_pb2.ProducePartition(
            partition=where, current_leader_epoch=-1, records=batch_of([b"x" * 100])
        )
        request = log_pb2.ProduceRequest(
            acks=common_pb2.ACKS_ALL, timeout_ms=20_000, partitions=[partition]
        )
        answer = stub.ProduceOnce(log_pb2.ProduceOnceRequest(request=request), timeout=30)
        [written] = answer.response.partitions
        assert not written.HasField("error"), written.error.message
        fetch = log_pb2.FetchRequest.FromString(
            fetch_request(HONEST, offset=written.base_offset, max_wait_ms=20_000)
        )
        [read] = stub.Fetch(fetch, timeout=30).partitions
        assert not read.HasField("error"), read.error.message
        assert read.records


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Abused]:
    cluster = Abused(tmp_path)
    try:
        cluster.start()
        create_topic(cluster, ABUSED, replication_factor=1)
        create_topic(cluster, HONEST, replication_factor=1)
        for _ in range(24):
            produce(cluster, ABUSED, [os.urandom(MIB - 1024)])
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def honest(cluster: Abused) -> Iterator[HonestClient]:
    with HonestClient(cluster.address) as client:
        yield client
        client.served_more()
        tell(f"{client.told()}; {cluster.rss_bytes() / MIB:.0f} MiB in the end")
    assert not client.failed


def highest_rss(cluster: Abused, until: Callable[[], bool], timeout_s: float) -> int:
    """The most memory that the node has until then."""
    highest, deadline = 0, time.monotonic() + timeout_s
    while not until() and time.monotonic() < deadline:
        highest = max(highest, cluster.rss_bytes())
        time.sleep(0.02)  # Between two looks at another process.
    return highest


@contextlib.contextmanager
def connections(count: int, make: Callable[[], Hostile]) -> Iterator[list[Hostile]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(make()) for _ in range(count)]


def test_answers_that_nobody_takes_are_bounded_and_their_clients_disconnected(
    cluster: Abused, honest: HonestClient
) -> None:
    before = cluster.rss_bytes()
    honest.begin()
    # Without limits these are 900 answers of 24 MiB.
    with connections(3, lambda: Hostile(cluster.address)) as hostile:
        for one in hostile:
            for _ in range(300):
                one.call(FETCH, fetch_request(ABUSED))
        wait_until(lambda: cluster.metric("penstock_unsent_bytes") > UNSENT_MAX // 2, "full")
        honest.served_more()
        highest = highest_rss(cluster, lambda: all(one.closed.is_set() for one in hostile), 40)
        assert all(one.closed.is_set() for one in hostile)
        assert all(one.taken_bytes == 0 for one in hostile)
    tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most; {honest.told()}")
    # Each answer is there twice while it is sent; what is beside that are calls and their bytes.
    assert highest - before < 2 * UNSENT_MAX + 64 * MIB
    assert cluster.metric("penstock_stalled_clients_total") >= 3
    wait_until(lambda: cluster.metric("penstock_unsent_bytes") < MIB, "all is free again")
    assert cluster.told("takes nothing of its answers was disconnected") == 1


@pytest.mark.parametrize("method", ["DescribeTopics", "Watch"])
def test_metadata_that_nobody_takes_are_bounded_too(cluster: Abused, method: str) -> None:
    create_topic(cluster, "wide", partitions=1_500, replication_factor=1)
    with open_channel(cluster.address, None) as channel:
        request = metadata_pb2.DescribeTopicsRequest(topics=["wide"])
        asked = request.SerializeToString() if method == "DescribeTopics" else b""
        answer = metadata_pb2_grpc.MetadataStub(channel).DescribeTopics(request, timeout=30)
    before = cluster.rss_bytes()
    with Hostile(cluster.address) as hostile:
        for _ in range(3_900):
            hostile.call(f"/penstock.v1.Metadata/{method}", asked)
        highest = highest_rss(cluster, hostile.closed.is_set, 60)
        assert hostile.closed.is_set()
        assert hostile.taken_bytes == 0
    tell(
        f"{method}, {answer.ByteSize()} bytes, 3,900 times: {before / MIB:.0f} MiB before, "
        f"{highest / MIB:.0f} MiB at most"
    )
    # Half of it is what 3,900 calls and streams take without any answer.
    assert highest - before < 2 * UNSENT_MAX + 100 * MIB
    assert cluster.metric("penstock_stalled_clients_total") >= 1
    wait_until(lambda: cluster.metric("penstock_unsent_bytes") < MIB, "all is free again")


def test_what_a_follower_repairs_its_log_by_is_bounded_too(
    cluster: Abused, honest: HonestClient
) -> None:
    """Without TLS whoever knows the cluster's id gets it."""
    topic = cluster.topic(ABUSED)
    hello = replication_pb2.FollowerHello(cluster_id=cluster.cluster_id, node_id=9, broker_epoch=1)
    asked = replication_pb2.ReadBatchesRequest(
        hello=hello,
        partition=replication_pb2.ReplicaPartition(topic_id=topic.topic_id, partition=0),
        leader_epoch=topic.partitions[0].leader_epoch,
        max_bytes=MIB,
    )
    before = cluster.rss_bytes()
    honest.begin()
    with Hostile(cluster.address) as hostile:
        for _ in range(500):
            hostile.call("/penstock.v1.Replication/ReadBatches", asked.SerializeToString())
        highest = highest_rss(cluster, hostile.closed.is_set, 60)
        assert hostile.closed.is_set()
    tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most")
    assert highest - before < 2 * UNSENT_MAX + 64 * MIB
    wait_until(lambda: cluster.metric("penstock_unsent_bytes") < MIB, "all is free again")


def test_a_client_that_asks_for_more_than_it_takes_is_refused_and_told(cluster: Abused) -> None:
    with Hostile(cluster.address) as hostile:
        for _ in range(300):
            hostile.call(FETCH, fetch_request(ABUSED))
        wait_until(
            lambda: (
                cluster.metric("penstock_answers_refused_total") > 100 or hostile.closed.is_set()
            ),
            "refused or disconnected",
            40,
        )
        assert cluster.metric("penstock_unsent_bytes") <= UNSENT_MAX // 2 + MIB


def test_who_reads_slowly_is_not_disconnected(cluster: Abused) -> None:
    with open_channel(cluster.address, None) as channel:
        stub = log_pb2_grpc.LogStub(channel)
        request = log_pb2.FetchRequest.FromString(fetch_request(ABUSED))
        # More at a time than the connection may have: they wait for one another, and all come.
        calls = [stub.Fetch.future(request, timeout=60) for _ in range(12)]
        for call in calls:
            [answer] = call.result().partitions
            assert not answer.HasField("error"), answer.error.message
            assert answer.records
    assert cluster.metric("penstock_stalled_clients_total") == 0


def test_thousands_of_streams_of_one_client_hold_up_nobody(
    cluster: Abused, honest: HonestClient
) -> None:
    before = cluster.rss_bytes()
    honest.begin()
    with Hostile(cluster.address, 65_535) as hostile:
        for _ in range(330):
            hostile.call("/penstock.v1.Log/Produce", None)
            hostile.call("/penstock.v1.Groups/Heartbeat", None)
            hostile.call("/penstock.v1.Metadata/Watch", b"")
        honest.served_more(50)
        thousand = cluster.rss_bytes()
        tell(f"1,000 streams: {(thousand - before) / MIB:.0f} MiB; {honest.told()}")
        assert hostile.refused == []
        for _ in range(3_200):
            hostile.call("/penstock.v1.Log/Produce", None)
        wait_until(lambda: REFUSED_STREAM in hostile.refused, "those beyond the limit are refused")
        honest.served_more(50)
        highest = cluster.rss_bytes()
        assert not hostile.closed.is_set()
    tell(f"4,000 streams: {(highest - before) / MIB:.0f} MiB; {honest.told()}")
    assert highest - before < 200 * MIB


def at_once(cluster: Abused, ask: Callable[[metadata_pb2_grpc.MetadataStub], Any]) -> float:
    """Ask 3,000 times at once; the CPU seconds of the node when all of it was answered."""

    async def answers() -> list[object]:
        options = [*CHANNEL_OPTIONS]
        async with grpc.aio.insecure_channel(cluster.address, options=options) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)  # type: ignore[no-untyped-call]
            calls = (ask(stub) for _ in range(3_000))
            return await asyncio.gather(*calls, return_exceptions=True)

    before, begun_s = cluster.rss_bytes(), time.monotonic()
    had = cluster.process.cpu_times()
    lost = [answer for answer in asyncio.run(answers()) if isinstance(answer, BaseException)]
    has = cluster.process.cpu_times()
    took_s, grown = time.monotonic() - begun_s, (cluster.rss_bytes() - before) / MIB
    cpu_s = has.user + has.system - had.user - had.system
    tell(f"3,000 calls in {took_s:.1f} s, {cpu_s:.1f} s of CPU time, {grown:.0f} MiB")
    assert lost == []
    return cpu_s


def test_three_thousand_calls_at_once_are_all_answered(
    cluster: Abused, honest: HonestClient
) -> None:
    honest.begin()
    at_once(
        cluster,
        lambda stub: stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=60),
    )
    tell(honest.told())


def test_metadata_of_many_partitions_are_made_once_for_all_that_ask_at_once(
    cluster: Abused, honest: HonestClient
) -> None:
    """They take little more than other calls, and not twenty times that."""
    create_topic(cluster, "wide", partitions=1_500, replication_factor=1)
    wide = metadata_pb2.DescribeTopicsRequest(topics=["wide"])
    little = at_once(
        cluster,
        lambda stub: stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=60),
    )
    honest.served_more()
    honest.begin()
    much = at_once(cluster, lambda stub: stub.DescribeTopics(wide, timeout=60))
    honest.served_more()
    tell(honest.told())
    assert much < 5 * little


def test_two_thousand_connections_and_no_more(cluster: Abused, honest: HonestClient) -> None:
    before = cluster.rss_bytes()
    honest.begin()
    host, _, port = cluster.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(2_100):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            one.setblocking(False)
        honest.served_more(20)
        wait_until(lambda: cluster.process.num_fds() < 2_200, "those beyond the limit are closed")
        highest = cluster.rss_bytes()
        tell(f"2,100 connections: {(highest - before) / MIB:.0f} MiB; {honest.told()}")
        assert highest - before < 300 * MIB
    wait_until(lambda: cluster.process.num_fds() < 200, "their descriptors are free")


def test_an_oversize_request_is_refused_with_the_limit(cluster: Abused) -> None:
    with open_channel(cluster.address, None) as channel:
        produce_once = channel.unary_unary("/penstock.v1.Log/ProduceOnce")  # type: ignore[call-arg]
        with pytest.raises(grpc.RpcError) as refused:
            produce_once(b"x" * (64 * MIB + 1), timeout=30)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(64 * MIB) in refused.value.details()


GARBAGE = {
    "half a TLS hello": bytes.fromhex("1603010200010001fc0303") + b"\x11" * 40,
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "random bytes": random.Random(4).randbytes(5_000),
    "half a preface": b"PRI * HTTP/2.0\r\n",
    "nothing": b"",
    "a frame without end": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x00\x00\x00\x00\x00\x00",
}


def test_garbage_on_every_port_holds_up_nobody(cluster: Abused, honest: HonestClient) -> None:
    ports = {
        "broker": cluster.address,
        "controller": cluster.controller_addresses[1],
        "frames": frames_address(cluster, 1),
        "http": f"127.0.0.1:{cluster.http_port}",
    }
    descriptors = cluster.process.num_fds()
    told_bytes = cluster.node.log.stat().st_size
    honest.begin()
    with contextlib.ExitStack() as stack:
        for address in ports.values():
            host, _, port = address.rpartition(":")
            for garbage in GARBAGE.values():
                for _ in range(20):
                    one = stack.enter_context(socket.create_connection((host, int(port)), 10))
                    with contextlib.suppress(OSError):  # It may be closed already.
                        one.sendall(garbage)
        honest.served_more(20)
        # Slow ones are cut off while they still hold on to their end.
        wait_until(
            lambda: cluster.process.num_fds() <= descriptors + 20,
            "their descriptors are free",
            45,
        )
    tell(f"{honest.told()}; {cluster.node.log.stat().st_size - told_bytes} bytes of log")
    assert cluster.node.log.stat().st_size - told_bytes < 10_000


def test_a_node_out_of_descriptors_refuses_and_recovers(cluster: Abused) -> None:
    process = cluster.process
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    host, _, port = cluster.address.rpartition(":")
    with open_channel(cluster.address, None) as channel, contextlib.ExitStack() as stack:
        client = HonestClient(cluster.address)
        client._once(log_pb2_grpc.LogStub(channel))
        low = process.num_fds() + 5
        process.rlimit(psutil.RLIMIT_NOFILE, (low, hard))
        for _ in range(50):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            one.setblocking(False)
        wait_until(lambda: process.num_fds() >= low - 1, "no descriptor is left")
        # Who is connected is served on: the files that it needs are open.
        for _ in range(20):
            client._once(log_pb2_grpc.LogStub(channel))
        # Logs of a new topic want files.
        wish = cluster_pb2.CreateTopicCommand(name="new", partition_count=2, replication_factor=1)
        stub = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.CreateTopicsRequest(topics=[wish], timeout_ms=10_000)
        [created] = stub.CreateTopics(request, timeout=15).results
        assert not created.HasField("error"), created.error.message
        refused = write_once(channel, "new")
        tell(f"without descriptors: {ErrorCode(refused.error.code).name}: {refused.error.message}")
        assert refused.HasField("error")
        assert refused.error.code != ErrorCode.UNKNOWN_SERVER_ERROR
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    assert cluster.node.alive
    with HonestClient(cluster.address) as client:
        client.served_more(20)
    assert not client.failed
    with open_channel(cluster.address, None) as channel:
        wait_until(lambda: not write_once(channel, "new").HasField("error"), "it is written to", 30)


def write_once(channel: grpc.Channel, topic: str) -> log_pb2.ProducePartitionResult:
    partition = log_pb2.ProducePartition(
        partition=common_pb2.TopicPartition(topic=topic, partition=0),
        current_leader_epoch=-1,
        records=batch_of([b"x"]),
    )
    request = log_pb2.ProduceRequest(
        acks=common_pb2.ACKS_ALL, timeout_ms=5_000, partitions=[partition]
    )
    wrapped = log_pb2.ProduceOnceRequest(request=request)
    return log_pb2_grpc.LogStub(channel).ProduceOnce(wrapped, timeout=20).response.partitions[0]


def test_a_stop_under_abuse_ends_well_within_the_grace_period(
    cluster: Abused,
) -> None:
    with connections(3, lambda: Hostile(cluster.address)) as hostile:
        for one in hostile:
            for _ in range(150):
                one.call(FETCH, fetch_request(ABUSED))
                one.call("/penstock.v1.Log/Produce", None)
                one.call("/penstock.v1.Metadata/Watch", b"")
        wait_until(lambda: cluster.metric("penstock_unsent_bytes") > UNSENT_MAX // 2, "full")
        begun_s = time.monotonic()
        status = cluster.node.stop(timeout_s=40)
        took_s = time.monotonic() - begun_s
    tell(f"stopped in {took_s:.1f} s")
    assert status == 0
    assert took_s < 27
    assert cluster.told("Traceback") == 0
    cluster.start()
