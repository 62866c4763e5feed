"""The backends by name: what makes the cluster that a run is against."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.chaos.cluster import Capability, Cluster
    from penstock.chaos.nemeses import ScheduledFault
    from penstock.chaos.run_plan import RunPlan
    from penstock.cli.chaos.node_networks import NodeNetwork

CLUSTER_DIRECTORY: Final = "cluster"
_BUGGED_NODE: Final = "penstock.cli.chaos.bugged_node"


class Backend(enum.StrEnum):
    """Where nodes run."""

    LOCAL = "local"
    NAMESPACES = "namespaces"
    DOCKER = "docker"
    KUBERNETES = "kubernetes"


def make_cluster(plan: RunPlan, directory: Path, faults: Sequence[ScheduledFault]) -> Cluster:
    """The cluster of a run, not started yet. Raises PlanError, ClusterError.

    It has the facilities that the faults need, and is not slowed down by others.
    """
    from penstock.chaos.runner import needs_of  # noqa: PLC0415 - not for --help.

    if plan.bug:
        _check_bug(plan.bug)
    makers = {
        Backend.LOCAL: _local,
        Backend.NAMESPACES: _namespaces,
        Backend.DOCKER: _docker,
        Backend.KUBERNETES: _kubernetes,
    }
    return makers[Backend(plan.backend)](plan, directory / CLUSTER_DIRECTORY, needs_of(faults))


def _local(plan: RunPlan, directory: Path, needs: frozenset[Capability]) -> Cluster:
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.node_networks import Loopback, Relayed  # noqa: PLC0415 - as above.

    _options(plan, {})
    links = needs & {Capability.CUTS, Capability.LINKS, Capability.MESSAGES}
    # What is no Linux has no relay: then these are no capabilities, which the run says.
    network = Relayed(plan.seed) if links and sys.platform.startswith("linux") else Loopback()
    return _processes(plan, directory, needs, network)


def _namespaces(plan: RunPlan, directory: Path, needs: frozenset[Capability]) -> Cluster:
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.namespaced import Namespaced  # noqa: PLC0415 - as above.

    options = _options(plan, {"shaping": ""})
    network = Namespaced(
        range(1, plan.nodes + 1),
        shaping=options["shaping"],
        breaks_network=bool(needs & {Capability.CUTS, Capability.LINKS, Capability.PACKETS}),
        seed=plan.seed,
    )
    return _processes(plan, directory, needs, network)


def _processes(
    plan: RunPlan, directory: Path, needs: frozenset[Capability], network: NodeNetwork
) -> Cluster:
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.local_backend import LocalBackend  # noqa: PLC0415 - as above.
    from penstock.cli.local_cluster import node_command_of  # noqa: PLC0415 - as above.

    bugged = [sys.executable, "-m", _BUGGED_NODE, plan.bug]
    return LocalBackend(
        directory,
        plan.nodes,
        settings=_node_settings(plan),
        node_command=(lambda node: [*bugged, "--config", str(node.config_path)])
        if plan.bug
        else node_command_of,
        network=network,
        disks=bool(needs & {Capability.DISKS, Capability.CLOCKS}),
    )


def _docker(plan: RunPlan, directory: Path, needs: frozenset[Capability]) -> Cluster:
    from penstock.chaos.backends.containers import DockerEngine  # noqa: PLC0415 - not for --help.
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - as above.
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - as above.
    from penstock.cli.chaos.docker_backend import (  # noqa: PLC0415 - as above.
        DEFAULT_IMAGE,
        DockerBackend,
    )

    options = _options(plan, {"image": DEFAULT_IMAGE})
    breaks_network = bool(needs & {Capability.CUTS, Capability.LINKS, Capability.PACKETS})
    engine = DockerEngine()
    try:
        made = DockerBackend(
            directory,
            plan.nodes,
            engine,
            image=options["image"],
            entrypoint=["python", "-m", _BUGGED_NODE, plan.bug] if plan.bug else None,
            settings=_node_settings(plan),
            breaks_network=breaks_network,
            seed=plan.seed,
        )
        if breaks_network and made.why_no_network:
            raise PlanError(
                f"the network of containers cannot be broken here: {made.why_no_network}; next: "
                "take an image with iptables and a kernel with nfnetlink_queue (see "
                "docs/operating/docker.md), or leave these nemeses out"
            )
    except BaseException:
        engine.close()
        raise
    return made


def _kubernetes(plan: RunPlan, directory: Path, needs: frozenset[Capability]) -> Cluster:
    from penstock.chaos.cluster import Capability  # noqa: PLC0415 - not for --help.
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.kube_pods import KubePods, pods_within  # noqa: PLC0415 - as above.
    from penstock.cli.chaos.kubernetes_backend import (  # noqa: PLC0415 - as above.
        KubernetesBackend,
    )
    from penstock.cli.kube_api import Access  # noqa: PLC0415 - as above.

    known = {
        "api": "",
        "bootstrap": "",
        "first-id": "0",
        "namespace": "default",
        "selector": "app.kubernetes.io/name=penstock",
    }
    options = _options(plan, known)
    if plan.bug:
        raise PlanError("the nodes run already, without a bug; next: take local or docker")
    if _node_settings(plan):
        raise PlanError(
            f"the nodes run already, and the workload {plan.workload} needs settings of theirs; "
            "next: take local or docker, or another workload"
        )
    if not options["bootstrap"]:
        raise PlanError("where do clients begin? next: name --backend-set bootstrap=HOST:PORT")
    if not options["first-id"].isdigit():
        raise PlanError(f"first-id={options['first-id']!r} is no number; next: name one")
    return KubernetesBackend(
        directory,
        plan.nodes,
        KubePods(Access(options["api"])) if options["api"] else pods_within(),
        bootstrap=options["bootstrap"],
        namespace=options["namespace"],
        selector=options["selector"],
        first_id=int(options["first-id"]),
        cuts=Capability.CUTS in needs,
    )


def _node_settings(plan: RunPlan) -> Mapping[str, str | int]:
    """Settings of nodes that the workload asks for."""
    from penstock.chaos.workloads import TunesNodes  # noqa: PLC0415 - not for --help.
    from penstock.chaos.workloads.registry import find_workload  # noqa: PLC0415 - it imports gRPC.

    workload = find_workload(plan.workload)
    if not isinstance(workload, TunesNodes):
        return {}
    return workload.node_settings(plan.for_workload())


def _options(plan: RunPlan, known: Mapping[str, str]) -> dict[str, str]:
    """What the backend is told, over what it takes by itself. Raises PlanError."""
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.

    for name in plan.backend_options:
        if name not in known:
            there = f"take of {', '.join(sorted(known))}" if known else "leave it out"
            raise PlanError(f"the backend {plan.backend} has no option {name!r}; next: {there}")
    return {**known, **plan.backend_options}


def _check_bug(bug: str) -> None:
    from penstock.chaos.errors import PlanError  # noqa: PLC0415 - not for --help.
    from penstock.cli.chaos.node_bugs import BUGS, SIMULATED  # noqa: PLC0415 - needs the broker.

    if bug in SIMULATED:
        raise PlanError(
            f"the bug {bug!r} is one of simulated nodes alone: a real one would not have it; next: "
            f"`penstock chaos sim --bug {bug}`"
        )
    if bug not in BUGS:
        raise PlanError(f"there is no known bug {bug!r}; next: `penstock chaos list` shows them")
