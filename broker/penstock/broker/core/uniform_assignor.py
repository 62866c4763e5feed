"""The uniform assignor: even and sticky."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from penstock.broker.core.assignor_values import (
    Assignment,
    MemberSpec,
    Racks,
    in_order,
    partitions,
    subscribed,
)
from penstock.wire.ids import TopicId, TopicIdPartition


def assign_uniform(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int], _racks: Racks
) -> Assignment:
    """Balanced, with as little movement as that allows."""
    subscribers = subscribed(members, counts)
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
    for member_id in in_order(members):
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
    for member_id in in_order(members):
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
    rank = {member_id: position for position, member_id in enumerate(in_order(members))}
    for topic_id in sorted(subscribers, key=lambda topic: (len(subscribers[topic]), topic)):
        heap = [
            (len(held[member_id]), rank[member_id], member_id)
            for member_id in subscribers[topic_id]
        ]
        heapq.heapify(heap)
        for partition in partitions([topic_id], counts):
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
        self._order = in_order(members)
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
