"""`penstock groups offsets`: save, restore, move and delete the committed offsets of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connections import admin_client
from penstock.cli.errors import report, with_step
from penstock.cli.group_offsets_file import FileFormat, parse, render
from penstock.cli.output import print_json, print_table
from penstock.cli.places import TIME_HELP, expand, parse_partitions, parse_time_ms
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT64
from penstock.wire.errors import (
    GroupIdNotFoundError,
    InvalidRequestError,
    NonEmptyGroupError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client import AdminClient, OffsetAndMetadata
    from penstock.client.aio_admin import OffsetSpec

app = typer.Typer(
    help="Save, restore, move and delete the committed offsets of a group.", no_args_is_help=True
)

Group = Annotated[str, typer.Argument(help="The group.", metavar="GROUP")]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:PARTITION,...]",
        help="Only this topic, or these partitions of it; may be repeated.",
        show_default="all that the group has",
    ),
]
Execute = Annotated[
    bool,
    typer.Option("--execute", help="Commit the new offsets. Without it they are only shown."),
]


@dataclass(frozen=True, slots=True)
class Change:
    """A partition's committed offset, now and then; the log begins and ends at these offsets.

    ``asked`` is the offset that was asked for, where the log does not reach to it.
    """

    partition: TopicPartition
    current: int | None
    new: OffsetAndMetadata
    log_start: int
    log_end: int
    asked: int | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """Where offsets are to move: to a place or time, else to an offset, else so far from here."""

    spec: OffsetSpec | None
    offset: int | None
    shift_by: int


@app.command("export")
def export(
    ctx: typer.Context,
    name: Group,
    *,
    topic: Topics = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Where to write.", show_default="standard output"),
    ] = None,
    file_format: Annotated[
        FileFormat,
        typer.Option("--format", help="json, or csv as Kafka's tools write it with a header."),
    ] = FileFormat.JSON,
    bootstrap: Bootstrap = None,
) -> None:
    """Write down the group's committed offsets, for `import` to read."""
    settings = resolve(ctx, bootstrap, None)
    wanted = [parse_partitions(text, "--topic") for text in topic or []]
    with admin_client(settings) as admin:
        [group] = admin.describe_groups([name])
    offsets = {where: entry for where, entry in group.offsets.items() if _is_in(where, wanted)}
    text = render(name, offsets, file_format)
    if file is None or str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {file}: {error.strerror}") from None
    report(f"wrote {counted(len(offsets), 'offset')} of group {name} to {file}")


