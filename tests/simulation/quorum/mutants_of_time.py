"""The rules about silence, standstills and patience, one left out at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.raft_meta import driver, elections, guard
from penstock.raft_meta.rules import terms
from tests.simulation.quorum.leaving_out import Mutant, Test
from tests.unit.raft_meta import test_elections as timers
from tests.unit.raft_meta import test_guard_rules as rules
from tests.unit.raft_meta import test_standstills as standstills


def _on_its_own(test: Callable[[], object]) -> Test:
    """A test that needs nobody."""

    def run(_directory: object) -> None:
        test()

    run.__name__, run.__module__ = test.__name__, test.__module__
    return run


OF_TIME: Final[dict[str, Mutant]] = {
    "silence of one's own": Mutant(
        "a voter that stood still takes it for its leader's death",
        elections.Elections.stood_still,
        "self._leader_seen_s = min(self._leader_seen_s + lost_s, now_s)",
        "pass",
        (rules.test_a_voter_that_stood_still_neither_stands_nor_votes_before_it_has_listened,),
    ),
    "a leader's silence of its own": Mutant(
        "a leader that stood still takes it for the death of all others",
        guard.Guard.stood_still,
        "self._desk.engine.forgive_silence(lost_s)",
        "pass",
        (rules.test_a_leader_that_stood_still_does_not_blame_the_others,),
    ),
    "impatience": Mutant(
        "short leaderships in a row change no timeout",
        elections.Patience._grow,
        "self._factor = min(self._factor * 2, LONGEST_PATIENCE)",
        "pass",
        (
            rules.test_leaders_that_are_given_up_and_live_make_a_voter_patient,
            rules.test_a_leader_after_leaders_that_lived_waits_longer_for_answers_but_not_for_long,
        ),
    ),
    "late words tell nothing": Mutant(
        "a leader that is heard after its term was lost like any other",
        terms.Terms.accept_leader,
        "self._elections.patience.heard_late(message.term)",
        "pass",
        (rules.test_leaders_that_are_given_up_and_live_make_a_voter_patient,),
    ),
    "patient without a reason": Mutant(
        "leaders that are lost in silence, one soon after the other, are waited for longer",
        elections.Patience.leads,
        "if is_given_up and was_wrong:",
        "if is_given_up:",
        (rules.test_leaders_that_are_lost_in_silence_make_no_voter_patient,),
    ),
    "a standstill is no reason": Mutant(
        "who stood still itself gives up leaders as soon as before",
        elections.Patience.held_up,
        "self._was_wrong = True",
        "pass",
        (
            _on_its_own(
                timers.test_a_voter_that_stood_still_itself_may_have_given_up_a_leader_wrongly
            ),
        ),
    ),
    "patience for ever": Mutant(
        "timeouts stay long under a stable leader",
        elections.Patience.factor,
        "0.5 ** min(periods, 64)",
        "1.0",
        (
            _on_its_own(
                timers.test_patience_halves_while_a_leader_goes_on_and_nothing_holds_this_process_up
            ),
        ),
    ),
    "deaths make patient": Mutant(
        "a leader whose connection broke counts as one that was lost for want of time",
        elections.Patience.ended_openly,
        "self._ended_openly = True",
        "pass",
        (_on_its_own(timers.test_a_leader_that_died_or_handed_over_was_not_lost_for_want_of_time),),
    ),
    "pre-votes outlive a standstill": Mutant(
        "a voter stands with pre-votes of before it stood still",
        elections.Elections.stood_still,
        "self._round = None",
        "pass",
        (_on_its_own(timers.test_pre_votes_of_before_a_standstill_are_void),),
    ),
    "spells count twice": Mutant(
        "time in which both the loop and the thread stood still is counted for each",
        elections.Elections.stood_still,
        "max(since_s, self._accounted_s)",
        "since_s",
        (_on_its_own(timers.test_spells_that_overlap_count_once),),
    ),
    "a standstill puts off what came after it": Mutant(
        "a timer that was set after a spell runs for longer by it",
        elections.Elections.stood_still,
        "min(self.deadline_s + lost_s, now_s + self._timeout_s)",
        "self.deadline_s + lost_s",
        (
            _on_its_own(
                timers.test_who_has_heard_its_leader_since_waits_no_longer_for_having_stood_still
            ),
        ),
    ),
    "a stuck loop is nobody's excuse": Mutant(
        "the thread judges by their silence those whom its loop keeps waiting",
        driver.VoterThread._count_standstills,
        "since_s = min(since_s, loop_since_s)",
        "pass",
        (
            standstills.test_a_leader_whose_loop_is_stuck_does_not_blame_the_others,
            standstills.test_a_follower_whose_loop_is_stuck_does_not_stand,
        ),
    ),
    "a stuck loop is an excuse for ever": Mutant(
        "a leader that serves nobody goes on to take itself for one",
        driver.VoterThread._count_standstills,
        " and since_s - loop_since_s <= LONGEST_STUCK_S",
        "",
        (standstills.test_a_leader_whose_loop_is_stuck_for_long_leads_no_more,),
    ),
    "a slow disk is others' silence": Mutant(
        "a leader that was long at a write gives up those whom it did not ask meanwhile",
        driver.VoterThread._step_ended,
        "self._began_s if was_long else max",
        "max",
        (standstills.test_a_leader_with_a_long_step_does_not_blame_the_others,),
    ),
}
