"""`penstock cluster`: the brokers and the controllers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import admin_client, key_values
from penstock.cli.errors import EXIT_FAILED, OWN_STEP, report
from penstock.cli.output import print_json, print_table
from penstock.cli.quorum_table import controller_rows, leader_doubt, quorum_json
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import ClusterNotFoundedError, PenstockError
from penstock.wire.transport import format_address

if TYPE_CHECKING:
    from penstock.client.descriptions import (
        BrokerDescription,
        ClusterDescription,
        ConfigEntry,
        QuorumDescription,
    )

app = typer.Typer(
    help="Show the brokers and the controllers, and change what holds for all of them.",
    no_args_is_help=True,
)


@app.command("describe")
def describe(
    ctx: typer.Context,
    *,
    configs: Annotated[
        bool,
        typer.Option("--configs", help="Show the settings of a node, and who set them, instead."),
    ] = False,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            min=0,
            max=MAX_INT32,
            help="With --configs: whose.",
            show_default="whichever answers",
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show every broker, whether it serves, and how the controllers stand.

    While no majority of the controllers confirms who leads them, the brokers are shown as one of
    them heard of them last, with a warning on standard error, and the command ends with 1.
    """
    settings = resolve(ctx, bootstrap, output)
    if configs:
        with admin_client(settings) as admin:
            print_configs(settings, admin.describe_node_configs(node))
        return
    if node is not None:
        raise typer.BadParameter("it goes with --configs", param_hint="--node")
    quorum: QuorumDescription | None = None
    trouble, step = "", ""
    with admin_client(settings) as admin:
        cluster = admin.describe_cluster()
        try:
            quorum = admin.describe_quorum()
        except ClusterNotFoundedError:
            raise  # There are no brokers to be shown yet.
        except PenstockError as error:
            # The brokers are shown all the same: this is when an operator needs them.
            trouble, _, step = error.message.partition(OWN_STEP)
    if settings.as_json:
        told = quorum_json(quorum) if quorum is not None else {"error": trouble}
        print_json({**asdict(cluster), "quorum": told})
    else:
        _print_brokers(cluster)
        if quorum is not None:
            _print_quorum(quorum)
        else:
            print(f"Quorum: not known: {trouble}")
    if quorum is not None:
        doubt, _, step = leader_doubt(quorum).partition("\nnext: ")
    else:
        doubt = "it is not known how the controllers stand"
    if doubt:
        report(
            f"warning: {doubt}; the brokers are shown as broker {cluster.answered_by} heard of "
            f"them last\nnext: {step or 'see `penstock quorum status`'}"
        )
        raise typer.Exit(EXIT_FAILED)


@app.command("alter")
def alter(
    ctx: typer.Context,
    *,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="KEY=VALUE",
            help="A setting for all nodes, such as leader.imbalance.enable=false; may be repeated.",
            show_default=False,
        ),
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            "--reset",
            "--delete-config",
            metavar="KEY",
            help="A setting that each node's own file decides again; may be repeated.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Change settings of all nodes, without a restart: all of those named or none."""
    settings = resolve(ctx, bootstrap, output)
    configs = key_values(config or [], "--config")
    deleted = reset or []
    if not configs and not deleted:
        raise typer.BadParameter("name what to change", param_hint="--config or --reset")
    with admin_client(settings) as admin:
        admin.alter_cluster_configs(configs, deleted)
    if settings.as_json:
        print_json({"set": configs, "deleted": deleted})
    else:
        changes = [f"{key}={value}" for key, value in configs.items()]
        changes += [f"{key} as each node says" for key in deleted]
        print(f"altered the cluster: {', '.join(changes)}")


@app.command("upgrade")
def upgrade(
    ctx: typer.Context,
    version: Annotated[
        int | None,
        typer.Option(
            "--metadata-version",
            min=1,
            max=MAX_INT32,
            help="The level to raise it to.",
            show_default="the newest that all nodes support",
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Let the cluster use what the software now on every node can do. There is no way back."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        before = admin.describe_cluster().metadata_version
        now = admin.raise_metadata_version(version)
    if settings.as_json:
        print_json({"metadata_version": now, "before": before})
    elif now == before:
        print(f"the cluster works at metadata.version {now} already")
    else:
        print(f"the cluster works at metadata.version {now} now; before it was {before}")


@app.command("unregister")
def unregister(
    ctx: typer.Context,
    node: Annotated[
        int, typer.Argument(help="The broker's node id.", metavar="NODE", min=0, max=MAX_INT32)
    ],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Forget a broker that is gone for good: one that is stopped, and has no replicas."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        admin.unregister_broker(node)
    if settings.as_json:
        print_json({"node_id": node, "unregistered": True})
    else:
        print(f"unregistered broker {node}")


def print_configs(settings: Settings, entries: list[ConfigEntry]) -> None:
    """Configs with the value in force and who says so."""
    if settings.as_json:
        print_json([asdict(entry) for entry in entries])
        return
    print_table(
        ("Key", "Value", "Source", "Dynamic"),
        [
            (entry.key, entry.value or None, entry.source, "yes" if entry.dynamic else "no")
            for entry in entries
        ],
    )


def broker_state(broker: BrokerDescription) -> str:
    """One word for an operator."""
    if broker.fenced:
        return "fenced"
    if broker.in_controlled_shutdown:
        return "stopping"
    return "drained" if broker.drained_since_ms else "live"


def _external_address(broker: BrokerDescription) -> str | None:
    """Where clients from outside reach it, if by an address of their own."""
    if not broker.external_host:
        return None
    return format_address(broker.external_host, broker.external_port)


def _print_brokers(cluster: ClusterDescription) -> None:
    controller = str(cluster.controller_id) if cluster.controller_id >= 0 else "none"
    print(
        f"Cluster: {cluster.cluster_id}  Controller: {controller}  "
        f"ControllerEpoch: {cluster.controller_epoch}  "
        f"MetadataVersion: {cluster.metadata_version}  AnsweredBy: {cluster.answered_by}"
    )
    outside = any(broker.external_host for broker in cluster.brokers)
    print_table(
        (
            "Broker",
            "Address",
            *(("External",) if outside else ()),
            "Rack",
            "State",
            "Leads",
            "BrokerEpoch",
            "OfflineReplicas",
        ),
        [
            (
                broker.node_id,
                format_address(broker.host, broker.port),
                *((_external_address(broker),) if outside else ()),
                broker.rack or None,
                broker_state(broker),
                broker.leaderships if broker.leaderships >= 0 else None,
                broker.broker_epoch,
                broker.offline_replicas,
            )
            for broker in sorted(cluster.brokers, key=lambda broker: broker.node_id)
        ],
        right=("Broker", "Leads", "BrokerEpoch", "OfflineReplicas"),
    )


def _print_quorum(quorum: QuorumDescription) -> None:
    print_table(
        ("Controller", "Address", "Role", "LogEnd", "Behind"),
        [
            (row.node_id, row.address, row.state, row.log_end, row.behind)
            for row in controller_rows(quorum)
        ],
        right=("Controller", "LogEnd", "Behind"),
    )
