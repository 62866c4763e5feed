"""Whole clusters under faults of every kind. A failure prints its seed, and how to replay it."""

from __future__ import annotations

import pytest

from penstock.chaos.simulator.simulation import Simulation

SEEDS = 64
SEEDS_A_TEST = 16


@pytest.mark.simulation
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        report = Simulation(seed).run()
        assert report.violation is None, str(report)
        assert report.acknowledged > 0, str(report)
        assert report.read > 0, str(report)


@pytest.mark.simulation
def test_without_faults_the_first_leaders_lead_to_the_end() -> None:
    report = Simulation(3, faults=[]).run()
    assert report.violation is None, str(report)
    assert report.leaderships <= 3
