"""What breaks a cluster: the contract that every nemesis fulfils.

A nemesis plans its faults before the run, of the seed alone; at whom each one strikes is said by
role, and found out when its time comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from penstock.chaos.cluster import Capability, Cluster
from penstock.client import AdminClient


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to be done, and at whom; ``target`` is a role of ``penstock.chaos.roles``.

    It is JSON in a stored schedule, from which a run can be repeated and shrunk.
    """

    nemesis: str
    kind: str
    target: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault and when: milliseconds since the load began. It is healed after ``hold_ms``."""

    at_ms: int
    hold_ms: int
    fault: Fault


class Scene(Protocol):
    """What a fault may ask, when its time has come, about who plays which part."""

    @property
    def cluster(self) -> Cluster:
        """What is to be broken."""
        ...

    @property
    def random(self) -> Random:
        """For what is left to chance when the fault strikes; of the seed and the fault's place."""
        ...

    def resolve(self, target: str) -> Sequence[int]:
        """The nodes that play the role now. Raises FaultError where nobody does."""
        ...

    def down(self) -> Sequence[int]:
        """The nodes that faults hold down or apart now."""
        ...

    def admin(self) -> AbstractContextManager[AdminClient]:
        """A client for administering the cluster, to be closed; each call has some seconds."""
        ...


class Nemesis(Protocol):
    """``name`` is what the command line knows it by, and ``summary`` what its list says of it."""

    name: str
    summary: str
    needs: frozenset[Capability]

    def plan(self, random: Random, nodes: int) -> Fault:
        """The next fault, for a cluster of so many nodes. Pure but for ``random``."""
        ...

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Break it, and return when the fault holds: what was struck (``struck``) and how.

        Idempotent. Raises FaultError where it cannot be done; then nothing is broken.
        """
        ...

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Mend what ``invoke`` has broken, as it said. Idempotent."""
        ...
