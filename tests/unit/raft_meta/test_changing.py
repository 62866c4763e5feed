"""The voter set changes one voter at a time (Raft thesis 4), and the attacks on that."""

from __future__ import annotations

import pytest

from penstock.raft_meta.journal import VOTERS
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.changing import MOST_VOTERS, NEVER_ANSWERED, NO_TOKEN, Refusal
from penstock.raft_meta.voter import (
    ChangeRefused,
    HandOverFailed,
    ReadReady,
    Refused,
    VotersChanged,
    VotersCommitted,
)
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2
from tests.unit.raft_meta.founded import directory_of, voter_set
from tests.unit.raft_meta.leading_voter import Leader
from tests.unit.raft_meta.lone_voter import (
    Message,
    append,
    entry,
    pre_vote,
    reply,
    request_vote,
)
from tests.unit.raft_meta.raft_fuzz import Network

KIND = raft_pb2.RAFT_ENTRY_KIND_VOTERS
OTHER = b"E" * 16  # A directory of none of the founders.


@pytest.fixture
def leader(tmp_path):
    leader = Leader(tmp_path)
    yield leader
    leader.journal.abandon()


# Adding.


def test_a_new_voter_is_an_observer_first_and_counts_once_it_is_caught_up(leader):
    leader.settled()
    leader.propose(b"x")
    leader.answer(2)
    token = leader.add(4)
    assert leader.of(VotersChanged)[-1].observers == {4: ("host-4", 1)}
    assert leader.ids == {1, 2, 3}
    leader.answer(4, 2)  # Not all of it.
    assert leader.ids == {1, 2, 3}
    leader.answer(4)
    assert leader.ids == {1, 2, 3, 4}
    assert leader.journal.voters.get(4) == voter_set([4]).get(4)
    assert leader.of(VotersCommitted) == []
    leader.answer(4)
    leader.answer(2)
    assert [e.token for e in leader.of(VotersCommitted)] == [token]


def test_an_observer_does_not_count(leader):
    leader.settled()
    leader.add(4)
    leader.propose(b"x")
    index = leader.journal.last_index
    leader.answer(4, 1)
    assert leader.status.commit_index == index - 1
    leader.receive(4, reply(leader.status.term, index + 1, round_=1), b"")  # It hides its disk.
    assert leader.status.commit_index == index - 1
    assert leader.ids == {1, 2, 3}


def test_an_observer_that_comes_up_slowly_is_given_another_round(leader):
    leader.settled()
    token = leader.add(4)
    for _ in range(5):
        leader.now_s += 0.15
        for peer in (2, 3):
            leader.answer(peer)
    for number in range(20):
        leader.propose(b"%d" % number, token=1000 + number)
    leader.answer(4, 3)  # The log's end when it began, 0.75 s ago.
    leader.answer(4, 4)  # Not the end when the second round began.
    assert leader.ids == {1, 2, 3}
    leader.answer(4)
    assert leader.ids == {1, 2, 3, 4}
    assert leader.refusal(token) is None


def test_an_observer_that_is_too_slow_is_given_up(leader):
    leader.settled()
    token = leader.add(4, timeout_s=0.4)
    leader.answer(4, 1)
    leader.propose(b"x")
    leader.pass_time(0.45)
    late = ChangeRefused(token, Refusal.NOT_CAUGHT_UP, behind=2)
    assert leader.of(ChangeRefused) == [late]


def test_an_observer_that_does_not_come_up_is_given_up(leader):
    leader.settled()
    token = leader.add(4, timeout_s=0.4)
    for _ in range(3):
        leader.now_s += 0.15
        for peer in (2, 3):
            leader.answer(peer)
    never = ChangeRefused(token, Refusal.NOT_CAUGHT_UP, NEVER_ANSWERED)
    assert leader.of(ChangeRefused) == [never]
    assert leader.of(VotersChanged)[-1].observers == {}
    assert leader.ids == {1, 2, 3}
    assert 4 not in leader.status.match_index


def test_to_add_a_voter_again_changes_nothing(leader):
    leader.settled()
    token = leader.add(2)
    assert [e.token for e in leader.of(VotersCommitted)] == [token]
    assert leader.journal.last_index == 2


