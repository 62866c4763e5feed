"""Where the replicas of new partitions go: a pure, deterministic function of what is there.

A topic is spread evenly over brokers first: its leaders, its replicas, and each broker's heirs
(the second replica leads when the first dies, so the heirs of one broker are to be many). Ties
go to whoever carries least of the whole cluster, so that many small topics spread as well. The
replicas of one partition take a rack each as far as there are racks (a broker without a rack
counts as a rack of its own).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Load:
    """How many partitions each broker leads by preference, has a replica of, is an heir to."""

    leaders: Counter[int] = field(default_factory=Counter)
    replicas: Counter[int] = field(default_factory=Counter)
    heirs: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def add(self, replicas: tuple[int, ...]) -> None:
        """Count one partition's replicas, the preferred leader first."""
        self.leaders[replicas[0]] += 1
        self.replicas.update(replicas)
        self.heirs[replicas[:2]] += 1


def place(
    count: int,
    replication_factor: int,
    racks: Mapping[int, str],
    *,
    topic: Iterable[tuple[int, ...]] = (),
    cluster_leaders: Mapping[int, int],
    cluster_replicas: Mapping[int, int],
) -> list[tuple[int, ...]]:
    """Replicas of ``count`` new partitions, the preferred leader first.

    ``racks``: the usable brokers and their racks; there must be at least ``replication_factor``
    of them. ``topic``: the replicas of the partitions that the topic has already.
    """
    load = Load()
    for replicas in topic:
        load.add(replicas)
    nodes = sorted(racks)
    rack_of = {node: racks[node] or f"\0{node}" for node in nodes}
    everywhere = Load(Counter(cluster_leaders), Counter(cluster_replicas))
    placed = []
    for _ in range(count):
        replicas = _place_one(replication_factor, nodes, rack_of, load, everywhere)
        load.add(replicas)
        everywhere.add(replicas)
        placed.append(replicas)
    return placed


def _place_one(
    replication_factor: int,
    nodes: Sequence[int],
    rack_of: Mapping[int, str],
    load: Load,
    everywhere: Load,
) -> tuple[int, ...]:
    def as_leader(node: int) -> tuple[int, ...]:
        return (
            load.leaders[node],
            load.replicas[node],
            everywhere.leaders[node],
            everywhere.replicas[node],
            node,
        )

    leader = min(nodes, key=as_leader)
    chosen = [leader]
    used_racks = Counter([rack_of[leader]])

    def as_follower(node: int) -> tuple[int, ...]:
        # Doubling keeps both kinds of counts within 2 of each other (found by trial over sizes).
        inherits = 2 * load.heirs[leader, node] if len(chosen) == 1 else 0
        return (
            used_racks[rack_of[node]],
            load.replicas[node] + inherits,
            everywhere.replicas[node],
            (nodes.index(node) - nodes.index(leader)) % len(nodes),
        )

    while len(chosen) < replication_factor:
        follower = min((node for node in nodes if node not in chosen), key=as_follower)
        chosen.append(follower)
        used_racks[rack_of[follower]] += 1
    return tuple(chosen)
