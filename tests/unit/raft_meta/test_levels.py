"""Who votes knows the feature level that the log needs: whoever is added, and when it is raised."""

from __future__ import annotations

import pytest

from penstock.raft_meta.quorum import MachineState
from penstock.raft_meta.rules.changing import ChangeRefused, Refusal
from penstock.raft_meta.voter import Committed, LevelRefused
from tests.unit.raft_meta.leading_voter import Leader
from tests.unit.raft_meta.lone_voter import Lone, append, entry, reply


@pytest.fixture
def leader(tmp_path):
    leader = Leader(tmp_path)
    yield leader
    leader.journal.abandon()


def leads_at(leader: Leader, level: int) -> None:
    """It leads, everybody knows level 3, and its state machine has applied all there is."""
    leader.settled()
    applied_all(leader, level)
    for peer in range(2, leader.nodes + 1):
        says(leader, peer, level=3)


def applied_all(leader: Leader, level: int) -> None:
    leader.machine = MachineState(leader.journal.last_index, level)


def says(leader: Leader, peer: int, *, level: int, applied: int | None = None) -> None:
    """A controller has stored everything; ``applied`` None is what older software says."""
    message = reply(
        leader.status.term,
        leader.journal.last_index + 1,
        round_=leader.voter._guard._desk.progress(peer).began + 1,
    )
    message.append_entries_reply.supported_metadata_version = level
    if applied is not None:
        message.append_entries_reply.applied_index = applied
    leader.receive(peer, message)


def raise_to(leader: Leader, level: int, token: int = 900) -> list[LevelRefused]:
    leader.voter.propose(token, b"raise", level=level)
    leader.step()
    return [event for event in leader.of(LevelRefused) if event.token == token]


# Adding.


def test_whose_software_is_too_old_does_not_become_a_voter(leader):
    leads_at(leader, 2)
    token = leader.add(9)
    says(leader, 9, level=1)
    refused = ChangeRefused(token, Refusal.TOO_OLD, level=1, needed=2)
    assert leader.of(ChangeRefused) == [refused]
    assert 9 not in leader.ids
    assert leader.status.catching_up is None


def test_software_that_says_no_level_knows_the_oldest_alone(leader):
    leads_at(leader, 2)
    token = leader.add(4)
    leader.answer(4)
    assert leader.refusal(token) is Refusal.TOO_OLD


def test_software_that_says_neither_level_nor_progress_is_added_at_the_oldest_level(leader):
    leads_at(leader, 1)
    leader.add(4)
    leader.answer(4)
    assert leader.ids == {1, 2, 3, 4}


def test_a_new_voter_has_applied_what_there_was_when_it_came(leader):
    leads_at(leader, 2)
    leader.propose(b"x")
    leader.answer_all()
    applied_all(leader, 2)
    leader.add(4)
    last = leader.journal.last_index
    says(leader, 4, level=2, applied=0)
    says(leader, 4, level=2, applied=last - 1)
    assert leader.ids == {1, 2, 3}
    leader.propose(b"y")
    says(leader, 4, level=2, applied=last)  # Nobody waits for what came since.
    assert leader.ids == {1, 2, 3, 4}


def test_one_that_stores_and_does_not_apply_is_given_up_as_behind(leader):
    leads_at(leader, 2)
    token = leader.add(4, timeout_s=0.4)
    says(leader, 4, level=2, applied=0)
    leader.pass_time(0.45)
    behind = leader.journal.last_index
    assert leader.of(ChangeRefused) == [ChangeRefused(token, Refusal.NOT_CAUGHT_UP, behind)]


def test_nobody_is_added_before_the_level_in_force_is_known(leader):
    leader.settled()
    leader.machine = MachineState(1, 2)  # What is applied here is of an earlier term.
    leader.add(4)
    says(leader, 4, level=3, applied=leader.journal.last_index)
    applied_all(leader, 0)  # No controller was active yet.
    says(leader, 4, level=3, applied=leader.journal.last_index)
    assert leader.ids == {1, 2, 3}
    applied_all(leader, 2)
    leader.step()
    assert leader.ids == {1, 2, 3, 4}


