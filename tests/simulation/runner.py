"""What both simulators have in common: many seeds on many processes, and tables of mutants."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """How one seed went. ``text`` tells it to people; ``story`` is what happened."""

    seed: int
    broken: bool
    text: str
    story: list[str]
    totals: Counter[str]
    cpu_s: float = 0.0


class Hunted(NamedTuple):
    """A mutant: what noticed it and after how many seeds (0: a test), or None if nothing did."""

    name: str
    by: str | None
    how: str
    seeds: int


@dataclass(frozen=True)
class Simulator:
    """One simulator: ``run`` takes a seed, ``hunt`` a mutant's name, a first seed and how many."""

    name: str
    run: Callable[[int], Outcome]
    mutants: tuple[str, ...]
    hunt: Callable[[tuple[str, int, int]], Hunted]


def say(line: str = "") -> None:
    """Tell whoever runs this."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _pool(jobs: int, tasks_a_worker: int) -> Any:
    # Each worker begins anew after a while, so that none grows.
    return multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=tasks_a_worker)


def _timed(simulator: Simulator, seed: int) -> Outcome:
    began_s = time.process_time()
    outcome = simulator.run(seed)
    return outcome._replace(cpu_s=time.process_time() - began_s)


def run_seeds(simulator: Simulator, seeds: Iterable[int], jobs: int, *, story: bool) -> bool:
    """Many seeds on many processes; whether every promise was kept."""
    began_s = time.perf_counter()
    totals: Counter[str] = Counter()
    broken: list[int] = []
    cpu_s = 0.0
    say(f"{simulator.name}:")
    with _pool(jobs, 200) as pool:
        for number, outcome in enumerate(pool.imap_unordered(partial(_timed, simulator), seeds), 1):
            totals.update(outcome.totals)
            cpu_s += outcome.cpu_s
            if outcome.broken:
                broken.append(outcome.seed)
            if outcome.broken or story:
                say("\n".join([outcome.text, *(outcome.story if story else ())]))
            if number % 250 == 0:
                say(f"{number} seeds, {len(broken)} broken")
    for name, figure in sorted(totals.items()):
        say(f"  {name:32} {figure:>14,}")
    say(f"  {'seconds of CPU time':32} {cpu_s:>14,.0f}")
    virtual = totals["virtual seconds"] / max(cpu_s, 0.001)
    say(f"  {'virtual seconds a CPU second':32} {virtual:>14,.1f}")
    say(f"  {'seconds':32} {time.perf_counter() - began_s:>14,.0f}")
    say(f"broken: {sorted(broken)}" if broken else "no promise was broken")
    return not broken


def hunt_mutants(
    simulator: Simulator, names: Iterable[str], first: int, seeds: int, jobs: int
) -> bool:
    """A table of mutants and what caught them; whether all were."""
    caught = away = 0
    say(f"{simulator.name + ': mutant':42} {'caught by':58} after seeds")
    with _pool(jobs, 1) as pool:
        work = [(name, first, seeds) for name in names]
        for hunted in pool.imap(simulator.hunt, work):
            if hunted.by is None:
                away += 1
                say(f"{hunted.name:42} NOT CAUGHT in {seeds} seeds")
            else:
                caught += 1
                say(f"{hunted.name:42} {hunted.by:58} {hunted.seeds or '-'}")
                say(f"{'':42}   {hunted.how[:110]}")
    say(f"{caught} of {caught + away} mutants caught")
    return not away
