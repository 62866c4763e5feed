"""`penstock node`: one node in this process, as containers run it."""

from __future__ import annotations

from pathlib import Path

import typer

from penstock.cli.errors import NODE_STEPS, explain, with_step
from penstock.cli.installation import require_broker
from penstock.cli.settings import NodeConfigFile, NodeOverrides, require_text
from penstock.wire.errors import ErrorCode, PenstockError


def node(
    ctx: typer.Context,
    config: NodeConfigFile = None,
    settings: NodeOverrides = None,
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
        # It may well be there: what keeps it from being seen is told by the error itself.
        return True