# Raising.


def test_a_level_that_a_voter_does_not_know_is_not_raised_to(leader):
    leads_at(leader, 1)
    says(leader, 3, level=1)
    last = leader.journal.last_index
    assert raise_to(leader, 2) == [LevelRefused(900, 2, {3: 1})]
    assert leader.journal.last_index == last


def test_a_level_is_raised_when_all_voters_have_said_to_know_it(leader):
    leader.settled()
    applied_all(leader, 1)
    says(leader, 2, level=3)
    leader.voter._guard._desk.progress(3).level = 0  # It was not heard by this leader.
    assert raise_to(leader, 3) == [LevelRefused(900, 3, {3: 0})]
    says(leader, 3, level=3)
    assert raise_to(leader, 3, token=901) == []
    leader.answer_all()
    assert leader.of(Committed)[-1].token == 901


def test_nothing_is_asked_of_a_raise_to_what_is_in_force(leader):
    leads_at(leader, 3)
    leader.voter._guard._desk.progress(3).level = 0
    assert raise_to(leader, 3) == []


def test_the_leader_knows_the_level_too(leader):
    leads_at(leader, 3)
    for peer in (2, 3):
        says(leader, peer, level=4)
    assert raise_to(leader, 4) == [LevelRefused(900, 4, {1: 3})]


# Both at a time.


def test_a_level_is_not_raised_beyond_what_a_controller_that_is_being_added_knows(leader):
    leads_at(leader, 1)
    leader.add(4)
    assert raise_to(leader, 2) == [LevelRefused(900, 2, {4: 0})]
    says(leader, 4, level=1, applied=0)
    assert raise_to(leader, 2, token=901) == [LevelRefused(901, 2, {4: 1})]
    says(leader, 4, level=1, applied=leader.journal.last_index)
    assert leader.ids == {1, 2, 3, 4}  # In the log, and not committed.
    assert raise_to(leader, 2, token=902) == [LevelRefused(902, 2, {4: 1})]


def test_a_level_is_not_raised_in_the_step_in_which_an_old_controller_becomes_a_voter(leader):
    leads_at(leader, 1)
    leader.add(4)
    leader.voter.propose(900, b"raise", level=2)
    says(leader, 4, level=1, applied=leader.journal.last_index)
    assert leader.ids == {1, 2, 3, 4}
    assert leader.of(LevelRefused) == [LevelRefused(900, 2, {4: 1})]


def test_who_does_not_know_a_level_that_is_about_to_be_raised_is_not_added(leader):
    leads_at(leader, 1)
    assert raise_to(leader, 2) == []
    token = leader.add(4)
    says(leader, 4, level=1, applied=leader.journal.last_index)  # The raise is not committed.
    assert leader.refusal(token) is Refusal.TOO_OLD
    leader.answer_all()
    token = leader.add(4)
    says(leader, 4, level=1, applied=leader.journal.last_index)  # Nor is it applied here.
    assert leader.refusal(token) is Refusal.TOO_OLD


def test_a_raise_that_was_refused_where_it_was_applied_is_forgotten(leader):
    leads_at(leader, 1)
    raise_to(leader, 2)
    leader.answer_all()
    applied_all(leader, 1)  # A broker does not know it.
    leader.add(4)
    says(leader, 4, level=1, applied=leader.journal.last_index)
    assert leader.ids == {1, 2, 3, 4}


# What a follower says.


def test_each_answer_says_the_level_and_how_far_the_state_machine_is(tmp_path):
    lone = Lone(tmp_path)
    ((_, first),) = lone.tell(2, append(1, (1, 0), entry(2, 1)))
    assert first.append_entries_reply.supported_metadata_version == 3
    assert not first.append_entries_reply.HasField("applied_index")
    lone.machine = MachineState(2, 3)
    ((_, second),) = lone.tell(2, append(1, (2, 1), entry(3, 1), commit=2, round_=2))
    assert second.append_entries_reply.applied_index == 2
    lone.journal.abandon()
