"""Run seeds of the simulators, or hunt their mutants: ``make sim`` and ``make sim-mutants``."""

from __future__ import annotations

import argparse

from penstock.chaos.simulator.bugs import BUGS
from penstock.chaos.simulator.simulation import Simulation
from penstock.chaos.simulator.transactions.bugs import TRANSACTION_BUGS
from tests.simulation.quorum import faults, healing  # noqa: F401 - workers are forked with them.
from tests.simulation.quorum.leaving_out import hunt
from tests.simulation.quorum.mutants import MUTANTS
from tests.simulation.quorum.world import World
from tests.simulation.runner import Hunted, Outcome, Simulator, hunt_mutants, run_seeds

QUIET_MS = 600_000


def run_cluster(seed: int) -> Outcome:
    """One seed of the clusters' simulator."""
    report = Simulation(seed).run()
    return Outcome(seed, report.violation is not None, str(report), report.story, report.totals)


def run_transactions(seed: int) -> Outcome:
    """One seed of the clusters' simulator whose clients write transactions."""
    report = Simulation(seed, given={"transactions": True}).run()
    return Outcome(seed, report.violation is not None, str(report), report.story, report.totals)


def run_quiet(seed: int) -> Outcome:
    """One seed of the clusters' simulator that is quiet for ten minutes before the end."""
    report = Simulation(seed, given={"quiet_ms": QUIET_MS}).run()
    return Outcome(seed, report.violation is not None, str(report), report.story, report.totals)


def run_quorum(seed: int) -> Outcome:
    """One seed of the quorum's simulator."""
    report = World(seed).run()
    return Outcome(seed, bool(report.violation), str(report), report.story, report.totals)


def hunt_in_cluster(chosen: tuple[str, int, int]) -> Hunted:
    """One mutant of the clusters' simulator."""
    name, first, seeds = chosen
    report = BUGS[name].hunt(first, seeds)
    if report is None:
        return Hunted(name, None, "", seeds)
    return Hunted(name, f"seed {report.seed}", str(report.violation), report.seed - first + 1)


def hunt_in_quorum(chosen: tuple[str, int, int]) -> Hunted:
    """One mutant of the quorum's simulator."""
    name, first, seeds = chosen
    caught = hunt(MUTANTS[name], first, seeds)
    if caught is None:
        return Hunted(name, None, "", seeds)
    return Hunted(name, caught.by, caught.how, caught.seeds)


SIMULATORS = {
    "cluster": Simulator(
        "cluster",
        run_cluster,
        tuple(name for name in BUGS if name not in TRANSACTION_BUGS),
        hunt_in_cluster,
    ),
    "transactions": Simulator(
        "transactions", run_transactions, tuple(TRANSACTION_BUGS), hunt_in_cluster
    ),
    "quiet": Simulator("quiet", run_quiet, (), hunt_in_cluster),
    "quorum": Simulator("quorum", run_quorum, tuple(MUTANTS), hunt_in_quorum),
}


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 when a promise was broken or a mutant got away, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--sim", choices=(*SIMULATORS, "all"), default="all", help="which")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds of each")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--story", action="store_true", help="tell all that happened")
    parser.add_argument("--mutants", action="store_true", help="hunt the mutants instead")
    parser.add_argument("--only", action="append", help="of the mutants, these")
    chosen = parser.parse_args(arguments)
    simulators = [
        simulator for name, simulator in SIMULATORS.items() if chosen.sim in (name, "all")
    ]
    known = {name for simulator in simulators for name in simulator.mutants}
    unknown = set(chosen.only or ()) - known
    if unknown:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    kept = True
    for simulator in simulators:
        if chosen.mutants and not simulator.mutants:
            continue  # It is another one's code, which has its mutants there.
        if chosen.mutants:
            names = [name for name in simulator.mutants if name in (chosen.only or known)]
            kept &= hunt_mutants(simulator, names, chosen.start, chosen.seeds, chosen.jobs)
        else:
            seeds = range(chosen.start, chosen.start + chosen.seeds)
            kept &= run_seeds(simulator, seeds, chosen.jobs, story=chosen.story)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
