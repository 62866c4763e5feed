"""The nemeses by name, and what a command line says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import NotHereError, PlanError
from penstock.chaos.nemeses import Nemesis
from penstock.chaos.nemeses.clocks import CLOCKS
from penstock.chaos.nemeses.damage import DAMAGE
from penstock.chaos.nemeses.disks import DISKS, POWER
from penstock.chaos.nemeses.families import Family
from penstock.chaos.nemeses.limits import LIMITS
from penstock.chaos.nemeses.membership import MEMBERSHIP
from penstock.chaos.nemeses.network import NETWORK
from penstock.chaos.nemeses.packets import PACKETS
from penstock.chaos.nemeses.partitions import PARTITIONS
from penstock.chaos.nemeses.processes import KILL, PAUSE, TERM, Quiet, Rolling, Storm, Together

_FAMILIES: Final = (
    Family("partition", PARTITIONS),
    Family("netem", NETWORK),
    Family("disk", (*DISKS, *DAMAGE)),
    Family("power", POWER),
    Family("clock", CLOCKS),
    Family("membership", MEMBERSHIP),
    Family("limits", LIMITS),
)

USUAL: Final[Mapping[str, Nemesis]] = {
    one.name: one for one in (KILL, TERM, PAUSE, Storm(), Rolling(), *_FAMILIES, Quiet())
}
"""Those that every cell of a matrix has: families in place of their members."""

NEMESES: Final[Mapping[str, Nemesis]] = {
    **USUAL,
    **{name: member for family in _FAMILIES for name, member in family.members.items()},
    **{one.name: one for one in PACKETS},
}
"""All of them."""

_ONE_AT_A_TIME: Final = {
    "links": {Capability.CUTS, Capability.LINKS},
    "packets": {Capability.PACKETS},
}
"""What a backend is told of as a whole: the second nemesis would undo what the first has broken."""


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
    for what, by in _ONE_AT_A_TIME.items():
        breaking = [part.name for part in parts if part.needs & by]
        if len(breaking) > 1:
            raise PlanError(
                f"{' and '.join(breaking)} break {what}, and the one that begins later "
                "would heal those of the other; next: join them with a comma, by turns"
            )
    return parts[0] if len(parts) == 1 else Together(parts)


def find_nemeses(text: str) -> list[Nemesis]:
    """What ``kill,pause+quiet`` names; nothing for empty text. Raises PlanError."""
    return [find_nemesis(name.strip()) for name in text.split(",") if name.strip()]


def require(nemeses: Sequence[Nemesis], capabilities: frozenset[Capability], backend: str) -> None:
    """Raise NotHereError where the backend has not what one of them needs."""
    for nemesis in nemeses:
        missing = sorted(nemesis.needs - capabilities)
        if missing:
            raise NotHereError(
                f"the nemesis {nemesis.name} needs {', '.join(missing)}, which the backend "
                f"{backend} has not here; next: leave it out, or take another backend"
            )
