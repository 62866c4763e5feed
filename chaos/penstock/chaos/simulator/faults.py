"""What goes wrong in a run: drawn from the seed before it begins, so that it can be shown."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong at a time, on some nodes, for a while."""

    at_ms: int
    kind: str
    nodes: tuple[int, ...] = ()
    for_ms: int = 0

    def __str__(self) -> str:
        where = f" {','.join(map(str, self.nodes))}" if self.nodes else ""
        how_long = f" for {self.for_ms} ms" if self.for_ms else ""
        return f"{self.at_ms:6} ms  {self.kind}{where}{how_long}"


def _one(rng: Random, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return (rng.choice(nodes),)


def _some(rng: Random, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(rng.sample(nodes, rng.randint(1, len(nodes) - 1))))


def _two(rng: Random, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rng.sample(nodes, 2))


def _all(_: Random, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return nodes


def _none(_: Random, __: tuple[int, ...]) -> tuple[int, ...]:
    return ()


_KINDS: dict[str, tuple[int, Callable[[Random, tuple[int, ...]], tuple[int, ...]]]] = {
    "kill": (6, _one),  # The process dies, and is started again.
    "kill leader": (4, _none),  # Whoever leads the first partition then.
    "power loss": (5, _one),  # The node dies with its page cache.
    "power loss everywhere": (1, _all),
    "failed flush": (3, _one),  # A flush fails, and what it was for is in doubt.
    "failed disk": (2, _one),  # Of some of a broker's logs, until it is mended and started again.
    "lost disk": (1, _one),  # The node dies, and comes back with an empty disk.
    "lost tail": (2, _none),  # A leader's disk forgets the last of what it had confirmed.
    "bit flip": (3, _one),  # A bit changes on the disk.
    "restart": (3, _one),  # A clean shutdown, and a start.
    "late metadata": (3, _one),  # The node's broker acts late on what controllers have decided.
    "stall": (3, _one),  # The node's processes do nothing for a while.
    "clock": (3, _one),  # The node's clock leaps, or stands still.
    "split": (3, _some),  # These nodes are cut off from the others.
    "one way": (3, _two),  # Nothing gets from the first to the second.
    "reset": (4, _two),  # Streams between the two break; a part of what was under way comes late.
    "slow network": (2, _some),
    "slow disk": (3, _one),
    "another controller": (4, _none),
    "stale entry": (1, _none),  # An entry of a former controller comes late.
    "min isr": (2, _none),  # The topic's min.insync.replicas changes.
    "delete records": (2, _none),  # Somebody deletes what is committed up to somewhere.
    "move": (6, _none),  # A partition is to move to other brokers, or its move is cancelled.
    "add partition": (1, _none),
    "another producer": (3, _none),  # A producer's process ends, and another takes its place.
    "topic": (2, _none),  # A second topic is made, or deleted, again and again by the same name.
    "elect": (2, _none),  # The preferred leader is to lead, or where allowed whoever lives.
}


DAMAGED_LOG: Final = "damaged log"
"""A node restarts, and one of its logs does not open. It is drawn apart from all others."""

TRANSACTION_KINDS: Final = ("end after", "hold up a client", "kill coordinator")
"""What goes wrong only where there are transactions; drawn apart from all others.

A broker's process ends right after a step of a transaction that the run decides; a client stands
still, and another one may take its place; who leads a partition of the coordinators' topic ends.
"""

SAFE_KINDS: Final = (
    "kill",
    "kill leader",
    "power loss",
    "power loss everywhere",
    "failed flush",
    "restart",
    "late metadata",
    "stall",
    "clock",
    "split",
    "one way",
    "reset",
    "slow network",
    "slow disk",
    "another controller",
    "stale entry",
    "move",
    "add partition",
    "another producer",
    "topic",
    "elect",
)
"""After these everything that was acknowledged is still there, under flush.policy commit."""

KINDS: Final[tuple[str, ...]] = tuple(_KINDS)
"""Everything that can go wrong, or that somebody may do."""


def draw_faults(
    rng: Random, nodes: tuple[int, ...], *, until_ms: int, only: Collection[str] = KINDS
) -> list[Fault]:
    """A schedule of faults of some kinds, in the order of its times."""
    kinds = [kind for kind in _KINDS if kind in only]
    weights = [_KINDS[kind][0] for kind in kinds]
    gap_ms = rng.choice((250, 600, 1200))  # Some runs are wild, some give time to recover.
    faults: list[Fault] = []
    at_ms = 1500
    while kinds:
        at_ms += rng.randint(gap_ms // 4, gap_ms * 2)
        if at_ms >= until_ms:
            break
        [kind] = rng.choices(kinds, weights)
        faults.append(Fault(at_ms, kind, _KINDS[kind][1](rng, nodes), rng.randint(50, 2500)))
    return faults


def draw_quiet_faults(
    rng: Random,
    nodes: tuple[int, ...],
    *,
    from_ms: int,
    for_ms: int,
    only: Collection[str] = KINDS,
) -> list[Fault]:
    """What happens while it is quiet: little, and most of it for longer than anybody's patience."""
    kinds = [kind for kind in _KINDS if kind in only]
    weights = [_KINDS[kind][0] for kind in kinds]
    faults: list[Fault] = []
    at_ms = from_ms
    while kinds:
        at_ms += rng.randint(for_ms // 24, for_ms // 4)
        if at_ms >= from_ms + for_ms:
            break
        [kind] = rng.choices(kinds, weights)
        lasts_ms = rng.randint(50, rng.choice((2500, for_ms // 24, for_ms // 6)))
        faults.append(Fault(at_ms, kind, _KINDS[kind][1](rng, nodes), lasts_ms))
    return faults


def draw_damaged_logs(rng: Random, nodes: tuple[int, ...], *, until_ms: int) -> list[Fault]:
    """When which nodes restart with a log that does not open."""
    faults: list[Fault] = []
    at_ms = rng.randint(1500, 6000)
    while at_ms < until_ms:
        faults.append(Fault(at_ms, DAMAGED_LOG, _one(rng, nodes), rng.randint(50, 1500)))
        at_ms += rng.randint(1000, 4000)
    return faults


def draw_transaction_faults(
    rng: Random, *, until_ms: int, only: Collection[str] = TRANSACTION_KINDS
) -> list[Fault]:
    """When which of TRANSACTION_KINDS happen."""
    kinds = [kind for kind in TRANSACTION_KINDS if kind in only]
    faults: list[Fault] = []
    at_ms = 1500
    gap_ms = rng.choice((150, 400, 1000))
    while kinds:
        at_ms += rng.randint(gap_ms // 4, gap_ms * 2)
        if at_ms >= until_ms:
            break
        faults.append(Fault(at_ms, rng.choice(kinds), (), rng.randint(50, 2500)))
    return faults
