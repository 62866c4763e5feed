"""The checkers catch what they are for: known bugs, each of which is one rule left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation

ENOUGH_SEEDS = 60
RARELY = {  # It takes one of dozens of seeds: these are for ``make sim-mutants``.
    "leader-epoch-stays-when-replicas-leave",
    # Unit tests of the coordinator have these rules too.
    "group-commits-overtake-attempts",
    "marks-wait-for-what-is-gone",
    # A broker's own hosting of groups has it in tests/unit/groups/test_transaction_offsets.py.
    "others-hear-that-a-producer-is-fenced",
    # It took 44 seeds, which is longer than a test may on a busy machine; it is also in
    # tests/unit/groups/test_group_transactions.py and test_transaction_offsets.py.
    "member-epochs-of-positions-are-not-checked",
}


@pytest.mark.simulation
@pytest.mark.parametrize("name", [name for name in BUGS if name not in RARELY])
def test_a_known_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    assert bug.hunt(0, ENOUGH_SEEDS), f"{ENOUGH_SEEDS} seeds did not show that {bug.description}"


@pytest.mark.simulation
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.faults is not None])
def test_the_schedule_that_shows_a_bug_does_no_harm_without_it(name: str) -> None:
    bug = BUGS[name]
    for seed in range(3):
        report = Simulation(seed, bug.faults, only=bug.shown_by, given=bug.given).run()
        assert report.violation is None, str(report)


def test_what_does_not_fit_the_code_shows_nothing() -> None:
    bug = BUGS["acks-before-flush"]
    unfit = replace(bug, replacement=lambda: 0)
    with pytest.raises(TypeError, match="acknowledges what is not durable"):
        unfit.hunt(0, 1)


def test_a_bug_is_gone_when_its_block_ends() -> None:
    for bug in BUGS.values():
        before = vars(bug.target)[bug.name]
        with bug.planted():
            assert vars(bug.target)[bug.name] is bug.replacement
        assert vars(bug.target)[bug.name] is before
