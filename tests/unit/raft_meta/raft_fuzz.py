"""A quorum in one process: voters on a virtual network and clock, with losses and crashes.

What must hold is checked as it happens: one leader a term, one order of commands on all voters,
nothing acknowledged ever lost. A seed replays a run.
"""

from __future__ import annotations

import heapq
import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import Leadership, Role
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voter import (
    ChangeRefused,
    Committed,
    Installed,
    Refused,
    Undecided,
    Voter,
    VotersCommitted,
)
from penstock.v1 import raft_pb2

TIMING = RaftTiming(election_min_s=0.5, election_max_s=1.0, heartbeat_s=0.15)
_ids = itertools.count(1)


class Crash(Exception):  # noqa: N818 - it is an event, not a mistake.
    """The process dies here."""


def open_fast(*arguments, **named):
    """LMDB without fsync: a crash of a test's voter is that of a process, not of a machine."""
    return lmdb.open(*arguments, **{**named, "sync": False, "metasync": False})


def separator_joined(commands: list[bytes]) -> bytes:
    return b"\n".join(commands)


@dataclass
class Host:
    """One voter with its disk, and the state machine: the list of commands applied."""

    node_id: int
    directory: Path
    voter: Voter | None = None
    journal: LmdbJournal | None = None
    state: list[bytes] = field(default_factory=list)
    applied_index: int = 0
    snapshot_index: int = 0
    down_until_s: float = 0.0
    crash_before_sync: bool = False
    crash_after_sync: bool = False
    generation: int = 0

    @property
    def is_member(self) -> bool:
        """It lives, and by its own account it is a voter."""
        return self.voter is not None and self.voter.status().is_voter


