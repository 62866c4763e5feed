"""Two quorums for the same attacks: pysyncobj as shipped, and our guarded voter.

Nothing moves by itself: a test says who ticks, which packets arrive, and when a disk forgets. The
engine as shipped is loaded a second time, under its own modules, since ours is disarmed for good.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import random
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from penstock.raft_meta import snapshots
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voter import Committed, Installed, Voter
from tests.simulation.quorum.disk import Disk, SimulatedOs, SimulatedPath
from tests.unit.raft_meta.founded import directory_of, found
from tests.unit.raft_meta.raft_fuzz import TIMING

ROUND_S = 0.16  # Longer than either heartbeat.


def _is_engine(name: str) -> bool:
    return name == "pysyncobj" or name.startswith("pysyncobj.")


@functools.cache
def shipped_modules() -> SimpleNamespace:
    """pysyncobj as it is installed, untouched by penstock.raft_meta.engine."""
    kept = {name: module for name, module in sys.modules.items() if _is_engine(name)}
    for name in kept:
        del sys.modules[name]
    try:
        names = ("syncobj", "node", "transport", "journal", "tcp_connection", "poller", "pickle")
        fresh = {name: importlib.import_module(f"pysyncobj.{name}") for name in names}
        return SimpleNamespace(**fresh)
    finally:
        for name in [name for name in sys.modules if _is_engine(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


@dataclass(frozen=True)
class Packet:
    """A message as it was sent. ``entries`` counts what it carries."""

    source: int
    target: int
    kind: str
    message: Any
    entries: int = 0


class AttackedCluster:
    """What an attack is made of. Nodes are 1..count."""

    def __init__(self, count: int) -> None:
        self.numbers = range(1, count + 1)
        self.now_s = 100.0
        self.acknowledged: set[bytes] = set()
        self.leaders: dict[int, set[int]] = defaultdict(set)  # By term.
        self.history: list[Packet] = []
        self.sent: list[Packet] = []
        self.blocked: Callable[[Packet], bool] = lambda _packet: False

    # What the two differ in.

    def _tick(self, number: int) -> None:
        raise AssertionError

    def _deliver(self, packet: Packet) -> None:
        raise AssertionError

    def leads(self, number: int) -> bool:
        raise AssertionError

    def term(self, number: int) -> int:
        raise AssertionError

    def propose(self, number: int, value: bytes) -> None:
        raise AssertionError

    def values(self, number: int) -> list[bytes]:
        raise AssertionError

    # What they share.

    def _emit(self, packet: Packet) -> None:
        self.history.append(packet)
        self.sent.append(packet)

    def _note(self, number: int) -> None:
        if self.leads(number):
            self.leaders[self.term(number)].add(number)

    def tick(self, number: int) -> None:
        self._tick(number)
        self._note(number)

    def deliver(self, packet: Packet) -> None:
        self._deliver(packet)
        self._note(packet.target)

    def exchange(self, among: Collection[int]) -> None:
        """Deliver what was sent, and what is said to it, until all is said; the rest is lost."""
        while self.sent:
            packet = self.sent.pop(0)
            if {packet.source, packet.target} <= set(among) and not self.blocked(packet):
                self.deliver(packet)

    def run(self, among: Collection[int] | None = None, rounds: int = 1) -> None:
        """Let these nodes live, and hear each other."""
        among = self.numbers if among is None else among
        for _ in range(rounds):
            self.now_s += ROUND_S
            for number in among:
                self.tick(number)
            self.exchange(among)

    def elect(self, number: int, among: Collection[int] | None = None) -> None:
        """After a long silence, ``number`` alone wants to lead, and does in the end."""
        assert self.stands(number, among), f"node {number} was not elected"

    def stands(self, number: int, among: Collection[int] | None = None) -> bool:
        """After a long silence, ``number`` alone wants to lead; whether it does in the end."""
        among = self.numbers if among is None else among
        self.sent.clear()
        blocked = self.blocked
        self.blocked = lambda packet: (
            blocked(packet)
            or (packet.source != number and packet.kind in ("pre_vote", "request_vote"))
        )
        for _ in range(5):
            self.now_s += 2.0
            for _ in range(3):
                self.tick(number)
                self.exchange(among)
            if self.leads(number):
                break
        self.blocked = blocked
        return self.leads(number)

    def last(self, source: int, target: int, kind: str) -> Packet:
        """The newest packet of a kind that carried something, whether or not it arrived."""
        return next(
            packet
            for packet in reversed(self.history)
            if (packet.source, packet.target, packet.kind) == (source, target, kind)
            and (kind != "append" or packet.entries)
        )


_ENGINE_KINDS = {
    "append_entries": "append",
    "next_node_idx": "append_reply",
    "request_vote": "request_vote",
    "response_vote": "vote",
}


@functools.cache
def _shipped_classes() -> SimpleNamespace:
    """Subclasses of the engine's own, made when it is loaded."""
    engine: Any = shipped_modules()

    class Peer(engine.node.Node):
        def __reduce__(self) -> tuple[object, ...]:
            return (str, (self.id,))  # Its class is of modules that nobody can import by name.

    class Wire(engine.transport.Transport):
        def __init__(self, send: Callable[[str, dict[str, Any]], None]) -> None:
            super().__init__(None, None, [])
            self._send = send

        def send(self, node: Any, message: dict[str, Any]) -> bool:
            self._send(node.id, message)
            return True

    class Store(engine.syncobj.SyncObj):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.values: list[bytes] = []

        @engine.syncobj.replicated
        def put(self, value: bytes) -> None:
            self.values.append(value)

    return SimpleNamespace(Peer=Peer, Wire=Wire, Store=Store)


