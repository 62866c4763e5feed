"""Connections without gRPC are as well guarded as those with: both ends know who is there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from penstock.broker.replication.connecting import ReplicationConnector
from penstock.broker.replication.frame_server import FrameServer
from penstock.broker.replication.ports import StreamBrokenError
from penstock.cli.certificates import Authority, Issued, issue_node, write_files
from penstock.raft_meta.authentication import PeerAuthentication, node_name
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.exposure import TlsFiles
from penstock.raft_meta.tls_contexts import TlsContexts
from penstock.v1 import replication_pb2

CLUSTER = "kT_b-C"
AUTHORITY = Authority()
HELLO = replication_pb2.FollowerHello(cluster_id=CLUSTER, node_id=2, broker_epoch=1)

KINDS = ["hello", "coordinator"]
"""What a connection may be opened for: to follow, or to bring marks."""


def node(directory: Path, node_id: int, issued: Issued | None = None) -> tuple[TlsFiles, NodeTls]:
    issued = issued or issue_node(AUTHORITY, node_id, CLUSTER)
    files = write_files(directory / f"{node_id}", "node", AUTHORITY, issued)
    return files, NodeTls(files, cluster_id=CLUSTER, node_id=node_id)


class Leading:
    """A leader that lets whoever comes in so far as its certificate does, and counts."""

    def __init__(self, contexts: TlsContexts) -> None:
        self.refused: list[str] = []
        self.asked: list[int] = []
        self.server = FrameServer(
            self,  # type: ignore[arg-type]
            PeerAuthentication(CLUSTER, tls=True),
            contexts.server,
            lambda _request, _on_end: None,
            cluster_id=CLUSTER,
            node_id=1,
            count_refused=self.refused.append,
            count_served=lambda: None,
        )
        self.port = 0

    def check_follower(self, hello: replication_pb2.FollowerHello) -> None:
        self.asked.append(hello.node_id)
        raise StreamBrokenError(StatusCode.ABORTED, "known, and that was all", cause="refused")


@asynccontextmanager
async def leading(tls: NodeTls) -> AsyncIterator[Leading]:
    leader = Leading(TlsContexts(tls))
    leader.port = await leader.server.start("127.0.0.1", 0)
    try:
        yield leader
    finally:
        await leader.server.stop()


async def follow(
    leader: Leading, connector: NodeConnector, said: Any = HELLO, *, kind: str = "hello"
) -> StreamBrokenError:
    """How it ends for who connects: nobody is let in for good here."""
    first = replication_pb2.ReplicationFetchRequest(**{kind: said})
    connecting = ReplicationConnector(connector)
    with pytest.raises(StreamBrokenError) as caught:
        await connecting._connect(1, "127.0.0.1", leader.port, first, bytes)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_speaks_for_itself_alone(tmp_path: Path, kind: str) -> None:
    connector = NodeConnector(node(tmp_path, 2)[1])
    async with leading(node(tmp_path, 1)[1]) as leader:
        refusal = await follow(leader, connector, kind=kind)
        assert refusal.reason == "known, and that was all"
        assert leader.asked == [2]
        forged = replication_pb2.FollowerHello(cluster_id=CLUSTER, node_id=3)
        refusal = await follow(leader, connector, forged, kind=kind)
        assert refusal.status is StatusCode.PERMISSION_DENIED
        assert "may not speak as node 3" in refusal.reason
        assert leader.asked == [2]
        assert leader.refused == ["refused", "certificate"]


class Forged(NodeConnector):
    """Connects with a certificate that no node of ours would be given."""

    def __init__(self, tls: NodeTls, directory: Path, issued: Issued, ca: bytes) -> None:
        super().__init__(tls)
        pair = directory / "pair.pem"
        pair.write_bytes(issued.key + issued.certificate)
        self._forged = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._forged.check_hostname = False
        self._forged.load_verify_locations(cadata=ca.decode())
        self._forged.load_cert_chain(pair)

    def tls_context(self) -> ssl.SSLContext:
        return self._forged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [["client"], [node_name(2, "other")], [f"*.{CLUSTER}.penstock"]])
async def test_whoever_is_no_node_of_the_cluster_is_told_so(
    tmp_path: Path, names: list[str], kind: str
) -> None:
    tls = node(tmp_path, 2)[1]
    connector = Forged(tls, tmp_path, AUTHORITY.issue("x", names), AUTHORITY.pem)
    async with leading(node(tmp_path, 1)[1]) as leader:
        refusal = await follow(leader, connector, kind=kind)
        assert refusal.status is StatusCode.UNAUTHENTICATED
        assert leader.refused == ["certificate"]
        assert leader.asked == []


def bad_certificates() -> dict[str, Issued]:
    now, name = datetime.now(UTC), node_name(2, CLUSTER)
    ends = now - timedelta(days=1)
    return {
        "another authority's": issue_node(Authority("other"), 2, CLUSTER),
        "expired": AUTHORITY.issue("old", [name], begins=now - timedelta(days=2), ends=ends),
    }


@pytest.mark.parametrize("which", ["another authority's", "expired"])
async def test_a_certificate_that_is_not_good_ends_in_the_handshake(
    tmp_path: Path, which: str
) -> None:
    tls = node(tmp_path, 2)[1]
    connector = Forged(tls, tmp_path, bad_certificates()[which], AUTHORITY.pem)
    async with leading(node(tmp_path, 1)[1]) as leader:
        with contextlib.suppress(OSError):  # TLS 1.3: it may learn of it when it reads.
            await follow(leader, connector)
        assert leader.asked == []
        assert leader.refused == ["tls"]


@pytest.mark.parametrize("said", [b"penstock\x00\x01", b"\x16\x03\x01\xff\xff" + bytes(40)])
async def test_whoever_speaks_no_tls_or_shows_nothing_is_not_heard(
    tmp_path: Path, said: bytes
) -> None:
    async with leading(node(tmp_path, 1)[1]) as leader:
        reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
        writer.write(said)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert not answer.startswith(b"penstock")
        writer.close()
        anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", leader.port, ssl=anonymous)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert leader.refused == ["tls", "tls"]
        assert leader.asked == []


async def test_a_follower_knows_the_leader_by_its_certificate(tmp_path: Path) -> None:
    connector = NodeConnector(node(tmp_path, 2)[1])
    async with leading(node(tmp_path, 3)[1]) as other:  # Where node 1 should be.
        refusal = await follow(other, connector)
        assert "node 3, as its certificate says, may not speak as node 1" in refusal.reason
        assert refusal.cause != "refused"  # It is no word of the leader's: gRPC is tried.
        assert other.asked == []


async def test_renewed_files_are_used_from_the_next_connection_on(tmp_path: Path) -> None:
    files, tls = node(tmp_path, 1)
    connector = NodeConnector(node(tmp_path, 2)[1])
    async with leading(tls) as leader:
        first = shown_by(leader.port, connector)
        assert await asyncio.to_thread(first) == await asyncio.to_thread(first)
        renewed = issue_node(AUTHORITY, 1, CLUSTER)
        files.certificate.write_bytes(renewed.certificate)  # Without its key: not yet.
        before = await asyncio.to_thread(first)
        files.key.write_bytes(renewed.key)
        after = await asyncio.to_thread(first)
        assert before != after
        assert ssl.DER_cert_to_PEM_cert(after).split() == renewed.certificate.decode().split()
        assert (await follow(leader, connector)).reason == "known, and that was all"


def shown_by(port: int, connector: NodeConnector) -> Any:
    """What certificate a port shows, asked anew at each call."""

    def ask() -> bytes:
        context = connector.tls_context()
        assert context is not None
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain) as secured,
        ):
            return secured.getpeercert(binary_form=True) or b""

    return ask


def test_an_intermediate_authority_may_stand_alone_in_tls_ca(tmp_path: Path) -> None:
    # As with gRPC: what tls.ca names is trusted, whoever has signed it. Two nodes shake hands.
    contexts = TlsContexts(node(tmp_path, 1)[1])
    for context in (contexts.server(), contexts.client()):
        assert context.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
