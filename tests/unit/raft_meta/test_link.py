"""The stream to another controller is kept open whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from penstock.raft_meta import link
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.link import Message, RaftLink, _Outlet, step_to_connect
from penstock.v1 import raft_pb2
from tests.support import eventually


class BreakingConnector:
    """A connector whose credentials cannot be made while ``broken``."""

    def __init__(self) -> None:
        self.broken = False
        self.asked = 0
        self.opened: list[str] = []

    def credentials(self) -> None:
        self.asked += 1
        if self.broken:
            raise ValueError("no sense can be made of it")

    def open(self, address: str, _peer: int) -> aio.Channel:
        self.opened.append(address)
        return aio.insecure_channel(address)


class RefusedError(Exception):
    """What ends a call that is refused."""


class OneCall:
    """The context of a call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, _status: grpc.StatusCode, reason: str) -> None:
        raise RefusedError(reason)


ADDRESS = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "


@pytest.mark.parametrize(
    ("reason", "is_about_tls"),
    [
        (ADDRESS + "Failed to connect to remote host: Connection refused", False),
        (ADDRESS + "Failed to connect to remote host: Timeout occurred: FD Shutdown", False),
        (ADDRESS + "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", True),
        ("Socket closed", True),
    ],
)
def test_certificates_are_not_to_blame_where_nobody_listens(
    reason: str, is_about_tls: bool
) -> None:
    assert ("tls.*" in step_to_connect(reason)) == is_about_tls


async def test_a_stream_is_tried_again_after_whatever_went_wrong(monkeypatch) -> None:
    monkeypatch.setattr(link, "_BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(link, "_BACKOFF_MAX_S", 0.02)

    async def fail(_outlet: _Outlet) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(_Outlet, "_stream", fail)
    connector = BreakingConnector()
    addresses = [("127.0.0.1", 1), ("127.0.0.1", 2)]
    outlet = _Outlet(2, lambda: addresses, Message(), connector)  # type: ignore[arg-type]
    try:
        connector.broken = True
        await eventually(lambda: connector.asked >= 4)
        assert not outlet._task.done()
        assert len(connector.opened) == 1
        connector.broken = False
        await eventually(lambda: len(connector.opened) >= 3)
        assert set(connector.opened) == {"127.0.0.1:1", "127.0.0.1:2"}
    finally:
        await outlet.close()


async def test_why_a_stream_ended_is_not_forgotten_for_a_write_that_came_too_late() -> None:
    addresses = [("127.0.0.1", 1)]
    outlet = _Outlet(2, lambda: addresses, Message(), BreakingConnector())  # type: ignore[arg-type]
    try:
        for code, details in (
            (grpc.StatusCode.INTERNAL, "Internal error from Core"),
            (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
            (grpc.StatusCode.INTERNAL, "Internal error from Core"),
        ):
            outlet._complain(aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details, None))
        assert outlet.failure == "UNIMPLEMENTED: Method not found!"
    finally:
        await outlet.close()


async def test_why_a_node_of_the_settings_was_refused_is_known_until_it_is_not() -> None:
    voters = {node: ("127.0.0.1", node) for node in (1, 2)}
    one = RaftLink(
        node_id=1,
        cluster_id="c",
        voters=voters,
        advertised=voters[1],
        connector=NodeConnector(None),
        authentication=PeerAuthentication("c", tls=False),
        on_message=lambda _peer, _message: None,
        on_lost=lambda _peer: None,
    )

    async def introduce(node_id: int, cluster_id: str) -> None:
        hello = raft_pb2.RaftHello(
            cluster_id=cluster_id, node_id=node_id, receiver_node_id=1, directory_id=b"d" * 16
        )

        async def messages() -> AsyncIterator[Message]:
            yield Message(hello=hello)

        with contextlib.suppress(RefusedError):
            await one._introduce(messages(), OneCall())

    await introduce(2, "Bogus" * 1000)
    await introduce(7, "Bogus")
    (refusal,) = one.refusals().values()
    assert refusal.startswith("node 2 is of cluster 'Bogus")
    assert len(refusal) <= 300
    await introduce(2, "c")
    assert one.refusals() == {}


async def test_the_connections_of_voters_are_known_while_their_streams_last() -> None:
    voters = {node: ("127.0.0.1", node) for node in (1, 2)}
    one = RaftLink(
        node_id=1,
        cluster_id="c",
        voters=voters,
        advertised=voters[1],
        connector=NodeConnector(None),
        authentication=PeerAuthentication("c", tls=False),
        on_message=lambda _peer, _message: None,
        on_lost=lambda _peer: None,
    )
    over = asyncio.Event()

    async def messages(node_id: int) -> AsyncIterator[Message]:
        yield Message(
            hello=raft_pb2.RaftHello(
                cluster_id="c", node_id=node_id, receiver_node_id=1, directory_id=b"d" * 16
            )
        )
        await over.wait()

    stranger = asyncio.create_task(one.Exchange(messages(7), OneCall()))
    await eventually(lambda: one.connected() == {7})
    assert one.connections() == frozenset()
    voter = asyncio.create_task(one.Exchange(messages(2), OneCall()))
    await eventually(lambda: one.connections() == {"ipv4:127.0.0.1:1"})
    over.set()
    await asyncio.gather(stranger, voter)
    assert one.connections() == frozenset()
