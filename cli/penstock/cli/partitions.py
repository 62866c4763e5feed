"""`penstock partitions`: move replicas to other brokers, and elect leaders."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connections import admin_client
from penstock.cli.draining import drain
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    InvalidRequestError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import PartitionReassignment

app = typer.Typer(help="Move replicas to other brokers, and elect leaders.", no_args_is_help=True)

Plan = dict[TopicPartition, list[int]]


@app.command("reassign")
def reassign(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to move: topics, or single partitions.", metavar="[TOPIC[:PARTITION]]..."
        ),
    ] = None,
    *,
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            metavar="NODE,NODE,...",
            help="The brokers to move to, the preferred leader first; of a whole topic's "
            "partitions each begins with another, so that its leaders are spread.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="PLAN.json",
            help='A plan: {"partitions": [{"topic": ..., "partition": 0, "replicas": [4, 5]}]}.',
            show_default=False,
        ),
    ] = None,
    from_broker: Annotated[
        int | None,
        typer.Option(
            "--from-broker",
            min=0,
            max=MAX_INT32,
            metavar="NODE",
            help="Move every replica of this broker to others, or those of the topics named.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NODE,NODE,...",
            help="With --from-broker: the brokers that may take the replicas.",
            show_default="all other live ones",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show what moves, and how far each replica is.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Stop moves, and restore the replicas from before.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show the moves, and begin none.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Move partitions to other brokers.

    The old replicas stay until the new ones are in sync. Without a broker to move to, say whether
    to --list or to --cancel.
    """
    settings = resolve(ctx, bootstrap, output)
    names = names or []
    ways = (replicas is not None, file is not None, from_broker is not None, show, cancel)
    if to is not None and from_broker is None:
        raise typer.BadParameter("it goes with --from-broker", param_hint="--to")
    if sum(ways) != 1:
        raise typer.BadParameter(
            "give one of them", param_hint="--replicas, --file, --from-broker, --list or --cancel"
        )
    if file is not None and names:
        raise typer.BadParameter("the plan names what to move", param_hint="--file")
    if replicas is not None and not names:
        raise typer.BadParameter("name a topic to move", param_hint="TOPIC")
    targets = node_ids(replicas, "--replicas") if replicas is not None else []
    takers = node_ids(to, "--to") if to is not None else None
    if takers is not None and from_broker in takers:
        raise typer.BadParameter(f"broker {from_broker} is to lose its replicas", param_hint="--to")
    with admin_client(settings) as admin:
        if show:
            _print_moves(settings, admin.list_partition_reassignments(_expand(admin, names)))
        elif cancel:
            _cancel(settings, admin, _expand(admin, names), dry_run)
        elif from_broker is not None:
            plan = plan_drain(admin, names, from_broker, takers)
            if plan or settings.as_json:
                _move(settings, admin, plan, dry_run)
            else:
                what = f" of {', '.join(names)}" if names else ""
                print(f"broker {from_broker} has no replicas{what}: there is nothing to move")
        else:
            plan = _read_plan(file) if file is not None else _spread(admin, names, targets)
            _move(settings, admin, plan, dry_run)


def _move(settings: Settings, admin: AdminClient, plan: Plan, dry_run: bool) -> None:
    before = _replicas(admin, sorted({where.topic for where in plan}))
    for where in plan:
        if where not in before:
            count = sum(known.topic == where.topic for known in before)
            raise UnknownTopicOrPartitionError(
                f"{where.topic} has no partition {where.partition}; it has {count}, from 0 to "
                f"{count - 1}; next: name one of these"
            )
    admin.alter_partition_reassignments(plan, validate_only=dry_run)
    if settings.as_json:
        print_json(
            [
                {**_named(where), "from": before[where], "to": replicas, "begun": not dry_run}
                for where, replicas in plan.items()
            ]
        )
        return
    print_table(
        ("Partition", "From", "To"),
        [(str(where), before[where], replicas) for where, replicas in plan.items()],
    )
    if dry_run:
        print("nothing was moved: this was a --dry-run")
    else:
        print("see how far it is with: penstock partitions reassign --list")


def _cancel(
    settings: Settings, admin: AdminClient, named: list[TopicPartition], dry_run: bool
) -> None:
    moving = [entry.partition for entry in admin.list_partition_reassignments(named)]
    admin.alter_partition_reassignments(dict.fromkeys(moving), validate_only=dry_run)
    if settings.as_json:
        print_json([{**_named(where), "cancelled": not dry_run} for where in moving])
    elif not moving:
        print("nothing moves, and nothing was cancelled")
    else:
        verb = "would cancel" if dry_run else "cancelled"
        print(f"{verb} the moves of {', '.join(map(str, moving))}")


def _print_moves(settings: Settings, moves: list[PartitionReassignment]) -> None:
    if settings.as_json:
        print_json([{**asdict(move), "partition": _named(move.partition)} for move in moves])
        return
    if not moves:
        print("nothing moves")
        return
    print_table(
        ("Partition", "Leader", "Target", "Replica", "Role", "InSync", "LogEnd", "Behind"),
        [
            (
                str(move.partition),
                move.leader if move.leader >= 0 else "none",
                move.target,
                replica.node_id,
                _role(move, replica.node_id),
                "yes" if replica.in_sync else "no",
                replica.log_end_offset if replica.log_end_offset >= 0 else None,
                replica.lag if replica.lag >= 0 else None,
            )
            for move in moves
            for replica in move.replicas
        ],
        right=("Replica", "LogEnd", "Behind"),
    )
    print(f"{counted(len(moves), 'partition', '')} on the way")


