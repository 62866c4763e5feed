"""The table of known bugs that the harness finds is the one that `make chaos-bugs` repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import chaos_bugs
from bench.chaos_bugs import ROWS, Row, hunt

from penstock.chaos.checkers.registry import CHECKERS
from penstock.chaos.simulator.bugs import BUGS

DOCS = Path(__file__).resolve().parents[3] / "docs" / "chaos.md"


def test_the_rows_are_of_bugs_and_checkers_that_there_are() -> None:
    assert all(row.bug in BUGS and row.checker in CHECKERS for row in ROWS)
    assert len({row.bug for row in ROWS}) >= 10


def test_the_docs_have_the_same_rows() -> None:
    lines = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and line.count("|") == 6
    ]
    told = [(bug, checker, budget) for bug, _, checker, _, budget in lines if bug in BUGS]
    assert told == [(row.bug, row.checker, f"{row.budget} seeds") for row in ROWS]


def test_a_bug_is_hunted_until_its_own_checker_flags_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {0: {"reorder"}, 1: set(), 2: {"reorder", "duplicate"}}
    monkeypatch.setattr(chaos_bugs, "_simulate", lambda _, seed: flags[seed])
    found = hunt(Row("retries-are-appended-again", "duplicate", 3))
    assert found.seed == 2
    away = hunt(Row("retries-are-appended-again", "duplicate", 2))
    assert away.seed is None
