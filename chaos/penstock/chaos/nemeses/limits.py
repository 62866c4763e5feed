"""Processes that may open no more files, or have no more memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.backends import processes
from penstock.chaos.checkers.crashes import MAY_END
from penstock.chaos.cluster import Capability, Cluster
from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.roles import A_COORDINATOR

_LIMITS: Final = frozenset({Capability.LIMITS})
_TARGETS: Final = ("a leader", A_COORDINATOR, "the active controller", "random")


@dataclass(slots=True, eq=False)
class Scarce:
    """Lets the nodes of a role have little more than they have now of something."""

    name: str
    summary: str
    draw: Callable[[Random], int]
    """How much more."""
    set: Callable[[Cluster, int, int], None]
    """Limit a node to what its process has now and so much more."""
    ends: bool = False
    """Whether a node may end for want of it; then it is started when it is healed."""
    needs: frozenset[Capability] = _LIMITS

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whose, and how little."""
        target = random.choice(_TARGETS)
        parameters = {"more": self.draw(random)}
        return Fault(self.name, self.name, target if nodes > 1 else "all", parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """From now on they may have no more."""
        struck = list(scene.resolve(fault.target))
        held: dict[str, Any] = {"struck": struck, **fault.parameters}
        if self.ends:
            held[MAY_END] = "memory"
        try:
            for node in struck:
                self.set(scene.cluster, node, fault.parameters["more"])
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """They may have what they had; what has ended is started."""
        for node in held["struck"]:
            scene.cluster.set_limits(node)
            if self.ends:
                # What went without memory may have lost any of its parts.
                if node in scene.cluster.running:
                    scene.cluster.kill(node)
                scene.cluster.start_node(node)


def _pid(cluster: Cluster, node: int) -> int:
    pid = cluster.pid(node)
    if pid is None:
        raise FaultError(f"node {node} is not running on this machine, and cannot be limited")
    return pid


def _limit_descriptors(cluster: Cluster, node: int, more: int) -> None:
    most = processes.open_descriptors(_pid(cluster, node)) + more
    cluster.set_limits(node, descriptors=most)


def _limit_memory(cluster: Cluster, node: int, more: int) -> None:
    most = processes.data_bytes(_pid(cluster, node)) + more
    cluster.set_limits(node, memory_bytes=most)


FEW_DESCRIPTORS: Final = Scarce(
    "few-descriptors",
    "one node by role may open 0 to 8 more files and connections than it has open",
    lambda random: random.randint(0, 8),
    _limit_descriptors,
)
LITTLE_MEMORY: Final = Scarce(
    "little-memory",
    "one node by role may have 0 to 64 MB more memory than it has; then it is started anew",
    lambda random: random.choice((0, 1, 8, 64)) << 20,
    _limit_memory,
    ends=True,
    needs=_LIMITS | {Capability.PROCESSES},
)

LIMITS: Final = (FEW_DESCRIPTORS, LITTLE_MEMORY)
