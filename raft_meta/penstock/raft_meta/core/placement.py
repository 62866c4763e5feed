"""Where the replicas of new partitions go: a pure, deterministic function of what is there.

A topic is spread evenly over brokers first: its leaders, its replicas, and each broker's heirs
(the second replica leads when the first dies, so the heirs of one broker are to be many). Ties
go to whoever carries least of the whole cluster, so that many small topics spread as well. The
replicas of one partition take a rack each as far as there are racks (a broker without a rack
counts as a rack of its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_Nodes = tuple[int, ...]

_BITS: Final = 32
"""What each criterion takes of a key; no count of partitions needs more."""
_NEVER: Final = 1 << 8 * _BITS
"""Above any key."""


def place(
    count: int,
    replication_factor: int,
    racks: Mapping[int, str],
    *,
    topic: Iterable[_Nodes] = (),
    cluster_leaders: Mapping[int, int],
    cluster_replicas: Mapping[int, int],
) -> list[_Nodes]:
    """Replicas of ``count`` new partitions, the preferred leader first.

    ``racks``: the usable brokers and their racks; there must be at least ``replication_factor``
    of them. ``topic``: the replicas of the partitions that the topic has already.
    """
    placer = _Placer(racks, cluster_leaders, cluster_replicas)
    for replicas in topic:
        placer.count(replicas)
    return [placer.place(replication_factor) for _ in range(count)]


def _key(*criteria: int) -> int:
    """One integer that orders as the tuple does, and is compared a good deal faster."""
    key = 0
    for criterion in criteria:
        key = key << _BITS | criterion
    return key


# What one more partition adds: where leaders are compared, and where followers are.
_TOPIC_LEADER: Final = _key(1, 0, 0, 0)
_LEADER: Final = _key(1, 0, 1, 0)
_TOPIC_REPLICA: Final = (_key(1, 0, 0), _key(1, 0))
_REPLICA: Final = (_key(1, 0, 1), _key(1, 1))


class _Placer:
    """What each broker carries, as keys that order brokers by all criteria at once.

    A broker is known by its position in the order of node ids. Placing happens where a command is
    applied, and all else waits for it: with 100 brokers it takes some 25 µs a partition.
    """

    def __init__(
        self,
        racks: Mapping[int, str],
        cluster_leaders: Mapping[int, int],
        cluster_replicas: Mapping[int, int],
    ) -> None:
        self._nodes = sorted(racks)
        self._positions = {node: at for at, node in enumerate(self._nodes)}
        leaders = [cluster_leaders.get(node, 0) for node in self._nodes]
        replicas = [cluster_replicas.get(node, 0) for node in self._nodes]
        # Of the topic: leaders, replicas; then of the cluster: leaders, replicas.
        self._leading = [_key(0, 0, *counts) for counts in zip(leaders, replicas, strict=True)]
        # Replicas of the topic, then of the cluster. How often the rack is used comes before.
        self._following = replicas
        self._heirs: dict[int, list[int]] = {}  # Of each leader: how often each is the second.
        mates: dict[str, list[int]] = {}
        for at, node in enumerate(self._nodes):
            mates.setdefault(racks[node] or f"\0{node}", []).append(at)
        self._rack_mates = [mates[racks[node] or f"\0{node}"] for node in self._nodes]

    def place(self, replication_factor: int) -> _Nodes:
        """The replicas of one more partition, which is counted."""
        leader = self._leading.index(min(self._leading))
        chosen = [leader]
        while len(chosen) < replication_factor:
            chosen.append(self._next_follower(chosen))
        self._leading[leader] += _LEADER
        if replication_factor > 1:
            self._heirs_of(leader)[chosen[1]] += 1
        for at in chosen:
            self._add_replica(at, _REPLICA)
        return tuple(self._nodes[at] for at in chosen)

    def _next_follower(self, chosen: Sequence[int]) -> int:
        """The least loaded of the least used rack; of equals, the next one after the leader."""
        leader = chosen[0]
        if len(chosen) == 1:
            # Doubling keeps both kinds of counts within 2 of each other (found by trial over
            # sizes).
            counted = zip(self._following, self._heirs_of(leader), strict=True)
            keys = [key + (inherits << _BITS + 1) for key, inherits in counted]
        else:
            keys = self._following.copy()
        for taken in chosen:
            for mate in self._rack_mates[taken]:
                keys[mate] += 1 << 2 * _BITS
        for taken in chosen:
            keys[taken] = _NEVER
        least = min(keys)
        try:
            return keys.index(least, leader)
        except ValueError:
            return keys.index(least)

    def _heirs_of(self, leader: int) -> list[int]:
        heirs = self._heirs.get(leader)
        if heirs is None:
            heirs = self._heirs[leader] = [0] * len(self._nodes)
        return heirs

    def count(self, replicas: _Nodes) -> None:
        """Count a partition that the topic has already; the cluster's counts hold it."""
        at = [self._positions.get(node, -1) for node in replicas]
        if at[0] >= 0:
            self._leading[at[0]] += _TOPIC_LEADER
        if len(at) > 1 and at[0] >= 0 and at[1] >= 0:
            self._heirs_of(at[0])[at[1]] += 1
        for position in at:
            if position >= 0:
                self._add_replica(position, _TOPIC_REPLICA)

    def _add_replica(self, position: int, weight: tuple[int, int]) -> None:
        self._leading[position] += weight[0]
        self._following[position] += weight[1]