def test_a_voter_is_found_at_another_address(leader):
    leader.settled()
    leader.voter.add_voter(9, 2, ("elsewhere", 7), leader.now_s, timeout_s=5)
    leader.step()
    leader.answer(3)
    assert leader.journal.voters.get(2).address == ("elsewhere", 7)
    assert leader.journal.voters.get(2).directory_id == directory_of(2)


def test_a_voter_with_another_disk_is_not_the_voter_that_it_was(leader):
    leader.settled()
    leader.propose(b"x")
    leader.answer(2, directory=directory_of(22))
    assert leader.status.commit_index == 2
    assert leader.refusal(leader.add(2)) is Refusal.DUPLICATE


def test_there_are_never_too_many_voters(tmp_path):
    leader = Leader(tmp_path, MOST_VOTERS)
    leader.settled()
    assert leader.refusal(leader.add(MOST_VOTERS + 1)) is Refusal.TOO_MANY
    leader.journal.abandon()


# Removing.


def test_a_removed_voter_does_not_count_from_the_moment_it_is_in_the_log(leader):
    leader.settled()
    token = leader.remove(3)
    assert leader.ids == {1, 2}
    leader.answer(3)
    assert leader.of(VotersCommitted) == []
    leader.answer(2)
    assert [e.token for e in leader.of(VotersCommitted)] == [token]


def test_what_can_not_be_removed_is_named(leader):
    leader.settled()
    assert leader.refusal(leader.remove(9)) is Refusal.UNKNOWN
    leader.remove(3)
    leader.answer(2)
    leader.remove(2)
    leader.step()
    assert leader.ids == {1}
    assert leader.refusal(leader.remove(1)) is Refusal.LAST


def test_a_change_that_would_stop_the_cluster_is_not_begun(leader):
    leader.settled()
    for _ in range(4):  # Node 3 is silent.
        leader.now_s += 0.15
        leader.answer(2)
    assert leader.refusal(leader.remove(2)) is Refusal.NOT_ENOUGH_LIVE
    assert leader.refusal(leader.remove(3)) is None
    assert leader.ids == {1, 2}


def test_a_change_is_judged_by_the_time_at_which_it_is_asked_for(leader):
    """Not by that of the last step."""
    leader.settled()
    leader.now_s += 0.3
    leader.answer(2)
    leader.now_s += 0.3
    assert leader.refusal(leader.remove(2)) is Refusal.NOT_ENOUGH_LIVE


def test_a_leader_that_is_to_go_hands_over_and_its_successor_removes_it(leader):
    leader.settled()
    token = leader.remove(1)
    assert leader.refusal(token) is Refusal.HANDED_OVER
    assert leader.ids == {1, 2, 3}
    assert leader.refusal(leader.add(4)) is Refusal.NOT_LEADER


def test_a_leader_that_is_to_go_and_has_no_successor_leads_on_and_says_so(leader):
    term = leader.settled()
    leader.remove(1)
    leader.propose(b"meanwhile", token=77)
    assert [event.token for event in leader.of(Refused)] == [77]
    for _ in range(8):  # Its successor answers, and never stands.
        leader.now_s += 0.15
        for peer in (2, 3):
            leader.answer(peer)
    assert (leader.role, leader.status.term) == (Role.LEADER, term)
    assert leader.of(HandOverFailed) == [HandOverFailed()]
    leader.propose(b"later", token=78)
    assert [event.token for event in leader.of(Refused)] == [77]


# One at a time.


def test_two_changes_never_overlap(leader):
    """The next waits for the last to be committed; else {1,2,3} -> {1,2} -> {1} elects two."""
    leader.settled()
    leader.voter.remove_voter(7, 3, leader.now_s)
    leader.voter.remove_voter(8, 2, leader.now_s)  # In the same step.
    leader.step()
    assert leader.refusal(8) is Refusal.IN_PROGRESS
    assert leader.refusal(leader.remove(2)) is Refusal.IN_PROGRESS
    assert leader.refusal(leader.add(4)) is Refusal.IN_PROGRESS
    assert leader.ids == {1, 2}
    leader.answer(2)
    assert leader.refusal(leader.add(4)) is None
    assert leader.refusal(leader.add(5)) is Refusal.IN_PROGRESS


