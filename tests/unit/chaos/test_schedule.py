"""Schedules of faults: made of the seed, and kept in files."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import PlanError
from penstock.chaos.nemeses import Fault, Nemesis, Scene
from penstock.chaos.schedule import read_schedule, schedule, write_schedule


class Named:
    """A nemesis that breaks nothing."""

    summary = ""
    needs: frozenset[Capability] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, random: Random, nodes: int) -> Fault:
        return Fault(self.name, "some", "random", {"number": random.randrange(nodes)})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        raise AssertionError("it is only planned")

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        raise AssertionError("it is only planned")


NEMESES: list[Nemesis] = [Named("kill"), Named("pause"), Named("partition")]


@given(
    seed=st.integers(), duration_ms=st.integers(0, 600_000), interval_ms=st.integers(100, 30_000)
)
def test_a_schedule_is_its_seeds_and_faults_do_not_overlap(
    seed: int, duration_ms: int, interval_ms: int
) -> None:
    found = schedule(seed, NEMESES, 3, duration_ms, interval_ms)
    assert found == schedule(seed, NEMESES, 3, duration_ms, interval_ms)
    for one, following in pairwise(found):
        assert one.hold_ms > 0
        assert one.at_ms + one.hold_ms < following.at_ms
    assert all(one.at_ms + one.hold_ms <= duration_ms for one in found)
    first = {one.fault.nemesis for one in found[: len(NEMESES)]}
    assert len(first) == min(len(found), len(NEMESES)), "each has its turn"


def test_another_seed_is_another_schedule() -> None:
    assert schedule(1, NEMESES, 3, 60_000, 5_000) != schedule(2, NEMESES, 3, 60_000, 5_000)


def test_no_nemesis_is_no_fault() -> None:
    assert schedule(1, [], 3, 60_000, 5_000) == []


def test_a_schedule_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    found = schedule(1, NEMESES, 3, 60_000, 5_000)
    write_schedule(found, path)
    assert read_schedule(path) == found
    for wrong in ("{", "[1]", '[{"at_ms": 1}]', '[{"at_ms": 1, "hold_ms": 2, "fault": {"x": 1}}]'):
        path.write_text(wrong)
        with pytest.raises(PlanError, match=r"schedule\.json is no schedule"):
            read_schedule(path)
