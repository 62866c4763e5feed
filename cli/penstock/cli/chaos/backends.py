"""The backends by name: what makes the cluster that a run is against."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.chaos.cluster import Cluster
    from penstock.chaos.run_plan import RunPlan

CLUSTER_DIRECTORY: Final = "cluster"


class Backend(enum.StrEnum):
    """Where nodes run."""

    LOCAL = "local"


def make_cluster(
    plan: RunPlan, directory: Path, settings: Mapping[str, str | int] | None = None
) -> Cluster:
    """The cluster of a run, not started yet. Raises PlanError."""
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.local_nodes import LocalNodes  # noqa: PLC0415 - it imports gRPC.

    if plan.bug:
        from penstock.chaos.simulator.bugs import BUGS  # noqa: PLC0415 - it imports all cores.

        if plan.bug not in BUGS:
            raise PlanError(
                f"there is no known bug {plan.bug!r}; next: `penstock chaos list` shows them"
            )
    return LocalNodes(directory / CLUSTER_DIRECTORY, plan.nodes, settings=settings, bug=plan.bug)
