"""The backend of containers: each node in one, on a network of the run's own.

What each facility does and does not model is said in docs/internals/chaos.md.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.broker.datadir import format_directory, new_cluster_id
from penstock.chaos.backends.containers import (
    LABEL,
    OWNER_LABEL,
    ContainerSpec,
    Engine,
    Network,
)
from penstock.chaos.backends.owner import is_gone, this_owner
from penstock.chaos.backends.packets import Faults, NodeFaults
from penstock.chaos.cluster import (
    CLIENTS,
    Capability,
    DiskFault,
    Link,
    LinkFault,
    PacketFault,
)
from penstock.chaos.errors import ChaosError, ClusterError, FaultError
from penstock.cli.chaos.whole import describe_unwhole
from penstock.cli.cluster_layout import settings_by_size
from penstock.cli.local_cluster import read_tail
from penstock.wire.errors import PenstockError
from penstock.wire.transport import format_address

DEFAULT_IMAGE: Final = "penstock:latest"
START_S: Final = 120.0
TERMINATE_S: Final = 30.0
KILL_S: Final = 30.0
_POLL_S: Final = 0.1
_TAIL_LINES: Final = 20
_BROKER_PORT: Final = 9092
_CONTROLLER_PORT: Final = 10_092
_CONFIG_PATH: Final = "/etc/penstock/node.toml"
_DATA_PATH: Final = "/var/lib/penstock/data"
_IMAGE_USER: Final = 10_001
"""Whom the image's files belong to, where we are root: a node never is."""
_QUEUE: Final = ("python", "-m", "penstock.chaos.backends.packet_queue")
_QUEUE_MAY: Final = ("NET_ADMIN", "NET_RAW")
_VERSION_LABEL: Final = "org.opencontainers.image.version"


@dataclass(slots=True)
class _Node:
    """One node and its containers; ``wire`` is what its network lives in, if it can be broken."""

    node_id: int
    directory: Path
    address: str = ""
    container: str = ""
    wire: str = ""
    is_up: bool = False
    """Whether it is meant to run."""
    notes: str = ""
    """What is to stand in its log beside what it wrote."""

    @property
    def config_path(self) -> Path:
        """Its settings, beside its directory."""
        return self.directory.with_name(f"{self.directory.name}.toml")

    @property
    def log_path(self) -> Path:
        """What it wrote, once it was gathered."""
        return self.directory.with_name(f"{self.directory.name}.log")