def _role(move: PartitionReassignment, node_id: int) -> str:
    if node_id in move.adding:
        return "adding"
    return "removing" if node_id in move.removing else "staying"


@app.command("elect")
def elect(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Topics, or single partitions; without one, all that another leads than is "
            "preferred.",
            metavar="[TOPIC[:PARTITION]]...",
        ),
    ] = None,
    *,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Where no in-sync replica lives, let any other lead: records that only the dead "
            "ones have are lost for good.",
        ),
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Give partitions their preferred leader again, or, as the last resort, any leader at all."""
    settings = resolve(ctx, bootstrap, output)
    if unclean and not names:
        raise typer.BadParameter("name the partitions that may lose records", param_hint="TOPIC")
    with admin_client(settings) as admin:
        wanted = _expand(admin, names or [])
        leaders = admin.elect_leaders(wanted, unclean=unclean)
    if settings.as_json:
        print_json([{**_named(where), "leader": leaders[where]} for where in sorted(leaders)])
    elif not leaders:
        print("no election was needed")
    else:
        print_table(
            ("Partition", "Leader"),
            [(str(where), leaders[where]) for where in sorted(leaders)],
            right=("Leader",),
        )


def _named(where: TopicPartition) -> dict[str, Any]:
    return {"topic": where.topic, "partition": where.partition}


def _split(name: str) -> tuple[str, int | None]:
    """A topic, and the partition if one is named. Topics' names have no colon."""
    topic, colon, number = name.rpartition(":")
    if not colon:
        return name, None
    if not number.isdecimal() or not topic:
        raise typer.BadParameter(f"{name!r} is not TOPIC or TOPIC:PARTITION")
    if int(number) > MAX_INT32:
        raise typer.BadParameter(f"no topic has a partition {number}")
    return topic, int(number)


def _replicas(admin: AdminClient, topics: list[str]) -> dict[TopicPartition, tuple[int, ...]]:
    return {
        TopicPartition(topic.name, entry.partition): entry.replicas
        for topic in admin.describe_topics(topics)
        for entry in topic.partitions
    }


def _expand(admin: AdminClient, names: list[str]) -> list[TopicPartition]:
    """The partitions named; those of a topic where that is all that is named."""
    split = [_split(name) for name in names]
    whole = {topic for topic, number in split if number is None}
    known = _replicas(admin, sorted(whole)) if whole else {}
    found = dict.fromkeys(known)
    found.update({TopicPartition(topic, n): None for topic, n in split if n is not None})
    return list(found)


def plan_drain(admin: AdminClient, names: list[str], leaving: int, to: list[int] | None) -> Plan:
    """Where the replicas of a broker go, each partition taken at where it is moving already.

    Of the topics and partitions named, or all. Raises BrokerIdNotRegisteredError, or
    InvalidReplicaAssignmentError where no broker is left that could take a replica.
    """
    brokers = {broker.node_id: broker for broker in admin.describe_cluster().brokers}
    for node in (leaving, *(to or ())):
        if node not in brokers:
            raise BrokerIdNotRegisteredError.among(node, brokers)
    live = [
        node
        for node, broker in brokers.items()
        if node != leaving and not broker.fenced and not broker.in_controlled_shutdown
    ]
    racks = {node: broker.rack for node, broker in brokers.items()}
    every = [topic.name for topic in admin.list_topics(include_internal=True)]
    replicas = _replicas(admin, every)
    only = set(_expand(admin, names)) if names else None
    for move in admin.list_partition_reassignments():
        replicas[move.partition] = move.target
    candidates = {node: racks[node] for node in (live if to is None else to)}
    plan = drain(leaving, replicas, candidates, racks, only)
    return {where: list(nodes) for where, nodes in plan.items()}


def _spread(admin: AdminClient, names: list[str], nodes: list[int]) -> Plan:
    single = {where for where in map(_split, names) if where[1] is not None}
    plan: Plan = {}
    for where in _expand(admin, names):
        exact = (where.topic, where.partition) in single
        first = 0 if exact else where.partition % len(nodes)
        plan[where] = nodes[first:] + nodes[:first]
    return plan


def node_ids(text: str, option: str) -> list[int]:
    """Node ids that a person separated by commas. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MAX_INT32 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of node ids", param_hint=option)
    return [int(part) for part in parts]


def _read_plan(path: Path) -> Plan:
    """The plan in a file, in the shape that Kafka's tool takes as well."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["partitions"]
        moves = [
            (
                TopicPartition(str(entry["topic"]), int(entry["partition"])),
                [int(node) for node in entry["replicas"]],
            )
            for entry in entries
        ]
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidRequestError(
            f"{path} is no plan: wanted is "
            '{"partitions": [{"topic": "orders", "partition": 0, "replicas": [4, 5, 6]}]}'
        ) from None
    plan = dict(moves)
    if not plan or not all(plan.values()):
        raise InvalidRequestError(
            f"{path} names no partitions, or one without replicas, where both are wanted"
        )
    if len(plan) < len(moves):
        named = [where for where, _ in moves]
        twice = next(where for where in named if named.count(where) > 1)
        raise InvalidRequestError(f"{path} names {twice} more than once; which one is meant?")
    return plan
