"""`penstock topics`: make, list, describe, alter and delete topics."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.cluster import print_configs
from penstock.cli.connections import admin_client, key_values
from penstock.cli.errors import with_step
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.config_keys import MAX_INT32, MAX_INT64
from penstock.wire.errors import InvalidConfigError, OffsetOutOfRangeError
from penstock.wire.ids import TopicPartition
from penstock.wire.topic_config import MAX_PARTITIONS_PER_TOPIC

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import TopicDescription

_USUAL_REPLICATION: Final = 3

app = typer.Typer(help="Make, list, describe, alter and delete topics.", no_args_is_help=True)


@app.command("create")
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")],
    *,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", min=1, max=MAX_PARTITIONS_PER_TOPIC, help="How many partitions."
        ),
    ] = 1,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            "--replication-factor",
            min=1,
            max=MAX_INT32,
            help="Copies of each partition.",
            show_default="3, or all live brokers where they are fewer",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="KEY=VALUE",
            help="A topic config, such as min.insync.replicas=2; may be repeated.",
            show_default=False,
        ),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave a topic of this name as it is.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Make a topic."""
    settings = resolve(ctx, bootstrap, output)
    configs = key_values(config or [], "--config")
    with admin_client(settings) as admin:
        try:
            made = admin.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor or default_replication(admin),
                configs=configs,
                if_not_exists=if_not_exists,
            )
        except InvalidConfigError as error:
            raise with_step(error, "correct what --config KEY=VALUE names") from None
    if settings.as_json:
        print_json(asdict(made))
    elif made.created:
        print(f"created topic {name}")
    else:
        print(f"topic {name} exists already and stays as it is")


def default_replication(admin: AdminClient) -> int:
    """Three, or as many as there are brokers alive to hold the copies."""
    live = sum(1 for broker in admin.describe_cluster().brokers if not broker.fenced)
    return max(1, min(_USUAL_REPLICATION, live))


