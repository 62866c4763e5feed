"""A change of the voters whose client went away is given up, and holds nobody up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.raft_meta import link
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.quorum_service import QuorumServicer
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.v1 import controller_pb2, controller_pb2_grpc, raft_pb2_grpc
from penstock.wire.errors import (
    ErrorCode,
    InvalidRequestError,
    UnknownVoterError,
    VoterChangeInProgressError,
    VoterNotCaughtUpError,
)
from tests.support import eventually

NOWHERE = ("127.0.0.1", 1)  # Nobody listens there.
LONG_MS = 60_000


def machine() -> SimpleNamespace:
    return SimpleNamespace(
        apply=lambda _index, _term, _payload: b"done",
        freeze=lambda: lambda: b"",
        install=lambda _index, _snapshot: None,
    )


@pytest.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[RaftQuorum]:
    """One controller, which leads."""
    config = ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="c",
        data_dir=tmp_path,
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
    )
    quorum = RaftQuorum(config, machine())
    await quorum.start()
    await eventually(lambda: quorum.status().role is Role.LEADER)
    await quorum.propose(b"first")  # From then on voters may be changed.
    yield quorum
    await quorum.stop()


def observes(quorum: RaftQuorum, node_id: int) -> bool:
    """The leader sends a node its log."""
    return node_id in quorum.status().match_index


async def add(quorum: RaftQuorum, node_id: int) -> asyncio.Task[object]:
    """A change that is under way and never ends: nobody answers."""
    change = asyncio.create_task(quorum.add_voter(node_id, NOWHERE, timeout_ms=LONG_MS))
    await eventually(lambda: observes(quorum, node_id))
    return change


async def is_free(quorum: RaftQuorum) -> bool:
    """Whether a change could begin: one that can not be is refused for a reason of its own."""
    try:
        await quorum.remove_voter(77)
    except UnknownVoterError:
        return True
    except VoterChangeInProgressError:
        return False
    raise AssertionError("a node that is no voter was removed")


async def test_a_change_under_way_holds_up_others(quorum: RaftQuorum) -> None:
    change = await add(quorum, 4)
    assert not await is_free(quorum)
    with pytest.raises(VoterChangeInProgressError):
        await quorum.add_voter(5, NOWHERE)
    assert observes(quorum, 4)
    assert not change.done()
    change.cancel()


async def test_a_change_whose_client_is_gone_is_given_up(quorum: RaftQuorum) -> None:
    change = await add(quorum, 4)
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    await eventually(lambda: not observes(quorum, 4))
    assert await is_free(quorum)
    later = await add(quorum, 5)
    assert quorum.status().voters is not None
    assert quorum.status().voters.node_ids == {1}
    later.cancel()


async def test_a_voter_is_not_sought_where_it_is_not(quorum: RaftQuorum) -> None:
    """It is heard at another address, so that this one is a mistake, or is of another node."""
    with pytest.raises(
        InvalidRequestError,
        match=r"controller 1 is a voter.*known at 127\.0\.0\.1:1 and heard at 127\.0\.0\.1:1.*"
        r"127\.0\.0\.1:2.*next: penstock quorum add 1@127\.0\.0\.1:1",
    ):
        await quorum.add_voter(1, ("127.0.0.1", 2))
    voters = quorum.status().voters
    assert voters is not None
    assert [member.address for member in voters] == [("127.0.0.1", 1)]
    assert await quorum.add_voter(1, ("127.0.0.1", 1)) == voters
    assert await is_free(quorum)


async def test_a_voter_that_is_heard_elsewhere_is_found_there(quorum: RaftQuorum) -> None:
    """As of one whose controller.advertised was changed."""
    moved = ("localhost", 1)
    quorum._config = replace(quorum._config, advertised=moved)
    await quorum.add_voter(1, moved)
    voters = quorum.status().voters
    assert voters is not None
    assert [member.address for member in voters] == [moved]


class Elsewhere(raft_pb2_grpc.RaftServicer):
    """The controller port of another node."""

    async def Exchange(self, request_iterator: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this is node 9")


@pytest.fixture
async def ports() -> AsyncIterator[dict[str, int]]:
    """Of another controller, of a server that is no controller, and of nobody."""
    servers = [aio.server(), aio.server()]
    raft_pb2_grpc.add_RaftServicer_to_server(Elsewhere(), servers[0])
    first, second = (server.add_insecure_port("127.0.0.1:0") for server in servers)
    for server in servers:
        await server.start()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # And does not listen.
        yield {"another": first, "none": second, "nobody": silent.getsockname()[1]}
    for server in servers:
        await server.stop(None)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("another", "FAILED_PRECONDITION: this is node 9"),
        ("none", "UNIMPLEMENTED: "),
        ("nobody", "UNAVAILABLE: failed to connect"),
    ],
)
async def test_why_a_controller_was_not_heard_is_told_with_the_refusal(
    quorum: RaftQuorum,
    ports: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    reason: str,
) -> None:
    monkeypatch.setattr(link, "_CONNECT_S", 0.3)
    address = ("127.0.0.1", ports[place])
    change = asyncio.create_task(quorum.add_voter(4, address, timeout_ms=LONG_MS))
    await eventually(lambda: quorum.link.failure_of(4).startswith(reason))
    [token] = quorum._changing
    quorum._thread.submit(lambda voter, _now_s: voter.stop_adding(token))
    with pytest.raises(VoterNotCaughtUpError, match=rf"did not answer \(.*heard last: {reason}"):
        await change


async def test_a_change_is_given_up_before_its_client_is_tired_of_it(quorum: RaftQuorum) -> None:
    with pytest.raises(VoterNotCaughtUpError, match="controller 4 did not answer"):
        await quorum.add_voter(4, NOWHERE, timeout_ms=1500)
    assert await is_free(quorum)


async def test_whoever_hangs_up_gives_the_change_up(quorum: RaftQuorum, tmp_path: Path) -> None:
    """By the service: a call that is cancelled, and one whose connection breaks."""
    config = ControllerConfig(
        node_id=1, cluster_id="c", data_dir=tmp_path, listen=("", 0), voters={1: ("", 1)}
    )
    server = aio.server()
    servicer = QuorumServicer(config, quorum, lambda: 0)
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.AlterVoters,
        request_deserializer=controller_pb2.AlterVotersRequest.FromString,
        response_serializer=controller_pb2.AlterVotersResponse.SerializeToString,
    )
    handlers = {"AlterVoters": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("penstock.v1.Controller", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request = controller_pb2.AlterVotersRequest(add={"node_id": 4, "host": "127.0.0.1", "port": 1})
    try:
        for hang_up in ("cancel", "close"):
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = controller_pb2_grpc.ControllerStub(channel)
                call = stub.AlterVoters(request, timeout=60)
                waiting = asyncio.ensure_future(call)
                await eventually(lambda: observes(quorum, 4))
                refused = await stub.AlterVoters(request, timeout=60)
                assert refused.error.code == ErrorCode.VOTER_CHANGE_IN_PROGRESS.value
                if hang_up == "cancel":
                    call.cancel()
                else:
                    await channel.close(None)
                await asyncio.gather(waiting, return_exceptions=True)
                await eventually(lambda: not observes(quorum, 4))
            assert await is_free(quorum)
    finally:
        await server.stop(None)
