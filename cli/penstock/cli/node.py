"""`penstock node`: one node in this process, as containers run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import NODE_STEPS, explain
from penstock.cli.installation import require_broker


def node(
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
    require_broker()
    # Imported here: it is all of the broker, and not in every installation.
    from penstock.broker.__main__ import run  # noqa: PLC0415 - see above.

    raise typer.Exit(run(config, settings or [], lambda error: explain(error, NODE_STEPS)))
