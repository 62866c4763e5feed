"""The Raft engine: pysyncobj 0.3.17, reduced to what is sound and driven by a guard.

The only module that imports pysyncobj. Names of the engine's that are private and used here are
pinned by tests/unit/raft_meta/test_engine_contract.py; S:n is a line of its syncobj.py.
"""

from __future__ import annotations

import _socket
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

import pysyncobj.pickle
import pysyncobj.serializer
import pysyncobj.syncobj
import pysyncobj.tcp_connection
from pysyncobj.config import FAIL_REASON, SERIALIZER_STATE, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.syncobj import SyncObj
from pysyncobj.transport import Transport

from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.journal import COMMAND, VOTERS, LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.desk import MAX_BATCH_BYTES, EngineMessage
from penstock.raft_meta.snapshots import Snapshot

_ROLES: Final = (Role.FOLLOWER, Role.CANDIDATE, Role.LEADER)  # By the engine's numbers.
_NEVER: Final = 1 << 60
_COMMAND_TYPE: Final = COMMAND[0]
_VOTERS_TYPE: Final = VOTERS[0]
_NOBODY: Final = -1

NEVER_APPENDED: Final = frozenset(
    {
        FAIL_REASON.QUEUE_FULL,
        FAIL_REASON.MISSING_LEADER,
        FAIL_REASON.NOT_LEADER,
        FAIL_REASON.REQUEST_DENIED,
    }
)
"""Reasons of the engine for which a command certainly did not enter the log."""
SUCCESS: Final = FAIL_REASON.SUCCESS

Outcome = Callable[[Any, int], None]


class _NoPickle:
    """Stands where the engine would pickle. Nothing is ever pickled, least of all unpickled."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def refuse(*_arguments: object, **_named: object) -> NoReturn:
            raise RaftSafetyError(f"the Raft engine tried to use pickle.{name}")

        return refuse


class _NoSerializer:
    """Stands where the engine would make, load and send snapshots: that is ours."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def checkSerializing(self) -> tuple[int, None]:  # noqa: N802 - the engine's name for it.
        return SERIALIZER_STATE.NOT_SERIALIZING, None

    def getTransmissionData(self, _peer: Node) -> None:  # noqa: N802 - the engine's name for it.
        """Nothing: the message that then carries it tells the guard that a peer is far behind."""

    def cancelTransmisstion(self, _peer: Node) -> None:  # noqa: N802 - the engine's name for it.
        pass

    def setTransmissionData(self, _data: object) -> NoReturn:  # noqa: N802 - the engine's name.
        raise RaftSafetyError("the Raft engine was given a snapshot of its own format")

    def serialize(self, _data: object, _index: int) -> NoReturn:
        raise RaftSafetyError("the Raft engine tried to make a snapshot")

    def deserialize(self) -> NoReturn:
        raise RaftSafetyError("the Raft engine tried to load a snapshot")


_clock = threading.local()  # Each voter's thread has its own time, set before each call.


def _engine_now_s() -> float:
    return float(getattr(_clock, "now_s", 0.0))


def _disarm() -> None:
    """Take out of the engine what must never run, and what must be ours."""
    refusing = _NoPickle()
    for module in (pysyncobj.syncobj, pysyncobj.serializer, pysyncobj.tcp_connection):
        module.pickle = refusing
    for name in ("load", "loads", "dump", "dumps"):
        setattr(pysyncobj.pickle, name, getattr(refusing, name))
    pysyncobj.syncobj.Serializer = _NoSerializer
    pysyncobj.syncobj.createJournal = lambda journal: journal
    pysyncobj.syncobj.monotonicTime = _engine_now_s
    pysyncobj.syncobj.PIPE_NOTIFIER_ENABLED = False  # One thread ticks; nobody needs waking.
    # The import puts one of its own in its place, for everybody in the process.
    socket.inet_ntop = _socket.inet_ntop


_disarm()


class _Peer(Node):  # type: ignore[misc]  # pysyncobj has no types.
    """A voter. Its hash does not change from run to run, so that schedules can be replayed."""

    def __init__(self, node_id: int) -> None:
        super().__init__(str(node_id))
        self.number = node_id

    def __hash__(self) -> int:
        return self.number


class _Bridge(Transport):  # type: ignore[misc]  # pysyncobj has no types.
    """The engine's transport: what it says goes to the guard, what the guard lets in comes back."""

    def __init__(self, send: Callable[[int, EngineMessage], None]) -> None:
        super().__init__(None, None, [])
        self._send = send

    def send(self, node: _Peer, message: EngineMessage) -> bool:
        self._send(node.number, message)
        return True

    def deliver(self, node: _Peer, message: EngineMessage) -> None:
        self._onMessageReceived(node, message)

    def connected(self, node: _Peer) -> None:
        self._onNodeConnected(node)

    def disconnected(self, node: _Peer) -> None:
        self._onNodeDisconnected(node)

    def destroy(self) -> None:
        """Nothing: connections are the link's."""


