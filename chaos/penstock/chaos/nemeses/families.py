"""A name for several nemeses of one kind, of which each fault is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import Capability
from penstock.chaos.nemeses import Fault, Nemesis, Scene


class Family:
    """Draws each fault from its members; ``kind`` of a fault says of which one it is."""

    needs: frozenset[Capability]

    def __init__(self, name: str, members: Sequence[Nemesis]) -> None:
        self.name = name
        self.members: Final = {member.name: member for member in members}
        self.summary = "each time one of: " + ", ".join(self.members)
        self.needs = frozenset().union(*(member.needs for member in members))

    def within(self, offered: frozenset[Capability]) -> Family | None:
        """The same of those members alone that need nothing else; None where there are none."""
        left = [member for member in self.members.values() if member.needs <= offered]
        return Family(self.name, left) if left else None

    def plan(self, random: Random, nodes: int) -> Fault:
        """A fault of a member that is left to chance."""
        member = self.members[random.choice(list(self.members))]
        planned = member.plan(random, nodes)
        return Fault(self.name, member.name, planned.target, planned.parameters)

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """As the member does."""
        member, own = self._own(fault)
        return member.invoke(own, scene)

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """As the member does."""
        member, own = self._own(fault)
        member.heal(own, scene, held)

    def _own(self, fault: Fault) -> tuple[Nemesis, Fault]:
        """The member, and the fault as it has planned it: a member's kind is its name."""
        member = self.members[fault.kind]
        return member, Fault(member.name, member.name, fault.target, fault.parameters)
