"""`penstock chaos matrix`: every workload under every nemesis, and what came of each."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.chaos.carry_out import StopRequest, carry_out, interrupted_status
from penstock.cli.chaos.outcome import EXIT_UNKNOWN, harness_errors, new_directory
from penstock.cli.errors import report
from penstock.cli.installation import require_broker
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Output, resolve

if TYPE_CHECKING:
    from penstock.chaos.run_plan import RunPlan

LEFT_OUT: Final = "left out"
"""The verdict of a nemesis whose fault the backend has not."""
_RUNS: Final = Path("chaos-runs")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    workload: str
    nemesis: str
    verdict: str
    anomalies: int
    what: str
    """Which checkers did not say true, or why there was no run."""
    directory: str


def matrix(
    ctx: typer.Context,
    *,
    workloads: Annotated[
        str, typer.Option("--workload", "-w", metavar="NAME,...", show_default="all")
    ] = "",
    nemeses: Annotated[str, typer.Option("--nemesis", metavar="NAME,...", show_default="all")] = "",
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=99, help="How many nodes.")] = 3,
    duration: Annotated[
        float, typer.Option("--duration", min=1, metavar="SECONDS", help="The load of each run.")
    ] = 20,
    interval: Annotated[
        float,
        typer.Option("--interval", min=0.5, metavar="SECONDS", help="From fault to fault."),
    ] = 8,
    rate: Annotated[
        float, typer.Option("--rate", min=0, help="Operations a second, as in `run`.")
    ] = 2_000,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of all runs.", show_default="drawn, and shown")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where runs go.", show_default="a new one in ./chaos-runs"
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Run every workload under every nemesis for a short time, and print a table.

    A nemesis that nobody named, and that cannot be here, is left out. Exit status: 1 where a
    promise was broken in one of the runs, else 3 where one could not be judged, else 0. Ctrl-C ends
    the run that is under way and shows those that were.
    """
    require_broker()
    settings = resolve(ctx, None, output)
    from penstock.chaos.nemeses.registry import USUAL  # noqa: PLC0415 - not for --help.
    from penstock.chaos.run_plan import RunPlan  # noqa: PLC0415 - as above.
    from penstock.chaos.workloads.registry import WORKLOADS  # noqa: PLC0415 - as above.

    drawn = secrets.randbelow(2**31) if seed is None else seed
    base = out or new_directory(_RUNS, ["matrix", f"seed{drawn}"])
    stop = StopRequest()
    cells: list[Cell] = []
    with harness_errors():
        for workload in _names(workloads) or list(WORKLOADS):
            for nemesis in _names(nemeses) or list(USUAL):
                if stop.event.is_set():
                    break
                plan = RunPlan(workload, nemesis, nodes, duration, drawn, rate, interval)
                cells.append(_cell(plan, base / f"{workload}-{nemesis}", stop))
                if settings.as_json:
                    cell = cells[-1]
                    print_json({name: getattr(cell, name) for name in Cell.__slots__})
                else:
                    report(f"{workload} under {nemesis}: {cells[-1].verdict} {cells[-1].what}")
    if not settings.as_json:
        print_table(
            ("Workload", "Nemesis", "Verdict", "Anomalies", "What"),
            [(one.workload, one.nemesis, one.verdict, one.anomalies, one.what) for one in cells],
            right=("Anomalies",),
        )
    if stop.event.is_set():
        raise typer.Exit(interrupted_status(stop))
    verdicts = {one.verdict for one in cells} - (set() if nemeses else {LEFT_OUT})
    if "false" in verdicts:
        raise typer.Exit(1)
    raise typer.Exit(0 if verdicts == {"true"} else EXIT_UNKNOWN)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _cell(plan: RunPlan, directory: Path, stop: StopRequest) -> Cell:
    """One run. What keeps it from being one is a cell that says so."""
    from penstock.chaos.errors import ChaosError, NotHereError  # noqa: PLC0415 - not for --help.

    try:
        with stop.installed():
            outcome, _ = carry_out(plan, directory, stop=stop)
    except NotHereError as error:
        return Cell(plan.workload, plan.nemesis, LEFT_OUT, 0, str(error), "")
    except ChaosError as error:
        return Cell(plan.workload, plan.nemesis, "unknown", 0, str(error), str(directory))
    what = ", ".join(
        f"{one.checker}: {one.valid.value}"
        for one in outcome.judgement.verdicts
        if one.valid.value != "true"
    )
    return Cell(
        plan.workload,
        plan.nemesis,
        outcome.valid.value,
        outcome.judgement.anomalies,
        what,
        str(directory),
    )
