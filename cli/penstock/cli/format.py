"""`penstock format`: give a data directory its cluster and its node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import print_json
from penstock.cli.settings import Output, resolve


def format_node(  # noqa: PLR0917 - one parameter for each option.
    ctx: typer.Context,
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The node's data.dir.")],
    node_id: Annotated[int, typer.Option("--node-id", min=0, help="The node's number.")],
    cluster_id: Annotated[
        str | None,
        typer.Option(
            "--cluster-id",
            help="The cluster's id, the same on every node; without it a new one is made.",
            show_default=False,
        ),
    ] = None,
    found: Annotated[
        bool,
        typer.Option(
            "--found",
            help="With --cluster-id: the cluster is new, and the controller with the least node "
            "id may found it. Never for a node that joins a cluster or comes back to it.",
        ),
    ] = False,
    output: Output = None,
) -> None:
    """Prepare a data directory. A node refuses one of another cluster or node.

    Formatting a directory again with the same ids changes nothing, but that --found may be added.
    """
    from penstock.broker.datadir import (  # noqa: PLC0415 - only this command needs it.
        format_directory,
        new_cluster_id,
    )

    settings = resolve(ctx, None, output)
    if cluster_id is not None and not cluster_id.strip():
        # A variable of the shell that is set on another machine: a new id in its place would be
        # found out at the node's start, or make a second cluster.
        raise typer.BadParameter(
            "it is empty: name the cluster's id, which `penstock cluster describe` shows; only "
            "without the option a new one is made",
            param_hint="--cluster-id",
        )
    identity = new_cluster_id() if cluster_id is None else cluster_id
    # Nobody else can have an id that is made here: the cluster is new.
    may_found = found or cluster_id is None
    fresh = format_directory(data_dir, identity, node_id, may_found=may_found)
    if settings.as_json:
        print_json(
            {
                "data_dir": str(data_dir),
                "cluster_id": identity,
                "node_id": node_id,
                "formatted": fresh,
            }
        )
    else:
        verb = "formatted" if fresh else "was formatted before:"
        print(f"{verb} {data_dir}: node {node_id} of cluster {identity}")
        if found and not fresh:
            print("its next start may found the cluster, if it was never part of one")
