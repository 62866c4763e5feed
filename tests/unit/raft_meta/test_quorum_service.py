"""What a controller says of the quorum, and when it may be believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.quorum import Hearing, QuorumStatus, Role
from penstock.raft_meta.quorum_service import QuorumServicer
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import controller_pb2
from penstock.wire.errors import NotControllerError, PenstockError, RequestTimedOutError


class ScriptedQuorum:
    """A voter in a role, and what becomes of it while it asks the others."""

    def __init__(self, role: Role, term: int = 4) -> None:
        self.now = QuorumStatus(1, role, term, 1 if role is Role.LEADER else -1, 7, 7, 8)
        self.later: QuorumStatus | None = None
        self.refusal: PenstockError | None = None
        self.reads: list[int | None] = []

    def status(self) -> QuorumStatus:
        return self.now

    def address_of(self, _node_id: int) -> None:
        return None

    async def read_index(self, *, timeout_ms: int | None = None) -> int:
        self.reads.append(timeout_ms)
        if self.refusal is not None:
            raise self.refusal
        self.now = self.later or self.now
        return 7


async def described(quorum: ScriptedQuorum) -> controller_pb2.DescribeQuorumResponse:
    config = ControllerConfig(
        node_id=1,
        cluster_id="c",
        data_dir=Path("nowhere"),
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
        may_found=True,
    )
    servicer = QuorumServicer(config, quorum, lambda: 6)  # type: ignore[arg-type]  # What it asks for.
    context: Any = None
    return await servicer.DescribeQuorum(controller_pb2.DescribeQuorumRequest(), context)


async def test_a_leader_is_confirmed_by_a_majority_that_it_asks_now() -> None:
    quorum = ScriptedQuorum(Role.LEADER)
    answer = await described(quorum)
    assert answer.confirmed
    assert answer.metadata_index == 6
    [waited_ms] = quorum.reads
    assert waited_ms is not None
    assert waited_ms <= 1_000, "whoever asks waits for it"


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.CANDIDATE])
async def test_nobody_else_is_and_nobody_is_asked(role: Role) -> None:
    quorum = ScriptedQuorum(role)
    answer = await described(quorum)
    assert (answer.HasField("confirmed"), answer.confirmed, quorum.reads) == (True, False, [])
    assert answer.metadata_index == 0, "what it was told may be less than was decided"


@pytest.mark.parametrize("refusal", [RequestTimedOutError("cut off"), NotControllerError("gone")])
async def test_a_leader_that_no_majority_answers_is_not_confirmed(refusal: PenstockError) -> None:
    quorum = ScriptedQuorum(Role.LEADER)
    quorum.refusal = refusal
    answer = await described(quorum)
    assert (answer.HasField("confirmed"), answer.confirmed) == (True, False)


@pytest.mark.parametrize(("role", "term"), [(Role.FOLLOWER, 5), (Role.LEADER, 6)])
async def test_what_another_leadership_confirmed_says_nothing_of_this_one(
    role: Role, term: int
) -> None:
    quorum = ScriptedQuorum(Role.LEADER)
    quorum.later = ScriptedQuorum(role, term).now
    assert not (await described(quorum)).confirmed


async def test_what_the_leader_knows_of_the_others_is_told() -> None:
    quorum = ScriptedQuorum(Role.LEADER)
    quorum.now = replace(
        quorum.now,
        voters=VoterSet.of([1, 2, 3], {number: ("h", number) for number in (1, 2, 3)}),
        match_index={1: 8, 2: 6, 3: 0, 4: 5},
        hearings={
            2: Hearing(20, True, True),
            3: Hearing(7_000, False, False),
            4: Hearing(1, True, True),
        },
        catching_up=(4, ("new", 4)),
    )
    answer = await described(quorum)
    first, second, third = answer.voters
    assert (answer.role, answer.last_index) == (controller_pb2.QUORUM_ROLE_LEADER, 8)
    assert (first.match_index, first.HasField("silent_ms"), first.unreachable) == (8, False, False)
    assert (second.match_index, second.silent_ms, second.unreachable) == (6, 20, False)
    # An empty log is not what it is known to have.
    assert (third.match_index, third.silent_ms, third.unreachable) == (-1, 7_000, True)
    newcomer = answer.catching_up
    assert (newcomer.node_id, newcomer.host, newcomer.match_index) == (4, "new", 5)


async def test_whoever_does_not_lead_tells_of_itself_alone() -> None:
    answer = await described(ScriptedQuorum(Role.CANDIDATE))
    assert (answer.role, answer.last_index) == (controller_pb2.QUORUM_ROLE_CANDIDATE, 8)
    assert [voter.match_index for voter in answer.voters] == [-1]
    assert not answer.voters[0].HasField("silent_ms")
    assert not answer.HasField("catching_up")


async def test_a_controller_that_knows_no_voters_says_who_founds() -> None:
    quorum = ScriptedQuorum(Role.FOLLOWER)
    quorum.now = replace(quorum.now, founder_id=1, needs_permission=True)
    answer = await described(quorum)
    founding = controller_pb2.QuorumFounding(founder_node_id=1, needs_permission=True)
    assert answer.founding == founding
    quorum.now = replace(quorum.now, voters=VoterSet.of([1]))
    assert not (await described(quorum)).HasField("founding")
