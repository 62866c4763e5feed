"""The Groups service over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog.testing
from grpc import aio

from penstock.broker.coordinator.service import GroupsServicer, peer_host
from penstock.broker.core.group_events import GroupSettings
from penstock.v1 import groups_pb2
from penstock.v1.groups_pb2_grpc import GroupsStub, add_GroupsServicer_to_server
from penstock.wire.errors import ErrorCode, error_from_proto
from penstock.wire.transport import CHANNEL_OPTIONS, SERVER_OPTIONS
from tests.support import eventually
from tests.unit.groups.coordinator_harness import (
    DEADLINE_S,
    World,
    commit_request,
    world,
)
from tests.unit.groups.group_harness import held

GROUP = "billing"


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[World, GroupsStub]]:
    async with world(**options) as w:
        server = aio.server(options=SERVER_OPTIONS)
        add_GroupsServicer_to_server(GroupsServicer(w.coordinator), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        try:
            yield w, GroupsStub(channel)
        finally:
            await channel.close()  # type: ignore[call-arg]  # The stubs want more.
            await server.stop(None)


class Member:
    """A member as a client would be."""

    def __init__(self, stub: GroupsStub, member_id: str, group: str = GROUP) -> None:
        self.group, self.member_id = group, member_id
        self.call: Any = stub.Heartbeat()  # type: ignore[call-arg]  # The stubs want more.

    async def send(self, epoch: int, **fields: Any) -> None:
        await self.call.write(
            groups_pb2.GroupHeartbeatRequest(
                group_id=self.group, member_id=self.member_id, member_epoch=epoch, **fields
            )
        )

    async def join(self, **fields: Any) -> None:
        await self.send(0, subscription=groups_pb2.Subscription(topics=["orders"]), **fields)

    async def read(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await self.call.read()


def code(message: Any) -> ErrorCode:
    assert message.HasField("error")
    return error_from_proto(message.error).code


async def test_two_members_share_a_topic_and_commit() -> None:
    async with served() as (w, stub):
        a, b = Member(stub, "a"), Member(stub, "b")
        await a.join(client_id="app")
        assert len(held((await a.read()).assignment.partitions)) == 4
        await b.join()
        assert not (await b.read()).assignment.partitions
        push = await a.read()
        kept = groups_pb2.OwnedPartitions(partitions=push.assignment.partitions)
        await a.send(push.member_epoch, owned=kept)
        assert not (await a.read()).HasField("error")
        gain = await b.read()
        assert len(held(gain.assignment.partitions)) == 2
        committed = await stub.CommitOffsets(
            commit_request(GROUP, 42, member_id="a", epoch=push.member_epoch)
        )
        assert not committed.HasField("error")
        assert not committed.results[0].HasField("error")
        fetched = await stub.FetchOffsets(groups_pb2.FetchOffsetsRequest(group_id=GROUP))
        assert [o.offset for o in fetched.offsets] == [42]
        (group,) = (
            await stub.DescribeGroups(groups_pb2.DescribeGroupsRequest(group_ids=[GROUP]))
        ).groups
        assert group.state == "stable"
        assert [(m.client_id, m.client_host) for m in group.members] == [
            ("app", "127.0.0.1"),
            ("", "127.0.0.1"),
        ]
        assert w.log_of(GROUP).end > 0


async def test_leaving_is_answered_before_the_stream_ends() -> None:
    async with served() as (w, stub):
        a = Member(stub, "a")
        await a.join()
        await a.read()
        w.replicas.hold_commits = True
        await a.send(-1)
        await a.call.done_writing()
        await eventually(lambda: w.log_of(GROUP).end > w.log_of(GROUP).high_watermark)
        w.replicas.commit()
        assert (await a.read()).member_epoch == -1
        assert await a.read() is aio.EOF
        assert await a.call.code() is grpc.StatusCode.OK


async def test_a_broken_stream_does_not_leave_the_group() -> None:
    async with served() as (w, stub):
        a = Member(stub, "a")
        await a.join()
        epoch = (await a.read()).member_epoch
        hosted = next(h for h in w.coordinator._hosted.values() if h._streams)
        a.call.cancel()
        await eventually(lambda: not hosted._streams)
        again = Member(stub, "a")
        await again.send(epoch)
        response = await again.read()
        assert response.member_epoch == epoch
        assert len(held(response.assignment.partitions)) == 4


async def test_a_new_leader_is_named_on_every_stream() -> None:
    async with served() as (w, stub):
        a = Member(stub, "a")
        await a.join()
        await a.read()
        w.move_away(GROUP)
        response = await a.read()
        assert code(response) is ErrorCode.NOT_COORDINATOR
        assert (response.error.current_leader.host, response.error.current_leader.port) == ("n2", 9)
        assert await a.read() is aio.EOF
        late = Member(stub, "b")
        await late.join()
        assert code(await late.read()) is ErrorCode.NOT_COORDINATOR
        refused = await stub.CommitOffsets(commit_request(GROUP, 1))
        assert code(refused) is ErrorCode.NOT_COORDINATOR
        assert refused.error.current_leader.node_id == 2
        described = await stub.DescribeGroups(groups_pb2.DescribeGroupsRequest(group_ids=[GROUP]))
        assert code(described.groups[0]) is ErrorCode.NOT_COORDINATOR


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (groups_pb2.GroupHeartbeatRequest(), ErrorCode.INVALID_GROUP_ID),
        (groups_pb2.GroupHeartbeatRequest(group_id="g"), ErrorCode.INVALID_REQUEST),
        (
            groups_pb2.GroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=-7),
            ErrorCode.INVALID_REQUEST,
        ),
        (
            groups_pb2.GroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=9),
            ErrorCode.UNKNOWN_MEMBER_ID,
        ),
        (
            groups_pb2.GroupHeartbeatRequest(
                group_id="g",
                member_id="m",
                subscription=groups_pb2.Subscription(topic_pattern="(?=x)"),
            ),
            ErrorCode.INVALID_REQUEST,
        ),
        (
            groups_pb2.GroupHeartbeatRequest(
                group_id="g",
                member_id="m",
                subscription=groups_pb2.Subscription(topics=["orders"]),
                server_assignor="magic",
            ),
            ErrorCode.UNSUPPORTED_ASSIGNOR,
        ),
    ],
)
async def test_nonsense_gets_a_typed_error_and_the_stream_goes_on(
    request_: groups_pb2.GroupHeartbeatRequest, expected: ErrorCode
) -> None:
    async with served() as (_, stub):
        call: Any = stub.Heartbeat()  # type: ignore[call-arg]  # The stubs want more.
        for _ in range(2):
            await call.write(request_)
            async with asyncio.timeout(DEADLINE_S):
                response = await call.read()
            assert code(response) is expected
            assert response.error.message


async def test_a_stream_is_that_of_one_member() -> None:
    async with served() as (_, stub):
        a = Member(stub, "a")
        await a.join()
        await a.read()
        a.member_id = "b"
        await a.join()
        assert code(await a.read()) is ErrorCode.INVALID_REQUEST
        assert await a.read() is aio.EOF


async def test_other_requests_refuse_in_their_answers() -> None:
    async with served() as (_, stub):
        assert code(await stub.CommitOffsets(groups_pb2.CommitOffsetsRequest())) is (
            ErrorCode.INVALID_GROUP_ID
        )
        assert code(await stub.FetchOffsets(groups_pb2.FetchOffsetsRequest())) is (
            ErrorCode.INVALID_GROUP_ID
        )
        await stub.CommitOffsets(commit_request("kept", 1))
        deleted = await stub.DeleteGroups(
            groups_pb2.DeleteGroupsRequest(group_ids=["kept", "never", ""])
        )
        assert not deleted.results[0].HasField("error")
        assert code(deleted.results[1]) is ErrorCode.GROUP_ID_NOT_FOUND
        assert code(deleted.results[2]) is ErrorCode.INVALID_GROUP_ID
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.DescribeGroups(groups_pb2.DescribeGroupsRequest(group_ids=["g"] * 1001))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_half_a_list_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (w, stub):
        await stub.CommitOffsets(commit_request(GROUP, 1))
        listed = await stub.ListGroups(groups_pb2.ListGroupsRequest())
        assert [g.group_id for g in listed.groups] == [GROUP]
        monkeypatch.setattr("penstock.broker.coordinator.led_partitions._LOAD_TIMEOUT_S", 0.05)
        w.log_of(GROUP).high_watermark = 0
        for number in w.replicas.partitions:
            w.replicas.lead(number, 2)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.ListGroups(groups_pb2.ListGroupsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "still reading" in (caught.value.details() or "")


async def test_disconnects_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    settings = GroupSettings(assignment_interval_ms=0)
    async with served(settings=settings) as (w, stub):
        members = [Member(stub, f"m{n}") for n in range(5)]
        for member in members:
            await member.join()
            await member.read()
        for member in members:
            member.call.cancel()
        await eventually(lambda: not any(h._streams for h in w.coordinator._hosted.values()))
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[2001:db8::1]:5000", "2001:db8::1"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("ipv4:odd", "odd"),
    ],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert peer_host(peer) == host


class Peer:
    """A call's context that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def write(self, message: Any) -> None:
        self.written.append(message)


async def garbage() -> AsyncIterator[groups_pb2.GroupHeartbeatRequest]:
    yield groups_pb2.GroupHeartbeatRequest.FromString(b"\xff\xff\xff")


async def test_a_member_that_sends_garbage_is_told_that_it_is_its_own_fault() -> None:
    async with world() as w, asyncio.timeout(DEADLINE_S):
        peer = Peer()
        with structlog.testing.capture_logs() as logs:
            await GroupsServicer(w.coordinator).Heartbeat(garbage(), peer)
        (answer,) = peer.written
        assert code(answer) is ErrorCode.INVALID_REQUEST
        assert not logs
