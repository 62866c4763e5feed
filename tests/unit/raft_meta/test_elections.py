"""The election timer: who stands when, after the leader's connection broke."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.raft_meta.elections import Elections, RaftTiming

TIMING = RaftTiming(election_min_s=0.5, election_max_s=1.0, heartbeat_s=0.15)
seeds = st.integers(0, 1 << 32)


def elections(seed: int) -> Elections:
    made = Elections(1, TIMING, random.Random(seed))
    made.heard_leader(10.0)
    return made


@given(seeds, seeds, st.integers(0, 3))
def test_two_that_lose_their_leader_at_once_do_not_stand_at_once(one, other, turn):
    first, second = elections(one), elections(other)
    first.lost_leader(10.0, turn)
    second.lost_leader(10.0, turn + 1)
    assert second.deadline_s - first.deadline_s > 0.099 or second.deadline_s >= 10.5


@given(seeds)
def test_the_first_in_turn_hardly_waits(seed):
    first = elections(seed)
    first.lost_leader(10.0, 0)
    assert 10.05 <= first.deadline_s <= 10.1


@given(seeds, st.integers(0, 9))
def test_nobody_waits_longer_than_without_the_hint(seed, turn):
    hinted, plain = elections(seed), elections(seed)
    hinted.lost_leader(10.0, turn)
    assert hinted.deadline_s <= plain.deadline_s
    assert not hinted.leader_is_alive(10.0)
