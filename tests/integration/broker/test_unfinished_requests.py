"""Clients that send requests in part, to a real node: it is bounded, and honest ones never pay.

Figures are printed (``pytest -s``), since docs/operating/limits.md tells of them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from penstock.cli.certificates import Authority
from penstock.v1 import common_pb2, log_pb2, log_pb2_grpc
from tests.integration.broker.test_abuse import (
    HONEST,
    MIB,
    UNFINISHED_MAX,
    Abused,
    HonestClient,
    highest_rss,
    tell,
)
from tests.integration.cluster import open_channel
from tests.integration.hostile import DATA, END_STREAM, Hostile, frame
from tests.integration.raw import batch_of, create_topic, fetch_at
from tests.support import wait_until

pytestmark = pytest.mark.integration

PRODUCE, ONCE = "/penstock.v1.Log/Produce", "/penstock.v1.Log/ProduceOnce"
MESSAGE_BYTES = 64 * MIB - 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Abused]:
    cluster = Abused(tmp_path)
    try:
        cluster.start()
        create_topic(
            cluster, HONEST, replication_factor=1, configs={"max.message.bytes": str(32 * MIB)}
        )
        yield cluster
    finally:
        cluster.close()


class Hoarder:
    """Sends 60 of 64 MB of a request on each of its streams, a megabyte each in turn."""

    def __init__(self, address: str, path: str, streams: int) -> None:
        self.hostile = Hostile(address)
        self._path = path
        self._streams = streams
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Hoarder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hostile.__exit__()
        self._thread.join()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            streams = [self.hostile.call(self._path, None) for _ in range(self._streams)]
            for stream in streams:
                self.hostile.send_part(stream, begun(MESSAGE_BYTES))
            for _ in range(60):
                for stream in streams:
                    self.hostile.send_part(stream, bytes(MIB))


def begun(size_bytes: int) -> bytes:
    """What gRPC puts before a message of this size."""
    return b"\0" + struct.pack(">I", size_bytes)


@contextlib.contextmanager
def hoarders(count: int, address: str, path: str, streams: int) -> Iterator[Sequence[Hoarder]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Hoarder(address, path, streams)) for _ in range(count)]


@pytest.mark.parametrize(("count", "streams", "path"), [(1, 50, PRODUCE), (10, 5, ONCE)])
def test_requests_in_part_are_bounded_and_their_clients_disconnected(
    cluster: Abused, count: int, streams: int, path: str
) -> None:
    with HonestClient(cluster.address) as honest:
        honest.served_more()
        before = cluster.rss_bytes()
        honest.begin()
        with hoarders(count, cluster.address, path, streams) as some:
            highest = highest_rss(cluster, lambda: all(one.done for one in some), 60)
            wait_until(
                lambda: cluster.metric("penstock_unfinished_bytes") <= UNFINISHED_MAX, "bounded"
            )
            assert any(one.hostile.closed.is_set() for one in some)
        honest.served_more()
    tell(f"{before / MIB:.0f} MiB before, {highest / MIB:.0f} MiB at most; {honest.told()}")
    # Without a bound these are 3 GB. What comes until it is noticed is some 100 ms of loopback.
    assert highest - before < UNFINISHED_MAX + 700 * MIB
    assert cluster.metric("penstock_overfull_clients_total") >= 1
    assert cluster.told("sent too much of requests in part was disconnected") == 1
    assert not honest.failed


def test_a_large_request_on_a_slow_link_is_taken_meanwhile(cluster: Abused) -> None:
    where = common_pb2.TopicPartition(topic=HONEST, partition=0)
    partition = log_pb2.ProducePartition(
        partition=where, current_leader_epoch=-1, records=batch_of([os.urandom(30 * MIB)])
    )
    request = log_pb2.ProduceOnceRequest(
        request=log_pb2.ProduceRequest(
            acks=common_pb2.ACKS_ALL, timeout_ms=20_000, partitions=[partition]
        )
    ).SerializeToString()
    message = memoryview(begun(len(request)) + request)
    with Hostile(cluster.address, MIB) as slow:
        stream = slow.call(ONCE, None)
        hoarded = 0
        while message:
            slow.send_part(stream, bytes(message[: MIB // 2]))
            message = message[MIB // 2 :]
            time.sleep(0.05)  # The link: ten megabytes a second.
            if len(message) < 15 * MIB and not hoarded:
                hoarded = 1
                with hoarders(2, cluster.address, PRODUCE, 10) as some:
                    wait_until(lambda: any(one.hostile.closed.is_set() for one in some), "cut", 30)
        slow._send(frame(DATA, END_STREAM, stream))
        wait_until(
            lambda: len(fetch_at(cluster.address, HONEST, 0).records) > 30 * MIB, "it is written"
        )
        assert not slow.closed.is_set()
    assert hoarded


@pytest.mark.parametrize("tls", [False, True])
def test_what_honest_clients_bring_is_never_taken_for_parts(tmp_path: Path, tls: bool) -> None:
    cluster = Abused(tmp_path, Authority() if tls else None)
    try:
        cluster.start()
        create_topic(cluster, HONEST, replication_factor=1)
        with open_channel(cluster.address, cluster.credentials) as channel:
            stub = log_pb2_grpc.LogStub(channel)
            for size_bytes, count in ((100, 3_000), (30_000, 1_000), (1_000_000, 250)):
                write_on_a_stream(stub, size_bytes, count)
            for _ in range(200):
                read_and_write_once(stub)
            wait_until(lambda: cluster.metric("penstock_unfinished_bytes") == 0, "nothing is left")
            tell(f"{cluster.rss_bytes() / MIB:.0f} MiB")
    finally:
        cluster.close()


def produce_request(size_bytes: int) -> log_pb2.ProduceRequest:
    where = common_pb2.TopicPartition(topic=HONEST, partition=0)
    partition = log_pb2.ProducePartition(
        partition=where, current_leader_epoch=-1, records=batch_of([bytes(size_bytes)])
    )
    return log_pb2.ProduceRequest(
        acks=common_pb2.ACKS_LEADER, timeout_ms=20_000, partitions=[partition]
    )


def write_on_a_stream(stub: log_pb2_grpc.LogStub, size_bytes: int, count: int) -> None:
    request = produce_request(size_bytes)
    for answer in stub.Produce(iter([request] * count), timeout=60):
        assert not answer.partitions[0].HasField("error"), answer.partitions[0].error.message
        count -= 1
    assert not count


def read_and_write_once(stub: log_pb2_grpc.LogStub) -> None:
    stub.ProduceOnce(log_pb2.ProduceOnceRequest(request=produce_request(5_000)), timeout=30)
    fetch = log_pb2.FetchPartition(
        partition=common_pb2.TopicPartition(topic=HONEST, partition=0),
        fetch_offset=4_000,
        current_leader_epoch=-1,
        last_fetched_epoch=-1,
        partition_max_bytes=MIB,
    )
    [read] = stub.Fetch(
        log_pb2.FetchRequest(max_bytes=MIB, partitions=[fetch]), timeout=30
    ).partitions
    assert read.records


def test_calls_that_were_given_up_half_way_cost_nobody_the_connection(cluster: Abused) -> None:
    """What they had is free, which nobody says: it is taken for parts until it is forgiven."""
    with Hostile(cluster.address) as hostile:
        for _ in range(3):
            stream = hostile.call(ONCE, None)
            hostile.send_part(stream, begun(MESSAGE_BYTES) + bytes(30 * MIB))
            hostile.reset(stream)
        wait_until(lambda: cluster.metric("penstock_unfinished_bytes") > 80 * MIB, "it is counted")
        channel_is_served(cluster)
        assert not hostile.closed.is_set()
    wait_until(lambda: cluster.metric("penstock_unfinished_bytes") == 0, "it left", 30)
    assert cluster.metric("penstock_overfull_clients_total") == 0


def channel_is_served(cluster: Abused) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        log_pb2_grpc.LogStub(channel).ProduceOnce(
            log_pb2.ProduceOnceRequest(request=produce_request(10)), timeout=30
        )
