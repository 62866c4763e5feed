"""The harness's workloads by name, as far as simulated clients do the same; and why not others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """``given``: fields of a run's Plan. ``often``: kinds of faults that each seed has besides."""

    summary: str
    given: Mapping[str, object] = field(default_factory=dict)
    often: frozenset[str] = frozenset()


def _cast(*roles: str) -> Mapping[str, object]:
    return {"transactions": True, "cast": roles}


WORKLOADS: Final[Mapping[str, NamedWorkload]] = {
    "append": NamedWorkload("producers with acks=all, 1 and 0, and readers"),
    "churn": NamedWorkload(
        "the same, under topics made, deleted, moved and given partitions all the time",
        often=frozenset({"topic", "move", "add partition", "elect"}),
    ),
    "retention": NamedWorkload(
        "the same, with records deleted all the time that readers may be too late for",
        often=frozenset({"delete records"}),
    ),
    "transfer": NamedWorkload(
        "transactions of every kind: transfers, and those of the next two", {"transactions": True}
    ),
    "process": NamedWorkload(
        "processors, alone and as a group, that read, process and write in transactions",
        _cast("processor", "group", "worker", "onlooker", "somebody"),
    ),
    "group": NamedWorkload(
        "members of a group that come, go, stall and are late, and commit in transactions",
        _cast("worker", "onlooker", "somebody"),
    ),
}
"""What `penstock chaos sim --workload` knows."""

WITHOUT: Final[Mapping[str, str]] = {
    "offsets": "its readers commit without transactions, which simulated members never do; what a "
    "group has is what `group` is about",
    "compacted": "compaction is done by the cleaner, around segments on a disk, and no core has a "
    "part in it",
    "register": "its consensus log is an idealised one, which is linearizable by construction; the "
    "real one has a simulator of its own, which checks that (`make sim SIM=quorum`)",
}
"""The other workloads of runs, and why the simulator has none such."""