class ShippedCluster(AttackedCluster):
    """SyncObj with its default configuration, journal files and dumps, ticked by hand."""

    def __init__(self, count: int, directory: Path) -> None:
        super().__init__(count)
        self._directory = directory
        self._engine = shipped_modules()
        self._engine.syncobj.monotonicTime = lambda: self.now_s
        self._stores: dict[int, Any] = {}
        self._wires: dict[int, Any] = {}
        self.callback_errors = 0
        for number in self.numbers:
            self._start(number)

    def _files(self, number: int) -> Path:
        return self._directory / f"node-{number}"

    def _start(self, number: int) -> None:
        files, classes = self._files(number), _shipped_classes()
        files.mkdir(parents=True, exist_ok=True)
        peers = {other: classes.Peer(str(other)) for other in self.numbers}
        conf = self._engine.syncobj.SyncObjConf(
            autoTick=False,
            useFork=False,
            journalFile=str(files / "journal"),
            fullDumpFile=str(files / "dump"),
        )
        wire = classes.Wire(
            lambda target, message: self._emit(
                Packet(
                    number,
                    int(target),
                    "snapshot" if "serialized" in message else _ENGINE_KINDS[message["type"]],
                    copy.deepcopy(message),
                    len(message.get("entries", ())),
                )
            )
        )
        others = [peer for other, peer in peers.items() if other != number]
        self._wires[number] = (wire, peers)
        self._stores[number] = classes.Store(peers[number], others, conf=conf, transport=wire)
        for peer in others:
            wire._onNodeConnected(peer)

    def _tick(self, number: int) -> None:
        with contextlib.suppress(ZeroDivisionError):  # Its own thread logs, and tries again.
            self._stores[number].doTick(0)

    def _deliver(self, packet: Packet) -> None:
        wire, peers = self._wires[packet.target]
        wire._onMessageReceived(peers[packet.source], copy.deepcopy(packet.message))

    def leads(self, number: int) -> bool:
        return bool(self._stores[number]._isLeader())

    def term(self, number: int) -> int:
        return int(self._stores[number].raftCurrentTerm)

    def propose(self, number: int, value: bytes, *, callback_fails: bool = False) -> None:
        def done(_result: object, error: int) -> None:
            if error == 0:
                self.acknowledged.add(value)
            if callback_fails and not self.callback_errors:
                self.callback_errors += 1
                raise ZeroDivisionError

        self._stores[number].put(value, callback=done)

    def values(self, number: int) -> list[bytes]:
        return list(self._stores[number].values)

    def begin_compaction(self, number: int) -> None:
        """The dump is in its place, and the log is not cut yet."""
        self._stores[number].forceLogCompaction()
        self.tick(number)

    def compact(self, number: int) -> None:
        self.begin_compaction(number)
        self.tick(number)

    def restart(self, number: int) -> None:
        """kill -9, and up again: what was written to files is there."""
        self._destroy(number)
        self._start(number)

    def lose_power(self, number: int) -> None:
        """Nothing is ever synced (the test watches for it), so nothing need be left."""
        self._destroy(number)
        shutil.rmtree(self._files(number))
        self._start(number)

    def copy_journal(self, number: int) -> None:
        shutil.copy(self._files(number) / "journal", self._files(number) / "journal.old")

    def lose_journal_tail(self, number: int) -> None:
        """Power is lost when the small file was written back, and the end of the log was not."""
        self._destroy(number)
        shutil.copy(self._files(number) / "journal.old", self._files(number) / "journal")
        self._start(number)

    def damage_vote(self, number: int) -> None:
        self._destroy(number)
        (self._files(number) / "journal.meta").write_bytes(b"\x00 damaged")
        self._start(number)

    def _destroy(self, number: int) -> None:
        store = self._stores[number]
        store._doDestroy()
        # It leaves the files of a snapshot open that is half sent or half received.
        serializer = store._SyncObj__serializer
        files = [sent["file"] for sent in serializer._Serializer__transmissions.values()]
        files.append(serializer._Serializer__incomingTransmissionFile)
        for file in files:
            if file is not None:
                file.close()

    def close(self) -> None:
        for number in self._stores:
            self._destroy(number)


