"""`penstock chaos shrink`: fewer faults that still break what a run broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.chaos.carry_out import StopRequest, as_scheduled, carry_out
from penstock.cli.chaos.outcome import EXIT_UNKNOWN, harness_errors
from penstock.cli.errors import report
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Output, resolve

if TYPE_CHECKING:
    from penstock.chaos.nemeses import ScheduledFault
    from penstock.chaos.run_plan import RunPlan

SMALLEST_FILE: Final = "smallest.json"


def shrink(
    ctx: typer.Context,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The directory of a run that failed.", show_default=False
        ),
    ],
    *,
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="The most runs that are made.")
    ] = 30,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=1,
            help="So many runs without the failure, and a schedule counts as harmless.",
        ),
    ] = 2,
    output: Output = None,
) -> None:
    """Look for the fewest faults that still break what a run broke.

    Repeats the run in DIR/shrink with fewer and fewer of its faults. The smallest schedule is
    written to DIR/smallest.json, and the command is printed that runs it: all that the run was
    asked for, with these faults. Exit status: 0 when it was seen to fail, 3 when no trial failed
    again.
    """
    settings = resolve(ctx, None, output)
    with harness_errors():
        from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
        from penstock.chaos.judging import read_judgement  # noqa: PLC0415 - as above.
        from penstock.chaos.run_plan import read_plan  # noqa: PLC0415 - as above.
        from penstock.chaos.runner import SCHEDULE_FILE  # noqa: PLC0415 - as above.
        from penstock.chaos.schedule import (  # noqa: PLC0415 - as above.
            read_schedule,
            write_schedule,
        )
        from penstock.chaos.shrinking import smallest_failing  # noqa: PLC0415 - as above.
        from penstock.chaos.verdict import Valid  # noqa: PLC0415 - as above.

        plan = read_plan(directory)
        faults = read_schedule(directory / SCHEDULE_FILE)
        broken = {
            one.checker for one in read_judgement(directory).verdicts if one.valid is Valid.FALSE
        }
        if not broken:
            raise PlanError(
                f"the run in {directory} broke no promise: there is nothing to shrink; next: name "
                "the directory of a run whose verdict is false"
            )
        trial = Trial(plan, directory / "shrink", broken, trials=trials, repeats=repeats)
        smallest = smallest_failing(faults, trial.fails)
        write_schedule(smallest, directory / SMALLEST_FILE)
    path = directory / SMALLEST_FILE
    repeat = as_scheduled(plan, path, smallest).command()
    _show(smallest, trial, len(faults), path, repeat, as_json=settings.as_json)
    if not trial.failures:
        raise typer.Exit(EXIT_UNKNOWN)


class Trial:
    """Runs a part of a schedule, and says whether one of the same checkers finds something."""

    def __init__(
        self, plan: RunPlan, base: Path, broken: set[str], *, trials: int, repeats: int
    ) -> None:
        self._plan: Final = plan
        self._base: Final = base
        self._broken: Final = broken
        self._left = trials
        self._repeats: Final = repeats
        self.runs = 0
        self.failures = 0

    def fails(self, faults: Sequence[ScheduledFault]) -> bool:
        """Whether one of the repeats fails. Raises OutOfTrialsError.

        Without any fault once is enough: what hardly ever fails so is looked for among the faults.
        """
        from penstock.chaos.shrinking import OutOfTrialsError  # noqa: PLC0415 - not for --help.

        for _ in range(self._repeats if faults else 1):
            if not self._left:
                raise OutOfTrialsError
            self._left -= 1
            if self._run(faults):
                self.failures += 1
                return True
        return False

    def _run(self, faults: Sequence[ScheduledFault]) -> bool:
        from penstock.chaos.shrinking import OutOfTrialsError  # noqa: PLC0415 - not for --help.
        from penstock.chaos.verdict import Valid  # noqa: PLC0415 - as above.

        self.runs += 1
        stop = StopRequest()
        with stop.installed():
            outcome, _ = carry_out(
                replace(self._plan),
                self._base / f"trial-{self.runs}",
                stop=stop,
                faults=faults,
            )
        found = {one.checker for one in outcome.judgement.verdicts if one.valid is Valid.FALSE}
        failed = bool(found & self._broken)
        what = f"fails ({', '.join(sorted(found & self._broken))})" if failed else "does not fail"
        report(f"trial {self.runs}: {len(faults)} faults: {what}")
        if outcome.interrupted:
            raise OutOfTrialsError
        return failed


def _show(
    smallest: Sequence[ScheduledFault],
    trial: Trial,
    before: int,
    path: Path,
    repeat: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "faults_before": before,
                "faults": len(smallest),
                "runs": trial.runs,
                "failures": trial.failures,
                "schedule": str(path),
                "repeat": repeat,
            }
        )
        return
    print_table(
        ("AtMs", "HoldMs", "Nemesis", "Fault", "AtWhom"),
        [
            (one.at_ms, one.hold_ms, one.fault.nemesis, one.fault.kind, one.fault.target)
            for one in smallest
        ],
        right=("AtMs", "HoldMs"),
    )
    print(f"{len(smallest)} of {before} faults, after {trial.runs} runs: {path}")
    print(f"repeat: {repeat}")
    if not trial.failures:
        print("no trial failed again: the failure is rare; raise --repeats and --trials")
