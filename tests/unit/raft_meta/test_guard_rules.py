"""The guard's eight rules, each by the attack that the bare engine falls for."""

from __future__ import annotations

import crc32c
import pytest

from penstock.raft_meta.guard import MAX_COMMAND_BYTES
from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.quorum import Leadership, Role
from penstock.raft_meta.voter import Committed, Installed, ReadReady, Refused, Undecided
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.lone_voter import (
    COMMAND,
    NO_OP,
    Lone,
    Message,
    append,
    entry,
    pre_vote,
    reply,
    request_vote,
)


@pytest.fixture
def lone(tmp_path):
    lone = Lone(tmp_path)
    yield lone
    lone.journal.abandon()


def only(messages):
    """The one answer, apart from pre-votes that the voter asks for when its own timer ran out."""
    answers = [message for _, message in messages if not message.HasField("pre_vote")]
    assert len(answers) == 1, messages
    return answers[0]


def rounds(messages):
    return {peer: message.append_entries.round for peer, message in messages}


# Durability.


def test_nothing_is_said_when_the_disk_fails(lone):
    def fail():
        raise OSError("disk")

    lone.journal._write = fail
    lone.voter.receive(2, append(1, (1, 0), entry(2, 1)), lone.now_s)
    with pytest.raises(OSError, match="disk"):
        lone.voter.step(lone.now_s)


def test_a_vote_is_on_disk_before_it_is_said(lone):
    said = only(lone.tell(2, request_vote(1)))
    assert said.HasField("vote")
    lone.crash()
    assert lone.tell(3, request_vote(1)) == []  # One vote a term, whatever happens in between.


def test_a_vote_that_comes_with_no_entry_is_on_disk_too(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1)))
    lone.now_s += 3
    assert only(lone.tell(3, request_vote(2, last=(2, 1)))).HasField("vote")
    lone.crash()
    assert lone.status.term == 2
    assert lone.tell(2, request_vote(2, last=(2, 1))) == []


def test_an_acknowledged_entry_survives(lone):
    said = only(lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1))))
    assert said.append_entries_reply.success
    assert said.append_entries_reply.next_index == 4
    lone.crash()
    assert lone.log == [(1, 0), (2, 1), (3, 1)]
    assert lone.status.term == 1


def test_the_only_voter_commits_nothing_before_it_is_on_disk(tmp_path):
    lone = Lone(tmp_path, nodes=1)
    lone.step()
    assert lone.role is Role.LEADER
    lone.propose(b"x")
    lone.step()
    assert [event.payload for event in lone.of(Committed)] == [b"x"]
    lone.crash()
    assert lone.journal.last_index == 3
    lone.journal.abandon()


# Rule 1: terms.


def test_a_newer_term_in_an_answer_ends_leadership(lone):
    term = lone.lead()
    lone.tell(2, reply(term + 3, 2))
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, term + 3)
    assert lone.of(Leadership)[-1] == Leadership(term + 3, -1, leading=False)


def test_a_term_notice_ends_leadership(lone):
    term = lone.lead()
    lone.tell(3, Message(term=term + 1, term_notice=raft_pb2.TermNotice()))
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, term + 1)


def test_a_leader_of_an_old_term_is_told_and_obeyed_no_more(lone):
    lone.tell(2, append(5, (1, 0), entry(2, 5)))
    said = only(lone.tell(3, append(4, (1, 0), entry(2, 4), entry(3, 4))))
    assert said.HasField("term_notice")
    assert said.term == 5
    assert lone.log == [(1, 0), (2, 5)]


def test_an_old_candidate_is_told(lone):
    lone.tell(2, append(5, (1, 0)))
    lone.wait(3)
    assert only(lone.tell(3, request_vote(4))).HasField("term_notice")


def test_two_leaders_in_one_term_end_the_process(lone):
    lone.tell(2, append(5, (1, 0)))
    with pytest.raises(RaftSafetyError, match="claims to lead term 5"):
        lone.tell(3, append(5, (1, 0)))