class DockerBackend:
    """Nodes as containers of an engine on this machine (``penstock.chaos.cluster.Cluster``).

    ``directory`` is made, and has the nodes' settings, data and, when they are stopped, logs. With
    ``breaks_network`` each node's network lives in a container of its own, in which packets are
    lost, late and doubled; it stays when the node is killed.

    ``log`` and ``pid`` may be asked from any thread, all else from one at a time.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        engine: Engine,
        *,
        image: str = DEFAULT_IMAGE,
        entrypoint: Sequence[str] | None = None,
        settings: Mapping[str, str | int] | None = None,
        breaks_network: bool = True,
        seed: int = 0,
    ) -> None:
        """Look at the image, and at what can be broken. Raises PlanError."""
        self._engine: Final = engine
        self._run: Final = secrets.token_hex(6)
        self._labels: Final = {LABEL: self._run, OWNER_LABEL: this_owner()}
        self._image: Final = image
        self._settings: Final = dict(settings or {})
        self._image_id, labels = engine.image(image)
        self._image_version: Final = labels.get(_VERSION_LABEL, "unknown")
        self._entrypoint: Final = entrypoint
        self._seed: Final = seed
        self.why_no_network: Final = self._probe() if breaks_network else "it was started without"
        self._directory: Final = directory.resolve()
        self._cluster_id: Final = new_cluster_id()
        self._nodes: Final = {
            node: _Node(node, self._directory / f"node-{node}") for node in range(1, nodes + 1)
        }
        self._faults: NodeFaults | None = None
        self._network: Network | None = None

    def _probe(self) -> str:
        """Why networks cannot be broken here; empty where they can."""
        spec = ContainerSpec(
            f"penstock-chaos-{self._run}-probe",
            self._image_id,
            [*_QUEUE[1:], "probe"],
            self._labels,
            entrypoint=_QUEUE[:1],
            user="0:0",
            capabilities=_QUEUE_MAY,
        )
        try:
            container = self._engine.create(spec)
            self._engine.start(container)
            self._engine.wait(container, KILL_S)
            if self._engine.state(container).exit_code == 0:
                return ""
            return self._engine.logs(container).decode(errors="replace").strip()
        except FaultError as error:
            return str(error)
        finally:
            self._engine.remove_all(self._run)

    # --- what it is

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What of the following it can do."""
        found = {Capability.PROCESSES, Capability.PAUSES, Capability.FILES}
        if not self.why_no_network:
            found |= {Capability.CUTS, Capability.LINKS, Capability.PACKETS}
        return frozenset(found)

    @property
    def nodes(self) -> Sequence[int]:
        """All of them."""
        return list(self._nodes)

    @property
    def bootstrap(self) -> str:
        """Every broker's address."""
        return ",".join(format_address(one.address, _BROKER_PORT) for one in self._nodes.values())

    @property
    def running(self) -> Sequence[int]:
        """Those whose container lives, be it paused."""
        return [node for node, one in self._nodes.items() if self._is_alive(one)]

    @property
    def versions(self) -> Mapping[str, str]:
        """The engine's, and the image's with its id."""
        return {
            "docker": self._engine.version(),
            "image": f"{self._image} {self._image_version} {self._image_id}",
        }

    def _is_alive(self, node: _Node) -> bool:
        return bool(node.container) and self._engine.state(node.container).is_alive

    # --- start and stop

    def start(self) -> None:
        """Start what does not run, and return when all are ready. Raises ClusterError."""
        try:
            self._sweep()
            if self._network is None:
                self._format()
                self._make()
            for node in self.nodes:
                self.start_node(node)
        except PenstockError as error:
            raise ClusterError(str(error)) from error
        except FaultError as error:
            raise ClusterError(
                f"{error}; next: see `docker events` and the engine's own log"
            ) from error
        self.wait_ready(START_S)

    def _format(self) -> None:
        for one in self._nodes.values():
            format_directory(one.directory, self._cluster_id, one.node_id, may_found=True)
        _own(self._directory)

    def _sweep(self) -> None:
        """Remove what runs left whose process was killed before it could."""
        for run, owner in self._engine.owners().items():
            if run != self._run and is_gone(owner):
                self._engine.remove_all(run)

    def _make(self) -> None:
        self._network = self._engine.make_network(f"penstock-chaos-{self._run}", self._labels)
        for one in self._nodes.values():
            one.address = self._network.address(one.node_id)
        for one in self._nodes.values():
            self._write_settings(one)
            if not self.why_no_network:
                one.wire = self._engine.create(self._wire_spec(one))
                self._engine.start(one.wire)
            one.container = self._engine.create(self._node_spec(one))
        if not self.why_no_network:
            addresses = {node: one.address for node, one in self._nodes.items()}
            self._faults = NodeFaults(addresses, self._tell_wire)

    def _write_settings(self, node: _Node) -> None:
        voters = ",".join(
            f"{one.node_id}@{format_address(one.address, _CONTROLLER_PORT)}"
            for one in self._nodes.values()
        )
        settings: dict[str, str | int | bool] = {
            "node.id": node.node_id,
            "data.dir": _DATA_PATH,
            "broker.listen": f"0.0.0.0:{_BROKER_PORT}",
            "broker.advertised": format_address(node.address, _BROKER_PORT),
            "controller.listen": f"0.0.0.0:{_CONTROLLER_PORT}",
            "controller.quorum.voters": voters,
            # On the run's own network are its nodes and this machine alone.
            "controller.insecure.allow": True,
            **settings_by_size(len(self._nodes)),
            **self._settings,
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        node.config_path.write_text("".join(lines), encoding="utf-8")

    def _wire_spec(self, node: _Node) -> ContainerSpec:
        return ContainerSpec(
            f"penstock-chaos-{self._run}-wire-{node.node_id}",
            self._image_id,
            [*_QUEUE[1:], "serve", f"{self._seed}/{node.node_id}"],
            self._labels,
            entrypoint=_QUEUE[:1],
            network=self._network,
            address=node.address,
            user="0:0",
            capabilities=_QUEUE_MAY,
        )

    def _node_spec(self, node: _Node) -> ContainerSpec:
        return ContainerSpec(
            f"penstock-chaos-{self._run}-node-{node.node_id}",
            self._image_id,
            ["--config", _CONFIG_PATH] if self._entrypoint else ["node", "--config", _CONFIG_PATH],
            self._labels,
            entrypoint=self._entrypoint,
            network=None if node.wire else self._network,
            address="" if node.wire else node.address,
            inside=node.wire,
            user=_user(),
            mounts={
                str(node.directory): (_DATA_PATH, True),
                str(node.config_path): (_CONFIG_PATH, False),
            },
            has_input=self._entrypoint is not None,
        )

    def stop(self) -> None:
        """Stop everything, gather the logs, and remove all that was made. Idempotent."""
        with ExitStack() as ending:  # Whatever happens, nothing is left behind.
            ending.callback(self._engine.close)
            ending.callback(self._engine.remove_all, self._run)
            ending.callback(self._gather_logs)
            try:
                self._stop_nodes()
            except FaultError as error:
                raise ClusterError(f"the nodes could not be stopped: {error}") from error

    def _stop_nodes(self) -> None:
        self._note_exits()
        live = [one for one in self._nodes.values() if self._is_alive(one)]
        for one in live:
            one.is_up = False
            self._engine.unpause(one.container)
            self._engine.signal(one.container, "SIGTERM")
        deadline = time.monotonic() + TERMINATE_S
        for one in live:
            self._engine.wait(one.container, max(1.0, deadline - time.monotonic()))

    def _gather_logs(self) -> None:
        for one in self._nodes.values():
            if one.container and (written := self._engine.logs(one.container)):
                one.log_path.write_bytes(written + one.notes.encode())

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every node serves and every partition has a leader. Raises ClusterError."""
        deadline = time.monotonic() + timeout_s
        while reason := self._why_unready():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster is not ready after {timeout_s:.0f} s: {reason}; next: see "
                    f"{self._directory}/node-*.log, and whether this machine reaches containers "
                    "by their addresses (an engine within a virtual machine does not let it)"
                )
            time.sleep(_POLL_S)

    def _why_unready(self) -> str:
        for one in self._nodes.values():
            if not self._is_alive(one):
                self._note_exits()
                self._gather_logs()
                raise ClusterError(
                    f"node {one.node_id} is down; the end of {one.log_path}:\n"
                    f"{read_tail(one.log_path, _TAIL_LINES)}"
                )
        return describe_unwhole(
            [
                _Address(one.node_id, format_address(one.address, _BROKER_PORT))
                for one in self._nodes.values()
            ],
            self._cluster_id,
        )

    # --- processes

    def kill(self, node: int) -> None:
        """End it at once, as SIGKILL does, and return when it is gone."""
        self._note_exits()
        one = self._nodes[node]
        one.is_up = False
        if self._is_alive(one):
            self._engine.signal(one.container, "SIGKILL")
            self._await_end(one, KILL_S)

    def terminate(self, node: int) -> None:
        """Ask it to stop, and return when it has; by force after half a minute."""
        self.resume(node)
        self._note_exits()
        one = self._nodes[node]
        one.is_up = False
        if not self._is_alive(one):
            return
        self._engine.signal(one.container, "SIGTERM")
        if not self._engine.wait(one.container, TERMINATE_S):
            self._note(one, f"did not stop within {TERMINATE_S:.0f} s and was killed")
            self._engine.signal(one.container, "SIGKILL")
            self._await_end(one, KILL_S)

    def _await_end(self, node: _Node, timeout_s: float) -> None:
        if not self._engine.wait(node.container, timeout_s):
            raise FaultError(f"the container of node {node.node_id} is there after SIGKILL still")

    def start_node(self, node: int) -> None:
        """Start one that is down; does not wait until it serves. No-op where it runs."""
        self._note_exits()
        one = self._nodes[node]
        if not self._is_alive(one):
            _own(one.directory)  # Files may have been put there.
            self._engine.start(one.container)
        one.is_up = True

    def pause(self, node: int) -> None:
        """Freeze its container; its network goes on, as that of a process does that is stopped."""
        one = self._nodes[node]
        if self._engine.state(one.container).status == "running":
            self._engine.pause(one.container)

    def resume(self, node: int) -> None:
        """Have it go on."""
        if self._nodes[node].container:
            self._engine.unpause(self._nodes[node].container)

    # --- the network

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        """From now on these links do that, and all others nothing. Raises FaultError."""
        ends: set[int | str] = {CLIENTS, *self.nodes}
        for link, fault in faults.items():
            if not {link.source, link.target} <= ends or link.source == link.target:
                raise FaultError(f"{link} is no link of this cluster")
            if fault.hold:
                raise FaultError("the backend docker holds no messages; next: take local")
        if faults or self._faults is not None:
            self._require_network().set_links(faults)

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        """From now on what the node sends suffers this; None heals it. Raises FaultError."""
        if fault is not None or self._faults is not None:
            self._require_network().set_packets(node, fault)

    def _require_network(self) -> NodeFaults:
        if self.why_no_network:
            raise FaultError(f"the network cannot be broken here: {self.why_no_network}")
        if self._faults is None:
            raise FaultError("the nodes have no network before they are started")
        return self._faults

    def _tell_wire(self, node: int, faults: Faults) -> None:
        text = json.dumps(faults.to_json())
        status, said = self._engine.execute(self._nodes[node].wire, [*_QUEUE, "set", text], "0:0")
        if status:
            raise FaultError(f"the network of node {node} could not be changed: {said}")

    # --- what it has not, and files

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        """Disks cannot be broken here."""
        if fault is not None:
            raise FaultError("the backend docker breaks no disks; next: take local")

    def data_directory(self, node: int) -> Path:
        """Where it keeps everything but its settings and its log."""
        return self._nodes[node].directory

    def format(self, node: int) -> None:
        """Make its directory, which is empty, one of this cluster's. Raises FaultError."""
        one = self._nodes[node]
        try:
            format_directory(one.directory, self._cluster_id, one.node_id)
        except PenstockError as error:
            raise FaultError(str(error)) from error
        _own(one.directory)

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        """They are all one here."""
        if offset_ms:
            raise FaultError("the backend docker has no clocks; next: see `capabilities`")

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        """There are none here."""
        if descriptors is not None or memory_bytes is not None:
            raise FaultError("the backend docker has no limits; next: take local")

    # --- evidence

    def heal_all(self) -> None:
        """Heal whatever is broken, and start whatever is down.

        What cannot be healed does not keep the rest from it; FaultError is raised for it then.
        """
        with ExitStack() as healing:  # From the last to the first.
            for node in self.nodes:
                healing.callback(self.start_node, node)
                healing.callback(self.resume, node)
                healing.callback(self.set_packets, node, None)
            healing.callback(self.set_links, {})

    def log(self, node: int) -> Path | None:
        """What it has written for people, over all of its lives; once it was stopped."""
        return self._nodes[node].log_path

    def pid(self, node: int) -> int | None:
        """Its process; None where it is down, or the engine is on another machine."""
        container = self._nodes[node].container
        try:
            state = self._engine.state(container) if container else None
            if state is None or not state.is_alive:
                return None
            groups = Path(f"/proc/{state.pid}/cgroup").read_text(encoding="utf-8")
        except (ChaosError, OSError):
            return None
        # Within a virtual machine it is a number of another kernel's.
        return state.pid if container in groups else None

    def _note_exits(self) -> None:
        """Have the log of a node that ended by itself say so: nothing else would."""
        for one in self._nodes.values():
            if not one.is_up:
                continue
            state = self._engine.state(one.container)
            if not state.is_alive:
                one.is_up = False
                why = ", out of memory" if state.out_of_memory else ""
                self._note(one, f"ended by itself: exit status {state.exit_code}{why}")

    def _note(self, node: _Node, what: str) -> None:
        node.notes += f"penstock.chaos: node {node.node_id} {what}\n"


@dataclass(frozen=True, slots=True)
class _Address:
    """A node, as far as it can be asked (``penstock.cli.readiness.Listening``)."""

    node_id: int
    address: str


def _user() -> str:
    """Whoever runs this, so that what nodes write is theirs; never root."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else f"{_IMAGE_USER}:{_IMAGE_USER}"


def _own(directory: Path) -> None:
    """Where we are root: give a directory, and all in it, to whom nodes run as."""
    if os.getuid():
        return
    for path in (directory, *directory.rglob("*")):
        os.chown(path, _IMAGE_USER, _IMAGE_USER, follow_symlinks=False)