def test_a_leader_changes_nothing_before_it_committed_in_its_term(leader):
    """The flaw of single-server changes as first published: it may not know of a set in force."""
    leader.lead()
    assert leader.refusal(leader.remove(3)) is Refusal.IN_PROGRESS
    leader.answer(2)
    leader.answer(3)
    assert leader.refusal(leader.remove(3)) is None


def test_a_change_of_who_leads_no_more_is_refused(leader):
    """Leadership is lost between the request and the step that would append the set."""
    term = leader.settled()
    leader.voter.remove_voter(7, 3, leader.now_s)
    leader.receive(2, append(term + 1, (2, term)))
    assert leader.refusal(7) is Refusal.NOT_LEADER
    assert leader.ids == {1, 2, 3}


def test_a_follower_changes_nothing(leader):
    leader.receive(2, append(4, (1, 0)))
    assert leader.refusal(leader.remove(3)) is Refusal.NOT_LEADER
    assert leader.refusal(leader.add(4)) is Refusal.NOT_LEADER


# What followers make of it.


def voters_entry(index: int, term: int, ids) -> raft_pb2.RaftEntry:
    payload = voter_set(ids).encode()
    return raft_pb2.RaftEntry(index=index, term=term, kind=KIND, payload=payload)


def test_a_follower_takes_a_set_from_the_log_and_gives_it_back_with_it(leader):
    leader.receive(2, append(4, (1, 0), voters_entry(2, 4, [1, 2, 3, 4])))
    assert leader.ids == {1, 2, 3, 4}
    leader.receive(3, append(5, (1, 0), entry(2, 5)))
    assert leader.ids == {1, 2, 3}
    assert [set(e.voters.node_ids) for e in leader.of(VotersChanged)] == [
        {1, 2, 3, 4},
        {1, 2, 3},
    ]


def test_a_set_in_the_log_is_in_force_after_a_crash(leader):
    leader.receive(2, append(4, (1, 0), voters_entry(2, 4, [1, 2, 3, 4])))
    leader.crash()
    assert leader.ids == {1, 2, 3, 4}
    leader.nodes = 3
    leader.stand()  # Two others of four: a majority with itself.
    leader.vote(2)
    assert leader.role is Role.CANDIDATE
    leader.vote(3)
    assert leader.role is Role.LEADER


def test_a_node_that_is_removed_never_stands(leader):
    leader.receive(2, append(4, (1, 0), voters_entry(2, 4, [2, 3])))
    for _ in range(30):
        assert leader.wait(1.0) == []
    assert leader.status.term == 4
    assert not leader.status.is_voter


def test_a_node_that_is_removed_still_votes_for_those_who_need_it(leader):
    """Its vote counts for who does not know yet that it is removed (thesis 4.2.2)."""
    leader.receive(2, append(4, (1, 0), voters_entry(2, 4, [2, 3])))
    leader.now_s += 3
    said = leader.receive(3, request_vote(5, last=(2, 4)))
    assert [m.WhichOneof("message") for _, m in said] == ["vote"]


@pytest.mark.parametrize("payload", [b"", b"\xff", VoterSet.of(range(9)).encode()[:-1]])
def test_an_entry_that_holds_no_set_is_dropped_with_its_message(leader, payload):
    bad = raft_pb2.RaftEntry(index=2, term=4, kind=KIND, payload=payload)
    assert leader.receive(2, append(4, (1, 0), bad)) == []
    assert leader.log == [(1, 0)]


# Votes of others.


def test_votes_out_of_another_disk_elect_nobody(leader):
    leader.stand()
    for peer in (2, 3):
        leader.vote(peer, directory=directory_of(99))
        leader.vote(peer, directory=b"")
    assert leader.role is Role.CANDIDATE
    leader.vote(2)
    assert leader.role is Role.LEADER


