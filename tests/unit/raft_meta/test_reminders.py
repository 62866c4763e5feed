"""What a controller that is no voter says in its log that it waits for."""

from __future__ import annotations

from dataclasses import replace

import structlog

from penstock.raft_meta.quorum import QuorumStatus, Role
from penstock.raft_meta.reminders import Reminders, reminder_of
from penstock.raft_meta.rules.founding import IN_USE
from penstock.raft_meta.voters import VoterSet

NEWCOMER = QuorumStatus(1, Role.FOLLOWER, 0, -1, 0, 0, 0, founder_id=1)


def test_a_founder_names_whom_it_waits_for() -> None:
    status = replace(NEWCOMER, awaited=(2, 3), founding_refusals={2: "its settings differ"})
    reminder = reminder_of(status, [1, 2, 3])
    assert reminder is not None
    assert reminder.details == {"missing": [2, 3], "refused": {2: "its settings differ"}}
    assert reminder.next_step.startswith("mend what some are refused for, and start the others; ")
    assert "controller.quorum.voters must be the same" in reminder.next_step
    silent = reminder_of(replace(status, founding_refusals={}), [1, 2, 3])
    assert silent is not None
    assert silent.next_step.startswith("start them; controller.quorum.voters must be the same")


def test_a_founder_whose_peer_belongs_to_a_cluster_is_sent_there() -> None:
    status = replace(NEWCOMER, awaited=(3,), founding_refusals={3: IN_USE})
    reminder = reminder_of(status, [1, 2, 3])
    assert reminder is not None
    assert "controllers that belong to one already" in reminder.event
    assert "penstock quorum remove 1, then penstock quorum add 1@" in reminder.next_step
    assert reminder.details == {"missing": [3], "refused": {3: IN_USE}}


def test_others_are_told_what_makes_them_voters() -> None:
    unpermitted = reminder_of(replace(NEWCOMER, needs_permission=True), [1, 2])
    assert unpermitted is not None
    assert "--found" in unpermitted.next_step
    unknowing = reminder_of(replace(NEWCOMER, founder_id=7), [1, 7])
    assert unknowing is not None
    assert "start node 7" in unknowing.next_step
    unlisted = reminder_of(replace(NEWCOMER, voters=VoterSet.of([2, 3])), [2, 3])
    assert unlisted is not None
    assert unlisted.next_step == "penstock quorum add"


def test_a_voter_waits_for_nothing() -> None:
    assert reminder_of(replace(NEWCOMER, voters=VoterSet.of([1])), [1]) is None


def test_what_has_changed_is_said_at_once_and_the_same_once_a_minute() -> None:
    reminders = Reminders()
    waits = replace(NEWCOMER, awaited=(2, 3))
    refuses = replace(waits, founding_refusals={2: "node 2 is of cluster 'Bogus'"})
    said: list[int] = []
    with structlog.testing.capture_logs() as lines:
        for now_s, status in [(0, waits), (5, waits), (10, refuses), (15, refuses), (70, refuses)]:
            reminders.look(reminder_of(status, [1, 2, 3]), float(now_s))
            said.append(len(lines))
    assert said == [1, 1, 2, 2, 3]
    assert lines[1]["refused"] == {2: "node 2 is of cluster 'Bogus'"}
    assert lines[1]["next_step"].startswith("mend what some are refused for")
