"""Run seeds of the simulator: ``python -m penstock.chaos.simulator --seed N``."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation, shrink


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 when a promise was broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m penstock.chaos.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the (first) seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument(
        "--shrink", action="store_true", help="look for fewer faults that break the same seed"
    )
    parser.add_argument("--bug", choices=BUGS, help="plant a known bug, and see it found")
    parser.add_argument("--story", action="store_true", help="tell what happened before the end")
    parser.add_argument(
        "--transactions", action="store_true", help="what clients write are transactions"
    )
    parser.add_argument(
        "--quiet-for", type=int, metavar="SECONDS", help="how long clients do little before the end"
    )
    chosen = parser.parse_args(arguments)
    bug = BUGS.get(chosen.bug)
    kinds, given = (bug.shown_by, bug.given) if bug else (None, {})
    if chosen.transactions:
        given = {**given, "transactions": True}
    if chosen.quiet_for is not None:
        given = {**given, "quiet_ms": chosen.quiet_for * 1000}
    broken = 0
    with bug.planted() if bug else nullcontext():
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            report = Simulation(seed, only=kinds, given=given).run()
            if report.violation is not None:
                broken += 1
                if chosen.shrink:
                    report = shrink(report)
            if chosen.story:
                sys.stdout.write("\n".join([*report.story, ""]))
            sys.stdout.write(f"{report}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
