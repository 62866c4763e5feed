"""The election timer: who stands when, and what makes it run slower."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.raft_meta.elections import (
    LONGEST_PATIENCE,
    SETTLED_SHARE,
    Elections,
    Patience,
    RaftTiming,
)

TIMING = RaftTiming(election_min_s=0.5, election_max_s=1.0, heartbeat_s=0.15)
seeds = st.integers(0, 1 << 32)


def elections(seed: int) -> Elections:
    made = Elections(1, TIMING, random.Random(seed))
    made.heard_leader(1, 10.0)
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


# Patience: timeouts that grow where leaders are given up that live.

SETTLED_S = SETTLED_SHARE * TIMING.election_max_s


def wrongly_given_up(patience: Patience, count: int, now_s: float = 100.0) -> float:
    """So many in a row, each heard again after its successor; the time at the end."""
    patience.leads(0, now_s)
    for term in range(1, count + 1):
        now_s += 1.0
        patience.leads(term, now_s)
        patience.heard_late(term - 1)
    return now_s


@given(st.integers(1, 40), st.floats(0.1, 3.0))
def test_leaders_lost_in_silence_one_after_another_make_no_voter_patient(count, apart_s):
    patience = Patience(SETTLED_S)
    for term in range(count):
        patience.leads(term, 100.0 + term * apart_s)
    assert patience.factor(100.0 + count * apart_s) == 1.0


@given(st.integers(1, 40))
def test_patience_doubles_up_to_a_bound_where_leaders_turn_out_to_live(count):
    patience = Patience(SETTLED_S)
    now_s = wrongly_given_up(patience, count)
    assert patience.factor(now_s) == min(2.0**count, LONGEST_PATIENCE)


def test_a_leader_that_is_heard_before_its_successor_was_given_up_wrongly_too():
    patience = Patience(SETTLED_S)
    patience.leads(1, 1.0)
    patience.heard_late(1)  # Its term is over, and nobody leads the next one yet.
    assert patience.factor(2.0) == 1.0
    patience.leads(2, 2.0)
    assert patience.factor(2.0) == 2.0


def test_a_leader_that_is_heard_again_and_again_was_given_up_once(monkeypatch):
    monkeypatch.setattr("penstock.raft_meta.elections.LONGEST_PATIENCE", 64.0)
    patience = Patience(SETTLED_S)
    patience.leads(1, 1.0)
    patience.heard_late(1)
    patience.leads(2, 2.0)
    for _ in range(5):
        patience.heard_late(1)
    assert patience.factor(2.0) == 2.0


def test_a_voter_that_stood_still_itself_may_have_given_up_a_leader_wrongly():
    patience = Patience(SETTLED_S)
    patience.leads(1, 1.0)
    patience.held_up(1.5)
    patience.leads(2, 2.0)
    assert patience.factor(2.0) == 2.0
    other = Patience(SETTLED_S)
    other.leads(1, 1.0)
    other.held_up(1.5)
    other.leads(2, 2.0 + SETTLED_S)
    assert other.factor(2.0 + SETTLED_S) == 1.0, "it had settled"


def test_patience_halves_while_a_leader_goes_on_and_nothing_holds_this_process_up():
    patience = Patience(SETTLED_S)
    now_s = wrongly_given_up(patience, 10)
    assert patience.factor(now_s + SETTLED_S - 0.1) == LONGEST_PATIENCE
    patience.held_up(now_s + SETTLED_S - 0.1)
    assert patience.factor(now_s + SETTLED_S) == LONGEST_PATIENCE
    assert patience.factor(now_s + 2 * SETTLED_S) == LONGEST_PATIENCE / 2
    patience.leads(1000, now_s + 2 * SETTLED_S)
    assert patience.factor(now_s + 2 * SETTLED_S) == LONGEST_PATIENCE / 2
    assert patience.factor(now_s + 9 * SETTLED_S) == 1.0


def test_a_leader_that_died_or_handed_over_was_not_lost_for_want_of_time():
    patience = Patience(SETTLED_S)
    for term in range(1, 10):
        patience.leads(term, float(term))
        patience.held_up(float(term))
        patience.heard_late(term - 1)
        patience.ended_openly()
    assert patience.factor(10.0) == 1.0


def test_a_connection_that_breaks_under_a_leader_that_goes_on_does_not_excuse_its_loss():
    patience = Patience(SETTLED_S)
    patience.leads(1, 1.0)
    patience.ended_openly()
    patience.leads(1, 1.1)  # It lives after all.
    patience.leads(2, 3.0)
    patience.heard_late(1)
    assert patience.factor(3.0) == 2.0


def test_the_first_leader_that_is_seen_is_not_a_sign_of_short_leaderships():
    patience = Patience(SETTLED_S)
    patience.held_up(0.0)
    patience.leads(7, 0.0)
    patience.heard_late(6)
    assert patience.factor(0.0) == 1.0


def patient(seed: int, count: int) -> tuple[Elections, float]:
    """A voter that gave up so many leaders wrongly, and has just heard the last; the time."""
    made = Elections(1, TIMING, random.Random(seed))
    now_s = wrongly_given_up(made.patience, count)
    made.heard_leader(count, now_s)
    return made, now_s


@given(seeds, st.integers(0, 20))
def test_a_patient_voter_waits_longer_and_hears_no_candidate_meanwhile(seed, count):
    made, now_s = patient(seed, count)
    factor = min(2.0**count, LONGEST_PATIENCE)
    assert TIMING.election_min_s * factor <= made.deadline_s - now_s
    assert made.deadline_s - now_s <= TIMING.election_max_s * factor
    assert made.leader_is_alive(now_s + TIMING.election_min_s * factor - 0.001)
    assert not made.leader_is_alive(now_s + TIMING.election_min_s * factor)


@given(seeds)
def test_a_broken_connection_is_a_hint_however_patient_a_voter_is(seed):
    made, now_s = patient(seed, 20)
    made.lost_leader(now_s, 0)
    assert made.deadline_s <= now_s + 0.1
    assert not made.leader_is_alive(now_s)


# Time in which the process stood still.


@given(seeds, st.floats(0.2, 1000.0))
def test_a_process_that_stood_still_hears_what_waits_before_it_stands(seed, still_s):
    made = elections(seed)
    left_s = made.deadline_s - 10.2
    now_s = 10.2 + still_s
    assert made.stood_still(10.2, now_s) == pytest.approx(still_s)
    assert made.deadline_s >= now_s + TIMING.heartbeat_s
    assert made.deadline_s == pytest.approx(now_s + max(left_s, TIMING.heartbeat_s))
    assert made.leader_is_alive(now_s), "its silence was this process' own"


def test_spells_that_overlap_count_once():
    made = elections(1)
    deadline_s = made.deadline_s
    assert made.stood_still(10.0, 12.0) == 2.0
    assert made.stood_still(9.0, 12.0) == 0.0
    assert made.stood_still(11.0, 13.0) == 1.0
    assert made.deadline_s == pytest.approx(deadline_s + 3.0)


def test_who_stands_still_does_not_make_a_dead_leader_live():
    made = elections(1)
    made.lost_leader(10.0, 0)
    made.stood_still(10.0, 15.0)
    assert not made.leader_is_alive(15.0)
    made.heard_leader(1, 20.0)
    assert not made.leader_is_alive(20.5)
    made.stood_still(20.5, 30.0)
    assert not made.leader_is_alive(30.0), "its silence had lasted too long before"


@given(seeds, st.floats(0.2, 1000.0))
def test_who_has_heard_its_leader_since_waits_no_longer_for_having_stood_still(seed, still_s):
    made, now_s = elections(seed), 10.1 + still_s
    made.heard_leader(1, now_s)  # What waited came before the news of the standstill.
    deadline_s = made.deadline_s
    made.stood_still(10.1, now_s)
    assert made.deadline_s == pytest.approx(deadline_s)


@given(seeds, st.floats(0.11, 2.0), st.floats(0.16, 2.0))
def test_a_voter_that_is_often_held_up_stands_in_the_end(seed, still_s, awake_s):
    made, now_s = elections(seed), 10.0
    for _ in range(1000):
        now_s += awake_s
        if made.is_due(now_s):
            break
        made.stood_still(now_s, now_s + still_s)
        now_s += still_s
    assert made.is_due(now_s)


def test_pre_votes_of_before_a_standstill_are_void():
    made = elections(1)
    made.begin_pre_vote(2, 10.6)
    made.count_with(2)
    made.begin_pre_vote(2, 10.6)
    made.count_pre_vote(2, 3)
    assert made.may_stand(2)
    made.stood_still(10.7, 12.0)
    assert not made.may_stand(2)
