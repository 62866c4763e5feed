"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.chaos.errors import PlanError
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


def find_workload(name: str) -> Workload:
    """The workload of that name. Raises PlanError."""
    try:
        return WORKLOADS[name]
    except KeyError:
        raise PlanError(
            f"there is no workload {name!r}; next: take one of {', '.join(sorted(WORKLOADS))}"
        ) from None
