"""`penstock chaos sim`: seeds of the simulator, which runs the cores in virtual time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.chaos.outcome import EXIT_UNKNOWN, harness_errors
from penstock.cli.errors import EXIT_FAILED, report
from penstock.cli.installation import require_broker
from penstock.cli.output import print_json
from penstock.cli.settings import Output, resolve

if TYPE_CHECKING:
    from penstock.chaos.simulator.faults import Fault
    from penstock.chaos.simulator.known_bug import Bug
    from penstock.chaos.simulator.simulation import Report, Simulation

_SHRINKING_RUNS: Final = 60
"""Of one seed that fails: some seconds each."""


def sim(
    ctx: typer.Context,
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds.")] = 20,
    first: Annotated[int, typer.Option("--first", min=0, help="The first seed.")] = 0,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            metavar="NAME",
            help="What clients do: append, churn, retention, transfer, process or group.",
        ),
    ] = "append",
    bug: Annotated[
        str, typer.Option("--bug", metavar="NAME", help="Put a known bug into the cores.")
    ] = "",
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            metavar="NUMBERS",
            help="Of the faults that a seed draws these alone, by their places, such as `3,7`; "
            "`none` for none.",
        ),
    ] = "",
    quiet_for: Annotated[
        int | None,
        typer.Option(
            "--quiet-for",
            min=0,
            metavar="SECONDS",
            help="For how long clients do little before the end, in virtual time; else one seed in "
            "eight has a minute or so.",
        ),
    ] = None,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink/--no-shrink", help="Look for the fewest faults that still break a seed."
        ),
    ] = True,
    story: Annotated[
        bool, typer.Option("--story", help="Tell what happened before a promise was broken.")
    ] = False,
    output: Output = None,
) -> None:
    """Run the cores of a whole cluster in virtual time, seed by seed, under faults of chance.

    What holds inside of the cluster is checked after every step, and what clients did and were told
    by the same checkers as that of `penstock chaos run`. A seed that breaks a promise is printed
    with the fewest faults that it takes, and with the command that repeats it. Of a seed that is
    unknown it says why. Exit status: 1 where one broke a promise, 3 where none was judged to be
    true, else 0.
    """
    require_broker()
    settings = resolve(ctx, None, output)
    with harness_errors():
        _check_workload(workload)
        runs = _Runs(workload, bug, _known_bug(bug), _numbers(faults), quiet_for)
        tally = _Tally(as_json=settings.as_json)
        with runs.known.planted() if runs.known else nullcontext():
            for seed in range(first, first + seeds):
                _judge_seed(runs, seed, tally, shrink=shrink, story=story)
        tally.show(seeds)
    if status := tally.status:
        raise typer.Exit(status)


def _judge_seed(runs: _Runs, seed: int, tally: _Tally, *, shrink: bool, story: bool) -> None:
    """Run it, and show it where it broke a promise."""
    result = runs.run(seed)
    tally.add(seed, result)
    if result.violation is None:
        return
    if shrink:
        result = runs.shrink(result)
    command = runs.command(result)
    if tally.as_json:
        print_json(_as_json(result, command))
        return
    if story:
        print("\n".join(result.story))
    print(result.told(command))


class _Tally:
    """What came of seeds together."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json: Final = as_json
        self._broken: Final[list[int]] = []
        self._unknown: Final[dict[int, str]] = {}
        self._verdicts: Final[Counter[str]] = Counter()
        self._virtual_ms = 0
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def add(self, seed: int, result: Report) -> None:
        """One more; of one that is not judged, why not."""
        self._virtual_ms += result.virtual_ms
        self._verdicts[result.judged.value] += 1
        if result.violation is not None:
            self._broken.append(seed)
        elif result.judged.value == "unknown":
            self._unknown[seed] = _why_unknown(result)
            if not self.as_json:
                report(f"seed {seed} is unknown: {self._unknown[seed]}")

    @property
    def status(self) -> int:
        """1 where a promise was broken, 3 where no seed was judged, else 0."""
        if self._broken:
            return EXIT_FAILED
        return 0 if self._verdicts["true"] else EXIT_UNKNOWN

    def show(self, seeds: int) -> None:
        """All of it."""
        seconds = time.perf_counter() - self._began
        cpu_s = time.process_time() - self._began_cpu
        broken, virtual_s = self._broken, self._virtual_ms // 1000
        if self.as_json:
            summed = {"seeds": seeds, "broken": broken, "seconds": round(seconds, 1)}
            summed |= {"cpu_seconds": round(cpu_s, 1), "virtual_seconds": virtual_s}
            print_json({**summed, "verdicts": self._verdicts, "unknown": self._unknown})
            return
        speed = self._virtual_ms / 1000 / max(cpu_s, 0.001)
        told = ", ".join(f"{count} {name}" for name, count in sorted(self._verdicts.items()))
        report(
            f"{virtual_s} virtual seconds, {speed:.0f} a second of CPU time; "
            f"what clients saw is judged: {told}"
        )
        summary = f"{seeds} seeds in {seconds:.1f} s, {len(broken)} broke a promise"
        report(summary + (f": {', '.join(map(str, broken[:20]))}" if broken else ""))


