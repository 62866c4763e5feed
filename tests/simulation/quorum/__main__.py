"""Run seeds: ``make sim`` and ``make sim-mutants`` call it."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.quorum import faults, healing  # noqa: F401 - workers are forked with them.
from tests.simulation.quorum.mutants import MUTANTS, Caught, hunt
from tests.simulation.quorum.world import Report, World, totals_of


def run_seed(seed: int) -> Report:
    """One seed, in this process."""
    return World(seed).run()


def say(line: str = "") -> None:
    """Tell whoever runs this."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(totals: Counter[str], seconds: float) -> None:
    """What was run, in figures."""
    for name, count in sorted(totals.items()):
        say(f"  {name:28} {count:>14,}")
    say(f"  {'seconds':28} {seconds:>14,.0f}")


def run_seeds(seeds: Iterable[int], jobs: int, story: bool) -> int:
    """Many seeds on many processes; 1 when a promise was broken."""
    began_s = time.perf_counter()
    totals: Counter[str] = Counter()
    broken: list[int] = []
    # Each worker begins anew after a while, so that none grows.
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        for number, report in enumerate(pool.imap_unordered(run_seed, seeds), 1):
            totals += totals_of([report])
            if report.violation:
                broken.append(report.seed)
            if report.violation or story:
                say("\n".join([str(report), *(report.story if story else ())]))
            if number % 250 == 0:
                say(f"{number} seeds, {len(broken)} broken")
    show(totals, time.perf_counter() - began_s)
    say(f"broken: {sorted(broken)}" if broken else "no promise was broken")
    return 1 if broken else 0


def hunt_one(chosen: tuple[str, int, int]) -> tuple[str, Caught | None]:
    """Hunt one mutant, in this process."""
    name, first, seeds = chosen
    return name, hunt(MUTANTS[name], first, seeds)


def hunt_all(names: list[str], first: int, seeds: int, jobs: int) -> int:
    """A table of mutants and what caught them; 1 when one got away."""
    away = 0
    say(f"{'mutant':34} {'caught by':58} after seeds")
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        work = [(name, first, seeds) for name in names]
        for name, caught in pool.imap(hunt_one, work):
            if caught is None:
                away += 1
                say(f"{name:34} NOT CAUGHT")
            else:
                say(f"{name:34} {caught.by:58} {caught.seeds or '-'}")
                say(f"{'':34}   {caught.how[:110]}")
    say(f"{len(names) - away} of {len(names)} mutants caught")
    return 1 if away else 0


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 when a promise was broken or a mutant got away, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.quorum", description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--story", action="store_true", help="tell all that happened")
    parser.add_argument("--mutants", action="store_true", help="hunt the mutants instead")
    parser.add_argument("--only", action="append", choices=MUTANTS, help="of the mutants, these")
    chosen = parser.parse_args(arguments)
    if chosen.mutants:
        return hunt_all(chosen.only or list(MUTANTS), chosen.start, chosen.seeds, chosen.jobs)
    return run_seeds(range(chosen.start, chosen.start + chosen.seeds), chosen.jobs, chosen.story)


if __name__ == "__main__":
    raise SystemExit(main())
