"""`penstock node`: one node in this process, as containers run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import NODE_STEPS, explain, with_step
from penstock.cli.installation import require_broker
from penstock.cli.settings import require_text
from penstock.wire.errors import ErrorCode, PenstockError


def node(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The node's settings, as TOML.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting that wins over file and environment; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run one node until SIGTERM or Ctrl-C.

    Settings come from the file, then from PENSTOCK_* variables, then from --set; the last wins.
    """
    require_text(ctx)
    require_broker()
    # Imported here: it is all of the broker, and not in every installation.
    from penstock.broker.__main__ import run  # noqa: PLC0415 - see above.

    def describe(error: PenstockError) -> str:
        if error.code is ErrorCode.CONFIGURATION and config is not None and not _is_file(config):
            with_step(
                error,
                "name the node's file with --config; `penstock dev` writes DIR/node-N/node.toml",
            )
        return explain(error, NODE_STEPS)

    raise typer.Exit(run(config, settings or [], describe))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
