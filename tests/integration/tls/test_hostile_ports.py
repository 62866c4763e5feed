"""Whatever strangers send to the ports of a cluster, it goes on, and no larger than before."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from penstock.broker.replication.frames import PREAMBLE
from penstock.cli.certificates import Authority, Issued, issue_node
from penstock.raft_meta.authentication import node_name
from penstock.v1 import raft_pb2
from penstock.wire.transport import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from tests.integration import raw
from tests.integration.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
WARM_UP = 400
ROUNDS = 3000
GROWTH_BYTES = 32 * 1024 * 1024
LOG_BYTES = 256 * 1024
METHODS = {
    "/penstock.v1.Raft/Exchange": "stream_unary",
    "/penstock.v1.Controller/RegisterBroker": "unary_unary",
    "/penstock.v1.Controller/Heartbeat": "stream_stream",
    "/penstock.v1.Controller/AlterPartition": "unary_unary",
    "/penstock.v1.Controller/ExecuteAdmin": "unary_unary",
    "/penstock.v1.Controller/WatchMetadata": "unary_stream",
    "/penstock.v1.Controller/DescribeQuorum": "unary_unary",
    "/penstock.v1.Replication/Fetch": "stream_stream",
    "/penstock.v1.Coordination/AddPartitions": "unary_unary",
    "/penstock.v1.Coordination/WriteMarkers": "unary_unary",
    "/penstock.v1.Log/Produce": "stream_stream",
    "/penstock.v1.Groups/Heartbeat": "stream_stream",
    "/penstock.v1.Admin/CreateTopics": "unary_unary",
    "/penstock.v1.NoSuch/Method": "unary_unary",
}
CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}


def payloads(rng: random.Random) -> Iterator[bytes]:
    """What a stranger may write into a connection, for ever."""
    while True:
        yield rng.randbytes(rng.randrange(1, 400))
        yield b"GET / HTTP/1.1\r\nHost: penstock\r\n\r\n"
        yield PREFACE
        yield PREFACE + SETTINGS + rng.randbytes(60)
        yield PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + rng.randbytes(200)
        yield PREFACE + SETTINGS + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01" + b"\x82" * 300
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(120)
        yield b"\x16\x03\x01\xff\xff" + rng.randbytes(20)
        yield PREAMBLE + rng.randbytes(60)
        yield PREAMBLE + MAX_MESSAGE_BYTES.to_bytes(4, "big") + b"\x01" + rng.randbytes(300)
        yield PREAMBLE + b"\x00\x00\x00\x14\x01" + rng.randbytes(20)
        yield b""


def throw(address: str, data: bytes) -> None:
    """Connect, write, and leave without a word."""
    host, _, port = address.rpartition(":")
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=5) as opened,
    ):
        opened.sendall(data)


def whisper(address: str, context: ssl.SSLContext, data: bytes) -> None:
    """The same within TLS, as far as the other end plays along."""
    host, _, port = address.rpartition(":")
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=5) as opened,
        context.wrap_socket(opened) as secured,
    ):
        secured.sendall(data)


def tls_context(directory: Path, name: str, issued: Issued | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if issued is not None:
        pair = directory / f"{name}.pem"
        pair.write_bytes(issued.key + issued.certificate)
        context.load_cert_chain(pair)
    return context


def strangers(directory: Path, cluster: Cluster) -> dict[str, ssl.SSLContext]:
    """Whom the authority has not signed, or not for this, or not for now."""
    authority = cluster.authority
    assert authority is not None
    name, now = node_name(2, cluster.cluster_id), datetime.now(UTC)
    expired = authority.issue(
        "old", [name], begins=now - timedelta(days=2), ends=now - timedelta(days=1)
    )
    shown = {
        "nothing": None,
        "another authority's": issue_node(Authority("other"), 2, cluster.cluster_id),
        "an expired one": expired,
        "a client's": authority.issue("client", ["client"]),
        "another cluster's": issue_node(authority, 2, "other"),
    }
    return {
        which: tls_context(directory, f"stranger-{number}", issued)
        for number, (which, issued) in enumerate(shown.items())
    }


def ask(channel: grpc.Channel, path: str, data: bytes, timeout_s: float = 2.0) -> grpc.StatusCode:
    """How a call ends that sends these bytes."""
    kind = METHODS[path]
    what: Any = iter([data]) if kind.startswith("stream") else data
    try:
        answer = getattr(channel, kind)(path)(what, timeout=timeout_s)
        if kind.endswith("stream"):
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def nonsense(rng: random.Random, cluster: Cluster) -> bytes:
    """Bytes for a call: some are a message, of somebody else."""
    hello = raft_pb2.RaftHello(
        cluster_id=rng.choice([cluster.cluster_id, "other", ""]),
        node_id=rng.choice([-1, 0, 3, 99, 2**31 - 1]),
        receiver_node_id=rng.choice([1, 2, 7]),
    )
    forged = raft_pb2.RaftExchangeRequest(term=2**60, hello=hello).SerializeToString()
    return rng.choice([b"", rng.randbytes(30), b"\xff" * 9, forged, forged[:-1], forged * 3])


class Sizes:
    """How large the nodes' processes and their logs are."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first = self._now()

    def _now(self) -> dict[int, tuple[int, int]]:
        found = {}
        for node in self._cluster.nodes.values():
            assert node.process is not None
            assert node.alive, self._cluster.log_tails()
            rss = psutil.Process(node.process.pid).memory_info().rss
            found[node.node_id] = (rss, node.log.stat().st_size)
        return found

    def assert_no_larger(self) -> None:
        for node_id, (rss, logged) in self._now().items():
            grown, written = rss - self._first[node_id][0], logged - self._first[node_id][1]
            assert grown < GROWTH_BYTES, f"node {node_id} grew by {grown} bytes"
            assert written < LOG_BYTES, f"node {node_id} logged {written} bytes"


