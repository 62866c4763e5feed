"""`penstock transactions`: what transactions do, and how to end those that nobody else will."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connections import admin_client
from penstock.cli.errors import EXIT_FAILED
from penstock.cli.output import print_json, print_table
from penstock.cli.places import format_time_ms
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32, MAX_INT64, suggest
from penstock.wire.errors import TransactionalIdNotFoundError
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import HangingTransaction, TransactionDescription

app = typer.Typer(
    help="List, describe and abort transactions, and find those that nobody will end.",
    no_args_is_help=True,
)

_STATES = ("empty", "ongoing", "prepare_commit", "prepare_abort", "kept")
_MAX_TIMEOUT = "transaction.max.timeout.ms"


@app.command("list")
def list_transactions(
    ctx: typer.Context,
    *,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help=f"Only these: {', '.join(_STATES)}.", show_default="all"),
    ] = None,
    longer_than: Annotated[
        float,
        typer.Option(
            "--longer-than", min=0, metavar="SECONDS", help="Only what has gone on for so long."
        ),
    ] = 0.0,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """List transactional ids, those of engines' attempts among them."""
    settings = resolve(ctx, bootstrap, output)
    states = state or []
    for name in states:
        if name not in _STATES:
            near = suggest(name, list(_STATES)) or f"; the states are {', '.join(_STATES)}"
            raise typer.BadParameter(f"there is no state {name!r}{near}", param_hint="--state")
    with admin_client(settings) as admin:
        found = admin.list_transactions(states, min_duration_ms=round(longer_than * 1000))
    if settings.as_json:
        print_json([asdict(entry) for entry in found])
        return
    print_table(
        ("TransactionalId", "State", "Since", "ProducerId", "Coordinator"),
        [
            (e.transactional_id, e.state, format_time_ms(e.since_ms), e.producer_id, e.coordinator)
            for e in found
        ],
        right=("ProducerId", "Coordinator"),
    )


@app.command("describe")
def describe(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="The transactional ids.", metavar="ID")],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show where each id stands, since when, and the partitions in its transaction."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        found = [_described(admin, name) for name in names]
    if settings.as_json:
        print_json([_description_json(entry) for entry in found])
        return
    print_table(
        (
            "TransactionalId",
            "State",
            "ProducerId",
            "Epoch",
            "TimeoutMs",
            "Began",
            "LastEnd",
            "Partitions",
        ),
        [
            (
                entry.transactional_id,
                entry.state,
                entry.producer_id,
                entry.producer_epoch,
                entry.transaction_timeout_ms,
                format_time_ms(entry.start_ms),
                _last_end(entry),
                [str(partition) for partition in entry.partitions] or None,
            )
            for entry in found
        ],
        right=("ProducerId", "Epoch", "TimeoutMs"),
    )


