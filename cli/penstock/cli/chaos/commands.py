"""The commands of `penstock chaos`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.chaos import matrix, shrink, sim
from penstock.cli.chaos.backends import Backend
from penstock.cli.chaos.carry_out import StopRequest, as_scheduled, carry_out, interrupted_status
from penstock.cli.chaos.outcome import (
    exit_status,
    harness_errors,
    new_directory,
    show_judgement,
)
from penstock.cli.chaos.progress import Shown
from penstock.cli.errors import report
from penstock.cli.installation import require_broker
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Output, Settings, resolve

if TYPE_CHECKING:
    from penstock.chaos.run_plan import RunPlan

RUNS: Final = Path("chaos-runs")

app = typer.Typer(
    help="Break a cluster on purpose, and judge what it promised.", no_args_is_help=True
)

Workload = Annotated[str, typer.Option("--workload", "-w", metavar="NAME", help="What clients do.")]
Nemeses = Annotated[
    str,
    typer.Option(
        "--nemesis",
        metavar="NAME,...",
        help="What breaks the cluster: names with commas, by turns; with +, several at a time; "
        "`none` breaks nothing.",
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, max=99, help="How many nodes.")]
Duration = Annotated[
    float, typer.Option("--duration", min=1, metavar="SECONDS", help="How long the load lasts.")
]
Rate = Annotated[
    float,
    typer.Option(
        "--rate",
        min=0,
        help="Records (or what the workload counts) a second, of all clients together; 0 for as "
        "many as there can be.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval",
        min=0.5,
        metavar="SECONDS",
        help="From the beginning of a fault to the next one.",
    ),
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The directory of a run.", show_default=False)
]


@app.command("run")
def run(
    ctx: typer.Context,
    *,
    workload: Workload = "append",
    nemesis: Nemeses = "kill,pause",
    nodes: Nodes = 3,
    duration: Duration = 60,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="What chance is made of.", show_default="drawn, and shown"),
    ] = None,
    rate: Rate = 5_000,
    interval: Interval = 10,
    backend: Annotated[
        Backend,
        typer.Option(
            "--backend",
            help="Where the nodes run: processes, for root processes in network namespaces, "
            "containers, or pods.",
        ),
    ] = Backend.LOCAL,
    backend_options: Annotated[
        list[str] | None,
        typer.Option(
            "--backend-set",
            metavar="KEY=VALUE",
            help="An option of the backend, such as image, or shaping of namespaces.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where everything about the run goes.",
            show_default="a new one in ./chaos-runs",
        ),
    ] = None,
    recovery: Annotated[
        float,
        typer.Option(
            "--recovery",
            min=1,
            metavar="SECONDS",
            help="So long the cluster may take to be whole again in the end.",
        ),
    ] = 60,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the workload."),
    ] = None,
    objectives: Annotated[
        list[str] | None,
        typer.Option(
            "--objective",
            metavar="NAME=MS",
            help="The longest time without a success that is allowed: `window` of any partition, "
            "`kill-p50` and `kill-p99` of those whose leader is killed.",
        ),
    ] = None,
    bug: Annotated[
        str,
        typer.Option(
            "--bug", metavar="NAME", help="Put a known bug into the nodes, to see it found."
        ),
    ] = "",
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--schedule",
            metavar="FILE",
            help="The faults of this file, such as a run's schedule.json, and no others.",
        ),
    ] = None,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Keep the nodes' data also of a good run.")
    ] = False,
    output: Output = None,
) -> None:
    """Load a cluster of its own, break it, heal it, and judge what came of it.

    Exit status: 0 where every promise was kept, 1 where one was broken, 3 where that cannot be
    told, 2 for a plan that cannot be, and 130 for a run that Ctrl-C ended early and in which
    nothing was found. Ctrl-C ends the load: everything is healed, judged and reported all the
    same. A second one gives up.
    """
    require_broker()
    settings = resolve(ctx, None, output)
    if not nemesis.strip(", "):
        raise typer.BadParameter(f"--nemesis {nemesis!r} names none; `none` breaks nothing")
    with harness_errors():
        from penstock.chaos.run_plan import RunPlan  # noqa: PLC0415 - not for --help.

        plan = RunPlan(
            workload,
            "" if nemesis == "none" else nemesis,
            nodes,
            duration,
            secrets.randbelow(2**31) if seed is None else seed,
            rate,
            interval,
            recovery,
            backend.value,
            bug,
            _pairs("--set", options or []),
            backend_options=_pairs("--backend-set", backend_options or []),
            objective=_milliseconds("--objective", objectives or []),
        )
        label = nemesis if schedule is None else "scheduled"
        directory = out or new_directory(RUNS, [workload, label, f"seed{plan.seed}"])
        if schedule is not None and _is_given(ctx, "nemesis"):
            raise typer.BadParameter(
                f"--schedule {schedule} has its faults, and --nemesis {nemesis} draws others; "
                "name one of them"
            )
        _refuse_filled(directory)
        _run(plan, directory, settings, schedule, keep_data=keep_data)


def _run(
    plan: RunPlan, directory: Path, settings: Settings, schedule: Path | None, *, keep_data: bool
) -> None:
    from penstock.chaos.runner import SCHEDULE_FILE  # noqa: PLC0415 - it imports gRPC.
    from penstock.chaos.schedule import read_schedule  # noqa: PLC0415 - not for --help.

    faults = None if schedule is None else read_schedule(schedule)
    if faults is None:
        report(plan.command())
    else:
        report(as_scheduled(plan, directory / SCHEDULE_FILE, faults).command())
        if late := sum(one.at_ms >= plan.duration_s * 1000 for one in faults):
            report(
                f"warning: {late} of the {len(faults)} faults of {schedule} begin after the load "
                f"of {plan.duration_s:g} s and will not happen; next: a longer --duration"
            )
    stop = StopRequest()
    with stop.installed():
        outcome, page = carry_out(
            plan, directory, stop=stop, onlooker=Shown(), faults=faults, keep_data=keep_data
        )
    show_judgement(
        outcome.judgement, as_json=settings.as_json, directory=directory, report_path=page
    )
    status = exit_status(outcome.valid)
    if outcome.interrupted and status != 1:
        status = interrupted_status(stop)
    raise typer.Exit(status)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise typer.BadParameter(f"{option} {text}: KEY=VALUE is wanted")
    return dict(text.split("=", 1) for text in texts)


def _milliseconds(option: str, texts: list[str]) -> dict[str, int]:
    found = {}
    for name, text in _pairs(option, texts).items():
        if not text.isdecimal():
            raise typer.BadParameter(f"{option} {name}={text}: whole milliseconds are wanted")
        found[name] = int(text)
    return found


def _refuse_filled(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise typer.BadParameter(f"--out {directory}: it is no directory; name one")
    if directory.exists() and any(directory.iterdir()):
        raise typer.BadParameter(f"--out {directory}: it is not empty; name another directory")


@app.command("list")
def list_names(ctx: typer.Context, *, output: Output = None) -> None:
    """Print the workloads, nemeses, checkers and known bugs that there are."""
    from penstock.chaos.checkers.registry import SUMMARIES  # noqa: PLC0415 - not for --help.
    from penstock.chaos.nemeses.registry import NEMESES  # noqa: PLC0415 - as above.
    from penstock.chaos.workloads.registry import WORKLOADS  # noqa: PLC0415 - as above.

    settings = resolve(ctx, None, output)
    rows = [
        *(("workload", one.name, one.summary) for one in WORKLOADS.values()),
        *(("nemesis", one.name, one.summary) for one in NEMESES.values()),
        *(("checker", one.name, summary) for one, summary in SUMMARIES.items()),
        *_bugs(),
    ]
    if settings.as_json:
        for kind, name, summary in rows:
            print_json({"kind": kind, "name": name, "summary": summary})
    else:
        print_table(("Kind", "Name", "Summary"), rows)


def _bugs() -> list[tuple[str, str, str]]:
    """Kind, name and summary of each: some are for simulated nodes alone (`sim`)."""
    try:
        from penstock.cli.chaos.node_bugs import BUGS, SIMULATED  # noqa: PLC0415 - needs the broker.
    except ModuleNotFoundError:
        return []
    return [
        *(("bug", name, bug.description) for name, bug in BUGS.items()),
        *(("bug of sim", name, bug.description) for name, bug in SIMULATED.items()),
    ]


@app.command("check")
def check(
    ctx: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="The directory of a run, or a history alone.")
    ],
    *,
    output: Output = None,
) -> None:
    """Judge a run again, or a history alone, by the checkers of today.

    A history alone is judged by all checkers that are about what it holds, without evidence beside
    it. The exit status is as that of `run`.
    """
    settings = resolve(ctx, None, output)
    with harness_errors():
        from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
        from penstock.chaos.stored_run import (  # noqa: PLC0415 - as above.
            judge_again,
            judge_history,
            read_run,
            report_stored,
        )

        if path.is_dir():
            judgement = judge_again(read_run(path))
            page = report_stored(path)
            show_judgement(judgement, as_json=settings.as_json, directory=path, report_path=page)
        elif path.exists():
            judgement = judge_history(path)
            show_judgement(judgement, as_json=settings.as_json, directory=None, report_path=None)
        else:
            raise PlanError(f"there is no {path}; next: name a history or the directory of a run")
    raise typer.Exit(exit_status(judgement.valid))


@app.command("report")
def report_run(directory: Directory) -> None:
    """Write the report of a run anew, and print where it is."""
    with harness_errors():
        from penstock.chaos.stored_run import report_stored  # noqa: PLC0415 - not for --help.

        print(report_stored(directory))


app.command("shrink")(shrink.shrink)
app.command("matrix")(matrix.matrix)
app.command("sim")(sim.sim)
