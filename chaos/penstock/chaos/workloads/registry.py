"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import NotHereError, PlanError
from penstock.chaos.nemeses import Nemesis
from penstock.chaos.workloads import Workload
from penstock.chaos.workloads.append import Append
from penstock.chaos.workloads.churn import Churn
from penstock.chaos.workloads.compacted import Compacted
from penstock.chaos.workloads.group import Group
from penstock.chaos.workloads.offsets import Offsets
from penstock.chaos.workloads.process import Process
from penstock.chaos.workloads.register import Register
from penstock.chaos.workloads.retention import Retention
from penstock.chaos.workloads.transfer import Transfer

WORKLOADS: Final[Mapping[str, Workload]] = {
    one.name: one
    for one in (
        Append(),
        Group(),
        Offsets(),
        Process(),
        Transfer(),
        Churn(),
        Compacted(),
        Register(),
        Retention(),
    )
}
"""All of them."""

_UNJUDGED: Final[Mapping[str, Mapping[Capability, str]]] = {
    "compacted": {
        Capability.CLOCKS: "for how long a scan is whole is counted by the clocks of brokers "
        "(min.compaction.lag.ms)"
    }
}
"""What is promised of a workload's topics for as long alone as these are whole, and why."""


def require_judged(workload: Workload, nemeses: Sequence[Nemesis]) -> None:
    """Raise NotHereError where nothing is promised of the workload under one of them."""
    for nemesis in nemeses:
        for needed, why in _UNJUDGED.get(workload.name, {}).items():
            if needed in nemesis.needs:
                raise NotHereError(
                    f"the workload {workload.name} cannot be judged under {nemesis.name}: {why}; "
                    "next: leave one of the two out"
                )


def find_workload(name: str) -> Workload:
    """The workload of that name. Raises PlanError."""
    try:
        return WORKLOADS[name]
    except KeyError:
        raise PlanError(
            f"there is no workload {name!r}; next: take one of {', '.join(sorted(WORKLOADS))}"
        ) from None