# Rule 2: AppendEntries.


def test_a_message_delivered_twice_cuts_nothing(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1)))
    lone.tell(2, append(1, (3, 1), entry(4, 1), entry(5, 1)))
    said = only(lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1))))
    assert said.append_entries_reply.success
    assert said.append_entries_reply.next_index == 4  # What the message shows, and no more.
    assert lone.log[-1] == (5, 1)


def test_an_empty_message_cuts_nothing(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1)))
    said = only(lone.tell(2, append(1, (2, 1))))
    assert said.append_entries_reply.next_index == 3
    assert lone.log[-1] == (3, 1)


def test_only_what_differs_is_replaced(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), entry(4, 1)))
    lone.tell(3, append(2, (1, 0), entry(2, 1), entry(3, 2)))
    assert lone.log == [(1, 0), (2, 1), (3, 2)]


def test_the_commit_index_stays_within_what_the_message_matched(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), entry(4, 1)))
    lone.tell(3, append(2, (2, 1), commit=4))  # 3 and 4 may not be what the new leader has.
    assert lone.status.commit_index == 2
    assert [event.index for event in lone.of(Committed)] == [2]


def test_what_is_committed_is_never_replaced(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), commit=3))
    with pytest.raises(RaftSafetyError, match="committed here"):
        lone.tell(3, append(2, (1, 0), entry(2, 1), entry(3, 2)))
    assert lone.log[-1] == (3, 1)


# Rule 3: refusals.


def test_a_refusal_goes_back_a_whole_term_but_not_to_what_is_committed(lone):
    entries = [entry(2, 1), *(entry(index, 2) for index in range(3, 9))]
    lone.tell(2, append(2, (1, 0), *entries, commit=4))
    said = only(lone.tell(3, append(3, (8, 3), entry(9, 3)))).append_entries_reply
    assert (said.success, said.reset, said.next_index) == (False, True, 5)
    said = only(lone.tell(3, append(3, (20, 3)))).append_entries_reply
    assert (said.success, said.next_index) == (False, 9)


def test_refusals_of_what_was_under_way_are_void(lone):
    term = lone.lead()
    lone.tell(2, reply(term, 3, round_=1))
    for number in range(5):
        lone.propose(b"%d" % number, token=number)
    lone.tell(2, reply(term, 2, success=False, reset=True, round_=2))
    for late in (3, 4):
        said = lone.tell(2, reply(term, 3, success=False, reset=True, round_=late))
        assert [m for peer, m in said if peer == 2 and m.append_entries.entries] == []
    sent = [m.append_entries for peer, m in lone.wait(0.2) if peer == 2]
    assert sent[0].previous_index == lone.journal.last_index  # Not sent all over again.


# Rule 4: answers.


def test_answers_of_another_term_commit_nothing(lone):
    term = lone.lead()
    lone.propose(b"x")
    lone.tell(2, reply(term - 1, 4, round_=1))
    assert lone.of(Committed) == []
    lone.tell(2, reply(term, 4, round_=1))
    assert [event.payload for event in lone.of(Committed)] == [b"x"]


def test_answers_beyond_the_log_are_dropped(lone):
    term = lone.lead()
    lone.tell(2, reply(term, 50, round_=1))
    assert lone.status.match_index[2] == 0
    lone.tell(2, reply(term, 3, round_=1000))  # To a message that was never sent.
    assert lone.status.match_index[2] == 0


def test_a_vote_delivered_again_and_again_is_one_vote(tmp_path):
    lone = Lone(tmp_path, nodes=5)
    lone.stand()
    for _ in range(5):
        lone.vote(2)
    assert lone.role is Role.CANDIDATE
    lone.vote(3)
    assert lone.role is Role.LEADER
    lone.journal.abandon()


# Rule 5: PreVote and stickiness.


def test_without_a_majority_the_term_never_rises(lone):
    for _ in range(50):
        messages = lone.wait(1.1)
        assert all(message.HasField("pre_vote") for _, message in messages)
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, 0)


