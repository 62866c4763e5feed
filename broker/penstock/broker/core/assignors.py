"""Server-side assignors: who of a group shall read what. Pure and deterministic (KIP-848).

Whatever the assignor, every partition of a topic that at least one member subscribes to goes to
exactly one member that subscribes to it, and none else is assigned.

========== =====================================================================================
uniform    Sticky and balanced: the default. Loads differ as little as the subscriptions allow
           (by at most one when all subscribe to the same), and among the balanced assignments
           one that moves the fewest partitions is chosen when all subscribe to the same.
range      Each topic by itself: members in order take contiguous ranges, so that topics with the
           same number of partitions are co-partitioned.
roundrobin All partitions in order are dealt out over the members in order.
rackaware  As even as uniform, and with as many partitions as possible read by members that have a
           replica in their own rack.
========== =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.broker.core.assignor_values import (
    Assignment,
    Assignor,
    MemberSpec,
    Racks,
    in_order,
    partitions,
    subscribed,
)
from penstock.broker.core.rack_assignor import assign_rack_aware
from penstock.broker.core.uniform_assignor import assign_uniform
from penstock.wire.ids import TopicId, TopicIdPartition

DEFAULT_ASSIGNOR: Final = "uniform"


def assign_range(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int], _racks: Racks
) -> Assignment:
    """Contiguous ranges, topic by topic."""
    held: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    for topic_id, subscribers in subscribed(members, counts).items():
        quota, extra = divmod(counts[topic_id], len(subscribers))
        start = 0
        for position, member_id in enumerate(subscribers):
            end = start + quota + (position < extra)
            held[member_id].update(TopicIdPartition(topic_id, n) for n in range(start, end))
            start = end
    return {member_id: frozenset(parts) for member_id, parts in held.items()}


def assign_round_robin(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int], _racks: Racks
) -> Assignment:
    """One partition after the other to one member after the other that subscribes to it."""
    held: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    order = in_order(members)
    position = 0
    for partition in partitions(subscribed(members, counts), counts):
        while partition.topic_id not in members[order[position % len(order)]].topics:
            position += 1
        held[order[position % len(order)]].add(partition)
        position += 1
    return {member_id: frozenset(parts) for member_id, parts in held.items()}


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    "rackaware": assign_rack_aware,
    "range": assign_range,
    "roundrobin": assign_round_robin,
    DEFAULT_ASSIGNOR: assign_uniform,
}
"""The assignors by the name that members ask for them with."""

RACK_AWARE: Final = frozenset({"rackaware"})
"""Those that look at racks: whatever moves replicas to other racks, makes a new assignment due."""
