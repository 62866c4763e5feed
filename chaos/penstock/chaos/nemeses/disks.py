"""Disks that are slow, full or broken, and nodes that lose power."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.checkers.crashes import MAY_END
from penstock.chaos.cluster import Capability, DiskFault
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.roles import A_COORDINATOR

_DISKS: Final = frozenset({Capability.DISKS})
_DISKS_AND_PROCESSES: Final = frozenset({Capability.DISKS, Capability.PROCESSES})
_ONE: Final = ("a leader", A_COORDINATOR, "the active controller", "random")
_ONE_OR_ALL: Final = (*_ONE, *_ONE, "a majority", "all")


@dataclass(slots=True, eq=False)
class BadDisk:
    """Has the disks of the nodes of a role do something. ``ends``: a node may end by that, and is
    killed and started when it is healed: no disk that has failed is trusted again before.
    """

    name: str
    summary: str
    draw: Callable[[Random], Mapping[str, Any]]
    """Fields of a DiskFault."""
    targets: Sequence[str] = _ONE
    ends: bool = False
    needs: frozenset[Capability] = _DISKS

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whose disks."""
        target = random.choice(self.targets)
        return Fault(self.name, self.name, target if nodes > 1 else "all", self.draw(random))

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """From now on they do that."""
        struck = list(scene.resolve(fault.target))
        held: dict[str, Any] = {"struck": struck, **fault.parameters}
        if self.ends:
            held[MAY_END] = "disk"
        try:
            for node in struck:
                scene.cluster.set_disk(node, DiskFault(**fault.parameters))
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Have them be good; start what has ended."""
        for node in held["struck"]:
            scene.cluster.set_disk(node, None)
            if self.ends:
                if node in scene.cluster.running:
                    scene.cluster.kill(node)
                scene.cluster.start_node(node)


SLOW_DISK: Final = BadDisk(
    "slow-disk",
    "each write and sync of one node by role, or of all, takes 2 to 100 ms longer",
    lambda random: {"delay_ms": random.choice((2, 10, 30, 100))},
    _ONE_OR_ALL,
)
FULL_DISK: Final = BadDisk(
    "full-disk",
    "no room (ENOSPC) on the disk of one node by role, sometimes of a majority or of all",
    lambda _: {"errno": "ENOSPC"},
    _ONE_OR_ALL,
)
FAILING_DISK: Final = BadDisk(
    "failing-disk",
    "writes fail (EIO) on one node by role, which gives its disk up; then a start with a good one",
    lambda _: {"errno": "EIO"},
    ends=True,
    needs=_DISKS_AND_PROCESSES,
)
FAILING_SYNC: Final = BadDisk(
    "failing-sync",
    "syncs fail (EIO) on one node by role, which gives its disk up; then a start with a good one",
    lambda _: {"errno": "EIO", "of_sync": True},
    ends=True,
    needs=_DISKS_AND_PROCESSES,
)


@dataclass(slots=True, eq=False)
class PowerLoss:
    """Kills nodes, all at one moment, and takes from their disks what was not synced.

    What was written before it began counts as synced, so that they run a while first, on disks
    that are slow, to have much that is not.
    """

    name: str
    summary: str
    targets: Sequence[str]
    needs: frozenset[Capability] = _DISKS_AND_PROCESSES

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whose power, and what they do before."""
        target = random.choice(self.targets)
        parameters = {"runs_ms": random.randint(500, 3_000), "delay_ms": random.choice((0, 2, 10))}
        return Fault(self.name, self.name, target if nodes > 1 else "all", parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when they are down, and have lost it."""
        cluster = scene.cluster
        struck = list(scene.resolve(fault.target))
        held = {"struck": struck}
        forgets = DiskFault(keep_unsynced=False, delay_ms=fault.parameters["delay_ms"])
        try:
            for node in struck:
                cluster.set_disk(node, forgets)
            threading.Event().wait(fault.parameters["runs_ms"] / 1000)
            for node in struck:  # So that nothing is synced between the first kill and the last.
                cluster.pause(node)
            for node in struck:
                cluster.kill(node)
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Power comes back."""
        for node in held["struck"]:
            scene.cluster.resume(node)
            scene.cluster.set_disk(node, None)
            scene.cluster.start_node(node)


LOST_UNSYNCED: Final = PowerLoss(
    "lost-unsynced", "one node by role loses power, and with it whatever it has not synced", _ONE
)
BLACKOUT: Final = PowerLoss(
    "blackout",
    "all nodes lose power at the same moment, and with it whatever they have not synced",
    ("all",),
)

DISKS: Final = (SLOW_DISK, FULL_DISK, FAILING_DISK, FAILING_SYNC)
POWER: Final = (LOST_UNSYNCED, BLACKOUT)