def test_a_refused_or_old_pre_vote_does_not_count(lone):
    lone.wait(1.1)
    for candidate_term, granted in ((1, False), (7, True)):
        answer = raft_pb2.PreVoteReply(candidate_term=candidate_term, granted=granted)
        lone.tell(2, Message(term=0, pre_vote_reply=answer))
    assert lone.role is Role.FOLLOWER


def test_each_candidacy_needs_its_own_pre_vote(lone):
    lone.stand()
    for _ in range(10):
        lone.wait(1.1)
    assert (lone.role, lone.status.term) == (Role.CANDIDATE, 1)


def test_a_second_candidacy_does_not_open_the_way_to_a_third(lone):
    lone.stand()
    lone.stand()  # From candidate to candidate: the engine's role does not change.
    for _ in range(10):
        lone.wait(1.1)
    assert (lone.role, lone.status.term) == (Role.CANDIDATE, 2)


def test_candidates_are_ignored_while_a_leader_is_alive(lone):
    lone.tell(2, append(1, (1, 0)))
    lone.now_s += 0.4
    said = only(lone.tell(3, pre_vote(2, last=(9, 1))))
    assert not said.pre_vote_reply.granted
    assert lone.tell(3, request_vote(2, last=(9, 1))) == []
    assert lone.status.term == 1
    lone.now_s += 0.2
    assert only(lone.tell(3, pre_vote(2, last=(9, 1)))).pre_vote_reply.granted
    assert only(lone.tell(3, request_vote(2, last=(9, 1)))).HasField("vote")


def test_a_leader_is_not_unseated_by_a_candidate(lone):
    term = lone.lead()
    assert lone.tell(3, request_vote(term + 1, last=(9, term))) == []
    assert lone.role is Role.LEADER


def test_a_pre_vote_changes_nothing_and_wants_a_fresh_log(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1)))
    lone.now_s += 3
    assert not only(lone.tell(3, pre_vote(2, last=(1, 0)))).pre_vote_reply.granted
    assert only(lone.tell(3, pre_vote(2, last=(2, 1)))).pre_vote_reply.granted
    assert only(lone.tell(2, pre_vote(2, last=(2, 1)))).pre_vote_reply.granted
    assert lone.status.term == 1


def test_a_leader_that_hears_no_majority_stops_leading(lone):
    lone.lead()
    lone.propose(b"x", token=9)
    for _ in range(5):
        lone.wait(0.15)
    assert lone.role is not Role.LEADER
    assert [event.token for event in lone.of(Undecided)] == [9]


def test_a_broken_connection_to_the_leader_hastens_the_election(lone):
    lone.tell(2, append(1, (1, 0)))
    lone.voter.peer_lost(3, lone.now_s)  # Not the leader's.
    assert lone.voter.next_deadline_s() >= lone.now_s + 0.5
    lone.voter.peer_lost(2, lone.now_s)
    assert lone.voter.next_deadline_s() <= lone.now_s + 0.25
    lone.tell(2, append(1, (1, 0)))  # It lives after all.
    assert lone.voter.next_deadline_s() >= lone.now_s + 0.5


def test_a_leader_that_stood_still_does_not_blame_the_others(lone):
    lone.lead()
    since_s = lone.now_s
    lone.now_s += 13.0
    lone.voter.stood_still(since_s, lone.now_s)
    lone.wait(0.01)
    assert lone.role is Role.LEADER
    for _ in range(5):
        lone.wait(0.15)
    assert lone.role is not Role.LEADER, "it has listened since, and nobody has answered"


def test_a_voter_that_stood_still_neither_stands_nor_votes_before_it_has_listened(lone):
    lone.tell(2, append(1, (1, 0)))
    since_s = lone.now_s
    lone.now_s += 13.0
    lone.voter.stood_still(since_s, lone.now_s)
    assert not only(lone.tell(3, pre_vote(2, last=(2, 1)))).pre_vote_reply.granted
    assert lone.voter.next_deadline_s() >= lone.now_s + 0.15
    lone.tell(2, append(1, (1, 0)))  # What waited in the socket.
    assert lone.voter.next_deadline_s() >= lone.now_s + 0.5
    assert lone.status.term == 1


