"""Partitions: nodes that do not hear each other, or their clients, and nobody is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import CLIENTS, Capability, Link, LinkFault
from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.roles import A_COORDINATOR

LINKS: Final = frozenset({Capability.LINKS})
_CUTS: Final = frozenset({Capability.CUTS})
"""Of those that cut links between nodes alone, and both ways."""
CUT: Final = LinkFault(cut=True)
ONE_BY_ROLE: Final = ("a leader", A_COORDINATOR, "the active controller", "random")
"""Whom faults of one node strike; a role that stands here twice is struck twice as often."""

_MANY: Final = 3
"""So many nodes it takes until all partitions differ from one another."""
_LEAST_CLOGGED_MS: Final = 200
_MOST_CLOGGED_MS: Final = 1_500


def between(some: Iterable[int | str], others: Collection[int | str]) -> set[Link]:
    """Both directions of all links from some ends to the others."""
    pairs = {(one, other) for one in some for other in others if one != other}
    return {Link(*pair) for one, other in pairs for pair in ((one, other), (other, one))}


@dataclass(frozen=True, slots=True)
class Around:
    """Whom a partition is made around."""

    struck: Sequence[int]
    nodes: Sequence[int]
    random: Random
    parameters: Mapping[str, Any]

    @property
    def others(self) -> list[int]:
        """All that are not struck."""
        return [node for node in self.nodes if node not in self.struck]

    def shuffled(self) -> list[int]:
        """All nodes in an order of chance, the struck ones first."""
        rest = self.random.sample(self.others, len(self.others))
        return [*self.random.sample(list(self.struck), len(self.struck)), *rest]


def _isolated(around: Around) -> set[Link]:
    return between(around.struck, [*around.others, CLIENTS])


def _halved(around: Around) -> set[Link]:
    """The struck one is in the smaller half; clients reach both."""
    order = around.shuffled()
    half = max(1, len(order) // 2)
    return between(order[:half], order[half:])


def _bridged(around: Around) -> set[Link]:
    """The struck one hears everybody, and alone does."""
    bridge, *rest = around.shuffled()
    assert bridge in around.struck
    half = len(rest) // 2
    return between(rest[:half], rest[half:])


def _in_a_ring(around: Around) -> set[Link]:
    """Each hears a majority, itself counted, and no two hear the same one."""
    ring = around.shuffled()
    majority = len(ring) // 2 + 1
    cut = set()
    for at, node in enumerate(ring):
        before = (majority - 1) // 2
        heard = {ring[(at - before + step) % len(ring)] for step in range(majority)}
        cut |= {Link(other, node) for other in ring if other not in heard}
    return cut


def _one_way(around: Around) -> set[Link]:
    """Nothing comes to the struck one from other nodes, or nothing from it to them."""
    if around.parameters["deaf"]:
        return {Link(other, node) for node in around.struck for other in around.others}
    return {Link(node, other) for node in around.struck for other in around.others}


def _without_clients(around: Around) -> set[Link]:
    return between(around.struck, [CLIENTS])


@dataclass(slots=True, eq=False)
class Partition:
    """Cuts the links that ``cut`` names around a node of some role, all at once."""

    name: str
    summary: str
    cut: Callable[[Around], set[Link]]
    least_nodes: int = 2
    draw: Callable[[Random], Mapping[str, Any]] = lambda _: {}
    needs: frozenset[Capability] = LINKS

    def plan(self, random: Random, nodes: int) -> Fault:
        """Around whom."""
        target = random.choice(ONE_BY_ROLE) if nodes > 1 else "all"
        return Fault(self.name, self.name, target, self.draw(random))

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Cut them."""
        nodes = scene.cluster.nodes
        if len(nodes) < self.least_nodes:
            raise FaultError(
                f"{self.name} takes {self.least_nodes} nodes; next: choose another nemesis, or "
                "more --nodes"
            )
        struck = list(scene.resolve(fault.target))
        cut = self.cut(Around(struck, nodes, scene.random, fault.parameters))
        scene.cluster.set_links(dict.fromkeys(sorted(cut, key=str), CUT))
        return {"struck": struck, "cut": shown(cut)}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Have all links be whole."""
        scene.cluster.set_links({})


def shown(links: Iterable[Link]) -> list[str]:
    """Links as a stored fault names them."""
    return sorted(f"{link.source}>{link.target}" for link in links)


ISOLATE: Final = Partition(
    "isolate", "one node by role hears nobody, and nobody hears it: nodes and clients", _isolated
)
HALVES: Final = Partition(
    "halves",
    "two halves of the nodes do not hear each other; clients reach both",
    _halved,
    needs=_CUTS,
)
BRIDGE: Final = Partition(
    "bridge",
    "two halves of the nodes hear each other through one node alone",
    _bridged,
    _MANY,
    needs=_CUTS,
)
MAJORITIES_RING: Final = Partition(
    "majorities-ring",
    "each node hears a majority, and no two the same one",
    _in_a_ring,
    _MANY,
    needs=_CUTS,
)
ONE_WAY: Final = Partition(
    "one-way",
    "one node hears no other and is heard, or is not heard and hears them",
    _one_way,
    draw=lambda random: {"deaf": random.random() < 1 / 2},
)
CLIENT_ONLY: Final = Partition(
    "client-only",
    "clients do not reach one node, and other nodes do",
    _without_clients,
    least_nodes=1,
)


class SwizzleClog:
    """Isolates some nodes from the others, one after the other, and heals in another order."""

    name = "swizzle-clog"
    summary = "isolate nodes one after the other, and heal them in another order"
    needs = _CUTS

    def plan(self, random: Random, nodes: int) -> Fault:
        """How many, and for how long there is a pause between two."""
        count = random.randint(min(2, nodes), nodes)
        pauses_ms = [random.randint(_LEAST_CLOGGED_MS, _MOST_CLOGGED_MS) for _ in range(count)]
        return Fault(self.name, self.name, "all", {"pauses_ms": pauses_ms})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when all of them are."""
        nodes = scene.cluster.nodes
        pauses_ms = fault.parameters["pauses_ms"]
        order = scene.random.sample(nodes, min(len(nodes), len(pauses_ms)))
        if len(nodes) == 1:
            raise FaultError(f"{self.name} takes two nodes; next: more --nodes")
        try:
            for count, pause_ms in enumerate(pauses_ms[: len(order)], 1):
                _isolate(scene, order[:count])
                threading.Event().wait(pause_ms / 1000)
        except FaultError:
            scene.cluster.set_links({})
            raise
        back = scene.random.sample(order, len(order))
        return {"struck": sorted(order), "order": order, "back": back}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """One after the other."""
        back = held["back"]
        try:
            for count, pause_ms in enumerate(fault.parameters["pauses_ms"][: len(back) - 1], 1):
                _isolate(scene, back[count:])
                threading.Event().wait(pause_ms / 1000)
        finally:
            scene.cluster.set_links({})


def _isolate(scene: Scene, some: Sequence[int]) -> None:
    nodes = scene.cluster.nodes
    pairs = [pair for pair in combinations(nodes, 2) if set(pair) & set(some)]
    cut = {link for one, other in pairs for link in between([one], [other])}
    scene.cluster.set_links(dict.fromkeys(sorted(cut, key=str), CUT))


PARTITIONS: Final = (
    ISOLATE,
    HALVES,
    BRIDGE,
    MAJORITIES_RING,
    ONE_WAY,
    CLIENT_ONLY,
    SwizzleClog(),
)
