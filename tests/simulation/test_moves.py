"""Partitions move between brokers, and moves are cancelled, while everything else goes wrong."""

from __future__ import annotations

import pytest

from penstock.chaos.simulator.faults import KINDS_WITH_MOVES
from penstock.chaos.simulator.simulation import Simulation

SEEDS_A_TEST = 6


@pytest.mark.simulation
@pytest.mark.parametrize("first", range(0, 24, SEEDS_A_TEST))
def test_no_promise_is_broken_while_partitions_move(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        report = Simulation(seed, only=KINDS_WITH_MOVES).run()
        assert report.violation is None, str(report)
        assert report.acknowledged > 0, str(report)
