"""What a voter's thread makes of time in which nobody could be heard: its own, and the loop's."""

from __future__ import annotations

import pytest

from penstock.raft_meta.driver import LONGEST_STUCK_S, Operation, VoterThread
from penstock.raft_meta.quorum import Role
from tests.unit.raft_meta.lone_voter import Lone, append, pre_vote

STEP_S = 0.05


class SteppedThread(VoterThread):
    """Runs when the test says so, in the voter's time."""

    def __init__(self, lone: Lone) -> None:
        self.lone = lone
        self.loop_due_s: float | None = None  # Since when the loop is stuck.
        super().__init__(
            lambda _now_s: lone.voter,
            on_output=lambda *_: None,
            on_failed=lambda _error: None,
            loop_late_since_s=lambda _now_s: self.loop_due_s,
        )

    def _now_s(self) -> float:
        return self.lone.now_s

    def run(self, *operations: Operation, after_s: float = STEP_S) -> None:
        self.lone.now_s += after_s
        self.lone.events += self._act(self.lone.voter, list(operations))[0]
        self._step_ended(self.lone.voter, self.lone.now_s)

    def run_for(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.run()


@pytest.fixture
def lone(tmp_path):
    made = Lone(tmp_path)
    yield made
    made.journal.abandon()


def leading(lone: Lone) -> SteppedThread:
    lone.lead()
    thread = SteppedThread(lone)
    thread.run(after_s=0.0)
    return thread


def test_a_leader_whose_loop_is_stuck_does_not_blame_the_others(lone):
    thread = leading(lone)
    thread.loop_due_s = lone.now_s
    thread.run_for(2.0)
    assert lone.role is Role.LEADER
    thread.loop_due_s = None
    thread.run_for(0.8)
    assert lone.role is not Role.LEADER, "it has listened since, and nobody has answered"


def test_a_follower_whose_loop_is_stuck_does_not_stand(lone):
    lone.tell(2, append(1, (1, 0)))
    thread = SteppedThread(lone)
    thread.loop_due_s = lone.now_s
    thread.run_for(3.0)
    assert not lone.voter._guard.elections.is_due(lone.now_s)
    said = lone.tell(3, pre_vote(2, last=(9, 1)))
    assert not said[0][1].pre_vote_reply.granted, "its leader is not silent for all that it knows"


def test_a_leader_whose_loop_is_stuck_for_long_leads_no_more(lone):
    thread = leading(lone)
    thread.loop_due_s = lone.now_s
    thread.run_for(LONGEST_STUCK_S + 1.0)
    assert lone.role is not Role.LEADER


def test_a_process_that_was_stopped_for_long_leads_on(lone):
    thread = leading(lone)
    thread.loop_due_s = lone.now_s + 0.05
    thread.run(after_s=10 * LONGEST_STUCK_S)
    assert lone.role is Role.LEADER


def test_a_thread_that_wakes_before_its_loop_counts_from_when_the_first_stood_still(lone):
    lone.tell(2, append(1, (1, 0)))
    thread = SteppedThread(lone)
    thread.run(after_s=0.0)
    thread.loop_due_s = lone.now_s + 0.1  # Its own timer is due half a second later or more.
    thread.run(after_s=60.0)
    said = lone.tell(3, pre_vote(2, last=(9, 1)))
    assert not said[0][1].pre_vote_reply.granted


def test_a_leader_with_a_long_step_does_not_blame_the_others(lone):
    thread = leading(lone)

    def write(_voter: object, _now_s: float) -> None:
        lone.now_s += 2.0  # The disk took so long.

    thread.run(write)
    thread.run(after_s=0.0)
    assert lone.role is Role.LEADER
    thread.run_for(0.8)
    assert lone.role is not Role.LEADER, "it has listened since, and nobody has answered"


def test_a_thread_that_runs_when_it_should_counts_nothing(lone, monkeypatch):
    told: list[float] = []
    thread = leading(lone)
    monkeypatch.setattr(lone.voter, "stood_still", lambda since_s, _now_s: told.append(since_s))
    thread.run_for(3.0)
    assert told == []
