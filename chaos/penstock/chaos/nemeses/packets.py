"""Faults of packets: nodes whose packets are lost, doubled, or overtake each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import Capability, PacketFault
from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, Scene

_TARGETS: Final = ("a leader", "the active controller", "random", "a minority", "all")


@dataclass(slots=True, eq=False)
class BadPackets:
    """Has the packets that some nodes send suffer one thing."""

    name: str
    summary: str
    draw: Callable[[Random], Mapping[str, float]]
    """Some of the fields of PacketFault."""
    needs: frozenset[Capability] = frozenset({Capability.PACKETS})

    def plan(self, random: Random, nodes: int) -> Fault:
        """How bad it is, and at whom."""
        target = random.choice(_TARGETS) if nodes > 1 else "all"
        return Fault(self.name, self.name, target, self.draw(random))

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """One node after the other; where it cannot be done to one, it is undone for all."""
        struck = list(scene.resolve(fault.target))
        held = {"struck": struck, **fault.parameters}
        try:
            for node in struck:
                scene.cluster.set_packets(node, PacketFault(**fault.parameters))
        except FaultError:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Undo it for each."""
        nodes: Sequence[int] = held["struck"]
        for node in nodes:
            scene.cluster.set_packets(node, None)


LOSSY: Final = BadPackets(
    "lossy",
    "nodes lose 1 to 20 % of the packets that they send",
    lambda random: {"loss": round(random.uniform(1, 20), 1)},
)
DUPLICATED: Final = BadPackets(
    "duplicated",
    "5 to 50 % of the packets that nodes send come twice",
    lambda random: {"duplicate": round(random.uniform(5, 50), 1)},
)
REORDERED: Final = BadPackets(
    "reordered",
    "packets that nodes send are 5 to 50 ms late, and 5 to 50 % of them overtake the others",
    lambda random: {
        "reorder": round(random.uniform(5, 50), 1),
        "delay_ms": round(random.uniform(5, 50), 1),
    },
)
PACKETS: Final = (LOSSY, DUPLICATED, REORDERED)