class MetadataRaft(SyncObj):  # type: ignore[misc]  # pysyncobj has no types.
    """The engine as the guard and the voter see it. One thread; time is what ``at`` was told.

    It orders and counts; entries are applied from the journal by the voter, since for the engine
    their type means nothing (S:892).
    """

    _gathering = False
    _gathered = False

    def __init__(
        self,
        *,
        node_id: int,
        journal: LmdbJournal,
        timing: RaftTiming,
        send: Callable[[int, EngineMessage], None],
        role_changed: Callable[[Role], None],
        install: Callable[[Snapshot], None],
        now_s: float,
    ) -> None:
        self.at(now_s)
        self._nodes: dict[int, _Peer] = {}
        self._journal = journal
        self._bridge = _Bridge(send)
        self._install = install
        conf = SyncObjConf(
            autoTick=False,
            useFork=False,
            appendEntriesUseBatch=False,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            journalFile=journal,
            raftMinTimeout=timing.election_min_s,
            raftMaxTimeout=timing.election_max_s,
            connectionTimeout=timing.election_max_s,
            appendEntriesPeriod=timing.heartbeat_s,
            # A leader that hears no majority for so long stops to be one (check quorum).
            leaderFallbackTimeout=timing.election_min_s,
            appendEntriesBatchSizeBytes=MAX_BATCH_BYTES,
            logCompactionMinEntries=_NEVER,
            logCompactionMinTime=_NEVER,
            onStateChanged=lambda _old, new: role_changed(_ROLES[new]),
        )
        # It is no voter until set_voters says so.
        nobody = [self._node(_NOBODY)]
        super().__init__(_Peer(node_id), nobody, conf=conf, transport=self._bridge)

    def at(self, now_s: float) -> None:
        """Set the engine's clock. Before every other call of a step."""
        _clock.now_s = now_s

    # What the guard asks (penstock.raft_meta.rules.desk.Engine).

    def term(self) -> int:
        """The current term."""
        return int(self.raftCurrentTerm)

    def role(self) -> Role:
        """The current role."""
        return _ROLES[self._SyncObj__raftState]

    def leader_id(self) -> int:
        """The leader of the current term, or -1."""
        leader = self._SyncObj__raftLeader
        return -1 if leader is None else int(leader.number)

    def deliver(self, peer: int, message: EngineMessage) -> None:
        """Hand the engine a message in its own form."""
        self._bridge.deliver(self._node(peer), message)

    def connect(self, peer: int) -> None:
        """Have the engine send to a peer."""
        self._bridge.connected(self._node(peer))

    def disconnect(self, peer: int) -> None:
        """Have the engine send nothing to a peer."""
        self._bridge.disconnected(self._node(peer))

    def stand(self) -> None:
        """Let the engine's election timer run out; it stands at the next tick if connected."""
        self._SyncObj__raftElectionDeadline = -1.0

    def count_silence_for(self, seconds: float) -> None:
        """As the leader, step down after so long without a majority's answers (check quorum)."""
        self._SyncObj__conf.leaderFallbackTimeout = seconds

    def forgive_silence(self, seconds: float) -> None:
        """So much of the peers' silence was none of theirs: this process heard nobody."""
        now_s, heard = _engine_now_s(), self._SyncObj__lastResponseTime
        for peer, heard_s in heard.items():
            heard[peer] = min(heard_s + seconds, now_s)

    def hurry(self) -> None:
        """Have the engine send AppendEntries at its next tick."""
        self._SyncObj__newAppendEntriesTime = -1.0

    def acknowledge(self, peer: int, index: int) -> None:
        """The peer's disk holds the log up to ``index``.

        The engine would also go back to just after it, and send again what is under way.
        """
        next_index = self._SyncObj__raftNextIndex[self._node(peer)]
        self._next_node_idx(peer, index + 1, success=True)
        self._SyncObj__raftNextIndex[self._node(peer)] = max(next_index, index + 1)

    def send_from(self, peer: int, index: int) -> None:
        """Go on at ``index`` for a peer."""
        self._next_node_idx(peer, index, reset=True)

    def saw(self, peer: int) -> None:
        """The peer is alive and follows."""
        self._next_node_idx(peer, 0)

    def install(self, snapshot: Snapshot) -> None:
        """Replace log and state by a snapshot, durably: the voter does it."""
        self._install(snapshot)

    # Who votes. The engine counts majorities over its "other nodes" and itself (S:646, S:664,
    # S:680, S:1068), and sends to its "readonly nodes" without counting them (S:1267).

    def _node(self, peer: int) -> _Peer:
        found = self._nodes.get(peer)
        if found is None:
            found = self._nodes[peer] = _Peer(peer)
        return found

    def set_voters(self, peers: Collection[int], *, is_voter: bool) -> None:
        """Count majorities over these peers and this node; one that is no voter never stands.

        A peer that was observed goes on where it was, and counts.
        """
        if not is_voter and self.role() is Role.LEADER:
            raise RaftSafetyError("a leader was to be no voter")
        wanted = {self._node(peer) for peer in peers}
        if not is_voter:
            # Somebody who is never connected keeps the gate shut (S:635), with no peers too.
            wanted.add(self._node(_NOBODY))
        others: set[_Peer] = self.__dict__["_SyncObj__otherNodes"]
        readonly: set[_Peer] = self._SyncObj__readonlyNodes
        for gone in others - wanted:
            self._forget(gone)
        readonly -= wanted
        for peer in wanted - others:
            self._SyncObj__raftNextIndex.setdefault(peer, self._journal.last_index + 1)
            self._SyncObj__raftMatchIndex.setdefault(peer, 0)
            self._SyncObj__lastResponseTime.setdefault(peer, _engine_now_s())
        self._SyncObj__otherNodes = wanted

    def observe(self, peer: int) -> None:
        """As the leader, send to a peer that does not count."""
        self._SyncObj__onReadonlyNodeConnected(self._node(peer))

    def stop_observing(self, peer: int) -> None:
        """Send nothing to a peer that does not count."""
        node = self._node(peer)
        if node in self._SyncObj__readonlyNodes:
            self._SyncObj__readonlyNodes.discard(node)
            self._forget(node)

    def _forget(self, node: _Peer) -> None:
        self.disconnect(node.number)
        self._SyncObj__raftNextIndex.pop(node, None)
        self._SyncObj__raftMatchIndex.pop(node, None)
        self._SyncObj__lastResponseTime.pop(node, None)

    def _next_node_idx(
        self, peer: int, index: int, *, success: bool = False, reset: bool = False
    ) -> None:
        self.deliver(
            peer,
            {"type": "next_node_idx", "next_node_idx": index, "success": success, "reset": reset},
        )

    # What the voter asks.

    def tick(self) -> None:
        """Stand if it is time, commit, note what is applied, send."""
        self.doTick(0)

    def _checkCommandsToApply(self) -> None:  # noqa: N802 - the engine's name for it.
        """Take all commands that wait, and send them together: the engine would one by one.

        S:540 sends to every peer after each command, which was half of a busy leader's work.
        """
        self._gathering, self._gathered = True, False
        try:
            super()._checkCommandsToApply()
        finally:
            self._gathering = False
        if self._gathered:
            self._SyncObj__sendAppendEntries()

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802 - the engine's name for it.
        if self._gathering:
            self._gathered = True
        else:
            super()._SyncObj__sendAppendEntries()

    def submit(self, payload: bytes, outcome: Outcome) -> None:
        """Append a command at the next tick; ``outcome`` is called when it is decided."""
        self._applyCommand(payload, outcome, _COMMAND_TYPE)

    def bounce(self, request_id: int) -> None:
        """Tell the caller of a command, which the engine forwarded, that it was not taken."""
        response = {"type": "apply_command_response", "request_id": request_id}
        self.deliver(_NOBODY, response | {"error": FAIL_REASON.NOT_LEADER})

    def submit_voters(self, payload: bytes, outcome: Outcome) -> None:
        """As submit, for a voter set: for the engine it is one more command that it ignores."""
        self._applyCommand(payload, outcome, _VOTERS_TYPE)

    def forget_commands(self) -> None:
        """Drop the outcomes that are awaited: their callers were told that nobody knows."""
        self._SyncObj__commandsWaitingCommit.clear()

    def applied_index(self) -> int:
        """The last entry that the engine counts as applied."""
        return int(self.raftLastApplied)

    def next_heartbeat_s(self) -> float:
        """When a leader's next tick is due."""
        return float(self._SyncObj__newAppendEntriesTime)

    def match_index(self) -> dict[int, int]:
        """How far each peer's disk agrees, as the leader knows it."""
        match = self._SyncObj__raftMatchIndex
        return {peer.number: index for peer, index in match.items() if peer.number != _NOBODY}

    def jump_to(self, index: int) -> None:
        """A snapshot brought the state up to ``index``, which the journal now begins with."""
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex = max(index, int(self.raftCommitIndex))