def leaders_given_up(lone, *, are_alive: bool) -> None:
    """Three in a row, a second each; the last one leads, and was just heard."""
    for term in (1, 2, 3):
        lone.now_s += 1.0
        lone.tell(2 + term % 2, append(term, (1, 0)))
        if are_alive:
            lone.tell(2 + (term - 1) % 2, append(term - 1, (1, 0)))
    lone.tell(3, append(3, (1, 0)))


def test_leaders_that_are_given_up_and_live_make_a_voter_patient(lone):
    leaders_given_up(lone, are_alive=True)
    assert lone.voter.next_deadline_s() >= lone.now_s + 1.0
    lone.now_s += 0.9
    assert not only(lone.tell(2, pre_vote(4, last=(2, 3)))).pre_vote_reply.granted


def test_leaders_that_are_lost_in_silence_make_no_voter_patient(lone):
    leaders_given_up(lone, are_alive=False)
    assert lone.voter.next_deadline_s() <= lone.now_s + 1.0
    lone.now_s += 0.6
    assert only(lone.tell(2, pre_vote(4, last=(2, 3)))).pre_vote_reply.granted


def test_leaders_that_hand_over_make_no_voter_patient(lone):
    lone.tell(2, append(1, (1, 0)))
    for term in (2, 3, 4):
        candidate, leader = 2 + (term + 1) % 2, 2 + term % 2
        request = request_vote(term, last=(2, term))
        request.request_vote.handed_over_by = leader
        assert only(lone.tell(candidate, request)).HasField("vote")
        lone.tell(candidate, append(term, (1, 0)))
        lone.now_s += 0.2
    lone.tell(candidate, append(term, (1, 0)))
    assert lone.voter.next_deadline_s() <= lone.now_s + 1.0


def test_a_leader_after_leaders_that_lived_waits_longer_for_answers_but_not_for_long(lone):
    leaders_given_up(lone, are_alive=True)
    lone.now_s += 3.0
    lone.lead()
    for _ in range(5):
        lone.wait(0.15)
    assert lone.role is Role.LEADER
    for _ in range(3):
        lone.wait(0.15)
    assert lone.role is not Role.LEADER


# Rule 6: snapshots.


def chunk(term, last, data, *, offset=0, total=None, crc=None, round_=1) -> Message:
    whole = data if total is None else b""
    return Message(
        term=term,
        snapshot_chunk=raft_pb2.SnapshotChunk(
            last_index=last[0],
            last_term=last[1],
            offset_bytes=offset,
            total_bytes=len(data) if total is None else total,
            crc32c=crc32c.crc32c(whole) if crc is None else crc,
            round=round_,
            data=data,
        ),
    )


def test_a_snapshot_is_installed_and_survives(lone):
    said = only(lone.tell(2, chunk(4, (20, 3), b"state"))).append_entries_reply
    assert (said.success, said.next_index) == (True, 21)
    assert [event.snapshot.data for event in lone.of(Installed)] == [b"state"]
    lone.events.clear()
    lone.crash()
    lone.step()
    assert lone.log == [(20, 3)]
    assert [event.snapshot.data for event in lone.of(Installed)] == [b"state"]
    lone.tell(2, append(4, (20, 3), entry(21, 4), commit=21))
    assert [event.index for event in lone.of(Committed)] == [21]


def test_a_damaged_snapshot_is_refused(lone):
    said = only(lone.tell(2, chunk(4, (20, 3), b"state", crc=1))).append_entries_reply
    assert (said.success, said.reset) == (False, True)
    assert lone.log == [(1, 0)]
    assert lone.of(Installed) == []


