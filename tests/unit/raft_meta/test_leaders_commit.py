"""How far the leader is, as a follower knows, that lacks the entries itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.raft_meta.lone_voter import Lone, append, entry


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    lone = Lone(tmp_path)
    yield lone
    lone.journal.abandon()


def test_a_follower_knows_how_far_the_leader_is(lone: Lone) -> None:
    lone.tell(2, append(1, (1, 0), entry(2, 1), commit=5_000))
    assert (lone.status.commit_index, lone.status.leaders_commit_index) == (2, 5_000)
    lone.crash()
    assert lone.status.leaders_commit_index == 0, "it has not heard the leader yet"


def test_who_does_not_count_has_no_say(lone: Lone) -> None:
    lone.tell(2, append(1, (1, 0), entry(2, 1), commit=5_000))
    lone.tell(9, append(1, (2, 1), commit=10**15))
    assert lone.status.leaders_commit_index == 5_000


def test_the_newest_word_holds(lone: Lone) -> None:
    lone.tell(2, append(1, (1, 0), entry(2, 1), commit=5_000))
    lone.tell(2, append(1, (2, 1), commit=4))
    assert lone.status.leaders_commit_index == 4
