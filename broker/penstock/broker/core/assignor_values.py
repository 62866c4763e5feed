"""What assignors are given and what they make of it, in common to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.wire.ids import TopicId, TopicIdPartition

Assignment = dict[str, frozenset[TopicIdPartition]]
"""What each member shall hold, by member id; every member has an entry."""

Racks = Callable[[TopicIdPartition], frozenset[str]]
"""The racks that have a replica of a partition; none when brokers say of no rack."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What an assignor knows of a member. ``previous`` is the target that it had before."""

    topics: frozenset[TopicId]
    previous: frozenset[TopicIdPartition] = frozenset()
    instance_id: str = ""
    rack: str = ""


Assignor = Callable[[Mapping[str, MemberSpec], Mapping[TopicId, int], Racks], Assignment]
"""Members by id, partition counts by topic id, and racks, to the assignment."""


def in_order(members: Mapping[str, MemberSpec]) -> list[str]:
    """Members in an order in which a static member keeps its place under a new member id."""
    return sorted(members, key=lambda member_id: (members[member_id].instance_id, member_id))


def subscribed(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]
) -> dict[TopicId, list[str]]:
    """The subscribers in order of each topic that exists and has any, topics in order too."""
    subscribers: dict[TopicId, list[str]] = {}
    for member_id in in_order(members):
        for topic_id in members[member_id].topics:
            if topic_id in counts:
                subscribers.setdefault(topic_id, []).append(member_id)
    return dict(sorted(subscribers.items()))


def partitions(
    topics: Iterable[TopicId], counts: Mapping[TopicId, int]
) -> Iterable[TopicIdPartition]:
    """All partitions of some topics, in their order."""
    return (
        TopicIdPartition(topic_id, number)
        for topic_id in topics
        for number in range(counts[topic_id])
    )
