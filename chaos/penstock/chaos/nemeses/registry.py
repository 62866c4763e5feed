"""The nemeses by name, and what a command line says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import PlanError
from penstock.chaos.nemeses import Nemesis
from penstock.chaos.nemeses.packets import DUPLICATED, LOSSY, REORDERED
from penstock.chaos.nemeses.processes import KILL, PAUSE, TERM, Quiet, Rolling, Storm, Together

NEMESES: Final[Mapping[str, Nemesis]] = {
    one.name: one
    for one in (KILL, TERM, PAUSE, Storm(), Rolling(), Quiet(), LOSSY, DUPLICATED, REORDERED)
}
"""All of them."""


def find_nemesis(name: str) -> Nemesis:
    """The nemesis of that name; of ``a+b``, both at a time. Raises PlanError."""
    names = name.split("+")
    for one in names:
        if one not in NEMESES:
            raise PlanError(
                f"there is no nemesis {one!r}; next: take of {', '.join(sorted(NEMESES))}, with "
                "commas for one after the other, with + for several at a time"
            )
    if len(set(names)) < len(names):
        raise PlanError(f"{name} names a nemesis twice; next: name each once")
    parts = [NEMESES[one] for one in names]
    if sum(Capability.PACKETS in part.needs for part in parts) > 1:
        # A node's packets have one fault at a time: the second would heal the first.
        raise PlanError(f"{name} breaks packets twice; next: name one of them, or put a comma")
    return parts[0] if len(parts) == 1 else Together(parts)


def find_nemeses(text: str) -> list[Nemesis]:
    """What ``kill,pause+quiet`` names; nothing for empty text. Raises PlanError."""
    return [find_nemesis(name.strip()) for name in text.split(",") if name.strip()]


def require(nemeses: Sequence[Nemesis], capabilities: frozenset[Capability], backend: str) -> None:
    """Raise PlanError where the backend has not what one of them needs."""
    for nemesis in nemeses:
        missing = sorted(nemesis.needs - capabilities)
        if missing:
            raise PlanError(
                f"the nemesis {nemesis.name} needs {', '.join(missing)}, which the backend "
                f"{backend} has not here; next: leave it out, or take another backend"
            )
