"""A network that works, and badly: slow, narrow, or late with messages of one kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import CLIENTS, Capability, Link, LinkFault
from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.nemeses.partitions import LINKS, ONE_BY_ROLE, between, shown

_MESSAGES: Final = LINKS | {Capability.MESSAGES}


@dataclass(slots=True, eq=False)
class BadLinks:
    """Has all links of some nodes, or of all, do the same; those to clients as well."""

    name: str
    summary: str
    draw: Callable[[Random], Mapping[str, Any]]
    """Fields of a LinkFault."""
    needs: frozenset[Capability] = LINKS

    def plan(self, random: Random, nodes: int) -> Fault:
        """How bad, and whose."""
        target = random.choice((*ONE_BY_ROLE, "all", "all")) if nodes > 1 else "all"
        return Fault(self.name, self.name, target, self.draw(random))

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """From now on they do that."""
        struck = list(scene.resolve(fault.target))
        links = between(struck, [*scene.cluster.nodes, CLIENTS])
        bad = LinkFault(**fault.parameters)
        scene.cluster.set_links(dict.fromkeys(sorted(links, key=str), bad))
        return {"struck": struck, **fault.parameters}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Have all links be good."""
        scene.cluster.set_links({})


def _slow(random: Random) -> Mapping[str, Any]:
    latency_ms = random.choice((5, 20, 50, 100, 200, 400))
    return {"latency_ms": latency_ms, "jitter_ms": round(latency_ms * random.uniform(0.1, 1), 1)}


SLOW: Final = BadLinks(
    "slow", "5 to 400 ms, and jitter, on the links of one node by role, or on all", _slow
)
RATE_LIMITED: Final = BadLinks(
    "rate-limited",
    "at most 16 KB to 1 MB a second over each link of one node by role, or over all",
    lambda random: {"rate_bytes": 1 << random.randint(14, 20)},
)


@dataclass(slots=True, eq=False)
class LateMessages:
    """Has messages of some names alone come late, in one direction; all others pass them."""

    name: str
    summary: str
    calls: Sequence[str]
    targets: Sequence[str]
    restarts: bool = False
    """Kill and start the struck node, since without that there are no such messages."""
    needs: frozenset[Capability] = _MESSAGES

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whose, and how late."""
        target = random.choice(self.targets) if nodes > 1 else "all"
        return Fault(self.name, self.name, target, {"hold_ms": random.randint(300, 5_000)})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """From now on they come late."""
        cluster = scene.cluster
        if len(cluster.nodes) == 1:
            raise FaultError(f"{self.name} takes two nodes; next: more --nodes")
        struck = list(scene.resolve(fault.target))
        # Whoever restarts is what the messages are about, and anybody may send them.
        sources = cluster.nodes if self.restarts else struck
        links = [
            Link(source, other) for source in sources for other in cluster.nodes if other != source
        ]
        late = LinkFault(hold=tuple(self.calls), hold_ms=fault.parameters["hold_ms"])
        cluster.set_links(dict.fromkeys(links, late))
        held = {"struck": struck, "calls": list(self.calls), "links": shown(links)}
        if self.restarts:
            try:
                for node in struck:
                    cluster.kill(node)
                    cluster.start_node(node)
            except Exception:
                self.heal(fault, scene, held)
                raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """What was held passes at once."""
        scene.cluster.set_links({})
        if self.restarts:
            for node in held["struck"]:
                scene.cluster.start_node(node)


LATE_ACKS: Final = LateMessages(
    "late-acks",
    "acknowledgements of a follower (records too, where it leads) come 0.3 to 5 s late",
    ("Replication/Fetch",),
    ("random", "a leader"),
)
LATE_ISR_CHANGES: Final = LateMessages(
    "late-isr-changes",
    "restart a node, and what leaders tell the controller of in-sync sets comes 0.3 to 5 s late",
    ("AlterPartition",),
    ("random", "a leader"),
    restarts=True,
    needs=_MESSAGES | {Capability.PROCESSES},
)
LATE_HEARTBEATS: Final = LateMessages(
    "late-heartbeats",
    "heartbeats of a broker come 0.3 to 5 s late to the active controller",
    ("Controller/Heartbeat",),
    ("not the active controller", "a leader"),
)

NETWORK: Final = (SLOW, RATE_LIMITED, LATE_ACKS, LATE_ISR_CHANGES, LATE_HEARTBEATS)
