"""The known bugs that clients can see, and how soon the chaos harness finds each of them.

Each row leaves one rule out of the cores and then has ``penstock chaos sim`` or ``penstock chaos
run`` look for what comes of it: a row is good when the checker that is named flags it within its
budget. What the simulator's own checkers, which see the inside of nodes, find before is not
counted. Exit status: 1 where a bug got away.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation

_RUN_S: Final = 300
"""So long a run of ``penstock chaos run`` may take in all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One bug. ``budget``: so many seeds, from 0 on, of the simulator; or runs of real nodes.

    ``run``: options of ``penstock chaos run`` beside the bug and the seed, where it is to be found
    by that; ``seed`` is then its first one.
    """

    bug: str
    checker: str
    budget: int
    run: Sequence[str] = ()
    seed: int = 0

    @property
    def command(self) -> str:
        """What looks for it, but for the seed."""
        if self.run:
            return " ".join(("penstock chaos run", *self.run, "--bug", self.bug))
        workload = "transfer" if BUGS[self.bug].given.get("transactions") else "append"
        return f"penstock chaos sim --workload {workload} --bug {self.bug}"


ROWS: Final = (
    Row(
        "retries-are-appended-again",
        "duplicate",
        2,
        run=("--nemesis", "pause", "--duration", "25"),
        seed=5,
    ),
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
    """After so many seeds or runs, the last of them ``seed``; ``seed`` is None where it was not."""

    tries: int
    seed: int | None
    seconds: float


def hunt(row: Row) -> Found:
    """Look for a bug until its checker flags it, or the budget is used up."""
    began = time.perf_counter()
    for tries, seed in enumerate(range(row.seed, row.seed + row.budget), 1):
        flagged = _run(row, seed) if row.run else _simulate(row, seed)
        if row.checker in flagged:
            return Found(tries, seed, time.perf_counter() - began)
    return Found(row.budget, None, time.perf_counter() - began)


def _simulate(row: Row, seed: int) -> set[str]:
    bug = BUGS[row.bug]
    with bug.planted():
        run = Simulation(seed, bug.faults, only=bug.shown_by, given=bug.given, recorded=True)
        return {verdict.checker for verdict in run.run().flagged}


def _run(row: Row, seed: int) -> set[str]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "run")
        command = ["chaos", "run", *row.run, "--bug", row.bug, "--seed", str(seed)]
        done = subprocess.run(
            [Path(sys.executable).with_name("penstock"), *command, "--out", out],
            stdout=subprocess.DEVNULL,
            timeout=_RUN_S,
            check=False,
        )
        verdict = out / "verdict.json"
        if done.returncode not in (0, 1, 3) or not verdict.exists():
            raise SystemExit(f"`penstock {' '.join(command)}` failed: exit {done.returncode}")
        verdicts = json.loads(verdict.read_text())["verdicts"]
        return {one["checker"] for one in verdicts if one["valid"] == "false"}


def main() -> int:
    """Look for all of them, or for those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="these bugs alone")
    parser.add_argument("--sim", action="store_true", help="in the simulator alone")
    arguments = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if row.bug in (arguments.only or (row.bug,)) and not (arguments.sim and row.run)
    ]
    away = 0
    print(f"{'bug':38} {'by':4} {'checker':22} {'found after':>14} {'of':>3} {'seconds':>8}")
    for row in rows:
        found = hunt(row)
        away += found.seed is None
        what = ("run" if row.run else "seed") + "s" * (found.tries > 1)
        after = "NOT FOUND" if found.seed is None else f"{found.tries} {what}"
        by = "run" if row.run else "sim"
        print(
            f"{row.bug:38} {by:4} {row.checker:22} {after:>14} {row.budget:3} {found.seconds:8.1f}",
            flush=True,
        )
        if found.seed is not None:
            seed = ("--seed" if row.run else "--seeds 1 --first") + f" {found.seed}"
            print(f"  {row.command} {seed}")
    print(f"{len(rows) - away} of {len(rows)} found")
    return 1 if away else 0


if __name__ == "__main__":
    raise SystemExit(main())