def assert_unharmed(cluster: Cluster, topic: str) -> None:
    raw.create_topic(cluster, topic, configs={"min.insync.replicas": "3"})
    raw.produce(cluster, topic, [b"a"])
    assert [record.value for record in raw.read_all(cluster, topic, at_least=1)] == [b"a"]
    for node in cluster.nodes.values():
        assert node.alive
        assert "Traceback" not in node.log.read_text()


def besiege(cluster: Cluster, attack: Callable[[int], None]) -> None:
    """Attack until the processes are as large as they get, and see that they are."""
    pids = [node.process.pid for node in cluster.nodes.values() if node.process is not None]
    for number in range(WARM_UP):
        attack(number)
    sizes = Sizes(cluster)
    for number in range(ROUNDS):
        attack(number)
    sizes.assert_no_larger()
    assert_unharmed(cluster, "after")
    assert pids == [node.process.pid for node in cluster.nodes.values() if node.process is not None]


def addresses(cluster: Cluster) -> list[str]:
    brokers = [node.address for node in cluster.nodes.values()]
    return [*cluster.controller_addresses.values(), *brokers]


def frames_addresses(cluster: Cluster) -> list[str]:
    return [raw.frames_address(cluster, node_id) for node_id in cluster.nodes]


@pytest.mark.parametrize("secure", [False, True])
def test_bytes_that_are_no_protocol(tmp_path: Path, secure: bool) -> None:
    with running_cluster(tmp_path, authority=Authority() if secure else None) as cluster:
        rng = random.Random(7)
        data, ports = payloads(rng), [*addresses(cluster), *frames_addresses(cluster)]
        contexts = list(strangers(tmp_path, cluster).values()) if secure else []

        def attack(number: int) -> None:
            address = ports[number % len(ports)]
            if contexts and number % 3:
                whisper(address, contexts[number % len(contexts)], next(data))
            else:
                throw(address, next(data))

        with contextlib.ExitStack() as silent:
            for number in range(120):  # They connect, say nothing or half of something, and stay.
                host, _, port = ports[number % len(ports)].rpartition(":")
                held = silent.enter_context(socket.create_connection((host, int(port))))
                held.sendall(next(data)[:20])
            besiege(cluster, attack)


@pytest.mark.parametrize("secure", [False, True])
def test_calls_that_make_no_sense(tmp_path: Path, secure: bool) -> None:
    with running_cluster(tmp_path, authority=Authority() if secure else None) as cluster:
        rng = random.Random(11)
        options = [
            *CHANNEL_OPTIONS,
            ("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),
            ("grpc.ssl_target_name_override", "localhost"),
        ]
        with contextlib.ExitStack() as opened:
            channels = [
                opened.enter_context(
                    grpc.insecure_channel(address, options=options)
                    if cluster.credentials is None
                    else grpc.secure_channel(address, cluster.credentials, options=options)
                )
                for address in addresses(cluster)
            ]
            paths = list(METHODS)

            def attack(number: int) -> None:
                path = paths[number % len(paths)]
                data = nonsense(rng, cluster)
                if path.endswith("ExecuteAdmin") and secure is False:
                    data = b"\xff" + data  # Without TLS whoever asks well is obeyed.
                code = ask(rng.choice(channels), path, data)
                assert code in CLEAR, (path, data, code)

            besiege(cluster, attack)
            huge = bytes(MAX_MESSAGE_BYTES + 1)
            sizes = Sizes(cluster)
            for channel in channels[:3]:
                code = ask(channel, "/penstock.v1.Controller/RegisterBroker", huge, 30)
                assert code in {
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.UNAUTHENTICATED,
                }
            sizes.assert_no_larger()


def test_who_shows_the_wrong_certificate_gets_no_answer(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, authority=Authority()) as cluster:
        for which, context in strangers(tmp_path, cluster).items():
            for address in (*addresses(cluster), *frames_addresses(cluster)):
                host, _, port = address.rpartition(":")
                heard = b""
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((host, int(port)), timeout=10) as plain,
                    context.wrap_socket(plain) as secured,
                ):
                    secured.sendall(PREFACE + SETTINGS)
                    heard = secured.recv(1)
                # The authority's own may connect; what they may ask there is checked call by call.
                assert bool(heard) == (which in {"a client's", "another cluster's"}), which
