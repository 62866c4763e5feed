"""A seed is all it takes to see a run again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.chaos.simulator.__main__ import main
from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.faults import KINDS, draw_faults
from penstock.chaos.simulator.simulation import shrink


def told(seed: int, hash_seed: str, *more: str) -> str:
    """What another process tells of the run; sets and dicts are ordered otherwise there."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.chaos.simulator", "--seed", str(seed), "--story", *more],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.simulation
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    assert told(5, "1") == told(5, "2")


@pytest.mark.simulation
def test_a_failure_tells_its_schedule_and_is_shrunk() -> None:
    name = "truncates-to-high-watermark"  # Few of the faults are needed, whatever the seed draws.
    report = BUGS[name].hunt(0, 40)
    assert report is not None
    with BUGS[name].planted():
        smaller = shrink(report, runs=25)
    assert smaller.violation is not None
    assert len(smaller.faults) < len(report.faults)
    text = str(smaller)
    assert f"--seed {report.seed}" in text
    assert all(str(fault) in text for fault in smaller.faults)
    assert smaller.story


@pytest.mark.simulation
def test_the_command_says_how_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" after")[0] for line in lines] == ["seed 1: ok", "seed 2: ok"]
    assert main(["--seed", "0", "--bug", "retries-are-appended-again", "--story"]) == 1
    output = capsys.readouterr().out
    assert "seed 0: VIOLATION" in output
    assert "of the same producer before it" in output
    assert "RoleChanged" in output


def test_schedules_know_only_the_kinds_asked_for() -> None:
    from random import Random

    nodes = (1, 2, 3)
    kinds = {
        fault.kind
        for seed in range(60)
        for fault in draw_faults(Random(seed), nodes, until_ms=20_000)
    }
    assert kinds == set(KINDS)
    only = draw_faults(Random(1), nodes, until_ms=20_000, only=("split",))
    assert {fault.kind for fault in only} == {"split"}
    assert all(0 < len(fault.nodes) < 3 for fault in only)
