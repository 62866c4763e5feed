"""A cluster of paper of which everything can be broken, and the scene that nemeses strike in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from penstock.chaos.cluster import Capability, DiskFault, Link, LinkFault
from penstock.chaos.errors import FaultError
from penstock.client import TopicPartition
from penstock.wire.errors import UnknownVoterError
from tests.unit.chaos.fake_cluster import FakeCluster


class BreakableCluster(FakeCluster):
    """What is broken at the moment is in ``links``, ``disks``, ``clocks`` and ``limits``.

    Nodes whose ids are in ``refusing`` end as soon as they are started; a call that is named in
    ``failing``, such as ``kill 2``, raises.
    """

    def __init__(self, root: Path, nodes: int = 3) -> None:
        super().__init__(nodes)
        self.capabilities = frozenset(Capability)
        self.root = root
        self.links: dict[Link, LinkFault] = {}
        self.disks: dict[int, DiskFault] = {}
        self.clocks: dict[int, tuple[int, int]] = {}
        self.limits: dict[int, tuple[int | None, int | None]] = {}
        self.paused: set[int] = set()
        self.refusing: set[int] = set()
        self.failing: set[str] = set()
        for node in self.nodes:
            (root / f"node-{node}" / "logs").mkdir(parents=True)
            (root / f"node-{node}" / "whose").write_text(f"{node}")

    def _do(self, what: str) -> None:
        if what in self.failing:
            raise FaultError(f"{what} does not go")
        self.done.append(what)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is broken, and everything is up."""
        broken = self.links or self.disks or self.clocks or self.limits or self.paused
        return not broken and self.up == set(self.nodes)

    def set_links(self, faults: Mapping[Link, LinkFault]) -> None:
        self._do(f"links {len(faults)}")
        self.links = dict(faults)

    def set_disk(self, node: int, fault: DiskFault | None) -> None:
        self._do(f"disk {node}" if fault else f"good disk {node}")
        self.disks.pop(node, None)
        if fault:
            self.disks[node] = fault

    def set_clock(self, node: int, offset_ms: int, strobe_ms: int = 0) -> None:
        self._do(f"clock {node}" if offset_ms else f"right clock {node}")
        self.clocks.pop(node, None)
        if offset_ms:
            self.clocks[node] = (offset_ms, strobe_ms)

    def set_limits(
        self, node: int, *, descriptors: int | None = None, memory_bytes: int | None = None
    ) -> None:
        self._do(f"limits {node}")
        self.limits.pop(node, None)
        if descriptors is not None or memory_bytes is not None:
            self.limits[node] = (descriptors, memory_bytes)

    def kill(self, node: int) -> None:
        self._do(f"kill {node}")
        self.up.discard(node)
        self.paused.discard(node)

    def pause(self, node: int) -> None:
        self._do(f"pause {node}")
        self.paused.add(node)

    def resume(self, node: int) -> None:
        self.paused.discard(node)

    def start_node(self, node: int) -> None:
        if node not in self.up:
            self._do(f"start {node}")
            whose = self.data_directory(node) / "whose"
            if whose.exists() and whose.read_text() == f"{node}":
                self.up.add(node)

    def data_directory(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def format(self, node: int) -> None:
        self._do(f"format {node}")
        assert not list(self.data_directory(node).iterdir())
        (self.data_directory(node) / "whose").write_text(f"{node}")

    def pid(self, node: int) -> int | None:
        return os.getpid() if node in self.up else None


@dataclass
class FakeAdmin:
    """An administration client of a cluster with one topic; ``replicas`` by partition."""

    voters: dict[int, str] = field(default_factory=lambda: {n: f"h:{n}" for n in (1, 2, 3)})
    replicas: dict[int, list[int]] = field(default_factory=lambda: {0: [1, 2, 3], 1: [2, 3, 1]})
    out_of_sync: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    refused: Exception | None = None

    def describe_quorum(self) -> Any:
        voters = [
            SimpleNamespace(node_id=node, host=address[0], port=address[2:], is_wiped=False)
            for node, address in self.voters.items()
        ]
        return SimpleNamespace(voters=voters)

    def remove_voter(self, node: int) -> None:
        if node not in self.voters:
            raise UnknownVoterError("it is none")
        del self.voters[node]

    def add_voter(self, node: int, address: str) -> None:
        self.voters[node] = address

    def list_topics(self, *, include_internal: bool = False) -> Any:
        partitions = [
            SimpleNamespace(
                partition=number,
                replicas=tuple(replicas),
                leader=replicas[0],
                isr=tuple(one for one in replicas if one not in self.out_of_sync.get(number, ())),
            )
            for number, replicas in self.replicas.items()
        ]
        return [SimpleNamespace(name="t", partitions=partitions)]

    def list_offsets(self, wanted: Mapping[TopicPartition, Any]) -> Any:
        return {tp: SimpleNamespace(offset=self.ends[tp.partition]) for tp in wanted}

    def alter_partition_reassignments(self, wanted: Mapping[TopicPartition, Any]) -> None:
        for tp, to in wanted.items():
            self.replicas[tp.partition] = list(to)
        if self.refused is not None:
            refused, self.refused = self.refused, None
            raise refused

    def list_partition_reassignments(self) -> Any:
        return []


class Stage:
    """A scene in which every role is node 2, but for ``all`` and ``nobody here``."""

    def __init__(self, cluster: FakeCluster, admin: FakeAdmin | None = None) -> None:
        self.cluster = cluster
        self.random = Random(1)
        self._admin = admin or FakeAdmin()
        self._down: list[int] = []

    def resolve(self, target: str) -> Sequence[int]:
        if target == "nobody here":
            raise FaultError("nobody")
        if target == "all":
            return list(self.cluster.nodes)
        found = next(node for node in (2, 3, 1) if node not in self._down)
        self._down.append(found)
        return [found]

    def down(self) -> Sequence[int]:
        return []

    @contextmanager
    def admin(self) -> Iterator[Any]:
        yield self._admin