@app.command("hanging")
def hanging(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="The topics to look in.", metavar="TOPIC", show_default="all"),
    ] = None,
    *,
    longer_than: Annotated[
        float | None,
        typer.Option(
            "--longer-than",
            min=0,
            metavar="SECONDS",
            help="Only where nothing was written for so long.",
            show_default=_MAX_TIMEOUT,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Find transactions that are open in a log and that no coordinator knows of.

    Readers of committed records stand still before them. There are none unless data were lost;
    `penstock transactions abort` ends one. Exit status 1 when one is found, or when that can't be
    told, since a coordinator, or a partition's leader, did not answer.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        older_ms = _max_timeout_ms(admin) if longer_than is None else round(longer_than * 1000)
        found = admin.find_hanging(_partitions(admin, names or []), older_than_ms=older_ms)
    if settings.as_json:
        print_json(
            {
                "hanging": [_hanging_json(entry) for entry in found.hanging],
                "in_doubt": [
                    _hanging_json(entry) | {"reason": reason} for entry, reason in found.in_doubt
                ],
                "not_searched": [
                    where._asdict() | {"reason": reason} for where, reason in found.not_searched
                ],
            }
        )
    else:
        if found.hanging:
            _print_hanging(found.hanging)
        elif not found.in_doubt:
            elsewhere = " in the others" if found.not_searched else ""
            print(f"no transaction hangs{elsewhere}")
        if found.in_doubt:
            _print_in_doubt(found.in_doubt)
        if found.not_searched:
            _print_not_searched(found.not_searched)
    if found.hanging or found.in_doubt or found.not_searched:
        raise typer.Exit(EXIT_FAILED)


@app.command("abort")
def abort(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="The transactional id.", metavar="ID", show_default=False),
    ] = None,
    *,
    topic: Annotated[
        str | None,
        typer.Option("--topic", help="Of a hanging one: where it is.", show_default=False),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            min=0,
            max=MAX_INT32,
            help="Of a hanging one: the topic's partition.",
            show_default=False,
        ),
    ] = None,
    producer_id: Annotated[
        int | None,
        typer.Option(
            "--producer-id",
            min=0,
            max=MAX_INT64,
            help="Of a hanging one: its producer.",
            show_default=False,
        ),
    ] = None,
    start_offset: Annotated[
        int | None,
        typer.Option(
            "--start-offset",
            min=0,
            max=MAX_INT64,
            help="Where it begins: another one of this producer is left alone.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With a place: ask no coordinator. What one commits later is lost there.",
        ),
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Abort the open transaction of an id; its producer may begin another one.

    One that hangs has no id, and is named by --topic, --partition and --producer-id, as `penstock
    transactions hanging` shows them. Refused where a coordinator knows of it, or where that can't
    be told; only where a partition of __transaction_state is lost for good is --force in place.
    """
    settings = resolve(ctx, bootstrap, output)
    place = {"--topic": topic, "--partition": partition, "--producer-id": producer_id}
    given = [option for option, value in place.items() if value is not None]
    if name is not None and force:
        raise typer.BadParameter("only a place can be forced", param_hint="--force")
    if name is not None and (given or start_offset is not None):
        raise typer.BadParameter(
            "the id says which transaction", param_hint=", ".join(given) or "--start-offset"
        )
    if name is None and not given:
        raise typer.BadParameter("name one, or the place of a hanging one", param_hint="ID")
    with admin_client(settings) as admin:
        if name is not None:
            _abort(settings, admin, name)
        elif topic is None or partition is None or producer_id is None:
            missing = [option for option in place if option not in given]
            raise typer.BadParameter("a hanging one needs it", param_hint=", ".join(missing))
        else:
            where = TopicPartition(topic, partition)
            if force:
                print(
                    "no coordinator is asked: if one knows of this transaction and commits it, "
                    f"{where} keeps nothing of it, and only the log of its broker will say so",
                    file=sys.stderr,
                    flush=True,
                )
            began = admin.abort_hanging(where, producer_id, start_offset, force=force)
            _say(
                settings,
                {"topic": topic, "partition": partition, "producer_id": producer_id}
                | {"start_offset": began, "aborted": True},
                f"aborted what producer id {producer_id} had open in {where} from offset {began}",
            )


def _abort(settings: Settings, admin: AdminClient, name: str) -> None:
    try:
        admin.abort_transaction(name)
    except TransactionalIdNotFoundError as error:
        raise _not_found(admin, name, error) from error
    _say(
        settings,
        {"transactional_id": name, "aborted": True},
        f"aborted the open transaction of {name}",
    )


def _say(settings: Settings, data: dict[str, Any], text: str) -> None:
    if settings.as_json:
        print_json(data)
    else:
        print(text)


def _described(admin: AdminClient, name: str) -> TransactionDescription:
    try:
        [found] = admin.describe_transactions([name])
    except TransactionalIdNotFoundError as error:
        raise _not_found(admin, name, error) from error
    return found


def _not_found(
    admin: AdminClient, name: str, error: TransactionalIdNotFoundError
) -> TransactionalIdNotFoundError:
    """The same with the near id, where there is one."""
    known = [entry.transactional_id for entry in admin.list_transactions()]
    return TransactionalIdNotFoundError(
        f"there is no transactional id {name!r}{suggest(name, known)}; next: `penstock "
        "transactions list` shows them"
        if suggest(name, known)
        else error.message
    )


def _max_timeout_ms(admin: AdminClient) -> int:
    """How long a transaction may be open, as brokers have it."""
    for entry in admin.describe_node_configs():
        if entry.key == _MAX_TIMEOUT:
            return int(entry.value)
    raise AssertionError(f"brokers have no {_MAX_TIMEOUT}")


def _partitions(admin: AdminClient, names: list[str]) -> list[TopicPartition]:
    """Those of the topics, or of all that there are, the cluster's own among them."""
    topics = admin.describe_topics(names) if names else admin.list_topics(include_internal=True)
    return [
        TopicPartition(topic.name, entry.partition)
        for topic in topics
        for entry in topic.partitions
    ]


def _print_in_doubt(found: Sequence[tuple[HangingTransaction, str]]) -> None:
    print(f"of {counted(len(found), 'open transaction')} it can't be told; leave it alone:")
    for entry, reason in found:
        print(
            f"{entry.partition}, producer id {entry.producer_id}, from offset "
            f"{entry.start_offset}: {reason}"
        )


def _print_not_searched(found: Sequence[tuple[TopicPartition, str]]) -> None:
    which = counted(len(found), "partition", "was")
    print(f"{which} not looked in; next: look again when the leaders answer:")
    for partition, reason in found:
        print(f"{partition}: {reason}")


def _print_hanging(found: Sequence[HangingTransaction]) -> None:
    now_ms = time.time_ns() // 1_000_000
    print_table(
        ("Topic", "Partition", "ProducerId", "Epoch", "StartOffset", "LastWrite", "SecondsAgo"),
        [
            (
                entry.partition.topic,
                entry.partition.partition,
                entry.producer_id,
                entry.producer_epoch,
                entry.start_offset,
                format_time_ms(entry.last_timestamp_ms),
                max(0, now_ms - entry.last_timestamp_ms) // 1000,
            )
            for entry in found
        ],
        right=("Partition", "ProducerId", "Epoch", "StartOffset", "SecondsAgo"),
    )
    print(f"{counted(len(found), 'transaction')} will not end by themselves; next:")
    for entry in found:
        print(
            f"penstock transactions abort --topic {entry.partition.topic} "
            f"--partition {entry.partition.partition} --producer-id {entry.producer_id} "
            f"--start-offset {entry.start_offset}"
        )


def _last_end(entry: TransactionDescription) -> str | None:
    """How the last transaction ended, and by whom; None where none has."""
    if entry.last_ended_by == "nobody":
        return None
    outcome = "committed" if entry.last_committed else "aborted"
    return f"{outcome} by {entry.last_ended_by}"


def _description_json(entry: TransactionDescription) -> dict[str, Any]:
    return asdict(entry) | {"partitions": [partition._asdict() for partition in entry.partitions]}


def _hanging_json(entry: HangingTransaction) -> dict[str, Any]:
    return entry.partition._asdict() | {
        "producer_id": entry.producer_id,
        "producer_epoch": entry.producer_epoch,
        "start_offset": entry.start_offset,
        "last_timestamp_ms": entry.last_timestamp_ms,
    }
