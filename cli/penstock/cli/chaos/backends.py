"""The backends by name: what makes the cluster that a run is against."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.chaos.cluster import Cluster
    from penstock.chaos.nemeses import ScheduledFault
    from penstock.chaos.run_plan import RunPlan
    from penstock.cli.cluster_layout import NodePlan

CLUSTER_DIRECTORY: Final = "cluster"


class Backend(enum.StrEnum):
    """Where nodes run."""

    LOCAL = "local"


def make_cluster(plan: RunPlan, directory: Path, faults: Sequence[ScheduledFault]) -> Cluster:
    """The cluster of a run, not started yet. Raises PlanError, ClusterError.

    It has the facilities that the faults need, and is not slowed down by others.
    """
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - not for --help.
    from penstock.chaos.runner import needs_of  # noqa: PLC0415 - as above.
    from penstock.chaos.workloads import TunesNodes  # noqa: PLC0415 - as above.
    from penstock.chaos.workloads.registry import find_workload  # noqa: PLC0415 - as above.
    from penstock.cli.chaos.local_backend import LocalBackend  # noqa: PLC0415 - as above.

    needs = needs_of(faults)
    workload = find_workload(plan.workload)
    settings: Mapping[str, str | int] = {}
    if isinstance(workload, TunesNodes):
        settings = workload.node_settings(plan.for_workload())
    return LocalBackend(
        directory / CLUSTER_DIRECTORY,
        plan.nodes,
        settings=settings,
        node_command=_bugged(plan.bug) if plan.bug else None,
        links=Capability.LINKS in needs,
        disks=Capability.DISKS in needs,
        seed=plan.seed,
    )


def _bugged(bug: str) -> Callable[[NodePlan], list[str]]:
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.node_bugs import BUGS  # noqa: PLC0415 - it imports the broker.

    if bug not in BUGS:
        raise PlanError(f"there is no known bug {bug!r}; next: `penstock chaos list` shows them")
    module = "penstock.cli.chaos.bugged_node"
    return lambda plan: [sys.executable, "-m", module, bug, "--config", str(plan.config_path)]
