"""`penstock pipeline`: projects of Spark Declarative Pipelines over the cluster's topics."""

from __future__ import annotations

import enum
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import EXIT_FAILED, NEXT_STEPS, OWN_STEP, report
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import print_json
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.reasons import MEND, error_names
from penstock.wire import errors
from penstock.wire.errors import ErrorCode, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipeline.declarative.definitions import Event, Pipeline

app = typer.Typer(
    help="Make, check, draw and run projects of Spark Declarative Pipelines.", no_args_is_help=True
)

_INTERVAL: Final = "500 milliseconds"
_STEPS: Final[Mapping[ErrorCode, str]] = {
    **NEXT_STEPS,
    ErrorCode.BOOTSTRAP_FAILED: (
        "start the cluster, or correct its address, in a new project `spark.penstock.bootstrap` "
        "in spark-pipeline.yml"
    ),
    ErrorCode.CONFIGURATION: "correct what the message names, in the project's files",
}
"""The next step where the options of commands are none of a project's."""


class Language(enum.StrEnum):
    """In what a new project's transformation is written."""

    PYTHON = "python"
    SQL = "sql"


class GraphFormat(enum.StrEnum):
    """How a graph is printed."""

    TEXT = "text"
    DOT = "dot"
    JSON = "json"


Spec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        help="The project's spark-pipeline.yml, or a directory in the project.",
        show_default="found from the current directory upwards",
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="sc://HOST:PORT",
        help="A Spark Connect server to run on.",
        show_default="Spark on this machine, for this command alone",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Show Spark's own log, and failures with all of their stacks."),
]


@app.command("init")
def init(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="The project, and its new directory.", metavar="NAME")
    ],
    *,
    language: Annotated[
        Language, typer.Option("--language", help="In what its transformation is written.")
    ] = Language.PYTHON,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Write a small project that reads one topic and writes to another one.

    It reads NAME-in and writes to NAME-out, of the cluster that the command is given.
    """
    settings = resolve(ctx, bootstrap, output)
    with _failures():
        from penstock.pipeline.declarative.project import make_project  # noqa: PLC0415 - light start.

        made = make_project(
            Path.cwd(), name, bootstrap=settings.bootstrap, in_sql=language is Language.SQL
        )
    if settings.as_json:
        print_json({"files": [str(path) for path in made]})
        return
    for path in made:
        print(path)
    create = "penstock topics create" + (f" -b {bootstrap}" if bootstrap else "")
    print(
        f"next: {create} {name}-in && {create} {name}-out\n      cd {name} && penstock pipeline run"
    )


@app.command("validate")
def validate(
    ctx: typer.Context,
    *,
    spec: Spec = None,
    remote: Remote = None,
    verbose: Verbose = False,
    output: Output = None,
) -> None:
    """See whether a project could run, without running it."""
    settings = resolve(ctx, None, output)
    with _failures(verbose), _project(spec, remote, verbose) as (spark, pipeline):
        from penstock.pipeline.declarative.definitions import run  # noqa: PLC0415 - imports Spark.

        for event in run(spark, pipeline, dry=True):
            _print_event(event, verbose=verbose, as_json=settings.as_json)
    if not settings.as_json:
        print("the project is valid")


@app.command("graph")
def graph(
    ctx: typer.Context,
    *,
    shape: Annotated[
        GraphFormat | None,
        typer.Option("--format", help="text, dot for Graphviz, or json.", show_default="text"),
    ] = None,
    spec: Spec = None,
    remote: Remote = None,
    verbose: Verbose = False,
    output: Output = None,
) -> None:
    """Print a project's datasets and what flows between them."""
    settings = resolve(ctx, None, output)
    chosen = shape or (GraphFormat.JSON if settings.as_json else GraphFormat.TEXT)
    from penstock.pipeline.declarative.graph import as_dot, as_text, as_value  # noqa: PLC0415 - as above.

    with _failures(verbose), _project(spec, remote, verbose) as (_, pipeline):
        found = pipeline.graph
    if chosen is GraphFormat.JSON:
        print_json(as_value(found))
    else:
        print(as_dot(found) if chosen is GraphFormat.DOT else as_text(found))


