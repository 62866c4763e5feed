"""A new voter is an observer until it has caught up (Raft thesis 4.2.1), and may never be more."""

from __future__ import annotations

import pytest

from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.changing import Refusal
from penstock.raft_meta.transfer import CHUNK_BYTES
from penstock.raft_meta.voter import VotersChanged, VotersCommitted
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.founded import directory_of
from tests.unit.raft_meta.leading_voter import Leader
from tests.unit.raft_meta.lone_voter import Message, append, reply

OTHER = b"E" * 16  # A directory of none of the founders.


@pytest.fixture
def leader(tmp_path):
    leader = Leader(tmp_path)
    yield leader
    leader.journal.abandon()


def test_an_observer_that_fell_silent_is_no_voter(leader):
    leader.settled()
    leader.add(4)
    leader.pass_time(0.6)
    leader.answer(4)  # All of it, and too slowly: another round.
    leader.now_s += 0.6
    for peer in (2, 3):  # In one step: nothing was done meanwhile.
        leader.answer(peer)
    leader.pass_time(0.3)
    assert leader.ids == {1, 2, 3}
    for _ in range(2):
        leader.answer(4)
    assert leader.ids == {1, 2, 3, 4}


def test_an_observer_that_hides_its_directory_is_no_voter(leader):
    """It would count out of any."""
    leader.settled()
    leader.add(4)
    for _ in range(2):
        leader.answer(4, directory=b"")
    assert leader.ids == {1, 2, 3}
    leader.answer(4)
    leader.answer(4)
    assert leader.journal.voters.get(4).directory_id == directory_of(4)


def test_a_caught_up_observer_is_no_voter_where_the_voters_are_silent(leader):
    leader.settled()
    leader.now_s += 0.45
    token = leader.add(4)
    leader.now_s += 0.1
    leader.answer(4)
    assert leader.refusal(token) is Refusal.NOT_ENOUGH_LIVE
    assert leader.ids == {1, 2, 3}


def test_an_observer_waits_for_a_hand_over_to_end(leader):
    leader.settled()
    token = leader.add(4)
    leader.voter.hand_over(leader.now_s)
    leader.answer(4)
    assert leader.ids == {1, 2, 3}
    leader.pass_time(0.6)  # Nobody took over.
    leader.answer(4)
    leader.answer(4)
    assert leader.ids == {1, 2, 3, 4}
    assert leader.refusal(token) is None


def test_an_observer_is_given_up_in_time(leader):
    leader.settled()
    token = leader.add(4, timeout_s=0.02)  # Sooner than the next heartbeat.
    assert leader.voter.next_deadline_s() == pytest.approx(leader.now_s + 0.02)
    leader.now_s += 0.021
    leader.step()
    assert leader.refusal(token) is Refusal.NOT_CAUGHT_UP


def test_a_node_that_nobody_waits_for_any_more_holds_nobody_up(leader):
    leader.settled()
    token = leader.add(4)
    leader.voter.stop_adding(99)  # Another change.
    leader.step()
    assert leader.refusal(token) is None
    leader.voter.stop_adding(token)
    said = leader.step()
    assert leader.refusal(token) is Refusal.NOT_CAUGHT_UP
    assert leader.of(VotersChanged)[-1].observers == {}
    leader.answer(4)
    leader.voter.propose(1, b"x")
    said += leader.step()
    assert {peer for peer, _ in said} == {2, 3}
    leader.answer_all()
    assert leader.refusal(leader.add(5)) is None


def test_whoever_leads_no_more_adds_nobody(leader):
    term = leader.settled()
    token = leader.add(4)
    leader.receive(2, append(term + 1, (2, term)))
    assert leader.refusal(token) is Refusal.NOT_LEADER
    assert leader.of(VotersChanged)[-1].observers == {}


def test_an_observer_of_an_earlier_term_is_sent_nothing(tmp_path):
    """It was caught up, and its voter was silent: the leader ended in the step that adds it."""
    leader = Leader(tmp_path, 2)
    leader.settled()
    leader.now_s += 0.4
    leader.add(4)
    leader.now_s += 0.2
    leader.answer(4)
    assert (leader.role, leader.ids) == (Role.FOLLOWER, {1, 2})
    leader.now_s += 2
    leader.stand()
    said = leader.vote(2)
    assert leader.role is Role.LEADER
    said += leader.wait(0.2)
    assert {peer for peer, _ in said} == {2}
    leader.journal.abandon()


