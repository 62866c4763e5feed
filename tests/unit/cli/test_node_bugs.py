"""The known bugs that nodes can be started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.chaos.errors import PlanError
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.simulator.bugs import BUGS as CORE_BUGS
from penstock.cli.chaos.backends import make_cluster
from penstock.cli.chaos.node_bugs import BUGS, SIMULATED

OF_NODES = [name for name in BUGS if name not in CORE_BUGS]


@pytest.mark.parametrize("name", OF_NODES)
def test_a_bug_is_in_what_nodes_run_and_is_taken_back(name: str) -> None:
    bug = BUGS[name]
    places = [(bug.target, bug.name), *((target, at) for target, at, _ in bug.also)]
    before = [vars(target)[at] for target, at in places]
    with bug.planted():
        planted = [vars(target)[at] for target, at in places]
        assert all(now is not then for now, then in zip(planted, before, strict=True))
    assert [vars(target)[at] for target, at in places] == before


def test_those_of_the_cores_are_there_unless_they_change_the_simulator_alone() -> None:
    assert CORE_BUGS.keys() == (BUGS.keys() | SIMULATED.keys()) - set(OF_NODES)
    assert not BUGS.keys() & SIMULATED.keys()
    assert "retries-are-appended-again" in BUGS
    assert "flipped-bits-are-served" in SIMULATED, "of its disks"
    assert len(OF_NODES) >= 3


def test_a_node_is_not_started_with_a_bug_that_it_would_not_have() -> None:
    plan = RunPlan("append", "none", 1, 1.0, 1, 10, 5, bug="flipped-bits-are-served")
    with pytest.raises(PlanError, match="penstock chaos sim --bug flipped-bits-are-served"):
        make_cluster(plan, Path("nowhere"), [])
