"""The backend of pods: a cluster that runs in Kubernetes already, as a StatefulSet.

What each facility does and does not model is said in docs/internals/chaos.md.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.chaos.backends.containers import LABEL
from penstock.chaos.cluster import (
    CLIENTS,
    Capability,
    DiskFault,
    Link,
    LinkFault,
    PacketFault,
)
from penstock.chaos.errors import ClusterError, FaultError
from penstock.cli.chaos.kube_pods import KubePods
from penstock.cli.chaos.whole import describe_unwhole
from penstock.cli.readiness import describe_cluster
from penstock.wire.transport import format_address

START_S: Final = 120.0
GONE_S: Final = 60.0
GRACE_S: Final = 30
_POLL_S: Final = 0.2
_POD_NAME: Final = "statefulset.kubernetes.io/pod-name"
"""The label that a StatefulSet gives each of its pods."""
_CUT: Final = LinkFault(cut=True)
_NO_FILES: Final = "the backend kubernetes has no files; next: see `capabilities`"


@dataclass(frozen=True, slots=True)
class _Address:
    """A node, as far as it can be asked (``penstock.cli.readiness.Listening``)."""

    node_id: int
    address: str


class KubernetesBackend:
    """The pods of a StatefulSet (``penstock.chaos.cluster.Cluster``), found by their labels.

    They run before and after: nothing is started or stopped here, but what was broken is healed.
    A pod that is deleted comes back by itself, so that a node is never held down. ``directory`` is
    made, and gets the pods' logs.

    ``log`` and ``pid`` may be asked from any thread, all else from one at a time.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        api: KubePods,
        *,
        bootstrap: str,
        namespace: str = "default",
        selector: str = "app.kubernetes.io/name=penstock",
        first_id: int = 0,
        cuts: bool = False,
    ) -> None:
        """``first_id`` is the id of the pod with the number 0; the others follow. With ``cuts``
        it is looked at the start whether these can be made.
        """
        self._directory: Final = directory
        self._wanted: Final = nodes
        self._api: Final = api
        self._bootstrap: Final = bootstrap
        self._namespace: Final = namespace
        self._selector: Final = selector
        self._first_id: Final = first_id
        self._cuts: Final = cuts
        self._labels: Final = {LABEL: secrets.token_hex(6)}
        self._cut: frozenset[tuple[int, int]] = frozenset()
        self._names: dict[int, str] = {}

    # --- what it is

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What of the following it can do."""
        return frozenset({Capability.PROCESSES, Capability.CUTS})

    @property
    def nodes(self) -> Sequence[int]:
        """All of them."""
        return list(range(self._first_id, self._first_id + self._wanted))

    @property
    def bootstrap(self) -> str:
        """As it was named."""
        return self._bootstrap

    @property
    def running(self) -> Sequence[int]:
        """Those whose pod runs, and is not being deleted."""
        return [node for node, pod in self._pods().items() if _runs(pod)]

    @property
    def versions(self) -> Mapping[str, str]:
        """The cluster's, and the images of its pods."""
        images = {
            container["image"]
            for pod in self._pods().values()
            for container in pod["spec"]["containers"]
        }
        return {"kubernetes": self._api.version(), "image": ", ".join(sorted(images))}

    def _pods(self) -> dict[int, Mapping[str, Any]]:
        """The pods by the nodes that they are. Raises FaultError where one has no number."""
        found: dict[int, Mapping[str, Any]] = {}
        for pod in self._api.pods(self._namespace, self._selector):
            name = str(pod["metadata"]["name"])
            number = name.rpartition("-")[2]
            if not number.isdigit():
                raise FaultError(
                    f"the pod {name} is of no StatefulSet; next: name others with --backend-set "
                    "selector=LABEL=VALUE"
                )
            node = self._first_id + int(number)
            self._names[node] = name
            found[node] = pod
        return dict(sorted(found.items()))

    # --- start and stop

    def start(self) -> None:
        """Find the pods, and return when all are ready. Raises ClusterError."""
        try:
            found = self._pods()
            if self._cuts:
                self._check_policies(found.values())
        except FaultError as error:
            raise ClusterError(str(error)) from error
        if list(found) != list(self.nodes):
            raise ClusterError(
                f"there are pods of the nodes {list(found)} with {self._selector} in the namespace "
                f"{self._namespace}, and {list(self.nodes)} were expected; next: see --nodes, and "
                "--backend-set namespace=, selector= and first-id="
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        self.wait_ready(START_S)

    def _check_policies(self, pods: Iterable[Mapping[str, Any]]) -> None:
        """What one policy allows no other forbids: where some allow anything, ours cut nothing."""
        labels = [pod["metadata"].get("labels", {}) for pod in pods]
        others = [
            str(policy["metadata"]["name"])
            for policy in self._api.policies(self._namespace)
            if any(_selects(policy["spec"].get("podSelector", {}), one) for one in labels)
        ]
        if others:
            raise FaultError(
                f"network policies add up, and what {', '.join(sorted(others))} allows to these "
                "pods no policy of this run would cut; next: delete that for as long as the run "
                "takes, or take another --nemesis"
            )

    def stop(self) -> None:
        """Heal what is cut, and gather the logs. Idempotent; the pods run on."""
        with ExitStack() as ending:
            ending.callback(self._heal_links)
            if self._directory.exists():
                for node, name in self._names.items():
                    ending.callback(self._gather_log, node, name)

    def _gather_log(self, node: int, name: str) -> None:
        """Add what the pod wrote: a pod that comes after it begins with nothing."""
        with self._log_path(node).open("ab") as file:
            file.write(self._api.log(self._namespace, name))

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every node serves and every partition has a leader. Raises ClusterError."""
        deadline = time.monotonic() + timeout_s
        while reason := self._why_unready():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster is not ready after {timeout_s:.0f} s: {reason}; next: see "
                    "`kubectl describe pods`, and whether this process reaches what brokers "
                    "advertise: it is best run in a pod beside them"
                )
            time.sleep(_POLL_S)

    def _why_unready(self) -> str:
        try:
            running = self.running
        except FaultError as error:
            return str(error)
        missing = [node for node in self.nodes if node not in running]
        if missing:
            return f"the pods of these nodes do not run: {missing}"
        for address in self._bootstrap.split(","):
            answer = describe_cluster(_Address(-1, address.strip()))
            if answer is not None:
                known = [
                    _Address(one.node_id, format_address(one.host, one.port))
                    for one in answer.brokers
                ]
                if [one.node_id for one in known] != list(self.nodes):
                    return f"the brokers are {[one.node_id for one in known]}"
                return describe_unwhole(known, answer.cluster_id)
        return f"nobody answers at {self._bootstrap}"

    # --- processes

    def kill(self, node: int) -> None:
        """Delete its pod without grace, and return when it is gone: another one takes its place."""
        self._delete(node, 0)

    def terminate(self, node: int) -> None:
        """Delete its pod with half a minute of grace, and return when it is gone."""
        self._delete(node, GRACE_S)

    def _delete(self, node: int, grace_s: int) -> None:
        pod = self._pods().get(node)
        if pod is None:
            return
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._gather_log(node, name)
        self._api.delete_pod(self._namespace, name, uid, grace_s)
        deadline = time.monotonic() + grace_s + GONE_S
        while (left := self._pods().get(node)) is not None and left["metadata"]["uid"] == uid:
            if time.monotonic() > deadline:
                raise FaultError(f"the pod {name} is still there {GONE_S:.0f} s after its grace")
            time.sleep(_POLL_S)

    def start_node(self, node: int) -> None:
        """Nothing: the StatefulSet starts what is down."""

    def pause(self, node: int) -> None:
        """Pods cannot be paused."""
        raise FaultError("the backend kubernetes pauses no pods; next: take local or docker")

    def resume(self, node: int) -> None:
        """Nothing: none is ever paused."""

    # --- links

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """Cut both directions between nodes, by a network policy for each of them."""
        for link, fault in faults.items():
            if fault != _CUT or CLIENTS in (link.source, link.target):
                raise FaultError(f"network policies cut nodes alone, and nothing else: {link}")
            if faults.get(Link(link.target, link.source)) != _CUT:
                raise FaultError(f"network policies cut no single direction: {link}")
            if not {link.source, link.target} <= set(self.nodes) or link.source == link.target:
                raise FaultError(f"{link} is no link of this cluster")
        cut = frozenset((int(one.source), int(one.target)) for one in faults)
        if cut == self._cut:
            return
        self._heal_links()
        self._cut = cut  # From now on there is something to heal.
        for node in sorted({source for source, _ in cut}):
            peers = sorted(target for source, target in cut if source == node)
            self._api.make_policy(self._namespace, self._policy(node, peers))

    def _heal_links(self) -> None:
        if self._cut:
            label, run = next(iter(self._labels.items()))
            self._api.delete_policies(self._namespace, f"{label}={run}")
            self._cut = frozenset()

    def _policy(self, node: int, peers: Sequence[int]) -> Mapping[str, Any]:
        """The node speaks with all pods but these: what a policy allows is all that there is."""
        others = {
            # All namespaces; a pod without this label is of no StatefulSet, and may.
            "namespaceSelector": {},
            "podSelector": {
                "matchExpressions": [
                    {
                        "key": _POD_NAME,
                        "operator": "NotIn",
                        "values": [self._names[peer] for peer in peers],
                    }
                ]
            },
        }
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {
                "name": f"penstock-chaos-{self._labels[LABEL]}-{node}",
                "labels": dict(self._labels),
            },
            "spec": {
                "podSelector": {"matchLabels": {_POD_NAME: self._names[node]}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [others]}],
                "egress": [{"to": [others]}],
            },
        }

    # --- what it has not

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """Packets cannot be broken here."""
        _refuse("packets", fault is not None)

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        """Disks cannot be broken here."""
        _refuse("disks", fault is not None)

    def data_directory(self, node: int) -> Path:
        """It is elsewhere."""
        raise FaultError(_NO_FILES)

    def format(self, node: int) -> None:
        """It is elsewhere."""
        raise FaultError(_NO_FILES)

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        """Clocks cannot be moved here."""
        _refuse("clocks", bool(offset_ms))

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        """There are none here."""
        _refuse("limits", descriptors is not None or memory_bytes is not None)

    # --- evidence

    def heal_all(self) -> None:
        """Heal what is cut; pods come back by themselves."""
        self._heal_links()

    def log(self, node: int) -> Path | None:
        """What its pods wrote, each before it was deleted, and in the end."""
        return self._log_path(node)

    def _log_path(self, node: int) -> Path:
        return self._directory / f"node-{node}.log"

    def pid(self, node: int) -> int | None:
        """It is elsewhere."""
        return None


def _runs(pod: Mapping[str, Any]) -> bool:
    return (
        pod.get("status", {}).get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for one in selector.get("matchExpressions", []):
        value = labels.get(one["key"])
        held = {
            "In": value in one.get("values", []),
            "NotIn": value not in one.get("values", []),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not held[one["operator"]]:
            return False
    return True


def _refuse(what: str, is_asked: bool) -> None:
    if is_asked:
        raise FaultError(f"the backend kubernetes breaks no {what}; next: see `capabilities`")
