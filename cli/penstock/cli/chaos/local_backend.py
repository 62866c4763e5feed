"""The local backend: node processes on this machine, and a network and disks to break.

What each facility does and does not model is said in docs/internals/chaos.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from penstock.broker.datadir import format_directory
from penstock.chaos.backends import preload, processes
from penstock.chaos.backends.unsynced import Lost
from penstock.chaos.cluster import (
    CLIENTS,
    Capability,
    DiskFault,
    Link,
    LinkFault,
    PacketFault,
)
from penstock.chaos.errors import ClusterError, FaultError
from penstock.cli.chaos.node_networks import Loopback, NodeNetwork, Relayed
from penstock.cli.chaos.whole import describe_unwhole
from penstock.cli.cluster_layout import NodePlan, check_ports
from penstock.cli.local_cluster import LocalCluster, node_command_of, read_tail
from penstock.wire.errors import PenstockError

START_S: Final = 60.0
TERMINATE_S: Final = 30.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 20


class LocalBackend:
    """Nodes as processes of this machine (``penstock.chaos.cluster.Cluster``).

    ``directory`` is made, and gets everything: the cluster, its logs, what was lost of its disks.
    ``network`` is what is between the nodes; by itself that is a relay, where there can be one.
    Without ``disks`` nothing is before their files and clocks; then there are no such faults, and
    what these cost is not paid.

    ``log`` and ``pid`` may be asked from any thread, all else from one at a time.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        settings: Mapping[str, str | int] | None = None,
        node_command: Callable[[NodePlan], list[str]] = node_command_of,
        network: NodeNetwork | None = None,
        disks: bool = True,
    ) -> None:
        """Make the cluster's directories. Raises ClusterError."""
        self._directory = directory
        self._network: NodeNetwork = _usual_network() if network is None else network
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._layout = self._network.lay_out(directory.resolve() / "cluster", nodes, settings)
        except (PenstockError, FaultError) as error:
            raise ClusterError(str(error)) from error
        self._preloads: dict[int, preload.Preload] = {}
        if disks and not preload.why_not():
            library = preload.build(directory)
            self._preloads = {
                plan.node_id: preload.Preload(
                    library, plan.directory, directory / "disks" / plan.directory.name
                )
                for plan in self._layout.plans
            }
        self._cluster = LocalCluster(
            self._layout,
            lambda plan: [*self._network.enter(plan.node_id), *node_command(plan)],
            self._environment,
        )
        self._pids: dict[int, int] = {}
        self._paused: set[int] = set()
        self._limits: dict[int, tuple[int | None, int | None]] = {}

    def _environment(self, plan: NodePlan) -> Mapping[str, str]:
        found = self._preloads.get(plan.node_id)
        return {} if found is None else found.environment

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What of the following it can do."""
        found = {Capability.PROCESSES, Capability.PAUSES, Capability.FILES}
        if sys.platform.startswith("linux"):
            found.add(Capability.LIMITS)
        if self._preloads:
            found |= {Capability.DISKS, Capability.CLOCKS}
        return self._network.capabilities | found

    @property
    def nodes(self) -> Sequence[int]:
        """All of them."""
        return [plan.node_id for plan in self._layout.plans]

    @property
    def bootstrap(self) -> str:
        """Every broker's address, through the network that can be broken."""
        return self._cluster.bootstrap

    @property
    def running(self) -> Sequence[int]:
        """Those whose process lives, be it paused."""
        return self._cluster.running

    @property
    def versions(self) -> Mapping[str, str]:
        """What there is of the network besides what runs this process."""
        return self._network.versions

    def start(self) -> None:
        """Start what does not run, and return when all are ready. Raises ClusterError."""
        try:
            self._network.start(self._layout.plans)
            running = self.running
            check_ports(plan for plan in self._layout.plans if plan.node_id not in running)
            for node in self.nodes:
                self.start_node(node)
        except (PenstockError, FaultError) as error:
            raise ClusterError(str(error)) from error
        self.wait_ready(START_S)

    def stop(self) -> None:
        """Stop everything and free what it took. Idempotent."""
        with ExitStack() as ending:  # Whatever happens, nothing is left behind.
            ending.callback(self._network.stop)
            ending.callback(self._cluster.stop)
            for node in list(self._paused):
                self.resume(node)
            self._note_exits()
            self._pids.clear()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every node serves and every partition has a leader. Raises ClusterError.

        Nodes are asked where they listen, not through links.
        """
        deadline = time.monotonic() + timeout_s
        while reason := self._why_unready():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster is not ready after {timeout_s:.0f} s: {reason}; next: see "
                    f"{self._layout.directory}/node-*.log"
                )
            time.sleep(_POLL_S)

    def _why_unready(self) -> str:
        running = self.running
        for node in self.nodes:
            if node not in running:
                self._note_exits()
                log = self._layout.plan(node).log_path
                raise ClusterError(
                    f"node {node} is down; the end of {log}:\n{read_tail(log, _TAIL_LINES)}"
                )
        return describe_unwhole(self._layout.plans, self._layout.cluster_id)

    # --- processes

    def kill(self, node: int) -> None:
        """End it at once, as SIGKILL does, and return when it is gone. Its disk may then forget."""
        self._paused.discard(node)
        self._pids.pop(node, None)
        if node in self.running:
            self._cluster.kill_node(node)
            self._lose_unsynced(node)
            self._network.know(self._pids)

    def terminate(self, node: int) -> None:
        """Ask it to stop, and return when it has; by force after half a minute."""
        self.resume(node)
        self._note_exits()
        self._pids.pop(node, None)
        if node in self.running and not self._cluster.stop_node(node, TERMINATE_S):
            self._note(node, f"did not stop within {TERMINATE_S:.0f} s and was killed")
            self._lose_unsynced(node)
        self._network.know(self._pids)

    def start_node(self, node: int) -> None:
        """Start one that is down; does not wait until it serves. No-op where it runs."""
        if node in self.running and self.pid(node) is None:
            # It was killed, and the last of its threads are ending.
            self._cluster.wait_end(node)
        self._note_exits()
        if node in self.running:
            return
        self._cluster.start_node(node)
        self._pids[node] = self._cluster.pid(node)
        self._apply_limits(node)
        self._network.know(self._pids)

    def pause(self, node: int) -> None:
        """Stop its process in its tracks, and return when it stands still."""
        pid = self._pids.get(node)
        if pid is not None:
            self._paused.add(node)
            processes.pause(pid)

    def resume(self, node: int) -> None:
        """Have it go on."""
        if node in self._paused:
            self._paused.discard(node)
            processes.resume(self._pids[node])

    # --- links

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing. Raises FaultError."""
        ends: set[int | str] = {CLIENTS, *self.nodes}
        for link in faults:
            if not {link.source, link.target} <= ends or link.source == link.target:
                raise FaultError(f"{link} is no link of this cluster; its ends are {_listed(ends)}")
        self._network.set_links(faults)

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """From now on what the node sends suffers this; None heals it. Raises FaultError."""
        self._network.set_packets(node, fault)

    # --- disks, files and limits

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        """From now on the node's disk does this; None heals it. Raises FaultError."""
        if fault is not None or self._preloads:
            self._preload(node).set_disk(fault)

    def data_directory(self, node: int) -> Path:
        """Where it keeps everything but its settings and its log."""
        return self._layout.plan(node).directory

    def format(self, node: int) -> None:
        """Make its directory, which is empty, one of this cluster's. Raises FaultError."""
        try:
            format_directory(self.data_directory(node), self._layout.cluster_id, node)
        except PenstockError as error:
            raise FaultError(str(error)) from error

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        """From now on its wall clock is off by so much; 0 heals it. Raises FaultError."""
        if offset_ms or self._preloads:
            self._preload(node).set_clock(offset_ms, strobe_ms)

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        """From now on it may have no more; None is what it was started with."""
        self._limits[node] = (descriptors, memory_bytes)
        self._apply_limits(node)

    def _apply_limits(self, node: int) -> None:
        if node in self._limits and node in self._pids:
            descriptors, memory_bytes = self._limits[node]
            processes.limit(self._pids[node], processes.DESCRIPTORS, descriptors)
            processes.limit(self._pids[node], processes.MEMORY, memory_bytes)

    def _preload(self, node: int) -> preload.Preload:
        found = self._preloads.get(node)
        if found is None:
            why = preload.why_not() or "it was started without"
            raise FaultError(f"node {node} has a disk and a clock that cannot be broken: {why}")
        return found

    def _lose_unsynced(self, node: int) -> None:
        found = self._preloads.get(node)
        lost = None if found is None else found.killed()
        if lost is not None:
            self._record(node, lost)

    def _record(self, node: int, lost: Lost) -> None:
        with self.lost_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"node": node, **asdict(lost)}) + "\n")

    @property
    def lost_path(self) -> Path:
        """A line of JSON for each loss of power: what was not synced, and is gone."""
        return self._directory / "lost.jsonl"

    # --- evidence

    def heal_all(self) -> None:
        """Heal whatever is broken, and start whatever is down.

        What cannot be healed does not keep the rest from it; FaultError is raised for it then.
        """
        with ExitStack() as healing:  # From the last to the first.
            for node in self.nodes:
                healing.callback(self.start_node, node)
                healing.callback(self.resume, node)
                healing.callback(self.set_limits, node)
                healing.callback(self.set_disk, node, None)
                healing.callback(self.set_clock, node, 0)
                healing.callback(self.set_packets, node, None)
            healing.callback(self.set_links, {})

    def log(self, node: int) -> Path | None:
        """What it has written for people, over all of its lives."""
        return self._layout.plan(node).log_path

    def pid(self, node: int) -> int | None:
        """Its process; None where it is down."""
        pid = self._pids.get(node)
        return pid if pid is not None and processes.state(pid) not in ("", "Z") else None

    def _note_exits(self) -> None:
        """Have the log of a node that ended by itself say so: nothing else would."""
        for ended in self._cluster.take_exits():
            self._pids.pop(ended.plan.node_id, None)
            self._paused.discard(ended.plan.node_id)
            self._note(ended.plan.node_id, f"(pid {ended.pid}) ended by itself: {ended.how}")

    def _note(self, node: int, what: str) -> None:
        with self._layout.plan(node).log_path.open("a", encoding="utf-8") as log:
            log.write(f"penstock.chaos: node {node} {what}\n")


def _usual_network() -> NodeNetwork:
    return Relayed() if sys.platform.startswith("linux") else Loopback()


def _listed(ends: set[int | str]) -> str:
    """The ends of links, for people."""
    return ", ".join(sorted(map(str, ends)))
