"""`penstock groups`: what consumer groups do, and how far behind they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import group_offsets, group_verify
from penstock.cli.connections import admin_client
from penstock.cli.output import print_json, print_table
from penstock.cli.places import log_ends
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.wording import some

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import GroupDescription, MemberDescription
    from penstock.wire.ids import TopicPartition

app = typer.Typer(
    help="List, describe, verify and delete consumer groups, and move or delete their offsets.",
    no_args_is_help=True,
)


_NOT_STABLE: Final = {
    "standby": "standing by",
    "waiting": "waiting for partitions that others give back",
    "revoking": "giving partitions back",
    "away": "away for a while",
}


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """One partition of a group: where it stands, and who reads it.

    ``lag`` is None while nothing was committed, and with ``log_end_offset`` while the partition
    has no leader; the member's fields are empty while nobody holds the partition.
    """

    topic: str
    partition: int
    committed_offset: int | None
    log_end_offset: int | None
    lag: int | None
    member_id: str
    client_id: str
    host: str


@app.command("list")
def list_groups(ctx: typer.Context, bootstrap: Bootstrap = None, output: Output = None) -> None:
    """List groups."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        groups = sorted(admin.list_groups(), key=lambda group: group.group_id)
    if settings.as_json:
        print_json([asdict(group) for group in groups])
        return
    print_table(
        ("Group", "State", "Members", "Coordinator"),
        [(g.group_id, g.state, g.member_count, g.coordinator) for g in groups],
        right=("Members", "Coordinator"),
    )


@app.command("describe")
def describe(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="The groups.", metavar="GROUP")],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show each partition's position, lag and member, and each member's host.

    A partition is shown when the group committed a position for it or a member holds it. Of the
    topics that members subscribe to, that is every one but those about to change hands. Where a
    log ends, and so the lag, is not known while its partition has no leader.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        described = [
            (group, partition_lags(admin, group)) for group in admin.describe_groups(names)
        ]
    if settings.as_json:
        print_json([_group_json(group, lags) for group, lags in described])
        return
    for group, lags in described:
        _print_group(group, lags)


def partition_lags(admin: AdminClient, group: GroupDescription) -> list[PartitionLag]:
    """One entry for each partition that the group has committed or a member holds, in order."""
    owners: dict[TopicPartition, MemberDescription] = {
        partition: member for member in group.members for partition in member.assigned
    }
    wanted = sorted({*group.offsets, *owners})
    ends = log_ends(admin, wanted, admin.list_topics(include_internal=True)) if wanted else {}
    lags = []
    for partition in wanted:
        committed = group.offsets.get(partition)
        position = committed.offset if committed is not None and committed.offset >= 0 else None
        end = ends.get(partition)
        owner = owners.get(partition)
        lags.append(
            PartitionLag(
                topic=partition.topic,
                partition=partition.partition,
                committed_offset=position,
                log_end_offset=end,
                lag=max(0, end - position) if end is not None and position is not None else None,
                member_id=owner.member_id if owner else "",
                client_id=owner.client_id if owner else "",
                host=owner.client_host if owner else "",
            )
        )
    return lags


def _print_group(group: GroupDescription, lags: list[PartitionLag]) -> None:
    print(
        f"Group: {group.group_id}  State: {group.state}  Members: {len(group.members)}  "
        f"Assignor: {group.assignor or '-'}  Coordinator: {group.coordinator}"
    )
    print_table(
        ("Topic", "Partition", "Committed", "LogEnd", "Lag", "Member", "ClientId", "Host"),
        [
            (
                lag.topic,
                lag.partition,
                lag.committed_offset,
                lag.log_end_offset,
                lag.lag,
                lag.member_id or None,
                lag.client_id or None,
                lag.host or None,
            )
            for lag in lags
        ],
        right=("Partition", "Committed", "LogEnd", "Lag"),
    )
    unled = [f"{lag.topic}-{lag.partition}" for lag in lags if lag.log_end_offset is None]
    if unled:
        print(f"no leader, so that the lag is not known: {some(unled, len(unled))}")
    for member in group.members:
        if member.state in _NOT_STABLE:
            where = f"member {member.member_id} at {member.client_host or '-'}"
            print(f"{_NOT_STABLE[member.state]}: {where}")


def _group_json(group: GroupDescription, lags: list[PartitionLag]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "state": group.state,
        "group_epoch": group.group_epoch,
        "assignment_epoch": group.assignment_epoch,
        "assignor": group.assignor,
        "coordinator": group.coordinator,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "host": member.client_host,
                "rack": member.rack_id,
                "member_epoch": member.member_epoch,
                "state": member.state,
                "assigned": [_partition_json(entry) for entry in member.assigned],
            }
            for member in group.members
        ],
        "partitions": [asdict(lag) for lag in lags],
    }


def _partition_json(partition: TopicPartition) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition}


app.command("verify")(group_verify.verify)


@app.command("delete")
def delete(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(help="The groups to delete.", metavar="GROUP")],
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Delete groups without members, with their committed offsets. There is no way back."""
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        for name in names:
            admin.delete_groups([name])
            if settings.as_json:
                print_json({"group_id": name, "deleted": True})
            else:
                print(f"deleted group {name}")


app.add_typer(group_offsets.app, name="offsets")
