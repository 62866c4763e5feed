"""Wall clocks that are wrong: monotonic ones go on, as they do when somebody sets the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import Capability
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.roles import A_COORDINATOR

_TARGETS: Final = (
    "a leader",
    A_COORDINATOR,
    "the active controller",
    "random",
    "a majority",
    "all",
)
_JUMPS_MS: Final = (200, 2_000, 30_000, 600_000, 3_000_000)
"""Less than an hour: topics of runs keep for days what these clocks could expire."""
_STROBES_MS: Final = (1, 10, 200)


@dataclass(slots=True, eq=False)
class WrongClock:
    """Has the clocks of the nodes of a role be off."""

    name: str
    summary: str
    draw: Callable[[Random], Mapping[str, int]]
    """``offset_ms`` and ``strobe_ms``."""
    needs: frozenset[Capability] = frozenset({Capability.CLOCKS})

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whose clocks, and how wrong."""
        target = random.choice(_TARGETS)
        return Fault(self.name, self.name, target if nodes > 1 else "all", self.draw(random))

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """From now on they are."""
        held: dict[str, Any] = {"struck": list(scene.resolve(fault.target)), **fault.parameters}
        try:
            for node in held["struck"]:
                scene.cluster.set_clock(node, **fault.parameters)
        except Exception:
            self.heal(fault, scene, held)
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """They are right again: they jump back."""
        for node in held["struck"]:
            scene.cluster.set_clock(node, 0)


def _offset_ms(random: Random) -> int:
    return random.choice(_JUMPS_MS) * random.choice((-1, 1))


CLOCKS: Final = (
    WrongClock(
        "clock-jump",
        "wall clocks, by role, jump 0.2 s to 50 minutes ahead or back, and later back to the time",
        lambda random: {"offset_ms": _offset_ms(random), "strobe_ms": 0},
    ),
    WrongClock(
        "clock-strobe",
        "wall clocks, by role, jump by so much and back every 1 to 200 ms",
        lambda random: {"offset_ms": _offset_ms(random), "strobe_ms": random.choice(_STROBES_MS)},
    ),
)
