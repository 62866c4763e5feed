"""AdminClient.add_voter and remove_voter, and their twins."""

from __future__ import annotations

import asyncio
import functools

import pytest

from penstock.client import AdminClient, AsyncAdminClient, InvalidRequestError, admin_calls
from penstock.client.descriptions import QuorumVoter
from penstock.v1 import admin_pb2
from penstock.wire.errors import (
    DuplicateVoterError,
    LastVoterError,
    NotEnoughVotersError,
    PenstockError,
    RequestTimedOutError,
    UnknownVoterError,
    VoterChangeInProgressError,
    VoterNotCaughtUpError,
)
from tests.support import eventually
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster

Request = admin_pb2.AlterQuorumRequest


async def test_voters_come_and_go(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        before = await admin.describe_quorum()
        assert (before.leader_id, before.term, before.voters_index) == (1, 4, 5)
        assert (before.commit_index, before.applied_index) == (9, 8)
        after = await admin.add_voter(4, "[::1]:9094")
        assert after.voters[-1] == QuorumVoter(4, "::1", 9094, 5, "0" * 31 + "4", is_wiped=True)
        after = await admin.remove_voter(4)
    assert after.voters == before.voters
    added, removed = cluster.altered
    assert (added.add.node_id, added.add.host, added.add.port) == (4, "::1", 9094)
    assert removed.WhichOneof("change") == "remove_node_id"
    assert 0 < added.timeout_ms <= 30_000


async def test_a_voter_that_answers_out_of_another_directory_is_shown(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        voters = (await admin.describe_quorum()).voters
    assert [voter.is_wiped for voter in voters] == [False, False, True]


@pytest.mark.parametrize(
    "error",
    [
        DuplicateVoterError,
        LastVoterError,
        NotEnoughVotersError,
        UnknownVoterError,
        VoterNotCaughtUpError,
    ],
)
async def test_a_refusal_is_raised_and_nothing_is_asked_again(
    cluster: FakeCluster, error: type[PenstockError]
) -> None:
    async def refuse(_request: Request) -> PenstockError:
        return error("no, because; next: something else")

    cluster.on_alter_quorum = refuse
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for call in (functools.partial(admin.add_voter, 4, "h:1"), lambda: admin.remove_voter(4)):
            cluster.altered.clear()
            with pytest.raises(error, match="no, because; next: something else") as caught:
                await call()
            assert getattr(caught.value, "__notes__", []) == []
            assert len(cluster.altered) == 1


async def test_a_change_waits_for_the_one_under_way(cluster: FakeCluster) -> None:
    async def busy(_request: Request) -> PenstockError | None:
        busy_still = len(cluster.altered) < 3
        return VoterChangeInProgressError("another one") if busy_still else None

    cluster.on_alter_quorum = busy
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        after = await admin.remove_voter(3)
    assert [voter.node_id for voter in after.voters] == [1, 2]
    assert len(cluster.altered) == 3


async def test_a_change_under_way_is_not_waited_for_for_ever(cluster: FakeCluster) -> None:
    async def busy(_request: Request) -> PenstockError:
        return VoterChangeInProgressError("another one")

    cluster.on_alter_quorum = busy
    async with AsyncAdminClient(
        cluster.bootstrap, request_timeout_ms=300, default_api_timeout_ms=600
    ) as admin:
        with pytest.raises(VoterChangeInProgressError):
            await admin.add_voter(4, "h:1")


async def test_a_change_that_is_cancelled_is_cancelled_at_the_broker(cluster: FakeCluster) -> None:
    """Else it would hold up all others until its time is over."""
    gone: list[int] = []

    async def wait(request: Request) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            gone.append(request.add.node_id)
            raise

    cluster.on_alter_quorum = wait
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        change = asyncio.create_task(admin.add_voter(4, "h:1"))
        await eventually(lambda: bool(cluster.altered))
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
        await eventually(lambda: gone == [4])


@pytest.mark.parametrize("address", ["nowhere", "h:", ":1", "h:99999", ""])
async def test_what_is_no_address_is_not_sent(cluster: FakeCluster, address: str) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        with pytest.raises(InvalidRequestError, match="address"):
            await admin.add_voter(4, address)
    assert cluster.altered == []


@pytest.mark.parametrize("node_id", [-1, 2**31, "4", None, True])
async def test_what_is_no_node_is_not_sent(cluster: FakeCluster, node_id: int) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for call in (
            functools.partial(admin.add_voter, node_id, "h:1"),
            functools.partial(admin.remove_voter, node_id),
        ):
            with pytest.raises(InvalidRequestError, match="node_id"):
                await call()
    assert cluster.altered == []


def test_the_synchronous_twin(background: Background) -> None:
    with AdminClient(background.cluster.bootstrap) as admin:
        assert [voter.node_id for voter in admin.add_voter(4, "h:1").voters] == [1, 2, 3, 4]
        after = admin.remove_voter(1)
        assert [voter.node_id for voter in after.voters] == [2, 3, 4]
        assert admin.describe_quorum().voters == after.voters

        async def refuse(_request: Request) -> PenstockError:
            return LastVoterError("the only one")

        background.cluster.on_alter_quorum = refuse
        with pytest.raises(LastVoterError, match="the only one"):
            admin.remove_voter(2)
        with pytest.raises(LastVoterError, match="the only one"):
            admin.add_voter(2, "h:1")


async def test_a_little_rest_of_the_time_is_not_what_a_failure_tells_of(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer comes within it, and "not within 300 ms" would hide that it was ten seconds."""
    clock = {"now_ms": 0.0}

    async def wait(request: Request) -> PenstockError:
        clock["now_ms"] += request.timeout_ms
        return RequestTimedOutError(f"not within {request.timeout_ms} ms")

    monkeypatch.setattr(admin_calls, "now_ms", lambda: clock["now_ms"])
    cluster.on_alter_quorum = wait
    async with AsyncAdminClient(
        cluster.bootstrap, request_timeout_ms=4_850, default_api_timeout_ms=9_700
    ) as admin:
        with pytest.raises(RequestTimedOutError, match="not within 4607 ms"):
            await admin.remove_voter(3)
    # 0.95 of the attempt: a broker that is not answered has the time to say so.
    assert [request.timeout_ms for request in cluster.altered] == [4_607, 4_607]
