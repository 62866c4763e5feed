"""A planned hand-over (Raft thesis 3.10): who may call whom, and what becomes of the office."""

from __future__ import annotations

import pytest

from penstock.raft_meta.quorum import Role
from penstock.raft_meta.voter import Committed, HandOverFailed, Refused
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.lone_voter import (
    Lone,
    Message,
    append,
    entry,
    pre_vote,
    reply,
    request_vote,
)
from tests.unit.raft_meta.raft_fuzz import Network


@pytest.fixture
def lone(tmp_path):
    lone = Lone(tmp_path)
    yield lone
    lone.journal.abandon()


@pytest.fixture
def net(tmp_path):
    net = Network(tmp_path, 3, seed=11)
    yield net
    net.close()


def timeout_now(term: int) -> Message:
    return Message(term=term, timeout_now=raft_pb2.TimeoutNow())


def called(term: int, by: int, last=(1, 0)) -> Message:
    message = request_vote(term, last)
    message.request_vote.handed_over_by = by
    return message


def of(messages, kind: str) -> list[tuple[int, Message]]:
    return [(peer, message) for peer, message in messages if message.HasField(kind)]


def leader_with_followers(lone: Lone, ends: dict[int, int]) -> int:
    """Lead, with a log up to 4 of which each peer has what ``ends`` says."""
    term = lone.lead()
    lone.propose(b"a", token=1)
    lone.propose(b"b", token=2)
    for peer, end in ends.items():
        lone.tell(peer, reply(term, end + 1, round_=1))
    return term


# The leader's side.


def test_the_most_caught_up_voter_is_called(lone):
    term = leader_with_followers(lone, {2: 3, 3: 4})
    lone.voter.hand_over(lone.now_s)
    said = of(lone.step(), "timeout_now")
    assert [(peer, message.term) for peer, message in said] == [(3, term)]


def test_nobody_is_called_before_it_has_the_whole_log(lone):
    term = leader_with_followers(lone, {2: 2, 3: 3})
    lone.voter.hand_over(lone.now_s)
    assert of(lone.step(), "timeout_now") == []
    assert of(lone.tell(3, reply(term, 5, round_=1)), "timeout_now")


def test_a_leader_whose_successor_is_behind_sleeps_until_it_answers(lone):
    leader_with_followers(lone, {2: 2, 3: 3})
    lone.voter.hand_over(lone.now_s)
    lone.step()
    assert lone.voter.next_deadline_s() >= lone.now_s + 0.1
    assert of(lone.step(), "append_entries") == []


def test_a_leader_that_hands_over_takes_no_proposals(lone):
    leader_with_followers(lone, {2: 4, 3: 4})
    lone.voter.hand_over(lone.now_s)
    lone.propose(b"late", token=9)
    assert lone.of(Refused) == [Refused(9, -1)]
    assert lone.journal.last_index == 4


def test_what_was_proposed_before_is_still_decided(lone):
    term = leader_with_followers(lone, {2: 2, 3: 2})
    lone.voter.hand_over(lone.now_s)
    lone.tell(3, reply(term, 5, round_=1))
    assert [event.payload for event in lone.of(Committed)] == [b"a", b"b"]


def test_it_is_given_up_after_an_election_timeout_and_the_leader_goes_on(lone):
    term = leader_with_followers(lone, {2: 2, 3: 2})
    lone.voter.hand_over(lone.now_s)
    for _ in range(4):
        lone.now_s += 0.15
        lone.tell(2, reply(term, 3, round_=1))
        lone.tell(3, reply(term, 3, round_=1))
    assert lone.of(HandOverFailed) == [HandOverFailed()]
    assert lone.role is Role.LEADER
    lone.propose(b"c", token=9)
    assert lone.of(Refused) == []


def test_without_anybody_who_answers_it_is_given_up_at_once(lone):
    lone.lead()
    lone.voter.hand_over(lone.now_s)
    lone.step()
    assert lone.of(HandOverFailed) == [HandOverFailed()]


def test_the_only_voter_hands_over_to_nobody(tmp_path):
    lone = Lone(tmp_path, nodes=1)
    lone.step()
    lone.voter.hand_over(lone.now_s)
    lone.step()
    assert lone.of(HandOverFailed) == [HandOverFailed()]
    lone.journal.abandon()