_GUARDED_KINDS = {
    "append_entries": "append",
    "append_entries_reply": "append_reply",
    "snapshot_chunk": "snapshot",
}


@dataclass
class _Node:
    disk: Disk
    voter: Voter
    journal: LmdbJournal
    values: list[bytes]


class GuardedCluster(AttackedCluster):
    """Our voters on simulated disks."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._real_os: ModuleType = snapshots.os
        snapshots.os = SimulatedOs  # type: ignore[misc, assignment]  # Put back by close().
        self._nodes: dict[int, _Node] = {}
        self._tokens: dict[int, bytes] = {}
        for number in self.numbers:
            self._start(number, Disk(random.Random(number)))

    def _start(self, number: int, disk: Disk) -> None:
        path = SimulatedPath(disk, "metadata")
        journal = LmdbJournal(
            path / "journal",  # type: ignore[arg-type]  # As much of a path as is used.
            cluster_id="attacked",
            node_id=number,
            open_environment=disk.open_environment,
            new_directory_id=lambda: directory_of(number),
        )
        found(journal, self.numbers)
        voter = Voter(
            node_id=number,
            voters=self.numbers,
            journal=journal,
            snapshots=SnapshotStore(path),  # type: ignore[arg-type]  # As above.
            timing=TIMING,
            rng=random.Random(number),
            retained_entries=2,
            now_s=self.now_s,
        )
        self._nodes[number] = _Node(disk, voter, journal, [])

    def _tick(self, number: int) -> None:
        node = self._nodes[number]
        events, messages = node.voter.step(self.now_s)
        for event in events:
            if isinstance(event, Committed):
                node.values.append(event.payload)
                if event.token in self._tokens:
                    self.acknowledged.add(self._tokens[event.token])
            elif isinstance(event, Installed):
                node.values = event.snapshot.data.split(b"\n") if event.snapshot.data else []
        for target, message in messages:
            kind = message.WhichOneof("message")
            entries = len(message.append_entries.entries)
            self._emit(Packet(number, target, _GUARDED_KINDS.get(kind, kind), message, entries))

    def _deliver(self, packet: Packet) -> None:
        copied = copy.deepcopy(packet.message)
        self._nodes[packet.target].voter.receive(packet.source, copied, self.now_s)
        self._tick(packet.target)

    def leads(self, number: int) -> bool:
        return self._nodes[number].voter.status().role is Role.LEADER

    def term(self, number: int) -> int:
        return self._nodes[number].voter.status().term

    def propose(self, number: int, value: bytes) -> None:
        token = len(self._tokens)
        self._tokens[token] = value
        self._nodes[number].voter.propose(token, value)

    def values(self, number: int) -> list[bytes]:
        return list(self._nodes[number].values)

    def begin_compaction(self, number: int) -> None:
        node = self._nodes[number]
        node.journal.compact_to = lambda _index: None  # type: ignore[method-assign]  # Killed here.
        self.compact(number)

    def compact(self, number: int) -> None:
        node = self._nodes[number]
        node.voter.compact(node.voter.status().applied_index, b"\n".join(node.values))

    def restart(self, number: int) -> None:
        node = self._nodes[number]
        node.journal.abandon()
        self._start(number, node.disk)

    def lose_power(self, number: int) -> None:
        self._nodes[number].disk.lose_power()
        self.restart(number)

    def copy_journal(self, number: int) -> None:
        """There is no file of which only one could be old."""

    def lose_journal_tail(self, number: int) -> None:
        self.lose_power(number)

    def damage_vote(self, number: int) -> None:
        node = self._nodes[number]
        (rows,) = [
            tables["meta"] for tables in node.disk._environments.values() if "meta" in tables
        ]
        row = bytearray(rows[b"hard-state"])
        row[-1] ^= 1
        rows[b"hard-state"] = bytes(row)
        self.restart(number)

    def close(self) -> None:
        snapshots.os = self._real_os  # type: ignore[misc, assignment]  # As it was.
