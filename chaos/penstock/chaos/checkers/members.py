"""What a group's members did, by time: made once for all checkers of groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.chaos.checkers.records import partition_name
from penstock.chaos.history import History, Operation, Type

ASSIGNMENTS: Final = ("assigned", "revoked", "lost")


@dataclass(frozen=True, slots=True)
class Poll:
    """An answered poll of a member: what it had, and of what it was given records."""

    operation: Operation
    member: str
    generation: int | None
    partitions: frozenset[str]
    given: frozenset[str]


@dataclass(slots=True)
class Group:
    """One of them. Everything is by time."""

    name: str
    members: set[str] = field(default_factory=set)
    assignments: list[Operation] = field(default_factory=list)
    """``assigned``, ``revoked`` and ``lost``, and ``join`` and ``leave``."""
    polls: list[Poll] = field(default_factory=list)
    commits: list[Operation] = field(default_factory=list)
    """``commit-offsets`` and ``send-offsets``."""
    reads: list[Operation] = field(default_factory=list)
    """``committed-offsets``."""

    @property
    def partitions(self) -> frozenset[str]:
        """All that any member ever had."""
        polled = (poll.partitions for poll in self.polls)
        assigned = (one.invoked.value.get("partitions") or () for one in self.assignments)
        return frozenset().union(*polled, *assigned)


def groups(history: History) -> Mapping[str, Group]:
    """Of a history, by name."""
    found: dict[str, Group] = {}
    of_member: dict[str, Group] = {}
    kinds = ("join", "leave", *ASSIGNMENTS, "commit-offsets", "send-offsets", "committed-offsets")
    for one in history.of(*kinds):
        asked, f = one.invoked.value, one.invoked.f
        group = found.setdefault(asked["group"], Group(asked["group"]))
        if asked.get("member"):
            group.members.add(asked["member"])
            of_member[asked["member"]] = group
        if f == "committed-offsets":
            group.reads.append(one)
        elif f in {"commit-offsets", "send-offsets"}:
            group.commits.append(one)
        else:
            group.assignments.append(one)
    for one in history.of("poll") if of_member else ():
        member = one.invoked.value.get("member")
        if member in of_member and one.type is Type.OK:
            of_member[member].polls.append(_poll(one, member))
    return found


def _poll(one: Operation, member: str) -> Poll:
    assert one.completed is not None
    asked, answer = one.invoked.value, one.completed.value or {}
    topic = asked["topic"]
    given = frozenset(run[0] for run in answer.get("runs") or ())
    return Poll(
        one,
        member,
        answer.get("generation"),
        frozenset(asked.get("positions") or ()) | frozenset(answer.get("positions") or ()),
        frozenset(partition_name(topic, entry) for entry in given),
    )


def offsets_of(operation: Operation) -> Mapping[str, int]:
    """What a commit asked for, by partition."""
    offsets: Mapping[str, int] = operation.invoked.value.get("offsets") or {}
    return offsets


def by_group(history: History) -> Sequence[Group]:
    """All groups of a history."""
    return list(history.derived(groups).values())


def seeks_of(history: History) -> Mapping[str, list[Operation]]:
    """By member or process the seeks that were answered."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for one in history.of("seek"):
        asked: Mapping[str, Any] = one.invoked.value
        found[asked.get("member") or one.invoked.p].append(one)
    return found
