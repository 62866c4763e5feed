"""`penstock log`: look into the files that brokers write."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import EXIT_FAILED, report
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Output, resolve

app = typer.Typer(help="Look into the files that brokers write.", no_args_is_help=True)


@app.callback()
def _log() -> None:
    """Look into the files that brokers write."""


@app.command("dump")
def dump(
    ctx: typer.Context,
    segment: Annotated[Path, typer.Argument(help="A segment file: BASE.log.", metavar="SEGMENT")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every checksum and the order of offsets.")
    ] = False,
    output: Output = None,
) -> None:
    """Print the record batches of one segment file; with --verify, judge it.

    Reads the file alone and needs no broker. The exit status is 1 when --verify finds damage.
    """
    try:
        # Imported here: storage is not in every installation.
        from penstock.broker.storage.dump import (  # noqa: PLC0415 - see above.
            dump_segment,
            verify_segment,
        )
    except ModuleNotFoundError as error:
        report(
            f"error: reading segments needs the package {error.name!r}, which is not installed\n"
            'next: pip install "penstock[broker]"'
        )
        raise typer.Exit(EXIT_FAILED) from None
