"""The known bugs that nodes can be started with."""

from __future__ import annotations

import pytest

from penstock.chaos.simulator.bugs import BUGS as CORE_BUGS
from penstock.cli.chaos.node_bugs import BUGS

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


def test_those_of_the_cores_are_there_as_well() -> None:
    assert CORE_BUGS.items() <= BUGS.items()
    assert len(OF_NODES) >= 3