@app.command("run")
def run_pipeline(
    ctx: typer.Context,
    *,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Go on until Ctrl-C or SIGTERM.")
    ] = False,
    interval: Annotated[
        str | None,
        typer.Option(
            "--interval",
            metavar="TEXT",
            help="How often a continuous run looks for records.",
            show_default=_INTERVAL,
        ),
    ] = None,
    full_refresh_all: Annotated[
        bool,
        typer.Option(
            "--full-refresh-all", help="Forget the checkpoints, and read everything again."
        ),
    ] = False,
    full_refresh: Annotated[
        list[str] | None,
        typer.Option(
            "--full-refresh", metavar="NAME", help="The same for one dataset; repeatable."
        ),
    ] = None,
    refresh: Annotated[
        list[str] | None,
        typer.Option("--refresh", metavar="NAME", help="Run for this dataset alone; repeatable."),
    ] = None,
    spec: Spec = None,
    remote: Remote = None,
    verbose: Verbose = False,
    output: Output = None,
) -> None:
    """Run a project on all that there is to read, or continuously.

    Either way a run goes on where the one before stopped, by the checkpoints in the project's
    storage. Ctrl-C and SIGTERM end a continuous run with status 0.
    """
    settings = resolve(ctx, None, output)
    if continuous and (full_refresh_all or full_refresh or refresh):
        raise typer.BadParameter("--continuous goes on from the checkpoints: no refresh with it")
    if interval is not None and not continuous:
        raise typer.BadParameter("--interval is for --continuous: give both, or neither")
    if full_refresh_all and (full_refresh or refresh):
        raise typer.BadParameter(
            "--full-refresh-all is all: no --full-refresh or --refresh with it"
        )
    with _failures(verbose), _project(spec, remote, verbose) as (spark, pipeline):
        if continuous:
            _run_on(spark, pipeline, interval or _INTERVAL, as_json=settings.as_json)
            return
        from penstock.pipeline.declarative.definitions import run  # noqa: PLC0415 - imports Spark.

        events = run(
            spark,
            pipeline,
            refresh=refresh or [],
            full_refresh=full_refresh or [],
            full_refresh_all=full_refresh_all,
        )
        for event in events:
            _print_event(event, verbose=verbose, as_json=settings.as_json)


def _run_on(spark: SparkSession, pipeline: Pipeline, interval: str, *, as_json: bool) -> None:
    """Run until a signal comes; what a query was writing then is written by the next run."""
    from penstock.pipeline.declarative.continuous import start, stop, watch  # noqa: PLC0415 - as above.
    from penstock.pipeline.declarative.definitions import run  # noqa: PLC0415 - imports Spark.

    interrupt = Interrupt()
    pause = threading.Event()
    with interrupt.installed():
        for event in run(spark, pipeline, dry=True):
            report(event.message)
        flows = start(spark, pipeline, interval=interval)
        try:
            for flow in flows:
                if as_json:
                    print_json({"flow": flow.name, "target": flow.target, "state": "RUNNING"})
                else:
                    print(f"flow {flow.name} runs into {flow.target}", flush=True)

            def stopped(seconds: float) -> bool:
                pause.wait(seconds)
                return interrupt.count > 0

            watch(flows, stopped)
            report("stopping the flows")
        finally:
            stop(flows)


@contextmanager
def _project(
    spec: Path | None, remote: str | None, verbose: bool
) -> Iterator[tuple[SparkSession, Pipeline]]:
    """The session for a project, and what the project defines."""
    from penstock.pipeline.declarative import connection, project  # noqa: PLC0415 - light start.
    from penstock.pipeline.session import require_spark  # noqa: PLC0415 - as above.

    require_spark()
    path = project.find_spec(spec or Path.cwd())
    from penstock.pipeline.declarative.definitions import define, load_spec  # noqa: PLC0415 - as above.

    loaded = load_spec(path)
    values: Mapping[str, str] = {**project.read_defaults(path.parent), **loaded.configuration}
    remote = remote or os.environ.get("SPARK_REMOTE")
    opened = (
        connection.local_connection(loaded.name, values, log_level="WARN" if verbose else "OFF")
        if not remote
        else connection.remote_connection(remote, loaded.configuration)
    )
    with opened as spark:
        yield spark, define(spark, path, loaded)


def _print_event(event: Event, *, verbose: bool, as_json: bool) -> None:
    when = datetime.fromtimestamp(event.time, UTC)
    if as_json:
        print_json({"time": when.isoformat(timespec="milliseconds"), "message": event.message})
    else:
        text = event.message if verbose else event.brief
        print(f"{when.astimezone():%H:%M:%S} {text}", flush=True)


@contextmanager
def _failures(verbose: bool = False) -> Iterator[None]:
    """Say what is wrong with a pipeline as every command does, and exit with status 1.

    All that Spark says of a failure goes before it if ``verbose``, and else into a file.
    """
    try:
        yield
    except PipelineError as error:
        message, _, step = " ".join(str(error).split()).partition(OWN_STEP)
        if step in ("", MEND):
            step = _step(message) or step or "see docs/pipelines.md"
        if detail := getattr(error, "detail", ""):
            if verbose:
                report(detail)
            elif (kept := _keep(detail)) is not None:
                step += f" (all that Spark says: {kept})"
        report(f"error: {message}\nnext: {step}")
        raise typer.Exit(EXIT_FAILED) from error


def _step(message: str) -> str:
    """What to do about the cluster's error that a message names, if it names one."""
    # What failed last is at the end, and is why all before it failed.
    for name in reversed(error_names(message)):
        found = getattr(errors, name, None)
        if isinstance(found, type) and issubclass(found, PenstockError):
            return _STEPS.get(found.code, "")
    return ""


def _keep(detail: str) -> str | None:
    """The new file with this; None where it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="penstock-pipeline-", suffix=".log", encoding="utf-8", delete=False
        ) as file:
            file.write(detail + "\n")
    except OSError:
        return None
    return file.name