def test_an_observer_on_a_new_disk_is_sent_the_log_anew_at_once(leader):
    term = leader.settled()
    leader.propose(b"x")
    leader.answer_all()
    leader.add(4)
    refusal = reply(term, 2, success=False, reset=True, round_=1)
    leader.receive(4, refusal)
    said = leader.receive(4, reply(term, 2, round_=2), OTHER)
    (probe,) = (message.append_entries for peer, message in said if peer == 4)
    assert (probe.previous_index, list(probe.entries)) == (leader.journal.last_index, [])
    # It lacks the same that the one before lacked, and is not made to wait for a heartbeat.
    refusal.append_entries_reply.round = probe.round
    said = leader.receive(4, refusal, OTHER)
    (wanted,) = (message.append_entries for peer, message in said if peer == 4)
    assert [each.index for each in wanted.entries] == [2, 3]


def test_an_observer_on_a_new_disk_is_sent_the_snapshot_from_its_beginning(leader):
    term = leader.settled()
    for number in range(4):
        leader.propose(b"%d" % number)
        leader.answer_all()
    leader.voter.compact(leader.status.applied_index, b"s" * 3 * CHUNK_BYTES)
    leader.add(4)
    said = leader.receive(4, reply(term, 2, success=False, reset=True, round_=1))
    for _ in range(2):
        (chunk,) = (m.snapshot_chunk for peer, m in said if m.HasField("snapshot_chunk"))
        taken = reply(term, 0, success=False, round_=chunk.round)
        said = leader.receive(4, taken)
    offset = chunk.offset_bytes
    leader.receive(4, taken, OTHER)
    refusal = reply(term, 2, success=False, reset=True, round_=chunk.round + 2)
    said = leader.receive(4, refusal, OTHER)
    (chunk,) = (m.snapshot_chunk for peer, m in said if m.HasField("snapshot_chunk"))
    assert (offset, chunk.offset_bytes) == (CHUNK_BYTES, 0)


# After it was given up, or before it was heard.


def compacted(leader) -> None:
    """The leader's log begins after what a newcomer needs, so that it gets a large snapshot."""
    leader.settled()
    for number in range(20):
        leader.propose(b"%d" % number, token=1000 + number)
        leader.answer_all()
    leader.voter.compact(leader.status.applied_index, b"s" * 3 * CHUNK_BYTES)
    leader.step()


def sent_to(leader, peer: int, beats: int) -> list[str]:
    """What a peer is sent in so many heartbeats, in which the voters go on answering."""
    kinds = []
    for _ in range(beats):
        leader.now_s += 0.15
        for voter in (2, 3):
            said = leader.answer(voter)
            kinds += [message.WhichOneof("message") for to, message in said if to == peer]
    return kinds


def test_nothing_is_sent_to_who_was_given_up(leader):
    compacted(leader)
    token = leader.add(4, timeout_s=0.4)
    refused = reply(leader.status.term, 2, success=False, round_=1, reset=True)
    leader.receive(4, refused)
    assert "snapshot_chunk" in sent_to(leader, 4, 1)
    leader.pass_time(0.6)
    assert leader.refusal(token) is Refusal.NOT_CAUGHT_UP
    assert sent_to(leader, 4, 30) == []
    leader.add(4, timeout_s=5)
    assert "snapshot_chunk" not in sent_to(leader, 4, 3), "it begins anew, with the log"


def test_an_observer_that_knows_a_later_term_is_followed_into_it(leader):
    """It stood in vain before it was removed, and follows nobody of an older term."""
    leader.settled()
    term = leader.status.term
    token = leader.add(4, timeout_s=100)
    leader.receive(4, Message(term=term + 1, term_notice=raft_pb2.TermNotice()))
    leader.step()
    assert leader.status.term == term + 1
    assert leader.refusal(token) is Refusal.NOT_LEADER  # Its client asks the next leader.


def test_strangers_of_a_later_term_are_not_followed(leader):
    leader.settled()
    term = leader.status.term
    leader.receive(4, Message(term=term + 1, term_notice=raft_pb2.TermNotice()))
    leader.step()
    assert leader.status.term == term


def test_a_voter_that_was_not_heard_yet_is_not_said_to_be_one(leader):
    """It may have lost its disk since it was added: then it does not count."""
    leader.lead()
    leader.answer(2)
    assert leader.refusal(leader.add(3)) is Refusal.NOT_CAUGHT_UP
    leader.answer(3)
    token = leader.add(3)
    assert [event.token for event in leader.of(VotersCommitted)] == [token]


def test_a_late_answer_out_of_the_disk_before_makes_no_voter(leader):
    """Node 4 was an observer with another disk; it is added anew when its answer arrives."""
    term = leader.settled()
    leader.add(4, timeout_s=0.4)
    leader.pass_time(0.6)
    late = reply(term, leader.journal.last_index + 1, round_=1)
    leader.add(4, timeout_s=5)
    leader.receive(4, late, b"E" * 16)
    leader.pass_time(0.3)
    assert leader.ids == {1, 2, 3}