@app.command("list")
def list_topics(
    ctx: typer.Context,
    internal: Annotated[
        bool, typer.Option("--internal", help="Show the cluster's own topics as well.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """List topics."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        topics = sorted(admin.list_topics(include_internal=internal), key=lambda topic: topic.name)
    if settings.as_json:
        print_json([_topic_json(topic) for topic in topics])
        return
    print_table(
        ("Topic", "PartitionCount", "ReplicationFactor"),
        [(topic.name, topic.partition_count, topic.replication_factor) for topic in topics],
        right=("PartitionCount", "ReplicationFactor"),
    )


@app.command("describe")
def describe(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(help="The topics; without one, all.", metavar="NAME")
    ] = None,
    *,
    configs: Annotated[
        bool,
        typer.Option("--configs", help="Show every config in force, and who set it, instead."),
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show topics with the leader, the replicas and the in-sync replicas of each partition.

    Also why the others are out of sync, as the leaders see it: slow, stuck, bootstrapping, offline,
    damaged, or unknown where a leader does not answer.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        wanted = names or sorted(topic.name for topic in admin.list_topics())
        if configs:
            for name in wanted:
                if not settings.as_json:
                    print(f"Topic: {name}")
                print_configs(settings, admin.describe_configs(name))
            return
        topics = list(admin.describe_topics(wanted, out_of_sync=True)) if wanted else []
    if settings.as_json:
        print_json([_topic_json(topic) for topic in topics])
        return
    for topic in topics:
        _print_topic(topic)


def _print_topic(topic: TopicDescription) -> None:
    configs = ",".join(f"{key}={value}" for key, value in sorted(topic.configs.items()))
    print(
        f"Topic: {topic.name}  TopicId: {topic.topic_id}  "
        f"PartitionCount: {topic.partition_count}  "
        f"ReplicationFactor: {topic.replication_factor}  Configs: {configs or '-'}"
    )
    print_table(
        ("Partition", "Leader", "Replicas", "Isr", "Elr", "Offline", "OutOfSync"),
        [
            (
                entry.partition,
                entry.leader if entry.leader >= 0 else "none",
                entry.replicas,
                entry.isr,
                entry.elr or None,
                entry.offline or None,
                ", ".join(f"{one.node_id} {one.reason}" for one in entry.out_of_sync or ()) or None,
            )
            for entry in topic.partitions
        ],
        right=("Partition", "Leader"),
    )


def _topic_json(topic: TopicDescription) -> dict[str, Any]:
    return {
        **asdict(topic),
        "partition_count": topic.partition_count,
        "replication_factor": topic.replication_factor,
    }


@app.command("alter")
def alter(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")],
    *,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="KEY=VALUE",
            help="A topic config to set, such as min.insync.replicas=1; may be repeated.",
            show_default=False,
        ),
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            "--reset",
            "--delete-config",
            metavar="KEY",
            help="A topic config to give its default again; may be repeated.",
            show_default=False,
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            min=1,
            max=MAX_PARTITIONS_PER_TOPIC,
            help="How many partitions it shall have, more than now; keys then map to others.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Change configs of a topic, all of those named or none, or add partitions to it."""
    settings = resolve(ctx, bootstrap, output)
    configs = key_values(config or [], "--config")
    defaults = reset or []
    if not configs and not defaults and partitions is None:
        raise typer.BadParameter(
            "name what to change", param_hint="--config, --reset or --partitions"
        )
    if both := sorted(configs.keys() & set(defaults)):
        raise typer.BadParameter(f"{both[0]!r} is set as well", param_hint="--reset")
    with admin_client(settings) as admin:
        if configs or defaults:
            admin.alter_configs(name, configs, defaults)
        if partitions is not None:
            admin.create_partitions(name, partitions)
    if settings.as_json:
        grown = {} if partitions is None else {"partitions": partitions}
        print_json({"name": name, "set": configs, "reset": defaults, **grown})
    else:
        changes = [f"{key}={value}" for key, value in configs.items()]
        changes += [f"{key} to its default" for key in defaults]
        changes += [] if partitions is None else [f"{partitions} partitions"]
        print(f"altered topic {name}: {', '.join(changes)}")


@app.command("delete-records")
def delete_records(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")],
    *,
    before: Annotated[
        list[str],
        typer.Option(
            "--before",
            metavar="PARTITION=OFFSET",
            help="Delete the partition's records before this offset, or all with `end`; may be "
            "repeated.",
        ),
    ],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Delete the oldest records of partitions. There is no way back."""
    settings = resolve(ctx, bootstrap, output)
    offsets = {
        TopicPartition(name, _whole(partition, MAX_INT32)): _offset(offset)
        for partition, offset in key_values(before, "--before").items()
    }
    with admin_client(settings) as admin:
        try:
            starts = admin.delete_records(offsets)
        except OffsetOutOfRangeError as error:
            step = "name an offset up to that, or delete all with --before PARTITION=end"
            raise with_step(error, step) from None
    for partition, start in sorted(starts.items()):
        if settings.as_json:
            entry = {"topic": name, "partition": partition.partition, "log_start_offset": start}
            print_json(entry)
        else:
            print(f"{partition} begins at offset {start}")


def _offset(text: str) -> int:
    """An offset; -1, as in the protocol, for the end of what is committed."""
    return -1 if text == "end" else _whole(text, MAX_INT64)


def _whole(text: str, highest: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= highest):
        raise typer.BadParameter(
            f"{text!r} is no whole number from 0 to {highest}; write PARTITION=OFFSET, such as "
            "0=42 or 0=end",
            param_hint="--before",
        )
    return int(text)


@app.command("delete")
def delete(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="The topics to delete.", metavar="NAME")],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Delete topics with all their records. There is no way back."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        for name in names:
            admin.delete_topic(name)
            if settings.as_json:
                print_json({"name": name, "deleted": True})
            else:
                print(f"deleted topic {name}")