def test_a_snapshot_of_what_is_here_changes_nothing(lone):
    lone.tell(2, append(1, (1, 0), entry(2, 1), entry(3, 1), entry(4, 1), commit=2))
    for last in ((2, 1), (4, 1)):  # Committed, and merely held.
        said = only(lone.tell(2, chunk(1, last, b"state"))).append_entries_reply
        assert (said.success, said.next_index) == (True, last[0] + 1)
    assert lone.log[-1] == (4, 1)
    assert lone.status.commit_index == 2
    assert lone.of(Installed) == []


def test_chunks_come_in_order_or_start_again(lone):
    data = b"first second"
    crc = crc32c.crc32c(data)
    parts = {"total": len(data), "crc": crc}
    lone.tell(2, chunk(4, (20, 3), data[:6], **parts))
    lone.tell(2, chunk(4, (20, 3), data[:6], **parts, round_=2))  # Sent again.
    said = only(lone.tell(2, chunk(4, (20, 3), data[8:], offset=8, **parts))).append_entries_reply
    assert (said.success, said.reset) == (False, True)
    said = only(lone.tell(2, chunk(4, (20, 3), data[6:], offset=6, **parts))).append_entries_reply
    assert said.reset  # The gap made it forget the beginning.
    lone.tell(2, chunk(4, (20, 3), data[:6], **parts))
    said = only(lone.tell(2, chunk(4, (20, 3), data[6:], offset=6, **parts))).append_entries_reply
    assert said.success
    assert [event.snapshot.data for event in lone.of(Installed)] == [data]


def test_a_leader_sends_one_snapshot_and_does_not_flood(lone):
    term = lone.lead()
    for number in range(20):
        lone.propose(b"%d" % number, token=number)
        lone.tell(3, reply(term, lone.journal.last_index + 1, round_=number + 1))
    lone.voter.compact(lone.status.applied_index, b"state")
    said = lone.tell(2, reply(term, 2, success=False, reset=True, round_=1))
    said += lone.step() + lone.step()
    chunks = [m.snapshot_chunk for peer, m in said if peer == 2]
    assert [each.data for each in chunks] == [b"state"]
    probes = [m.snapshot_chunk for peer, m in lone.wait(0.2) if peer == 2]
    assert [each.data for each in probes] == [b""]  # A sign of life.
    after = lone.tell(2, reply(term, chunks[0].last_index + 1, round_=chunks[0].round))
    assert all(not m.HasField("snapshot_chunk") for peer, m in after if peer == 2)
    assert lone.status.match_index[2] == chunks[0].last_index


# Rule 7: what may be in a log, and who may put it there.


@pytest.mark.parametrize(
    "bad",
    [
        raft_pb2.RaftEntry(index=2, term=1),
        raft_pb2.RaftEntry(index=2, term=1, kind=NO_OP, payload=b"x"),
        raft_pb2.RaftEntry(index=2, term=1, kind=COMMAND, payload=b"x" * (MAX_COMMAND_BYTES + 1)),
        raft_pb2.RaftEntry(index=3, term=1, kind=COMMAND),
        raft_pb2.RaftEntry(index=2, term=2, kind=COMMAND),
        raft_pb2.RaftEntry(index=2, term=-1, kind=COMMAND),
    ],
)
def test_malformed_entries_are_dropped(lone, bad):
    assert lone.tell(2, append(1, (1, 0), bad)) == []
    assert lone.log == [(1, 0)]
    assert lone.status.term == 0


@pytest.mark.parametrize(
    "bad",
    [
        Message(),
        Message(term=3),
        Message(term=-1, vote=raft_pb2.Vote()),
        Message(term=3, hello=raft_pb2.RaftHello()),
        append(3, (0, 0)),
        append(3, (1, 9)),
        request_vote(3, last=(0, 0)),
        request_vote(3, last=(1, -1)),
        request_vote(3, last=(1, 4)),
        chunk(3, (9, 4), b"x"),
        chunk(3, (9, 1), b"x", offset=5),
        chunk(3, (9, 1), b"x", total=1 << 60),
    ],
)
def test_malformed_messages_are_dropped(lone, bad):
    assert lone.tell(2, bad) == []
    assert lone.status.term == 0


