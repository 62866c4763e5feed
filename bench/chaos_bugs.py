"""The known bugs that clients can see, and how soon the chaos harness finds each of them.

Each row leaves one rule out of the cores and then runs seeds as ``penstock chaos sim`` does, to see
what comes of it: a row is good when the checker that is named flags it within its budget. What the
simulator's own checkers, which see the inside of nodes, find before is not counted. Exit status: 1
where a bug got away.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Final

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Row:
    """One bug. ``budget``: so many seeds of the simulator, from 0 on."""

    bug: str
    checker: str
    budget: int

    @property
    def command(self) -> str:
        """What looks for it, but for the seed."""
        workload = "transfer" if BUGS[self.bug].given.get("transactions") else "append"
        return f"penstock chaos sim --workload {workload} --bug {self.bug}"


ROWS: Final = (
    Row("retries-are-appended-again", "duplicate", 5),
    Row("old-retries-are-appended-again", "duplicate", 5),
    Row("sequence-gaps-are-taken", "reorder", 5),
    Row("hw-before-own-flush", "lost-write", 10),
    Row("truncates-to-high-watermark", "lost-write", 10),
    Row("any-replica-is-elected", "inconsistent-offset", 10),
    Row("aborted-transactions-are-left-out", "aborted-read", 5),
    Row("open-transactions-are-served", "precommitted-read", 5),
    Row("marks-are-forgotten", "transactions-end", 5),
    Row("aborted-positions-count", "transaction-offsets", 5),
)
"""What docs/chaos.md has a table of. Each is found by what clients see, within its budget."""


@dataclass(frozen=True, slots=True)
class Found:
    """By this seed; None where it was not."""

    seed: int | None
    seconds: float


def hunt(row: Row) -> Found:
    """Look for a bug until its checker flags it, or the budget is used up."""
    began = time.perf_counter()
    for seed in range(row.budget):
        if row.checker in _simulate(row, seed):
            return Found(seed, time.perf_counter() - began)
    return Found(None, time.perf_counter() - began)


def _simulate(row: Row, seed: int) -> set[str]:
    bug = BUGS[row.bug]
    with bug.planted():
        run = Simulation(seed, bug.faults, only=bug.shown_by, given=bug.given, recorded=True)
        return {verdict.checker for verdict in run.run().flagged}


def main() -> int:
    """Look for all of them, or for those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="these bugs alone")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if row.bug in (arguments.only or (row.bug,))]
    away = 0
    print(f"{'bug':38} {'checker':22} {'found by':>10} {'seeds':>6} {'seconds':>8}")
    for row in rows:
        found = hunt(row)
        away += found.seed is None
        by = "NOT FOUND" if found.seed is None else f"seed {found.seed}"
        print(f"{row.bug:38} {row.checker:22} {by:>10} {row.budget:6} {found.seconds:8.1f}")
        if found.seed is not None:
            print(f"  {row.command} --seeds 1 --first {found.seed}", flush=True)
    print(f"{len(rows) - away} of {len(rows)} found")
    return 1 if away else 0


if __name__ == "__main__":
    raise SystemExit(main())
