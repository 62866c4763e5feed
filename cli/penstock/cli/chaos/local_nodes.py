"""The local backend: a cluster of node processes on this machine."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.chaos.cluster import Capability, DiskFault, Link, LinkFault, PacketFault
from penstock.chaos.errors import ClusterError, FaultError
from penstock.cli.cluster_layout import NodePlan, find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster, NodeExit
from penstock.client import AdminClient
from penstock.wire.errors import PenstockError

START_S: Final = 60.0
TERMINATE_S: Final = 30.0
_POLL_S: Final = 0.1
_ASK_MS: Final = 2_000


class LocalNodes:
    """Nodes as processes (``penstock.chaos.cluster.Cluster``): they can be killed and paused."""

    capabilities: frozenset[Capability] = frozenset({Capability.PROCESSES, Capability.FILES})

    def __init__(
        self,
        directory: Path,
        nodes: int,
        *,
        settings: Mapping[str, str | int] | None = None,
        bug: str = "",
    ) -> None:
        base_port = find_base_port(nodes)
        layout = prepare_layout(directory, nodes=nodes, base_port=base_port, settings=settings)
        command = _bugged(bug) if bug else None
        self._cluster: Final = (
            LocalCluster(layout) if command is None else LocalCluster(layout, command)
        )
        self._paused: Final[set[int]] = set()
        self._pids: Final[dict[int, int]] = {}
        """Of those that run; asked from other threads too, unlike the cluster."""

    @property
    def nodes(self) -> Sequence[int]:
        """All of them."""
        return [plan.node_id for plan in self._cluster.layout.plans]

    @property
    def bootstrap(self) -> str:
        """Every broker's address."""
        return self._cluster.bootstrap

    @property
    def running(self) -> Sequence[int]:
        """Those whose process lives."""
        return self._cluster.running

    def start(self) -> None:
        """Start what does not run, and return when all are ready. Raises ClusterError."""
        try:
            self._cluster.start()
        except PenstockError as error:
            raise ClusterError(str(error)) from error
        self._pids.update({node: self._cluster.pid(node) for node in self.running})
        self.wait_ready(START_S)

    def stop(self) -> None:
        """Stop everything. Idempotent."""
        self._resume_all()
        self._note_exits()
        self._pids.clear()
        self._cluster.stop()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every node serves and every partition has a leader. Raises ClusterError."""
        deadline = time.monotonic() + timeout_s
        try:
            self._cluster.wait_ready(timeout_s)
        except PenstockError as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            raise ClusterError(f"{error}\n{notes}".strip()) from error
        while leaderless := self._leaderless():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"after {timeout_s:.0f} s there is no leader of {', '.join(leaderless[:5])}; "
                    f"next: see {self._cluster.layout.directory}/node-*/node.log"
                )
            time.sleep(_POLL_S)

    def _leaderless(self) -> list[str]:
        try:
            with AdminClient(
                self.bootstrap, default_api_timeout_ms=_ASK_MS, client_id="penstock-chaos"
            ) as admin:
                topics = admin.list_topics(include_internal=True)
        except PenstockError as error:
            return [f"any partition ({error})"]
        return [
            f"{topic.name}-{partition.partition}"
            for topic in topics
            for partition in topic.partitions
            if partition.leader < 0
        ]

    # --- processes

    def kill(self, node: int) -> None:
        """SIGKILL, and wait until it is gone."""
        self._note_exits()
        self._paused.discard(node)
        self._pids.pop(node, None)
        if node in self.running:
            self._cluster.kill_node(node)

    def terminate(self, node: int) -> None:
        """SIGTERM, and wait until it is gone; by force in the end."""
        self._note_exits()
        self.resume(node)
        self._pids.pop(node, None)
        if node not in self.running:
            return
        self._cluster.kill_node(node, signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_S
        while node in self.running:
            if time.monotonic() > deadline:
                self._cluster.kill_node(node)
                return
            time.sleep(_POLL_S)

    def start_node(self, node: int) -> None:
        """Start one that is down."""
        self._note_exits()
        if node not in self.running:
            self._cluster.start_node(node)
            self._pids[node] = self._cluster.pid(node)

    def pause(self, node: int) -> None:
        """SIGSTOP. No-op where it is down."""
        if node in self.running:
            self._cluster.signal_node(node, signal.SIGSTOP)
            self._paused.add(node)

    def resume(self, node: int) -> None:
        """SIGCONT. No-op where it is down."""
        if node in self._paused:
            self._paused.discard(node)
            self._cluster.signal_node(node, signal.SIGCONT)

    # --- what this backend has not

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """Not here."""
        raise FaultError("the local backend has no links; next: see `capabilities`")

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """Not here."""
        raise FaultError("the local backend has no packets; next: see `capabilities`")

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        """Not here."""
        raise FaultError("the local backend has no disks; next: see `capabilities`")

    def set_clock(self, node: int, offset_ms: int) -> None:
        """Not here."""
        raise FaultError("the local backend has no clocks; next: see `capabilities`")

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        """Not here."""
        raise FaultError("the local backend has no limits; next: see `capabilities`")

    # --- evidence

    def data_directory(self, node: int) -> Path:
        """Where it keeps everything."""
        return self._cluster.layout.plan(node).directory

    def heal_all(self) -> None:
        """Have what is paused go on, and start what is down."""
        self._resume_all()
        for node in self.nodes:
            self.start_node(node)

    def log(self, node: int) -> Path | None:
        """What it printed, over all of its lives."""
        return self._cluster.layout.plan(node).log_path

    def pid(self, node: int) -> int | None:
        """Its process; None where it is down."""
        return self._pids.get(node)

    def _resume_all(self) -> None:
        for node in list(self._paused):
            with contextlib.suppress(ProcessLookupError):
                self.resume(node)

    def _note_exits(self) -> None:
        """Have the log of a node that ended by itself say so: nothing else would."""
        for ended in self._cluster.take_exits():
            self._pids.pop(ended.plan.node_id, None)
            _note(ended)


def _note(ended: NodeExit) -> None:
    with ended.plan.log_path.open("a", encoding="utf-8") as log:
        log.write(f"penstock.chaos: pid {ended.pid} ended by itself: {ended.how}\n")


def _bugged(bug: str) -> Callable[[NodePlan], list[str]]:
    module = "penstock.cli.chaos.bugged_node"
    return lambda plan: [sys.executable, "-m", module, bug, "--config", str(plan.config_path)]
