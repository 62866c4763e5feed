"""The nemeses by name, and what a command line says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from penstock.chaos.cluster import OFFERED, Capability
from penstock.chaos.errors import NotHereError, PlanError
from penstock.chaos.nemeses import Fault, Nemesis
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
    Family("netem", (*NETWORK, *PACKETS)),
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
}
"""All of them."""

_OF_ANY: Final = {"slow", "rate-limited"}
"""Of those of links: clients have some, too."""

_ONE_AT_A_TIME: Final = {
    "links": {Capability.CUTS, Capability.LINKS},
    "packets": {Capability.PACKETS},
}
"""What a backend is told of as a whole: the second nemesis would undo what the first has broken."""


_OF_SEVERAL: Final = {
    "swizzle-clog": 2,
    **{one.name: 2 for one in (*NETWORK, *DAMAGE, *MEMBERSHIP) if one.name not in _OF_ANY},
}
"""How many nodes they take at least, of those that do not say so themselves."""


def find_nemesis(name: str, backend: str | None = None) -> Nemesis:
    """The nemesis of that name; of ``a+b``, both at a time. Raises PlanError.

    For a backend, families have those members alone that it has; raises NotHereError for one of
    which it has none.
    """
    names = name.split("+")
    for one in names:
        if one == "none":
            raise PlanError("none breaks nothing, and is beside nothing; next: leave it out")
        if one not in NEMESES:
            near = get_close_matches(one, NEMESES, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise PlanError(
                f"there is no nemesis {one!r}{meant}; next: take of {', '.join(sorted(NEMESES))}, "
                "with commas for one after the other, with + for several at a time"
            )
    if len(set(names)) < len(names):
        raise PlanError(f"{name} names a nemesis twice; next: name each once")
    parts = [_within(NEMESES[one], backend) for one in names]
    for what, by in _ONE_AT_A_TIME.items():
        breaking = [part.name for part in parts if part.needs & by]
        if len(breaking) > 1:
            raise PlanError(
                f"{' and '.join(breaking)} break {what}, and the one that begins later "
                "would heal those of the other; next: join them with a comma, by turns"
            )
    return parts[0] if len(parts) == 1 else Together(parts)


def _within(nemesis: Nemesis, backend: str | None) -> Nemesis:
    if backend is None or not isinstance(nemesis, Family):
        return nemesis
    left = nemesis.within(OFFERED[backend])
    if left is None:
        raise NotHereError(
            f"the backend {backend} has none of what the nemesis {nemesis.name} draws from "
            f"({', '.join(nemesis.members)}); next: leave it out, or take another backend"
        )
    return left


def find_nemeses(text: str, backend: str | None = None) -> list[Nemesis]:
    """What ``kill,pause+quiet`` names; nothing for empty text. Raises PlanError."""
    return [find_nemesis(name.strip(), backend) for name in text.split(",") if name.strip()]


def least_nodes(names: str) -> int:
    """How many nodes there must be so that what ``kill+halves`` names can happen.

    Of a family it is what its least demanding member takes: whatever else is drawn of it may fail.
    """
    return max(_least(NEMESES[name]) for name in names.split("+"))


def _least(nemesis: Nemesis) -> int:
    if isinstance(nemesis, Family):
        return min(map(_least, nemesis.members.values()))
    return int(getattr(nemesis, "least_nodes", _OF_SEVERAL.get(nemesis.name, 1)))


def those_of(fault: Fault) -> list[Nemesis]:
    """What carries a fault out: of a family its member, of several at a time each.

    Raises PlanError where it names what there is not.
    """
    if "+" in fault.nemesis:
        parts = [Fault(**one) for one in fault.parameters["faults"]]
        return [nemesis for part in parts for nemesis in those_of(part)]
    nemesis = find_nemesis(fault.nemesis)
    if not isinstance(nemesis, Family):
        return [nemesis]
    if fault.kind not in nemesis.members:
        raise PlanError(
            f"the nemesis {nemesis.name} has no {fault.kind!r}; next: take of "
            f"{', '.join(nemesis.members)}"
        )
    return [nemesis.members[fault.kind]]


def require(nemeses: Sequence[Nemesis], capabilities: frozenset[Capability], backend: str) -> None:
    """Raise NotHereError where the backend has not what one of them needs."""
    for nemesis in nemeses:
        missing = sorted(nemesis.needs - capabilities)
        if missing:
            raise NotHereError(
                f"the nemesis {nemesis.name} needs {', '.join(missing)}, which the backend "
                f"{backend} has not here; next: leave it out, or take another backend"
            )
