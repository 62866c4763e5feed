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
========== =====================================================================================
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.wire.ids import TopicId, TopicIdPartition

DEFAULT_ASSIGNOR: Final = "uniform"

Assignment = dict[str, frozenset[TopicIdPartition]]
"""What each member shall hold, by member id; every member has an entry."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What an assignor knows of a member. ``previous`` is the target that it had before."""

    topics: frozenset[TopicId]
    previous: frozenset[TopicIdPartition] = frozenset()
    instance_id: str = ""


Assignor = Callable[[Mapping[str, MemberSpec], Mapping[TopicId, int]], Assignment]
"""Members by id and partition counts by topic id, to the assignment."""


def _in_order(members: Mapping[str, MemberSpec]) -> list[str]:
    """Members in an order in which a static member keeps its place under a new member id."""
    return sorted(members, key=lambda member_id: (members[member_id].instance_id, member_id))


def _subscribed(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]
) -> dict[TopicId, list[str]]:
    """The subscribers in order of each topic that exists and has any, topics in order too."""
    subscribers: dict[TopicId, list[str]] = {}
    for member_id in _in_order(members):
        for topic_id in members[member_id].topics:
            if topic_id in counts:
                subscribers.setdefault(topic_id, []).append(member_id)
    return dict(sorted(subscribers.items()))


def _partitions(
    topics: Iterable[TopicId], counts: Mapping[TopicId, int]
) -> Iterable[TopicIdPartition]:
    return (
        TopicIdPartition(topic_id, number)
        for topic_id in topics
        for number in range(counts[topic_id])
    )


def assign_range(members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]) -> Assignment:
    """Contiguous ranges, topic by topic."""
    held: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    for topic_id, subscribers in _subscribed(members, counts).items():
        quota, extra = divmod(counts[topic_id], len(subscribers))
        start = 0
        for position, member_id in enumerate(subscribers):
            end = start + quota + (position < extra)
            held[member_id].update(TopicIdPartition(topic_id, n) for n in range(start, end))
            start = end
    return {member_id: frozenset(parts) for member_id, parts in held.items()}


def assign_round_robin(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]
) -> Assignment:
    """One partition after the other to one member after the other that subscribes to it."""
    held: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    order = _in_order(members)
    position = 0
    for partition in _partitions(_subscribed(members, counts), counts):
        while partition.topic_id not in members[order[position % len(order)]].topics:
            position += 1
        held[order[position % len(order)]].add(partition)
        position += 1
    return {member_id: frozenset(parts) for member_id, parts in held.items()}


def assign_uniform(members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]) -> Assignment:
    """Balanced, with as little movement as that allows."""
    subscribers = _subscribed(members, counts)
    sticky = _keep_previous(members, counts)
    everyone = len(members)
    if all(len(of_topic) == everyone for of_topic in subscribers.values()):
        _trim_to_quota(members, sticky, sum(counts[topic_id] for topic_id in subscribers))
        _deal_out(members, sticky, subscribers, counts)
    else:
        _deal_out(members, sticky, subscribers, counts)
        _Leveller(members, sticky).run()
    return {member_id: frozenset(parts) for member_id, parts in sticky.items()}


def _keep_previous(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int]
) -> dict[str, set[TopicIdPartition]]:
    """What members had and may keep; of two that claim the same, the first in order keeps it."""
    held: dict[str, set[TopicIdPartition]] = {}
    taken: set[TopicIdPartition] = set()
    for member_id in _in_order(members):
        spec = members[member_id]
        kept = {
            partition
            for partition in spec.previous
            if partition.topic_id in spec.topics
            and partition.partition < counts.get(partition.topic_id, 0)
            and partition not in taken
        }
        taken |= kept
        held[member_id] = kept
    return held


def _trim_to_quota(
    members: Mapping[str, MemberSpec], held: dict[str, set[TopicIdPartition]], total: int
) -> None:
    """Take from members what exceeds their even share.

    Where shares cannot be equal, the larger ones go first to members that have as much already.
    """
    if not members:
        return
    quota, extra = divmod(total, len(members))
    for member_id in _in_order(members):
        parts = held[member_id]
        share = quota
        if len(parts) > quota and extra:
            share += 1
            extra -= 1
        for partition in sorted(parts)[share:]:
            parts.remove(partition)


