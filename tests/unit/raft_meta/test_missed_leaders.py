"""Whom a follower says to lead when it hears that one no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.raft_meta.quorum import Role
from tests.unit.raft_meta.lone_voter import Lone, append

LONG_S = 1.1
"""More than any election timeout of these voters."""


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    lone = Lone(tmp_path)
    yield lone
    lone.journal.abandon()


def test_a_leader_whose_connection_broke_is_named_no_more_after_pre_votes_in_vain(
    lone: Lone,
) -> None:
    """Told of a leader that is dead for minutes, an operator looks in the wrong place."""
    lone.tell(2, append(5, (1, 0)))
    lone.voter.peer_lost(2, lone.now_s)
    lone.wait(0.0)
    assert lone.status.leader_id == 2, "it may be back in a moment"
    for _ in range(4):
        lone.wait(LONG_S)
    assert (lone.role, lone.status.term, lone.status.leader_id) == (Role.FOLLOWER, 5, -1)


def test_so_it_is_with_one_that_is_silent_and_one_that_is_heard_again_is_named_again(
    lone: Lone,
) -> None:
    for _ in range(2):
        lone.tell(2, append(5, (1, 0)))
        assert lone.status.leader_id == 2
        for _ in range(4):
            lone.wait(LONG_S)
        assert lone.status.leader_id == -1


def test_whoever_leads_names_itself_however_many_rounds_that_took(lone: Lone) -> None:
    for _ in range(5):
        lone.wait(LONG_S)
    lone.lead()
    assert lone.status.leader_id == 1
