"""`penstock quorum`: which controllers vote, and how that is changed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import admin_client
from penstock.cli.errors import EXIT_FAILED, report
from penstock.cli.output import print_json, print_table
from penstock.cli.quorum_progress import told_of_progress
from penstock.cli.quorum_table import (
    controller_rows,
    leader_doubt,
    quorum_json,
    warn_of_no_tolerance,
)
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import ConfigurationError
from penstock.wire.transport import parse_address

if TYPE_CHECKING:
    from penstock.client.descriptions import QuorumDescription

app = typer.Typer(
    help="Show and change which controllers vote: see docs/operating/controllers.md.",
    no_args_is_help=True,
)


@app.command("status")
def status(ctx: typer.Context, *, bootstrap: Bootstrap = None, output: Output = None) -> None:
    """Show the voters, who leads, and how far behind the others are.

    Confirmed: a majority said just now that it leads. Without that it is what one controller
    knows, with a warning on standard error, and the command ends with 1.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        quorum = admin.describe_quorum()
    _print(settings, quorum)
    if doubt := leader_doubt(quorum):
        report(f"warning: {doubt}")
        raise typer.Exit(EXIT_FAILED)


@app.command("add")
def add(
    ctx: typer.Context,
    voter: Annotated[
        str,
        typer.Argument(
            metavar="NODE@HOST:PORT", help="A controller that runs, and its controller port."
        ),
    ],
    *,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Make a running controller a voter, once it has caught up.

    Standard error says how far it is.
    """
    settings = resolve(ctx, bootstrap, output)
    number, at, address = voter.partition("@")
    try:
        if not at or not number.isdecimal():
            raise ValueError(f"{voter!r} is not a controller; write NODE@HOST:PORT")
        parse_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NODE@HOST:PORT") from None
    node = int(number)
    with admin_client(settings) as admin:
        with nullcontext() if settings.as_json else told_of_progress(admin, node):
            changed = admin.add_voter(node, address)
        _print_changed(settings, changed)


@app.command("remove")
def remove(
    ctx: typer.Context,
    node: Annotated[int, typer.Argument(min=0, max=MAX_INT32, help="The controller's node id.")],
    *,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Make a controller no voter; one that is gone for good, or that is to be stopped for good."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        _print_changed(settings, admin.remove_voter(node))


@app.command("recover")
def recover(
    ctx: typer.Context,
    *,
    config: Annotated[Path, typer.Option("--config", help="The stopped node's settings.")],
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Accept that what a lost majority decided, and this node has not, is lost.",
        ),
    ] = False,
    output: Output = None,
) -> None:
    """Make a stopped controller the only voter, after a majority's disks are lost for good.

    Without --accept-loss it shows how far the node's log goes, and changes nothing: of several
    survivors take the one with the greatest LastTerm, and among those the greatest LastIndex.
    """
    from penstock.broker.config import NodeConfig  # noqa: PLC0415 - only this command needs it.
    from penstock.broker.datadir import check_directory, read_meta  # noqa: PLC0415 - as above.
    from penstock.raft_meta import recovery  # noqa: PLC0415 - as above.

    settings = resolve(ctx, None, output)
    node = NodeConfig.load(config, os.environ)
    if "controller" not in node.roles:
        raise ConfigurationError(
            f"node {node.node_id} is no controller by the node.roles of its settings, and has no "
            "metadata log to go on from; next: run this on a controller that still has its "
            "directory"
        )
    meta = read_meta(Path(node.data_dir))
    directory = node.metadata_directory
    check_directory(directory, meta)
    if accept_loss:
        found = recovery.become_the_only_voter(
            directory,
            cluster_id=meta.cluster_id,
            node_id=node.node_id,
            addresses=node.voters,
        )
    else:
        found = recovery.survey(directory, cluster_id=meta.cluster_id, node_id=node.node_id)
    if settings.as_json:
        print_json({**asdict(found), "recovered": accept_loss})
        return
    print_table(
        ("Node", "LastTerm", "LastIndex", "VotersBefore"),
        [
            (
                found.node_id,
                found.last_term,
                found.last_index,
                ",".join(str(n) for n in found.voters_before),
            )
        ],
        right=("Node", "LastTerm", "LastIndex"),
    )
    if accept_loss:
        print(
            f"Controller {found.node_id} is the only voter now. Start it, then add others with "
            "empty directories: penstock quorum add NODE@HOST:PORT"
        )
    else:
        print("Nothing was changed. To make this controller the only voter, say --accept-loss.")


def _print_changed(settings: Settings, quorum: QuorumDescription) -> None:
    _print(settings, quorum)
    warn_of_no_tolerance(quorum)


def _print(settings: Settings, quorum: QuorumDescription) -> None:
    if settings.as_json:
        print_json(quorum_json(quorum))
        return
    leader = str(quorum.leader_id) if quorum.leader_id >= 0 else "none"
    print(
        f"Leader: {leader}  Term: {quorum.term}  Committed: {quorum.commit_index}  "
        f"VotersSince: {quorum.voters_index}  Tolerates: {quorum.tolerated_losses}  "
        f"AnsweredBy: {quorum.answered_by}  Confirmed: {'yes' if quorum.confirmed else 'no'}"
    )
    print_table(
        ("Voter", "Address", "State", "LogEnd", "Behind", "SilentMs", "Directory"),
        [astuple(row) for row in controller_rows(quorum)],
        right=("Voter", "LogEnd", "Behind", "SilentMs"),
    )
