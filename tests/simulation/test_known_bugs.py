"""The checkers catch what they are for: known bugs, each of which is one rule left out."""

from __future__ import annotations

import pytest

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation

ENOUGH_SEEDS = 80  # The rarest shows in one of five; most show in the first few.


@pytest.mark.simulation
@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    with bug.planted():
        caught = any(
            Simulation(seed, only=bug.shown_by).run().violation is not None
            for seed in range(ENOUGH_SEEDS)
        )
    assert caught, f"{ENOUGH_SEEDS} seeds did not show that {bug.description}"


def test_a_bug_is_gone_when_its_block_ends() -> None:
    for bug in BUGS.values():
        before = vars(bug.target)[bug.name]
        with bug.planted():
            assert vars(bug.target)[bug.name] is bug.replacement
        assert vars(bug.target)[bug.name] is before