def test_pre_votes_out_of_another_disk_open_no_gate(leader):
    leader.wait(1.1)
    granted = raft_pb2.PreVoteReply(candidate_term=1, granted=True)
    for peer in (2, 3):
        leader.receive(peer, Message(term=0, pre_vote_reply=granted), directory_of(99))
    assert leader.role is Role.FOLLOWER


def test_a_removed_server_does_not_disturb(leader):
    """It does not know, and stands again and again (thesis 4.2.3)."""
    term = leader.settled()
    leader.remove(3)
    leader.answer(2)
    for attempt in range(1, 5):
        leader.receive(3, pre_vote(term + attempt, last=(9, term)))
        leader.receive(3, request_vote(term + attempt, last=(9, term)))
        leader.receive(3, Message(term=term + attempt, term_notice=raft_pb2.TermNotice()))
        leader.receive(3, reply(term + attempt, 2))
    assert (leader.role, leader.status.term) == (Role.LEADER, term)


# Together.


@pytest.fixture
def net(tmp_path):
    net = Network(tmp_path, 1, seed=21)
    yield net
    net.close()


def test_a_cluster_grows_from_one_to_three_to_five_and_shrinks_again(net):
    net.wait_leader()
    for _ in range(60):  # More than is kept: the new ones need a snapshot.
        net.propose()
        net.run(0.01)
    for wanted in range(2, 6):
        host = net.join()
        net.insist(lambda node_id=host.node_id: net.add(node_id))
        net.settle()
        assert net.voters() == set(range(1, wanted + 1))
    assert net.installs >= 4
    for gone in (1, 2, 3, 4):
        net.insist(lambda node_id=gone: net.remove(node_id))
        net.crash(net.hosts[gone], down_s=1e9)
        del net.hosts[gone]
        net.run(1.0)
        assert gone not in net.voters()
    net.settle()
    assert net.voters() == {5}


def test_a_dead_controller_is_replaced_for_good(tmp_path):
    net = Network(tmp_path, 3, seed=22)
    net.wait_leader()
    net.propose()
    net.run(0.5)
    net.crash(net.hosts[2], down_s=1e9)
    net.insist(lambda: net.remove(2))
    net.wipe(net.hosts[2])
    net.start(net.hosts[2])
    net.insist(lambda: net.add(2))
    net.settle()
    assert net.hosts[2].is_member
    net.close()


def test_the_leader_is_removed_and_comes_back(tmp_path):
    net = Network(tmp_path, 3, seed=23)
    old = net.wait_leader()
    net.run(1.0)
    net.insist(lambda: net.remove(old.node_id))
    assert net.leader() is not old
    assert old.node_id not in net.voters()
    net.insist(lambda: net.add(old.node_id))
    net.settle()
    assert len(net.voters()) == 3
    net.close()


def test_entries_of_voter_sets_are_no_commands(net):
    net.wait_leader()
    host = net.join()
    net.insist(lambda: net.add(host.node_id))
    payload = net.propose()
    net.settle()
    assert net.decided[0] == payload
    assert any(each.command[:1] == VOTERS for each in host.journal[:])


# What a fresh pair of eyes found.


def test_an_observer_on_a_new_disk_does_not_count_as_the_one_before(leader):
    leader.settled()
    leader.add(4)
    term, last = leader.status.term, leader.journal.last_index
    for directory, message in (
        (directory_of(4), reply(term, last + 1, round_=1)),
        (OTHER, reply(term, 2, success=False, reset=True, round_=1)),
    ):
        message.directory_id = directory
        leader.voter.receive(4, message, leader.now_s)
    leader.step()
    assert leader.ids == {1, 2, 3}
    assert leader.status.match_index.get(4, 0) == 0
    assert leader.voter._guard.dropped == 1
    leader.answer(4, directory=OTHER)
    assert leader.journal.voters.get(4).directory_id == OTHER


def old_leader(tmp_path) -> Leader:
    """Its set was made when directories had no ids."""

    class Old(Leader):
        def found(self) -> None:
            addresses = {n: (f"host-{n}", 1) for n in (1, 2, 3)}
            self.journal.found(VoterSet.of([1, 2, 3], addresses), index=1)

    return Old(tmp_path)