def _deal_out(
    members: Mapping[str, MemberSpec],
    held: dict[str, set[TopicIdPartition]],
    subscribers: Mapping[TopicId, list[str]],
    counts: Mapping[TopicId, int],
) -> None:
    """Give what nobody has to the least loaded of those who want it; scarce topics first."""
    taken = {partition for parts in held.values() for partition in parts}
    rank = {member_id: position for position, member_id in enumerate(_in_order(members))}
    for topic_id in sorted(subscribers, key=lambda topic: (len(subscribers[topic]), topic)):
        heap = [
            (len(held[member_id]), rank[member_id], member_id)
            for member_id in subscribers[topic_id]
        ]
        heapq.heapify(heap)
        for partition in _partitions([topic_id], counts):
            if partition not in taken:
                load, position, member_id = heap[0]
                held[member_id].add(partition)
                heapq.heapreplace(heap, (load + 1, position, member_id))


class _Leveller:
    """Shifts partitions along chains of members, from the loaded to the idle, while it helps.

    A chain ends at a member with at least two fewer than its start; when none is left, no
    assignment is more even (Harvey et al., Semi-matchings for bipartite graphs, 2006).
    """

    def __init__(
        self, members: Mapping[str, MemberSpec], held: dict[str, set[TopicIdPartition]]
    ) -> None:
        self._members = members
        self._held = held
        self._order = _in_order(members)
        self._by_topic: dict[str, dict[TopicId, set[TopicIdPartition]]] = {}
        for member_id, parts in held.items():
            topics = self._by_topic.setdefault(member_id, {})
            for partition in parts:
                topics.setdefault(partition.topic_id, set()).add(partition)

    def run(self) -> None:
        """Level until nothing helps. Ends: every shift lowers the sum of the squared loads."""
        moved = True
        while moved:
            moved = False
            for start in sorted(self._order, key=lambda member_id: -len(self._held[member_id])):
                while chain := self._find_chain(start):
                    moved = True
                    for giver, topic_id, taker in chain:
                        self._move(giver, topic_id, taker)

    def _find_chain(self, start: str) -> list[tuple[str, TopicId, str]]:
        """The shortest chain of (giver, topic, taker) that helps, nearest the start first."""
        limit = len(self._held[start]) - 2
        if all(len(parts) > limit for parts in self._held.values()):
            return []
        reached: dict[str, tuple[str, TopicId]] = {}
        queue = deque([start])
        unseen = [member_id for member_id in self._order if member_id != start]
        while queue:
            giver = queue.popleft()
            topics = sorted(topic_id for topic_id, parts in self._by_topic[giver].items() if parts)
            still_unseen = []
            for member_id in unseen:
                wanted = self._members[member_id].topics
                topic = next((topic_id for topic_id in topics if topic_id in wanted), None)
                if topic is None:
                    still_unseen.append(member_id)
                    continue
                reached[member_id] = (giver, topic)
                if len(self._held[member_id]) <= limit:
                    return _walk_back(start, member_id, reached)
                queue.append(member_id)
            unseen = still_unseen
        return []

    def _move(self, giver: str, topic_id: TopicId, taker: str) -> None:
        """Move one partition: rather one that was the taker's, or that is new to the giver."""
        had, wanted = self._members[giver].previous, self._members[taker].previous
        candidates = self._by_topic[giver][topic_id]
        partition = min(candidates, key=lambda p: (p not in wanted, p in had, p))
        candidates.remove(partition)
        self._held[giver].remove(partition)
        self._held[taker].add(partition)
        self._by_topic[taker].setdefault(topic_id, set()).add(partition)


def _walk_back(
    start: str, end: str, reached: Mapping[str, tuple[str, TopicId]]
) -> list[tuple[str, TopicId, str]]:
    chain = []
    while end != start:
        giver, topic_id = reached[end]
        chain.append((giver, topic_id, end))
        end = giver
    chain.reverse()
    return chain


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    DEFAULT_ASSIGNOR: assign_uniform,
}
"""The assignors by the name that members ask for them with."""
