"""`penstock groups verify`: whether a group keeps what groups promise.

What is looked at is the group as its coordinator describes it, and the topics as the cluster has
them. The two are not of one moment, and a group that rebalances is on its way: what is found is
looked at again until it is gone, or the time is over.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.connections import admin_client
from penstock.cli.errors import EXIT_FAILED
from penstock.cli.output import print_json, print_table
from penstock.cli.places import log_ends
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import GroupDescription, MemberDescription

_LOOK_AGAIN_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise that is not kept: which, where, and how."""

    rule: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a group saw: the group, all topics' partition counts, the logs' ends.

    ``internal`` are the cluster's own topics, which no pattern matches.
    """

    group: GroupDescription
    partition_counts: Mapping[str, int]
    ends: Mapping[TopicPartition, int]
    internal: frozenset[str] = frozenset()


def verify(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The group.", metavar="GROUP")],
    *,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0,
            metavar="SECONDS",
            help="How long a rebalance may take: what is found is looked at again for so long.",
        ),
    ] = 10.0,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Check that the group's members share the partitions as they should.

    exclusive: no partition has two owners. complete: each partition of the topics subscribed to has
    one. zombie: every member is in the group's epoch and gave back what is no longer its own, and
    no position moves of a partition that nobody holds. position: no committed offset is beyond the
    end of its log. Exit status 1 when something is found. The group is looked at twice at least,
    half a second apart.
    """
    settings = resolve(ctx, bootstrap, output)
    deadline = time.monotonic() + wait
    with admin_client(settings) as admin:
        before = _look(admin, name)
        while True:
            # Time has to pass: between two looks positions may move that should not.
            time.sleep(_LOOK_AGAIN_SECONDS)
            after = _look(admin, name)
            found = [*findings(after), *moved_by_nobody(before, after)]
            if not found or time.monotonic() >= deadline:
                break
            before = after
    if settings.as_json:
        print_json(_verdict(after.group, found))
    else:
        _print(after.group, found)
    if found:
        raise typer.Exit(EXIT_FAILED)


def findings(look: Look) -> list[Finding]:
    """What one look shows to be wrong."""
    group = look.group
    return [
        *_doubly_held(group),
        *_unowned(look),
        *_zombies(group),
        *_beyond_the_end(group, look.ends),
    ]


def moved_by_nobody(before: Look, after: Look) -> list[Finding]:
    """Positions that changed though no member held the partition in either look."""
    held = {
        partition
        for look in (before, after)
        for member in look.group.members
        for partition in (*member.assigned, *member.target)
    }
    if not before.group.members or not after.group.members:
        return []  # A group without members is anybody's to commit for.
    return [
        Finding(
            "zombie",
            str(partition),
            f"its position went from {before.group.offsets[partition].offset} to {now.offset}, "
            "and no member holds it",
        )
        for partition, now in sorted(after.group.offsets.items())
        if partition not in held
        and partition in before.group.offsets
        and before.group.offsets[partition].offset != now.offset
    ]


def _doubly_held(group: GroupDescription) -> Iterator[Finding]:
    holders: dict[TopicPartition, list[MemberDescription]] = defaultdict(list)
    targets: dict[TopicPartition, list[MemberDescription]] = defaultdict(list)
    for member in group.members:
        for partition in member.assigned:
            holders[partition].append(member)
        for partition in member.target:
            targets[partition].append(member)
    for owners, how in ((holders, "held by"), (targets, "meant for")):
        for partition, members in sorted(owners.items()):
            if len(members) > 1:
                names = " and ".join(_name(member) for member in members)
                yield Finding("exclusive", str(partition), f"{how} {names}")


def _unowned(look: Look) -> Iterator[Finding]:
    members = look.group.members
    held = {partition for member in members for partition in member.assigned}
    meant = {partition: member for member in members for partition in member.target}
    for topic in sorted(_subscribed(look)):
        for number in range(look.partition_counts[topic]):
            partition = TopicPartition(topic, number)
            if partition not in held:
                member = meant.get(partition)
                why = "meant for nobody" if member is None else f"meant for {_name(member)}"
                yield Finding("complete", str(partition), f"no member holds it; it is {why}")


def _subscribed(look: Look) -> set[str]:
    """The topics that are there and that a member subscribes to, by name or by pattern."""
    # The coordinator's own patterns, which no pattern can make slow.
    from penstock.broker.core.group_pattern import (  # noqa: PLC0415 - only for this command.
        TopicPattern,
    )

    names = {topic for member in look.group.members for topic in member.topics}
    patterns = {one.topic_pattern for one in look.group.members if one.topic_pattern}
    parsed = [TopicPattern.parse(pattern) for pattern in sorted(patterns)]
    return {
        topic
        for topic in look.partition_counts
        if topic in names
        or (topic not in look.internal and any(pattern.matches(topic) for pattern in parsed))
    }


def _zombies(group: GroupDescription) -> Iterator[Finding]:
    for member in group.members:
        if member.member_epoch < 0:
            continue  # A static member that is away for a while.
        if member.member_epoch != group.assignment_epoch:
            yield Finding(
                "zombie",
                _name(member),
                f"it is in epoch {member.member_epoch}, the group in {group.assignment_epoch}",
            )
        for partition in sorted(set(member.assigned) - set(member.target)):
            yield Finding("zombie", _name(member), f"it has not given {partition} back")


def _beyond_the_end(
    group: GroupDescription, ends: Mapping[TopicPartition, int]
) -> Iterator[Finding]:
    for partition, committed in sorted(group.offsets.items()):
        end = ends.get(partition)
        if end is not None and committed.offset > end:
            yield Finding(
                "position",
                str(partition),
                f"{committed.offset} is committed, and the log ends at {end}",
            )


def _look(admin: AdminClient, name: str) -> Look:
    [group] = admin.describe_groups([name])
    topics = admin.list_topics(include_internal=True)
    counts = {topic.name: topic.partition_count for topic in topics}
    return Look(
        group,
        counts,
        # After the positions: whoever commits meanwhile does not commit beyond what is there then.
        log_ends(admin, group.offsets, topics),
        frozenset(topic.name for topic in topics if topic.internal),
    )


def _name(member: MemberDescription) -> str:
    return f"member {member.member_id} at {member.client_host or '-'}"


def _print(group: GroupDescription, found: list[Finding]) -> None:
    held = sum(len(member.assigned) for member in group.members)
    who = f"{counted(len(group.members), 'member')}, {counted(held, 'partition')} held"
    if not found:
        print(f"group {group.group_id} is sound: {group.state}, {who}")
        return
    print(f"group {group.group_id}: {group.state}, {who}, {counted(len(found), 'finding')}")
    print_table(("Rule", "Where", "What"), [(one.rule, one.where, one.what) for one in found])


def _verdict(group: GroupDescription, found: list[Finding]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "state": group.state,
        "members": len(group.members),
        "partitions_held": sum(len(member.assigned) for member in group.members),
        "sound": not found,
        "findings": [asdict(one) for one in found],
    }
