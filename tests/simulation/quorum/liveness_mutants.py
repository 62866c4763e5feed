"""The rules by which an active controller takes brokers for dead, one left out at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.raft_meta import active
from penstock.raft_meta.core import active_controller, sessions
from tests.simulation.quorum.leaving_out import Mutant, Test
from tests.unit.raft_meta import test_stalls_of_a_controller as shells
from tests.unit.raft_meta_core import test_own_stalls as stalls
from tests.unit.raft_meta_core import test_takeovers as takeovers
from tests.unit.raft_meta_core.test_active_controller import Shell


def _watching(test: Callable[[Shell], None]) -> tuple[Test, ...]:
    return (lambda _directory: test(stalls.watching()),)


def _stalling(test: Callable[[shells.Stalling], None]) -> tuple[Test, ...]:
    def run(directory: Path) -> None:
        test(shells.Stalling(directory))

    return (run,)


LIVENESS: Final[dict[str, Mutant]] = {
    "a controller's own stall is the brokers' silence": Mutant(
        "an active controller that stood still fences those that it could not hear",
        active_controller.ActiveController._on_stood_still,
        "session.stood_still(lost_ms, now_ms)",
        "pass",
        _watching(stalls.test_no_broker_is_fenced_for_the_controllers_own_silence),
    ),
    "a stall is told of when its turn comes": Mutant(
        "an active controller that stood still acts on what waited as if it had not",
        active.ControllerShell._handle,
        "self._punctuality.look()",
        "pass",
        _stalling(shells.test_a_stream_that_broke_in_a_stall_has_its_grace_after_it),
    ),
    "a stall makes every deadline later": Mutant(
        "who is heard after a stall gets the time of the stall on top",
        sessions.after_a_stall,
        "max(now_ms + wait_ms, due_ms)",
        "due_ms + 2 * lost_ms",
        _watching(stalls.test_who_was_heard_after_the_stall_has_a_session_from_then),
    ),
    "what waited is not heard first": Mutant(
        "an active controller that stood still judges before it has read its sockets",
        sessions.after_a_stall,
        "now_ms + _HEAR_MS",
        "due_ms",
        _watching(stalls.test_a_broker_that_was_almost_given_up_gets_no_more_than_time_to_be_heard),
    ),
    "broken Raft connections say nothing": Mutant(
        "a new active controller gives a whole session to nodes that died",
        active_controller.ActiveController._adopt,
        "node_id in unconnected",
        "False",
        (lambda _directory: takeovers.test_after_a_takeover_whoever_does_not_come_is_fenced(),),
    ),
    "broken Raft connections are not told": Mutant(
        "a new active controller does not learn whose Raft connection is broken",
        active.ControllerShell._on_claimed,
        "            status.unconnected,\n",
        "            frozenset(),\n",
        _stalling(shells.test_who_seems_gone_to_raft_is_given_up_soon),
    ),
    "no roll call": Mutant(
        "who died with the active controller has a whole session",
        active_controller.ActiveController._call_the_roll,
        "session.fence_at_ms = min(session.fence_at_ms, now_ms)",
        "pass",
        (
            lambda _directory: (
                takeovers.test_who_stays_away_while_most_come_is_fenced_before_a_whole_session()
            ),
        ),
    ),
    "a roll call on a busy host": Mutant(
        "who has not found a new active controller in time is fenced, however many they are",
        active_controller.ActiveController._call_the_roll,
        "2 * len(missing) >= len(watched)",
        "False",
        (lambda _directory: takeovers.test_nobody_is_fenced_early_unless_most_have_come(),),
    ),
    "a roll call of those who can't know": Mutant(
        "brokers that a hanging controller keeps waiting are fenced with it",
        active_controller.ActiveController._call_the_roll,
        "session.node_id in self._told",
        "True",
        (lambda _directory: takeovers.test_only_who_must_know_of_the_takeover_is_missed_early(),),
    ),
}
