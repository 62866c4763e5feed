"""`penstock quorum`: which controllers vote, and how that is changed."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import admin_client
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.transport import format_address, parse_address

if TYPE_CHECKING:
    from penstock.client.descriptions import QuorumDescription, QuorumVoter

app = typer.Typer(
    help="Show and change which controllers vote: see docs/operating/controllers.md.",
    no_args_is_help=True,
)


@app.command("status")
def status(ctx: typer.Context, *, bootstrap: Bootstrap = None, output: Output = None) -> None:
    """Show the voters, who leads, and how far behind the others are."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        _print(settings, admin.describe_quorum())


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
    """Make a running controller a voter, once it has caught up."""
    settings = resolve(ctx, bootstrap, output)
    number, at, address = voter.partition("@")
    try:
        if not at or not number.isdecimal():
            raise ValueError(f"{voter!r} is not a controller; write NODE@HOST:PORT")
        parse_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NODE@HOST:PORT") from None
    with admin_client(settings) as admin:
        _print(settings, admin.add_voter(int(number), address))


@app.command("remove")
def remove(
    ctx: typer.Context,
    node: Annotated[int, typer.Argument(min=0, help="The controller's node id.")],
    *,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Make a controller no voter; one that is gone for good, or that is to be stopped for good."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        _print(settings, admin.remove_voter(node))


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


def _print(settings: Settings, quorum: QuorumDescription) -> None:
    if settings.as_json:
        print_json(asdict(quorum))
        return
    leader = str(quorum.leader_id) if quorum.leader_id >= 0 else "none"
    print(
        f"Leader: {leader}  Term: {quorum.term}  Committed: {quorum.commit_index}  "
        f"VotersSince: {quorum.voters_index}  AnsweredBy: {quorum.answered_by}"
    )
    print_table(
        ("Voter", "Address", "State", "LogEnd", "Behind", "Directory"),
        [
            (
                voter.node_id,
                format_address(voter.host, voter.port),
                _state(voter, quorum),
                voter.match_index if voter.match_index >= 0 else None,
                max(0, quorum.commit_index - voter.match_index) if voter.match_index >= 0 else None,
                voter.directory_id or None,
            )
            for voter in quorum.voters
        ],
        right=("Voter", "LogEnd", "Behind"),
    )


def _state(voter: QuorumVoter, quorum: QuorumDescription) -> str:
    if voter.node_id == quorum.leader_id:
        return "leader"
    return "wiped: remove and add it" if voter.is_wiped else "follower"