def test_strangers_have_nothing_to_answer(lone):
    term = lone.lead()
    lone.propose(b"x")
    for message in (
        reply(term, 4),
        reply(term + 3, 4),
        Message(term=term + 3, vote=raft_pb2.Vote()),
        Message(term=term + 3, term_notice=raft_pb2.TermNotice()),
        Message(term=term + 3, pre_vote_reply=raft_pb2.PreVoteReply(granted=True)),
    ):
        lone.tell(9, message)
        lone.tell(-9, message)
    assert (lone.role, lone.status.term, lone.status.commit_index) == (Role.LEADER, term, 1)


def test_a_stranger_that_claims_to_lead_a_term_that_has_a_leader_is_not_heard(lone):
    lone.tell(2, append(5, (1, 0), entry(2, 5)))
    assert lone.tell(9, append(5, (1, 0), entry(2, 5, b"other"))) == []
    assert lone.status.leader_id == 2


def test_a_leader_is_heard_whoever_it_is_for_it_may_be_of_a_newer_voter_set(lone):
    said = only(lone.tell(9, append(3, (1, 0), entry(2, 3))))
    assert said.append_entries_reply.success
    assert (lone.status.term, lone.status.leader_id) == (3, 9)


def test_a_follower_takes_no_proposals_and_forwards_none(lone):
    lone.tell(2, append(1, (1, 0)))
    assert lone.propose(b"x", token=5) == []
    assert lone.of(Refused) == [Refused(5, 2)]


def test_a_proposal_into_a_leadership_that_just_ended_is_refused_or_undecided(lone):
    lone.lead()
    lone.now_s += 0.6  # Longer than a leader may go unheard; it notices within the next tick.
    lone.propose(b"x", token=5)
    assert lone.role is Role.FOLLOWER
    assert [type(e) for e in lone.events if getattr(e, "token", None) == 5] == [Refused]


# Rule 8: ReadIndex.


def test_a_read_waits_for_a_round_that_began_after_it(lone):
    term = lone.lead()
    before = rounds(lone.wait(0.2))
    lone.tell(2, reply(term, 3, round_=before[2]))
    assert lone.status.commit_index == 2
    lone.voter.read(7)
    after = rounds(lone.step())
    assert after[2] > before[2]
    lone.tell(2, reply(term, 3, round_=before[2]))
    assert lone.of(ReadReady) == []
    lone.tell(2, reply(term, 3, round_=after[2]))
    assert lone.of(ReadReady) == [ReadReady(7, 2)]


def test_a_new_leader_answers_no_read_before_it_committed_in_its_term(lone):
    term = lone.lead()
    lone.voter.read(7)
    sent = rounds(lone.step())
    lone.tell(2, reply(term, 2, success=False, round_=sent[2]))  # It echoes, but lacks the no-op.
    assert lone.of(ReadReady) == []
    lone.tell(2, reply(term, 3, round_=sent[2]))
    assert lone.of(ReadReady) == [ReadReady(7, 2)]


def test_a_follower_answers_no_read(lone):
    lone.tell(2, append(1, (1, 0)))
    lone.voter.read(7)
    lone.step()
    assert lone.of(Refused) == [Refused(7, 2)]


# Rest.


def test_an_idle_follower_sleeps_until_its_timer(lone):
    lone.tell(2, append(1, (1, 0)))
    assert 0.5 <= lone.voter.next_deadline_s() - lone.now_s <= 1.0


def test_an_idle_leader_sleeps_until_its_heartbeat(lone):
    term = lone.lead()
    lone.wait(0.2)
    lone.tell(2, reply(term, 3))
    lone.step()
    assert lone.voter.next_deadline_s() == pytest.approx(lone.now_s + 0.15)


def test_many_proposals_make_few_messages(lone):
    lone.lead()
    for token in range(500):
        lone.voter.propose(token, b"x" * 100)
    messages = lone.step()
    assert len(messages) == 2
    assert {len(m.append_entries.entries) for _, m in messages} >= {500}
