"""What bench/soak.py says of acknowledgements that took long: when, of which partitions, and what
was done to nodes before. Times are those of ``time.monotonic``, which the processes of a machine
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

LONG_SECONDS: Final = 1.0
"""A wait for an acknowledgement that is longer is told of."""


class Wait(NamedTuple):
    """Values of one partition that were under way at the same time, each for long."""

    partition: int
    began: float
    ended: float
    longest_seconds: float


@dataclass(slots=True)
class Waits:
    """The long waits of one writer."""

    by_partition: dict[int, list[Wait]] = field(default_factory=dict)

    def add(self, partition: int, sent_at: float, settled_at: float) -> None:
        """Note what became of one value; values of a partition come in their order."""
        seconds = settled_at - sent_at
        if seconds < LONG_SECONDS:
            return
        known = self.by_partition.setdefault(partition, [])
        if known and sent_at <= known[-1].ended:
            last = known[-1]
            longest = max(last.longest_seconds, seconds)
            known[-1] = last._replace(ended=settled_at, longest_seconds=longest)
        else:
            known.append(Wait(partition, sent_at, settled_at, seconds))

    def all(self) -> list[Wait]:
        """All of them."""
        return [wait for waits in self.by_partition.values() for wait in waits]


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node was ``killed`` or ``started``."""

    at: float
    node_id: int
    what: str
    was_controller: bool = False
    leaders: dict[int, int] = field(default_factory=dict)
    """Who led each partition just before, of a kill."""

    def tell(self, begun: float) -> str:
        """In words."""
        role = " (active controller)" if self.was_controller else ""
        return f"node {self.node_id}{role} {self.what} at {self.at - begun:.1f}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Long waits that overlap: from when, in seconds since the beginning, and the longest of them.

    ``leaders`` led the partitions before the last kill. ``after``: the last things that were done.
    ``load``: the machine's load average (of a minute) then, -1 when it was not looked at any more.
    What waits while more than its cores have to do waits for them.
    """

    at: float
    seconds: float
    partitions: list[int]
    leaders: list[int]
    after: list[str]
    load: float


def gaps(
    waits: Iterable[Wait],
    events: Sequence[NodeEvent],
    loads: Sequence[tuple[float, float]],
    begun: float,
) -> list[Gap]:
    """All writers' waits, those that overlap as one, in their order.

    ``loads``: load averages and when they were taken, in their order.
    """
    found: list[list[Wait]] = []
    ended = float("-inf")
    for wait in sorted(waits, key=lambda wait: wait.began):
        if wait.began > ended:
            found.append([])
        found[-1].append(wait)
        ended = max(ended, wait.ended)
    return [_explain(together, events, loads, begun) for together in found]


def _explain(
    together: Sequence[Wait],
    events: Sequence[NodeEvent],
    loads: Sequence[tuple[float, float]],
    begun: float,
) -> Gap:
    ended = max(wait.ended for wait in together)
    before = [event for event in events if event.at < ended]
    led: dict[int, int] = next((it.leaders for it in reversed(before) if it.leaders), {})
    partitions = sorted({wait.partition for wait in together})
    return Gap(
        at=round(together[0].began - begun, 1),
        seconds=round(max(wait.longest_seconds for wait in together), 3),
        partitions=partitions,
        leaders=sorted({led[number] for number in partitions if number in led}),
        after=[event.tell(begun) for event in before[-2:]],
        load=round(next((load for at, load in loads if at >= ended), -1.0), 1),
    )


def gap_rows(found: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The gaps as rows of a table."""
    return [
        (
            f"{gap['at']:.1f}",
            f"{gap['seconds']:.2f}",
            f"{gap['load']:.1f}",
            ",".join(map(str, gap["partitions"])),
            ",".join(map(str, gap["leaders"])),
            ", ".join(gap["after"]),
        )
        for gap in found
    ]