class Network:
    """Voters 1..n. ``run`` until a time; ``propose`` at the leader; ``crash`` and ``start``.

    ``join`` starts a node that is no voter, ``wipe`` gives one an empty disk, and ``add`` and
    ``remove`` ask a leader to change the voter set.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        seed: int,
        *,
        compact_every: int = 40,
        retained: int = 8,
        disconnects: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.compact_every = compact_every
        self.retained = retained
        self.disconnects = disconnects
        self.loss = self.duplication = 0.0
        self.delay_s = (0.0005, 0.002)
        self.cut: Callable[[int, int], bool] = lambda _source, _target: False
        self.directory = directory
        self.founders = range(1, nodes + 1)
        self.hosts = {n: Host(n, directory / f"node-{n}") for n in self.founders}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.leaders: dict[int, int] = {}  # Term to the node that led it.
        self.decided: list[bytes] = []  # The one order; each voter's state is a prefix of it.
        self.acknowledged: set[bytes] = set()
        self.pending: dict[int, bytes] = {}
        self.refused = self.undecided = self.crashes = self.leader_changes = self.installs = 0
        self.sent = 0
        self.changes: dict[int, str] = {}  # Token of a change of voters to what became of it.
        self.changed = 0  # Changes of voters that are committed.
        self._disks = itertools.count(1)
        for host in self.hosts.values():
            self.start(host)

    # Processes.

    def start(self, host: Host) -> None:
        journal = LmdbJournal(
            host.directory / "journal",
            cluster_id="fuzz",
            node_id=host.node_id,
            open_environment=open_fast,
            new_directory_id=lambda: next(self._disks).to_bytes(16, "big"),
            may_found=host.generation == 0,
        )
        host.journal = journal
        host.generation += 1
        host.state, host.applied_index, host.snapshot_index = [], 1, 0
        host.crash_after_sync = host.crash_before_sync = False
        self._arm(host, journal)
        host.voter = Voter(
            node_id=host.node_id,
            voters=self.founders,
            journal=journal,
            snapshots=SnapshotStore(host.directory),
            timing=TIMING,
            rng=random.Random(self.rng.random()),
            retained_entries=self.retained,
            now_s=self.now_s,
        )
        self._soon(host)

    def _arm(self, host: Host, journal: LmdbJournal) -> None:
        write = journal._write

        def crashing_write() -> None:
            if host.crash_before_sync:
                raise Crash
            write()
            if host.crash_after_sync:
                raise Crash

        journal._write = crashing_write

    def crash(self, host: Host, down_s: float | None = None) -> None:
        self.crashes += 1
        host.journal.abandon()
        host.voter = None
        host.generation += 1
        for token in [t for t, _ in self.pending.items() if t % 100 == host.node_id]:
            del self.pending[token]
        for token, outcome in self.changes.items():
            if token % 100 == host.node_id and outcome == "pending":
                self.changes[token] = "lost"
        if self.disconnects:
            for other in self.hosts.values():
                if other.voter is not None:
                    self._at(
                        self.now_s + 0.001,
                        other,
                        lambda v, p=host.node_id: v.peer_lost(p, self.now_s),
                    )
        host.down_until_s = self.now_s + (self.rng.uniform(0.01, 1.2) if down_s is None else down_s)
        self._push(host.down_until_s, lambda: self.start(host) if host.voter is None else None)

    def join(self) -> Host:
        """A new node with an empty disk: it waits to be added."""
        node_id = max(self.hosts) + 1
        host = self.hosts[node_id] = Host(node_id, self.directory / f"node-{node_id}")
        self.start(host)
        return host

    def wipe(self, host: Host, down_s: float = 0.5) -> None:
        """Its disk is lost; it comes back with an empty one."""
        if host.voter is not None:
            self.crash(host, down_s)
        shutil.rmtree(host.directory)

    # Time.

    def _push(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), action))

    def _at(self, at_s: float, host: Host, action: Callable[[Voter], None]) -> None:
        generation = host.generation

        def act() -> None:
            if host.voter is not None and host.generation == generation:
                self._guarded(host, action)

        self._push(at_s, act)

    def _soon(self, host: Host) -> None:
        self._at(self.now_s, host, lambda _voter: None)

    def _guarded(self, host: Host, action: Callable[[Voter], None]) -> None:
        try:
            action(host.voter)
            self._step(host)
        except Crash:
            self.crash(host)

    def _step(self, host: Host) -> None:
        voter = host.voter
        events, messages = voter.step(self.now_s)
        for event in events:
            self._take(host, event)
        if host.applied_index - host.snapshot_index >= self.compact_every:
            host.snapshot_index = host.applied_index
            voter.compact(host.applied_index, separator_joined(host.state))
        for target, message in messages:
            self._send(host.node_id, target, message)
        status = voter.status()
        if status.role is Role.LEADER:
            known = self.leaders.setdefault(status.term, host.node_id)
            assert known == host.node_id, f"two leaders in term {status.term}"
        self._wake(host, max(voter.next_deadline_s(), self.now_s + 0.0001))

    def _wake(self, host: Host, at_s: float) -> None:
        self._at(at_s, host, lambda _voter: None)

    def _send(self, source: int, target: int, message: raft_pb2.RaftExchangeRequest) -> None:
        raw = message.SerializeToString()
        self.sent += 1
        copies = 1 + (self.rng.random() < self.duplication)
        for _ in range(copies):
            if self.rng.random() < self.loss or self.cut(source, target):
                continue
            copy = raft_pb2.RaftExchangeRequest.FromString(raw)
            arrival_s = self.now_s + self.rng.uniform(*self.delay_s)
            self._push(arrival_s, lambda m=copy: self._arrive(source, self.hosts[target], m))

    def _arrive(self, source: int, host: Host, message: raft_pb2.RaftExchangeRequest) -> None:
        """Whoever runs there by now gets it, a process started since too."""
        if host.voter is not None:
            self._guarded(host, lambda voter: voter.receive(source, message, self.now_s))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            at_s, _, action = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            action()
        self.now_s = end_s

    def run_until(self, condition: Callable[[], bool], seconds: float) -> None:
        end_s = self.now_s + seconds
        while not condition():
            assert self.now_s < end_s, f"not within {seconds} s of virtual time"
            self.run(0.05)

    # Events and invariants.

    def _take(self, host: Host, event: object) -> None:
        match event:
            case Committed(index, _term, payload, token):
                assert index > host.applied_index
                host.applied_index = index
                host.state.append(payload)
                self._check_order(host)
                if token in self.pending:
                    assert self.pending.pop(token) == payload
                    self.acknowledged.add(payload)
            case Installed(snapshot):
                self.installs += 1
                host.state = snapshot.data.split(b"\n") if snapshot.data else []
                host.applied_index = host.snapshot_index = snapshot.index
                assert self.decided[: len(host.state)] == host.state
            case Refused(token, _):
                self.refused += 1
                self.pending.pop(token, None)
                self._changed(token, "refused")
            case Undecided(token):
                self.undecided += 1
                self.pending.pop(token, None)
                self._changed(token, "undecided")
            case Leadership():
                self.leader_changes += event.leading
            case VotersCommitted(_, token):
                self.changed += host.voter.status().role is Role.LEADER
                self._changed(token, "done")
            case ChangeRefused(token, reason, _):
                self._changed(token, reason.value)

    def _changed(self, token: int, outcome: str) -> None:
        if token in self.changes:
            before = self.changes[token]
            assert before == "pending", f"a change has two outcomes: {before} and {outcome}"
            self.changes[token] = outcome

    def _check_order(self, host: Host) -> None:
        position = len(host.state) - 1
        if position == len(self.decided):
            self.decided.append(host.state[-1])
        assert self.decided[position] == host.state[-1], "two orders of commands"

    def leaders_by_their_own_account(self) -> list[Host]:
        return [
            host
            for host in self.hosts.values()
            if host.voter is not None and host.voter.status().role is Role.LEADER
        ]

    def leader(self) -> Host | None:
        """The leader of the newest term among those alive."""
        leading = self.leaders_by_their_own_account()
        return max(leading, key=lambda host: host.voter.status().term, default=None)

    def propose(self, host: Host | None = None) -> bytes | None:
        host = host or self.leader()
        if host is None or host.voter is None:
            return None
        number = next(_ids)
        token, payload = number * 100 + host.node_id, b"command-%d" % number
        self.pending[token] = payload
        self._at(self.now_s, host, lambda voter: voter.propose(token, payload))
        return payload

    def add(self, node_id: int, host: Host | None = None, timeout_s: float = 5.0) -> int | None:
        """Ask a leader to make a node a voter; the token of the change."""
        return self._change(
            host,
            lambda voter, token: voter.add_voter(
                token, node_id, ("", 0), self.now_s, timeout_s=timeout_s
            ),
        )

    def remove(self, node_id: int, host: Host | None = None) -> int | None:
        """Ask a leader to make a node no voter; the token of the change."""
        return self._change(
            host, lambda voter, token: voter.remove_voter(token, node_id, self.now_s)
        )

    def _change(self, host: Host | None, operation: Callable[[Voter, int], None]) -> int | None:
        host = host or self.leader()
        if host is None or host.voter is None:
            return None
        token = next(_ids) * 100 + host.node_id
        self.changes[token] = "pending"
        self._at(self.now_s, host, lambda voter: operation(voter, token))
        return token

    def insist(self, ask: Callable[[], int | None], seconds: float = 20.0) -> None:
        """Ask a leader for a change again and again, as a client does, until it is done."""
        asked: list[int] = []

        def done() -> bool:
            outcomes = [self.changes[token] for token in asked]
            if "done" in outcomes:
                return True
            if "pending" not in outcomes and (token := ask()) is not None:
                asked.append(token)
            return False

        try:
            self.run_until(done, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {[self.changes[token] for token in asked]}") from None

    def voters(self) -> set[int]:
        """The node ids of the leader's voter set."""
        leader = self.leader()
        return set() if leader is None else set(leader.voter.status().voters.node_ids)

    def wait_leader(self, seconds: float = 10.0) -> Host:
        self.run_until(lambda: self.leader() is not None, seconds)
        return self.leader()

    def settle(self, seconds: float = 30.0) -> None:
        """With all alive and no faults: one more command must reach everybody."""
        self.loss = self.duplication = 0.0
        self.delay_s = (0.0005, 0.002)
        self.cut = lambda _source, _target: False
        for host in self.hosts.values():
            if host.voter is None:
                host.down_until_s = self.now_s
                self.start(host)
        last: list[bytes] = []

        def everywhere() -> bool:
            if not last or last[-1] not in self.acknowledged:
                payload = self.propose()
                if payload is not None:
                    last.append(payload)
                return False
            voters = self.leader().voter.status().voters if self.leader() else ()
            members = [
                host
                for host in self.hosts.values()
                if voters and voters.includes(host.node_id, host.journal.directory_id)
            ]
            return len(members) > 0 and all(last[-1] in host.state for host in members)

        self.run_until(everywhere, seconds)
        for host in self.hosts.values():
            assert host.state == self.decided[: len(host.state)]
            if last[-1] in host.state:
                assert self.acknowledged <= set(host.state), "an acknowledged command is lost"
            assert len(set(host.state)) == len(host.state), "a command was applied twice"

    def close(self) -> None:
        for host in self.hosts.values():
            if host.voter is not None:
                host.crash_before_sync = host.crash_after_sync = False
                host.voter.close()
