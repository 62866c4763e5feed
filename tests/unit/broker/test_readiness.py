"""When a controller is ready: in the quorum, and caught up with it."""

from __future__ import annotations

import pytest

from penstock.broker.readiness import why_controller_not_ready
from penstock.raft_meta.quorum import QuorumStatus, Role


def status(
    role: Role = Role.FOLLOWER,
    leader: int = 2,
    *,
    commit_index: int = 5_000,
    applied_index: int = 5_000,
    leaders_commit_index: int = 0,
) -> QuorumStatus:
    return QuorumStatus(
        1,
        role,
        4,
        leader,
        commit_index,
        applied_index,
        last_index=5_000,
        leaders_commit_index=leaders_commit_index,
    )


@pytest.mark.parametrize(
    "sound",
    [
        status(),
        status(Role.LEADER, 1),
        status(leaders_commit_index=5_900),
        # A newcomer leads a cluster in which nothing is decided yet.
        status(Role.LEADER, 1, commit_index=0, applied_index=0),
    ],
)
def test_who_leads_or_follows_closely_is_ready(sound: QuorumStatus) -> None:
    assert why_controller_not_ready(sound) == ""


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (status(leader=-1), "knows no leader"),
        (status(applied_index=3_000), "2000 entries"),
        (status(Role.LEADER, 1, applied_index=3_000), "2000 entries"),
        (status(leaders_commit_index=9_000), "4000 entries"),
        (status(commit_index=0, applied_index=0), "heard nothing from the leader 2"),
    ],
)
def test_who_lacks_something_says_what(lacking: QuorumStatus, said: str) -> None:
    assert said in why_controller_not_ready(lacking)