def test_directories_are_noted_once_all_are_known(tmp_path):
    leader = old_leader(tmp_path)
    leader.lead()
    leader.answer(2)
    leader.answer(2)
    assert leader.journal.last_index == 2
    leader.answer(3, directory=b"")  # Of a version that says none.
    leader.answer(2)
    assert leader.journal.last_index == 2
    leader.answer(3)
    assert leader.journal.voters == voter_set([1, 2, 3])
    leader.answer_all()
    assert [e.token for e in leader.of(VotersCommitted)] == [NO_TOKEN]
    leader.pass_time(1.0)
    assert leader.journal.last_index == 3
    leader.journal.abandon()


def test_a_removal_is_not_undone_by_noting_the_directories(tmp_path):
    leader = old_leader(tmp_path)
    leader.lead()
    leader.answer(2)
    message = reply(leader.status.term, leader.journal.last_index + 1, round_=1)
    message.directory_id = directory_of(3)
    leader.voter.receive(3, message, leader.now_s)
    leader.remove(3)  # In the step in which the last directory is known.
    for peer in (2, 3, 2):
        leader.answer(peer)
    assert leader.ids == {1, 2}
    leader.journal.abandon()


def test_no_observer_holds_up_other_changes_for_as_long_as_its_client_would(leader):
    leader.settled()
    token = leader.add(9, timeout_s=365 * 86400)
    for _ in range(1000):
        leader.now_s += 0.15
        for peer in (2, 3):
            leader.answer(peer)
    assert leader.refusal(token) is Refusal.NOT_CAUGHT_UP
    assert leader.refusal(leader.remove(3)) is None


def test_removing_a_node_that_is_being_added_ends_that(leader):
    leader.settled()
    token = leader.add(9)
    assert leader.refusal(leader.remove(9)) is None
    assert leader.refusal(token) is Refusal.NOT_CAUGHT_UP
    assert leader.refusal(leader.remove(3)) is None
    assert leader.ids == {1, 2}


def test_an_echo_of_before_a_removal_confirms_no_read_after_it(leader):
    term = leader.settled()
    for _ in range(20):
        leader.now_s += 0.15
        for peer in (2, 3):
            leader.answer(peer)
    old = reply(term, 2, round_=15)  # Of long ago, and still on its way.
    leader.remove(3)
    leader.answer(2)
    leader.add(3)
    leader.answer(3)
    for peer in (2, 3, 2, 3):
        leader.answer(peer)
    assert leader.ids == {1, 2, 3}
    for _ in range(3):
        leader.now_s += 0.1
        leader.step()
        for peer in (2, 3):
            leader.answer(peer)
    leader.voter.read(5)
    for _ in range(14):
        leader.now_s += 0.03
        leader.wait(0)
        leader.voter._guard._desk.engine.hurry()
    leader.receive(3, old)
    assert not leader.of(ReadReady)


# What the leader knows of the others.


def test_a_leader_tells_how_it_hears_the_others(leader):
    leader.settled()
    leader.now_s += 10.0
    leader.answer(2)
    leader.now_s += 0.01
    leader.step()
    heard, silent = leader.status.hearings[2], leader.status.hearings[3]
    assert (heard.silent_ms, heard.ever_answered, heard.is_reachable) == (10, True, True)
    assert silent.silent_ms >= 10_000
    assert not silent.is_reachable


def test_who_never_answered_is_silent_since_the_leader_leads(leader):
    leader.now_s += 100.0
    leader.lead()
    began_s = leader.now_s
    leader.now_s += 0.25
    leader.step()
    hearing = leader.status.hearings[3]
    assert not hearing.ever_answered
    assert hearing.silent_ms == round((leader.now_s - began_s) * 1000)


def test_a_newcomer_is_told_of_until_it_votes(leader):
    leader.settled()
    assert leader.status.catching_up is None
    leader.add(4)
    leader.step()
    assert leader.status.catching_up == (4, ("host-4", 1))
    leader.answer(4)
    assert leader.status.catching_up is None
