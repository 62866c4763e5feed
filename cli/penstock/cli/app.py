"""The `penstock` command: its sub-commands, its global options, and how it fails.

Sub-command modules import nothing heavy before they run, so that `penstock --help` and a typing
mistake are answered at once.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli import (
    adopt,
    bench,
    can_roll,
    chaos,
    cluster,
    consume,
    decommission,
    dev,
    doctor,
    drain,
    groups,
    log,
    metrics,
    node,
    offsets,
    partitions,
    pipeline,
    produce,
    quorum,
    replay,
    topics,
    transactions,
)
from penstock.cli import format as format_command
from penstock.cli.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    explain,
    explain_output,
    report,
)
from penstock.cli.settings import Bootstrap, GlobalOptions, Output
from penstock.cli.standard_streams import OutputError, silence_stdout
from penstock.cli.tls_options import TlsCa, TlsCert, TlsKey, TlsOptions, accept_tls_options
from penstock.wire import codec
from penstock.wire.errors import PenstockError

# The base of every complaint about a command line. typer gives it no name of its own.
_LINE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class RootGroup(TyperGroup):
    """The command as a whole: every failure leaves as one clear line and an exit status."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit with its status: 0, 1, 2 (usage), 130 or 141."""
        try:
            status = super().main(
                args=list(sys.argv[1:] if args is None else args) or ["--help"],
                prog_name=prog_name or "penstock",
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except typer.Abort:
            status = EXIT_INTERRUPTED
        except _LINE_ERROR as error:
            status = _report_line_error(error)
        if not standalone_mode:
            return status
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Read the command line's beginning; `--help` and `--version` print here already."""
        with _failures():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own subclass.
        """Run the sub-command, turning what it raises into its exit status."""
        with _failures():
            return super().invoke(ctx)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what is raised inside, or when the output leaves the process, into an exit status."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except PenstockError as error:
        report(explain(error))
        raise typer.Exit(EXIT_FAILED) from error
    except OutputError as error:
        silence_stdout()
        if error.is_closed_pipe:
            raise typer.Exit(EXIT_BROKEN_PIPE) from error
        report(explain_output(error))
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _report_line_error(error: Exception) -> int:
    """Say what is wrong with the command line, and where help is; the exit status."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        # A group named without its sub-command: show what there is.
        try:
            with _failures():
                # With rich it was printed when the error was made, and nothing is left to print.
                if text := getattr(error, "message", ""):
                    print(text)
        except typer.Exit as ended:
            return ended.exit_code
    else:
        message = getattr(error, "format_message", error.__str__)().replace("Value error, ", "")
        path = context.command_path if context is not None else "penstock"
        report(f"error: {message}\nnext: {path} --help")
    return int(getattr(error, "exit_code", EXIT_FAILED))


app = typer.Typer(
    name="penstock",
    cls=RootGroup,
    help="A replicated commit log: run a cluster, and work with its topics, records and groups.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",  # Joins the lines of a paragraph, which would break twice else.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        how = "compiled" if codec.IS_COMPILED else "pure Python"
        print(f"penstock {importlib.metadata.version('penstock')} (record codec: {how})")
        raise typer.Exit


@app.callback()
def _global_options(
    ctx: typer.Context,
    *,
    bootstrap: Bootstrap = None,
    output: Output = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    ctx.obj = GlobalOptions(bootstrap, output, TlsOptions(tls_ca, tls_cert, tls_key))


app.command("dev")(dev.dev)
app.command("node")(node.node)
app.command("format")(format_command.format_node)
app.command("adopt")(adopt.adopt)
app.add_typer(topics.app, name="topics")
app.add_typer(partitions.app, name="partitions")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.command("replay")(replay.replay)
app.add_typer(groups.app, name="groups")
app.add_typer(offsets.app, name="offsets")
app.add_typer(transactions.app, name="transactions")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(quorum.app, name="quorum")
app.command("can-roll")(can_roll.can_roll)
app.command("drain")(drain.drain)
app.command("decommission")(decommission.decommission)
app.command("doctor")(doctor.doctor)
app.command("metrics")(metrics.metrics)
app.add_typer(log.app, name="log")
app.add_typer(chaos.app, name="chaos")
accept_tls_options(app)
