"""`penstock cluster`: the brokers and the controllers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from penstock.cli.connections import admin_client
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.errors import PenstockError
from penstock.wire.transport import format_address

if TYPE_CHECKING:
    from penstock.client.descriptions import (
        BrokerDescription,
        ClusterDescription,
        QuorumDescription,
    )

app = typer.Typer(help="Show the brokers and the controllers.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    """Show the brokers and the controllers."""


@app.command("describe")
def describe(ctx: typer.Context, bootstrap: Bootstrap = None, output: Output = None) -> None:
    """Show every broker, whether it serves, and how the controllers stand."""
    settings = resolve(ctx, bootstrap, output)
    quorum: QuorumDescription | None = None
    trouble = ""
    with admin_client(settings) as admin:
        cluster = admin.describe_cluster()
        try:
            quorum = admin.describe_quorum()
        except PenstockError as error:
            # The brokers are shown all the same: this is when an operator needs them.
            trouble = error.message
    if settings.as_json:
        quorum_json = asdict(quorum) if quorum is not None else {"error": trouble}
        print_json({**asdict(cluster), "quorum": quorum_json})
        return
    _print_brokers(cluster)
    if quorum is not None:
        _print_quorum(quorum)
    else:
        print(f"Quorum: not known: {trouble}")


def broker_state(broker: BrokerDescription) -> str:
    """One word for an operator."""
    if broker.fenced:
        return "fenced"
    return "stopping" if broker.in_controlled_shutdown else "live"


def _print_brokers(cluster: ClusterDescription) -> None:
    controller = str(cluster.controller_id) if cluster.controller_id >= 0 else "none"
    print(
        f"Cluster: {cluster.cluster_id}  Controller: {controller}  "
        f"ControllerEpoch: {cluster.controller_epoch}  AnsweredBy: {cluster.answered_by}"
    )
    print_table(
        ("Broker", "Address", "Rack", "State", "BrokerEpoch"),
        [
            (
                broker.node_id,
                format_address(broker.host, broker.port),
                broker.rack or None,
                broker_state(broker),
                broker.broker_epoch,
            )
            for broker in sorted(cluster.brokers, key=lambda broker: broker.node_id)
        ],
        right=("Broker", "BrokerEpoch"),
    )


def _print_quorum(quorum: QuorumDescription) -> None:
    print_table(
        ("Controller", "Address", "Role", "LogEnd", "Behind"),
        [
            (
                voter.node_id,
                format_address(voter.host, voter.port),
                "leader" if voter.node_id == quorum.leader_id else "follower",
                voter.match_index if voter.match_index >= 0 else None,
                max(0, quorum.commit_index - voter.match_index) if voter.match_index >= 0 else None,
            )
            for voter in sorted(quorum.voters, key=lambda voter: voter.node_id)
        ],
        right=("Controller", "LogEnd", "Behind"),
    )
