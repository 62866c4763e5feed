"""A cluster that writes down what is done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.chaos.cluster import Capability, DiskFault, Link, LinkFault, PacketFault
from penstock.chaos.errors import ClusterError


class FakeCluster:
    """Three nodes that are up, and a list of what happened (``penstock.chaos.cluster.Cluster``)."""

    capabilities = frozenset({Capability.PROCESSES, Capability.PAUSES})
    bootstrap = "127.0.0.1:1"
    versions: Mapping[str, str] = {}

    def __init__(self, nodes: int = 3) -> None:
        self.nodes: Sequence[int] = list(range(1, nodes + 1))
        self.up = set(self.nodes)
        self.done: list[str] = []
        self.never_ready = False

    @property
    def running(self) -> Sequence[int]:
        return sorted(self.up)

    def start(self) -> None:
        self.done.append("start")

    def stop(self) -> None:
        self.done.append("stop")

    def wait_ready(self, timeout_s: float) -> None:
        self.done.append("wait_ready")
        if self.never_ready:
            raise ClusterError("it does not come back")

    def kill(self, node: int) -> None:
        self.done.append(f"kill {node}")
        self.up.discard(node)

    def terminate(self, node: int) -> None:
        self.done.append(f"terminate {node}")
        self.up.discard(node)

    def start_node(self, node: int) -> None:
        self.done.append(f"start {node}")
        self.up.add(node)

    def pause(self, node: int) -> None:
        self.done.append(f"pause {node}")

    def resume(self, node: int) -> None:
        self.done.append(f"resume {node}")

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        raise AssertionError("there are no links")

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        raise AssertionError("there are no packets")

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        raise AssertionError("there are no disks")

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        raise AssertionError("there are no clocks")

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        raise AssertionError("there are no limits")

    def data_directory(self, node: int) -> Path:
        raise AssertionError("there are no files")

    def format(self, node: int) -> None:
        raise AssertionError("there are no files")

    def heal_all(self) -> None:
        self.done.append("heal_all")

    def log(self, node: int) -> Path | None:
        return None

    def pid(self, node: int) -> int | None:
        return None
