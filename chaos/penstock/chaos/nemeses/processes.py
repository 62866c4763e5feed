"""Faults of processes: nodes killed, stopped, paused and restarted; and several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import Capability, Cluster
from penstock.chaos.errors import ClusterError, FaultError
from penstock.chaos.nemeses import Fault, Nemesis, Scene
from penstock.chaos.roles import A_COORDINATOR

_PROCESSES: Final = frozenset({Capability.PROCESSES})
_ROLES: Final = ("a leader", A_COORDINATOR, "the active controller", "random", "a minority")
"""Whom one node is by; a role that stands in such a list twice is struck twice as often."""
_ROLL_READY_S: Final = 30.0


@dataclass(slots=True, eq=False)
class Strike:
    """Does one thing to each of the nodes that play a role, and undoes it in the end."""

    name: str
    summary: str
    targets: Sequence[str]
    """One of these roles is drawn; a cluster of one node is struck as a whole."""
    do: Callable[[Cluster, int], object]
    undo: Callable[[Cluster, int], object]
    needs: frozenset[Capability] = _PROCESSES

    def plan(self, random: Random, nodes: int) -> Fault:
        """At whom it is left to chance."""
        target = random.choice(self.targets)
        return Fault(self.name, self.name, target if nodes > 1 else "all")

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """One node after the other; where it cannot be done to one, it is undone for all."""
        struck = list(scene.resolve(fault.target))
        try:
            for node in struck:
                self.do(scene.cluster, node)
        except FaultError:
            self.heal(fault, scene, {"struck": struck})
            raise
        return {"struck": struck}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Undo it for each."""
        for node in held["struck"]:
            self.undo(scene.cluster, node)


_SEVERAL_NOW_AND_THEN: Final = (*_ROLES, *_ROLES, "a majority", "all")

KILL: Final = Strike(
    "kill",
    "SIGKILL one node by role, sometimes a majority or all, and start it again",
    _SEVERAL_NOW_AND_THEN,
    lambda cluster, node: cluster.kill(node),
    lambda cluster, node: cluster.start_node(node),
)
TERM: Final = Strike(
    "term",
    "SIGTERM one node by role, which hands over first, and start it again",
    _ROLES,
    lambda cluster, node: cluster.terminate(node),
    lambda cluster, node: cluster.start_node(node),
)
PAUSE: Final = Strike(
    "pause",
    "SIGSTOP one node by role, sometimes a majority or all, and SIGCONT it",
    _SEVERAL_NOW_AND_THEN,
    lambda cluster, node: cluster.pause(node),
    lambda cluster, node: cluster.resume(node),
    _PROCESSES | {Capability.PAUSES},
)


class Storm:
    """Kills and starts one node again and again, before it can come to rest."""

    name = "storm"
    summary = "SIGKILL and start one node three to six times in a row"
    needs = _PROCESSES

    def plan(self, random: Random, nodes: int) -> Fault:
        """How often, and how long it may live each time."""
        lives_ms = [random.randint(100, 2_000) for _ in range(random.randint(2, 5))]
        return Fault(self.name, "storm", random.choice(_ROLES[:4]), {"lives_ms": lives_ms})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when it was killed for the last time."""
        struck = scene.resolve(fault.target)
        pause = threading.Event()
        for life_ms in fault.parameters["lives_ms"]:
            for node in struck:
                scene.cluster.kill(node)
                scene.cluster.start_node(node)
            pause.wait(life_ms / 1000)
        for node in struck:
            scene.cluster.kill(node)
        return {"struck": list(struck)}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Start it."""
        for node in held["struck"]:
            scene.cluster.start_node(node)


class Rolling:
    """Restarts every node, one after the other, as an upgrade does."""

    name = "rolling"
    summary = "SIGTERM and start every node, each when the one before serves again"
    needs = _PROCESSES

    def plan(self, random: Random, nodes: int) -> Fault:
        """Nothing is left to chance but the order."""
        return Fault(self.name, "rolling", "all", {"order": random.random()})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when all were restarted."""
        nodes = list(scene.resolve(fault.target))
        Random(fault.parameters["order"]).shuffle(nodes)
        for node in nodes:
            scene.cluster.terminate(node)
            scene.cluster.start_node(node)
            try:
                scene.cluster.wait_ready(_ROLL_READY_S)
            except ClusterError as error:
                raise FaultError(f"node {node} is not back in the rolling restart: {error}") from (
                    error
                )
        return {"struck": nodes}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Nothing is left to mend."""


class Quiet:
    """Breaks nothing: what is usual, for comparison."""

    name = "quiet"
    summary = "nothing, for as long as a fault would take"
    needs: frozenset[Capability] = frozenset()

    def plan(self, random: Random, nodes: int) -> Fault:
        """At nobody."""
        return Fault(self.name, "quiet", "nobody")

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Nothing."""
        return {"struck": []}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Nothing."""


class Together:
    """Faults of several nemeses at a time, each beside what the others hold."""

    needs: frozenset[Capability]

    def __init__(self, parts: Sequence[Nemesis]) -> None:
        self._parts: Final = {part.name: part for part in parts}
        self.name = "+".join(self._parts)
        self.summary = "at the same time: " + "; ".join(part.summary for part in parts)
        self.needs = frozenset().union(*(part.needs for part in parts))

    def plan(self, random: Random, nodes: int) -> Fault:
        """One fault of each."""
        planned = [part.plan(random, nodes) for part in self._parts.values()]
        parameters = {
            "faults": [
                {
                    "nemesis": one.nemesis,
                    "kind": one.kind,
                    "target": one.target,
                    "parameters": dict(one.parameters),
                }
                for one in planned
            ]
        }
        kind = "+".join(one.kind for one in planned)
        return Fault(self.name, kind, "+".join(one.target for one in planned), parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Break them one after the other; where one cannot be, those before it are healed."""
        held: list[Mapping[str, Any]] = []
        for part, one in self._each(fault):
            try:
                held.append(part.invoke(one, scene))
            except FaultError:
                self._heal(fault, scene, held)
                raise
        struck = sorted({node for one in held for node in one["struck"]}, key=str)
        return {"struck": struck, "parts": held}

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Heal them in the opposite order."""
        self._heal(fault, scene, held["parts"])

    def _heal(self, fault: Fault, scene: Scene, held: Sequence[Mapping[str, Any]]) -> None:
        each = list(zip(self._each(fault), held, strict=False))
        for (part, one), what in reversed(each):
            part.heal(one, scene, what)

    def _each(self, fault: Fault) -> list[tuple[Nemesis, Fault]]:
        faults = [Fault(**one) for one in fault.parameters["faults"]]
        return [(self._parts[one.nemesis], one) for one in faults]