def test_a_successor_that_is_lost_is_replaced_and_after_the_last_one_it_is_given_up(lone):
    leader_with_followers(lone, {2: 4, 3: 4})
    lone.voter.hand_over(lone.now_s)
    ((first, _),) = of(lone.step(), "timeout_now")
    lone.voter.peer_lost(first, lone.now_s)
    ((second, _),) = of(lone.step(), "timeout_now")
    assert {first, second} == {2, 3}
    lone.voter.peer_lost(second, lone.now_s)
    lone.step()
    assert lone.of(HandOverFailed) == [HandOverFailed()]


def test_a_leader_yields_to_its_successor_and_to_nobody_else(lone):
    term = leader_with_followers(lone, {2: 3, 3: 4})
    lone.tell(2, called(term + 1, by=1, last=(4, term)))
    assert lone.role is Role.LEADER
    lone.voter.hand_over(lone.now_s)
    lone.step()
    lone.tell(2, called(term + 1, by=1, last=(4, term)))  # Not the one that was called.
    assert lone.role is Role.LEADER
    said = lone.tell(3, called(term + 1, by=1, last=(4, term)))
    assert of(said, "vote")
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, term + 1)


# The successor's side.


def test_who_is_called_stands_at_once(lone):
    lone.tell(2, append(4, (1, 0), entry(2, 4)))
    said = of(lone.tell(2, timeout_now(4)), "request_vote")
    assert (lone.role, lone.status.term) == (Role.CANDIDATE, 5)
    assert {(peer, message.request_vote.handed_over_by) for peer, message in said} == {
        (2, 2),
        (3, 2),
    }
    lone.vote(3)
    assert lone.role is Role.LEADER


@pytest.mark.parametrize(("peer", "term"), [(3, 4), (2, 3), (2, 5), (3, 9)])
def test_only_the_leader_calls_and_only_in_its_term(lone, peer, term):
    lone.tell(2, append(4, (1, 0), entry(2, 4)))
    assert of(lone.tell(peer, timeout_now(term)), "request_vote") == []
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, 4)


def test_nobody_calls_where_no_leader_is_known(lone):
    assert of(lone.tell(2, timeout_now(0)), "request_vote") == []
    assert lone.status.term == 0


def test_a_call_is_good_for_one_candidacy(lone):
    lone.tell(2, append(4, (1, 0), entry(2, 4)))
    lone.tell(2, timeout_now(4))
    lone.tell(3, append(5, (1, 0)))  # Somebody else won term 5.
    assert of(lone.tell(2, timeout_now(4)), "request_vote") == []
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, 5)


# The other voters' side.


def test_voters_are_disloyal_only_where_their_leader_called(lone):
    lone.tell(2, append(4, (1, 0), entry(2, 4)))
    for message in (
        request_vote(5, last=(2, 4)),
        called(5, by=3, last=(2, 4)),
        called(6, by=2, last=(2, 4)),  # Not the term after the leader's.
    ):
        assert of(lone.tell(3, message), "vote") == []
        assert lone.status.term == 4
    assert of(lone.tell(3, called(5, by=2, last=(2, 4))), "vote")


def test_a_call_does_not_help_a_candidate_whose_log_is_behind(lone):
    lone.tell(2, append(4, (1, 0), entry(2, 4)))
    assert of(lone.tell(3, called(5, by=2, last=(1, 0))), "vote") == []


def test_a_pre_vote_is_refused_during_a_hand_over_as_ever(lone):
    leader_with_followers(lone, {2: 4, 3: 4})
    lone.voter.hand_over(lone.now_s)
    lone.step()
    ((_, said),) = of(lone.tell(2, pre_vote(9, last=(4, 1))), "pre_vote_reply")
    assert not said.pre_vote_reply.granted


# Together.


def test_the_office_moves_within_a_few_round_trips_and_loses_nothing(net):
    old = net.wait_leader()
    net.run(0.5)
    for _ in range(20):
        net.propose(old)
    net._at(net.now_s, old, lambda voter: voter.hand_over(net.now_s))
    net.run_until(lambda: net.leader() not in (None, old), 0.1)  # Far below any timeout.
    assert old.voter.status().role is Role.FOLLOWER
    net.settle()


def test_a_call_that_comes_late_hurts_nobody(net):
    old = net.wait_leader()
    net.run(0.5)
    successor = next(host for host in net.hosts.values() if host is not old)
    term = old.voter.status().term
    for _ in range(10):
        net.propose(old)
    net.run(0.001)
    net._arrive(old.node_id, successor, timeout_now(term))
    net.run(0.5)
    net.settle()