@app.command("import")
def import_offsets(
    ctx: typer.Context,
    name: Group,
    file: Annotated[
        Path, typer.Argument(help="What `export` wrote, or - for standard input.", metavar="FILE")
    ],
    *,
    execute: Execute = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Commit the offsets of a file for the group, which need not be the one they are from.

    Offsets that the log does not reach to any more, or not yet, become its first or its last. The
    group must have no members: stop them first. Without --execute nothing is changed.
    """
    settings = resolve(ctx, bootstrap, output)
    offsets = parse(_read(file), str(file))
    with admin_client(settings) as admin:
        expand(admin, [(where.topic, (where.partition,)) for where in offsets])
        changes = _plan(admin, name, offsets)
        _carry_out(settings, admin, name, changes, execute=execute)


@app.command("reset")
def reset(
    ctx: typer.Context,
    name: Group,
    *,
    topic: Topics = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PLACE",
            help=f"earliest, latest, or {TIME_HELP}: the first record of that time or later.",
            show_default=False,
        ),
    ] = None,
    to_offset: Annotated[
        int | None,
        typer.Option(
            "--to-offset",
            min=0,
            max=MAX_INT64,
            help="To this offset, in each partition.",
            show_default=False,
        ),
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option(
            "--shift-by",
            help="So many records on from where the group stands, or back where it is negative.",
            show_default=False,
        ),
    ] = None,
    execute: Execute = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Have the group read again, or skip: move its committed offsets.

    Give one of --to, --to-offset and --shift-by. Without --topic every partition moves that the
    group has committed an offset for. An offset outside of the log becomes its first or its last.
    The group must have no members: stop them first. Without --execute nothing is changed.
    """
    settings = resolve(ctx, bootstrap, output)
    if sum(option is not None for option in (to, to_offset, shift_by)) != 1:
        raise typer.BadParameter("give one of them", param_hint="--to, --to-offset or --shift-by")
    goal = Goal(None if to is None else _place(to), to_offset, shift_by or 0)
    wanted = [parse_partitions(text, "--topic") for text in topic or []]
    with admin_client(settings) as admin:
        current = _current(admin, name)
        partitions = expand(admin, wanted) if wanted else sorted(current)
        if not partitions:
            raise with_step(
                InvalidRequestError(f"group {name} has committed nothing yet"),
                "name what it shall read with --topic",
            )
        new = _targets(admin, partitions, current, goal)
        _carry_out(settings, admin, name, _plan(admin, name, new), execute=execute)


@app.command("delete")
def delete(
    ctx: typer.Context,
    name: Group,
    *,
    topic: Annotated[
        list[str],
        typer.Option(
            "--topic",
            metavar="TOPIC[:PARTITION,...]",
            help="This topic, or these partitions of it; may be repeated.",
        ),
    ],
    execute: Annotated[
        bool,
        typer.Option("--execute", help="Delete the offsets. Without it they are only shown."),
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Forget where the group stands in topics that it does not read any more.

    Whoever of the group reads them again begins where its `auto_offset_reset` says. Refused for a
    topic that a member subscribes to; members that read others may go on. There is no way back but
    `import` of what `export` wrote. Without --execute nothing is changed.
    """
    settings = resolve(ctx, bootstrap, output)
    wanted = [parse_partitions(text, "--topic") for text in topic]
    with admin_client(settings) as admin:
        named = expand(admin, [one for one in wanted if one[1] is not None])
        expand(admin, wanted)  # A topic that is not there is a slip of the keyboard.
        committed = admin.list_group_offsets(name)
        _require_committed(name, wanted, named, committed)
        chosen = {where: committed[where] for where in sorted(committed) if _is_in(where, wanted)}
        deleted = dict(chosen)
        try:
            for topic_name in sorted({where.topic for where in chosen}) if execute else []:
                deleted = {w: entry for w, entry in chosen.items() if w.topic < topic_name}
                of_topic = [where for where in chosen if where.topic == topic_name]
                admin.delete_group_offsets(name, of_topic)
            deleted = chosen
        finally:
            if deleted:
                _show_deleted(settings, name, deleted, execute=execute)


def _require_committed(
    name: str,
    wanted: list[tuple[str, tuple[int, ...] | None]],
    named: list[TopicPartition],
    committed: Mapping[TopicPartition, OffsetAndMetadata],
) -> None:
    """Raise what was named and is not there to be deleted."""
    topics = {where.topic for where in committed}
    missing = [str(where) for where in named if where not in committed]
    missing += [text for text, numbers in wanted if numbers is None and text not in topics]
    if missing:
        raise with_step(
            InvalidRequestError(
                f"group {name} has committed no offset for {', '.join(sorted(missing))}"
            ),
            f"see what it has with `penstock groups describe {name}`",
        )


def _show_deleted(
    settings: Settings,
    name: str,
    deleted: Mapping[TopicPartition, OffsetAndMetadata],
    *,
    execute: bool,
) -> None:
    if settings.as_json:
        offsets = [
            {
                "topic": where.topic,
                "partition": where.partition,
                "committed_offset": entry.offset,
            }
            for where, entry in deleted.items()
        ]
        print_json({"group_id": name, "executed": execute, "offsets": offsets})
        return
    print_table(
        ("Topic", "Partition", "Committed"),
        [(where.topic, where.partition, entry.offset) for where, entry in deleted.items()],
        right=("Partition", "Committed"),
    )
    if execute:
        print(f"deleted {counted(len(deleted), 'offset')} of group {name}")
    else:
        print("nothing was changed; add --execute to delete these offsets")


def _targets(
    admin: AdminClient,
    partitions: list[TopicPartition],
    current: Mapping[TopicPartition, OffsetAndMetadata],
    goal: Goal,
) -> dict[TopicPartition, OffsetAndMetadata]:
    from penstock.client import OffsetAndMetadata  # noqa: PLC0415 - it imports gRPC.

    if goal.spec is not None:
        # Where no record is that late, what comes next will be (asked first: more may come).
        ends = admin.list_offsets(dict.fromkeys(partitions, "latest"))
        found = admin.list_offsets(dict.fromkeys(partitions, goal.spec))
        places = [
            found[where].offset if found[where].offset >= 0 else ends[where].offset
            for where in partitions
        ]
    elif goal.offset is not None:
        places = [goal.offset] * len(partitions)
    else:
        places = [_current_offset(current, where) + goal.shift_by for where in partitions]
    return {
        where: OffsetAndMetadata(place) for where, place in zip(partitions, places, strict=True)
    }


def _current_offset(
    current: Mapping[TopicPartition, OffsetAndMetadata], where: TopicPartition
) -> int:
    if where not in current:
        raise with_step(
            InvalidRequestError(f"there is nothing to shift at {where}: no offset is committed"),
            "leave it out of --topic, or say where to with --to or --to-offset",
        )
    return current[where].offset


def _place(text: str) -> OffsetSpec:
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    return parse_time_ms(text, "--to")


def _plan(
    admin: AdminClient, name: str, new: Mapping[TopicPartition, OffsetAndMetadata]
) -> list[Change]:
    current = _current(admin, name)
    starts = admin.list_offsets(dict.fromkeys(new, "earliest"))
    ends = admin.list_offsets(dict.fromkeys(new, "latest"))
    return [
        change(where, current.get(where), entry, starts[where].offset, ends[where].offset)
        for where, entry in sorted(new.items())
    ]


def change(
    where: TopicPartition,
    current: OffsetAndMetadata | None,
    new: OffsetAndMetadata,
    log_start: int,
    log_end: int,
) -> Change:
    """What is to be committed: the offset asked for, or the nearest one that the log has."""
    within = min(max(new.offset, log_start), log_end)
    asked = None if within == new.offset else new.offset
    if asked is not None:
        # The epoch is that of the record before the offset asked for, not of this one.
        new = replace(new, offset=within, leader_epoch=-1)
    return Change(
        where, None if current is None else current.offset, new, log_start, log_end, asked
    )


def _current(admin: AdminClient, name: str) -> Mapping[TopicPartition, OffsetAndMetadata]:
    """What the group has committed; a group that is not there yet has nothing."""
    try:
        return admin.list_group_offsets(name)
    except GroupIdNotFoundError:
        return {}


def _carry_out(
    settings: Settings, admin: AdminClient, name: str, changes: list[Change], *, execute: bool
) -> None:
    """Show the changes, and commit them if it is meant so."""
    if execute:
        _require_no_members(admin, name)
        admin.alter_group_offsets(name, {one.partition: one.new for one in changes})
    _show(settings, name, changes, execute=execute)


def _require_no_members(admin: AdminClient, name: str) -> None:
    try:
        [group] = admin.describe_groups([name])
    except GroupIdNotFoundError:
        return
    if not group.members:
        return
    who = ", ".join(
        f"{member.client_id or member.member_id} at {member.client_host or '-'}"
        for member in group.members
    )
    raise with_step(
        NonEmptyGroupError(
            f"group {name} has {counted(len(group.members), 'member')} ({who}), which would go on "
            "from where they are and commit over it"
        ),
        "stop them, and try again",
    )


def _show(settings: Settings, name: str, changes: list[Change], *, execute: bool) -> None:
    if settings.as_json:
        print_json(
            {
                "group_id": name,
                "executed": execute,
                "offsets": [_change_json(one) for one in changes],
            }
        )
        return
    print_table(
        ("Topic", "Partition", "Committed", "New", "LogStart", "LogEnd", "Note"),
        [
            (
                one.partition.topic,
                one.partition.partition,
                one.current,
                one.new.offset,
                one.log_start,
                one.log_end,
                None if one.asked is None else f"{one.asked} is outside of the log",
            )
            for one in changes
        ],
        right=("Partition", "Committed", "New", "LogStart", "LogEnd"),
    )
    if execute:
        print(f"committed {counted(len(changes), 'offset')} for group {name}")
    else:
        print("nothing was changed; add --execute to commit these offsets")


def _change_json(one: Change) -> dict[str, Any]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "committed_offset": one.current,
        "new_offset": one.new.offset,
        "log_start_offset": one.log_start,
        "log_end_offset": one.log_end,
        "asked_offset": one.asked,
    }


def _is_in(where: TopicPartition, wanted: list[tuple[str, tuple[int, ...] | None]]) -> bool:
    return not wanted or any(
        where.topic == topic and (numbers is None or where.partition in numbers)
        for topic, numbers in wanted
    )


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            return typer.get_text_stream("stdin").read()
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{file} is not UTF-8") from None