def _why_unknown(result: Report) -> str:
    """What its checkers say; nothing is left for them where all that they had may be lost."""
    reasons = [
        f"{one.checker}: {one.reason}" for one in result.verdicts if one.reason and one.looked_at
    ]
    return "; ".join(reasons) or "nothing was left for the checkers to look at"


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one workload, with or without a known bug. ``places``: of the faults these alone;
    ``quiet_for``: so many seconds, or as a seed draws.
    """

    workload: str
    bug: str
    known: Bug | None
    places: Sequence[int] | None
    quiet_for: int | None = None

    def run(self, seed: int) -> Report:
        """One seed."""
        run = self._simulation(seed)
        if self.places is not None:
            run = self._simulation(seed, _chosen(run.faults, self.places))
        return run.run()

    def _simulation(self, seed: int, faults: Sequence[Fault] | None = None) -> Simulation:
        # Imported here: these are all cores of the cluster.
        from penstock.chaos.simulator.named_workloads import WORKLOADS  # noqa: PLC0415 - as above.
        from penstock.chaos.simulator.simulation import Simulation  # noqa: PLC0415 - see above.

        known, named = self.known, WORKLOADS[self.workload]
        given = {**(known.given if known else {}), **named.given}
        if self.quiet_for is not None:
            given["quiet_ms"] = self.quiet_for * 1000
        if faults is None and known is not None:
            faults = known.faults
        kinds = known.shown_by if known else None
        return Simulation(seed, faults, only=kinds, often=named.often, given=given, recorded=True)

    @staticmethod
    def shrink(result: Report) -> Report:
        """The same with the fewest faults that break it."""
        from penstock.chaos.simulator.simulation import shrink  # noqa: PLC0415 - as above.

        return shrink(result, runs=_SHRINKING_RUNS)

    def command(self, result: Report) -> str:
        """What repeats a run, with these faults alone."""
        drawn = self._simulation(result.seed).faults
        left = list(result.faults)
        places = []
        for place, fault in enumerate(drawn):
            if left and fault == left[0]:
                left.pop(0)
                places.append(str(place))
        command = f"penstock chaos sim --workload {self.workload} --first {result.seed} --seeds 1"
        bug = f" --bug {self.bug}" if self.bug else ""
        bug += f" --quiet-for {self.quiet_for}" if self.quiet_for is not None else ""
        return f"{command}{bug} --faults {','.join(places) or 'none'} --story"


def _check_workload(name: str) -> None:
    from penstock.chaos.simulator.named_workloads import (  # noqa: PLC0415 - not for --help.
        WITHOUT,
        WORKLOADS,
    )

    if name in WITHOUT:
        raise typer.BadParameter(
            f"--workload {name}: the simulator has none such, since {WITHOUT[name]}; "
            f"`penstock chaos run --workload {name}` has it"
        )
    if name not in WORKLOADS:
        raise typer.BadParameter(f"--workload {name}: take of {', '.join(WORKLOADS)}")


def _known_bug(name: str) -> Bug | None:
    from penstock.chaos.simulator.bugs import BUGS  # noqa: PLC0415 - these are cores, too.

    if name and name not in BUGS:
        raise typer.BadParameter(f"--bug {name}: `penstock chaos list` shows the known bugs")
    return BUGS.get(name)


def _numbers(faults: str) -> list[int] | None:
    """Places of faults; None where all are meant."""
    if not faults:
        return None
    try:
        return [] if faults == "none" else [int(one) for one in faults.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--faults {faults}: numbers are wanted, such as 3,7") from None


def _chosen(drawn: Sequence[Fault], places: Sequence[int]) -> Sequence[Fault]:
    for place in places:
        if not 0 <= place < len(drawn):
            raise typer.BadParameter(f"--faults {place}: the seed draws {len(drawn)}, from 0 on")
    return [drawn[place] for place in sorted(set(places))]


def _as_json(result: Report, command: str) -> dict[str, object]:
    return {
        "seed": result.seed,
        "violation": result.violation,
        "verdicts": {verdict.checker: verdict.valid.value for verdict in result.verdicts},
        "faults": [str(fault).strip() for fault in result.faults],
        "repeat": command,
    }
