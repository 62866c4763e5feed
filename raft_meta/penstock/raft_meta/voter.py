"""One voter of the quorum: journal, snapshots, engine and guard put together.

No thread, no clock, no network: time and messages come in, events and messages go out. The tests
drive many of these in one process; ``penstock.raft_meta.driver`` drives one on a thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.raft_meta.alignment import align
from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.engine import NEVER_APPENDED, SUCCESS, MetadataRaft
from penstock.raft_meta.guard import Guard, Message
from penstock.raft_meta.journal import COMMAND, VOTERS, LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import (
    OLDEST_LEVEL,
    Leadership,
    MachineState,
    QuorumStatus,
    Role,
)
from penstock.raft_meta.room import AwaitRoom, give_up, is_full
from penstock.raft_meta.rules.changing import (
    NO_TOKEN,
    AddVoter,
    ChangeRefused,
    Propose,
    RemoveVoter,
    Unchanged,
)
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import Address, VoterSet

__all__ = [
    "ChangeRefused",
    "Committed",
    "Event",
    "HandOverFailed",
    "Installed",
    "LevelRefused",
    "ReadReady",
    "Refused",
    "Undecided",
    "Voter",
    "VotersChanged",
    "VotersCommitted",
]

_NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Committed:
    """A command is committed. ``token`` is its proposer's if it was proposed here, or -1."""

    index: int
    term: int
    payload: bytes
    token: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The state is now this snapshot's."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Refused:
    """A proposal or read had no effect: this voter does not lead."""

    token: int
    leader_id: int


@dataclass(frozen=True, slots=True)
class LevelRefused:
    """A proposal had no effect: it would raise the feature level beyond what these nodes know.

    ``lacking`` is what each of them knows, or 0 of one that has not said.
    """

    token: int
    level: int
    lacking: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Undecided:
    """A proposal may or may not take effect: leadership was lost meanwhile."""

    token: int


@dataclass(frozen=True, slots=True)
class ReadReady:
    """A linearizable read may be answered once ``index`` is applied."""

    token: int
    index: int


@dataclass(frozen=True, slots=True)
class HandOverFailed:
    """No other voter took over in time, or there is none: this one leads on, if it led."""


@dataclass(frozen=True, slots=True)
class VotersChanged:
    """Another voter set is in force here, committed or not; or others are to be reached.

    ``observers`` are those who get the log and are no voters, with their addresses.
    """

    voters: VoterSet | None
    observers: Mapping[int, Address]


@dataclass(frozen=True, slots=True)
class VotersCommitted:
    """A change of the voter set is committed, or was in force already. ``token`` as above."""

    voters: VoterSet
    token: int


Event = (
    Committed
    | Installed
    | Refused
    | LevelRefused
    | Undecided
    | ReadReady
    | HandOverFailed
    | VotersChanged
    | VotersCommitted
    | ChangeRefused
    | Leadership
)


class Voter:
    """One voter. One thread; ``now_s`` is a monotonic clock's and never goes back.

    ``voters`` are those of controller.quorum.voters. They matter at the first start of a cluster
    alone (penstock.raft_meta.rules.founding): from then on its log says who votes. A node that
    the voter set lacks, with its very directory, follows and never votes for itself.
    ``supported_level`` is the newest feature level that this software knows; ``machine`` says how
    far the state machine is, on any thread, or None where nobody knows. ``why_unreadable`` is asked
    about snapshots of nodes that are no voters (see FeatureLevels).

    Raises RaftSafetyError, lmdb.Error or OSError when it cannot go on: the process must then end.
    """

    def __init__(
        self,
        *,
        node_id: int,
        voters: Collection[int],
        journal: LmdbJournal,
        snapshots: SnapshotStore,
        timing: RaftTiming,
        rng: random.Random,
        retained_entries: int,
        now_s: float,
        await_room: AwaitRoom = give_up,
        addresses: Mapping[int, Address] | None = None,
        supported_level: int = OLDEST_LEVEL,
        machine: Callable[[], MachineState | None] = lambda: None,
        why_unreadable: Callable[[bytes], str] = lambda _snapshot: "",
    ) -> None:
        self._node_id = node_id
        self._await_room = await_room
        self._journal = journal
        self._snapshots = snapshots
        self._retained_entries = retained_entries
        self._events: list[Event] = []
        self._proposals: deque[tuple[int, bytes, int]] = deque()  # With the level raised to.
        self._undecided: set[int] = set()  # Tokens of commands that the engine has.
        self._decided: dict[int, int] = {}  # Index to token of commands committed in this tick.
        self._snapshot = align(journal, snapshots)
        if journal.knows_no_voters and journal.voters is None and not journal.is_fresh:
            # Of a version in which the configuration said who votes; the log will say so from now.
            journal.found(VoterSet.of(voters, addresses))
        self._guard = Guard(
            node_id=node_id,
            configured=voters,
            addresses=addresses or {},
            journal=journal,
            timing=timing,
            rng=rng,
            load_snapshot=lambda: self._snapshot,
            supported_level=supported_level,
            machine=machine,
            why_unreadable=why_unreadable,
        )
        self._raft = MetadataRaft(
            node_id=node_id,
            journal=journal,
            timing=timing,
            send=self._guard.send,
            role_changed=self._guard.role_changed,
            install=self._install,
            now_s=now_s,
        )
        self._guard.bind(self._raft, now_s)
        self._delivered = self._raft.applied_index()
        if self._snapshot is not None:
            self._raft.jump_to(self._snapshot.index)
            self._delivered = self._snapshot.index
            self._events.append(Installed(self._snapshot))
        self._leadership = Leadership(self._raft.term(), _NOBODY, leading=False)
        self._hands_over = False
        self._told_voters: tuple[VoterSet | None, dict[int, Address]] = (None, {})

    # In.

    def receive(self, peer: int, message: Message, now_s: float) -> None:
        """Take a message of a voter whose identity is established."""
        self._raft.at(now_s)
        self._guard.receive(peer, message, now_s)

    def peer_lost(self, peer: int, now_s: float) -> None:
        """The connection from a voter broke."""
        self._raft.at(now_s)
        self._guard.peer_lost(peer, now_s)

    def stood_still(self, since_s: float, now_s: float) -> None:
        """From ``since_s`` until now this process heard nobody, whoever spoke: a busy host, a
        stopped process, a loop that was long at something else. Others' silence is not counted.
        """
        self._raft.at(now_s)
        self._guard.stood_still(since_s, now_s)

    def propose(self, token: int, payload: bytes, *, level: int = 0) -> None:
        """Append a command in the next step, if this voter leads then.

        ``level`` is the one that it raises the feature level to, if it does: everybody who votes,
        or is to, must know it.
        """
        self._proposals.append((token, payload, level))

    def resign(self, now_s: float, *, even_alone: bool = False) -> None:
        """Lead this term no more, if there is somebody else who may, or ``even_alone``."""
        self._raft.at(now_s)
        self._guard.resign(now_s, even_alone=even_alone)

    def hand_over(self, now_s: float) -> None:
        """Have another voter lead (Raft thesis 3.10); meanwhile proposals are refused.

        It ends within an election timeout, with another leader or with HandOverFailed. Nothing
        happens to a voter that does not lead.
        """
        self._raft.at(now_s)
        if self._raft.role() is not Role.LEADER:
            return
        self._guard.handing_over.begin(now_s)
        self._hands_over = True

    def add_voter(
        self, token: int, node_id: int, address: Address, now_s: float, *, timeout_s: float
    ) -> None:
        """Make a node a voter once it is caught up; ends with an event of the token."""
        self._raft.at(now_s)
        self._guard.changing.add(AddVoter(token, node_id, address, now_s + timeout_s), now_s)

    def stop_adding(self, token: int) -> None:
        """Nobody waits any more for the node of this token to become a voter."""
        self._guard.changing.stop_adding(token)

    def remove_voter(self, token: int, node_id: int, now_s: float) -> None:
        """Make a node no voter; ends with an event of the token."""
        self._raft.at(now_s)
        self._guard.changing.remove(RemoveVoter(token, node_id), now_s)
        self._hands_over |= self._guard.handing_over.is_under_way  # A leader that is to go.

    def read(self, token: int) -> None:
        """Begin a linearizable read."""
        if not self._guard.reading.begin(token):
            self._events.append(Refused(token, self._raft.leader_id()))

    def snapshot_of(self, index: int, data: bytes) -> Snapshot | None:
        """The snapshot that ``data``, the state up to ``index``, is; None if there is a newer one.

        Whoever asks writes it aside, on any thread, and then has ``keep`` called.
        """
        if self._has_snapshot_of(index):
            return None
        term = self._journal.term_at(index)
        if term is None or index > self._delivered:
            raise RaftSafetyError(f"a snapshot up to {index}, and {self._delivered} is applied")
        return Snapshot(index, term, data, self._journal.voters_at(index))

    def keep(self, snapshot: Snapshot) -> None:
        """Put the snapshot that was written aside in its place, and drop the log before it.

        Some entries before it stay, so that a voter a little behind needs no snapshot, and those
        that a voter needs which is sent an older one. A snapshot of the leader's that was installed
        meanwhile is newer, and stays.
        """
        if self._has_snapshot_of(snapshot.index):
            self._snapshots.drop_aside()
            return
        if self._snapshots.put_in_place(snapshot):
            self._snapshot = snapshot
            oldest = max(self._journal.first_index, snapshot.index - self._retained_entries)
            self._journal.compact_to(self._guard.first_needed(oldest))

    def compact(self, index: int, data: bytes) -> None:
        """Keep ``data`` as the snapshot up to ``index``: all the steps on this thread."""
        snapshot = self.snapshot_of(index, data)
        if snapshot is not None and self._snapshots.write_aside(snapshot):
            self.keep(snapshot)

    def _has_snapshot_of(self, index: int) -> bool:
        return self._snapshot is not None and index <= self._snapshot.index

    def _install(self, snapshot: Snapshot) -> None:
        # The snapshot goes first: a journal that begins where no snapshot ends could not be used
        # after a crash in between.
        while True:
            try:
                self._snapshots.save(snapshot)
                break
            except OSError as error:
                if not is_full(error):
                    raise
                self._await_room(error)
        self._snapshot = snapshot
        self._journal.reset_to_snapshot(snapshot.index, snapshot.term, snapshot.voters)
        self._raft.jump_to(snapshot.index)
        self._delivered = snapshot.index
        self._events.append(Installed(snapshot))

    # The step.

    def step(self, now_s: float) -> tuple[list[Event], list[tuple[int, Message]]]:
        """Act on everything that came in, and on time; what is returned is safe to act on.

        Messages may leave in their order; whatever they say is on disk.
        """
        raft, guard = self._raft, self._guard
        raft.at(now_s)
        guard.before_tick(now_s)
        self._change_voters()
        self._submit()
        raft.tick()
        guard.after_tick()
        while guard.bounced:
            raft.bounce(guard.bounced.pop())
        self._drain()
        self._note_leadership()
        self._note_hand_over()
        self._note_voters()
        for token, index in guard.reading.ready():
            self._events.append(ReadReady(token, index))
        messages = guard.flush()
        events, self._events = self._events, []
        return events, messages

    def _change_voters(self) -> None:
        for outcome in self._guard.changing.take_outcomes():
            match outcome:
                case Propose(token, voters):
                    if token != NO_TOKEN:
                        self._undecided.add(token)
                    self._raft.submit_voters(voters.encode(), self._outcome_of(token))
                case Unchanged(token) if self._journal.voters is not None:
                    self._events.append(VotersCommitted(self._journal.voters, token))
                case ChangeRefused(token) if token != NO_TOKEN:
                    self._events.append(outcome)

    def _note_voters(self) -> None:
        now = (self._journal.voters, self._guard.changing.addresses())
        if now != self._told_voters:
            self._told_voters = now
            self._events.append(VotersChanged(*now))

    def _submit(self) -> None:
        leading = self._raft.role() is Role.LEADER
        leaving = self._guard.handing_over.is_under_way
        while self._proposals:
            token, payload, level = self._proposals.popleft()
            if leading and not leaving:
                if lacking := self._guard.levels.lacking(level):
                    self._events.append(LevelRefused(token, level, lacking))
                    continue
                self._guard.levels.raising(level)
                self._undecided.add(token)
                self._raft.submit(payload, self._outcome_of(token))
            else:
                leader_id = _NOBODY if leaving else self._raft.leader_id()
                self._events.append(Refused(token, leader_id))

    def _outcome_of(self, token: int) -> Any:
        def outcome(_result: object, reason: int) -> None:
            if token not in self._undecided:
                return
            self._undecided.remove(token)
            if reason == SUCCESS:
                # The engine calls this just before it counts the entry as applied (S:719-725).
                self._decided[self._raft.applied_index() + 1] = token
            elif reason in NEVER_APPENDED:
                self._events.append(Refused(token, self._raft.leader_id()))
            else:
                self._events.append(Undecided(token))

        return outcome

    def _drain(self) -> None:
        applied = self._raft.applied_index()
        if applied > self._delivered:
            for command, index, term in self._journal.entries(self._delivered + 1, applied):
                token = self._decided.pop(index, _NOBODY)
                if command[:1] == COMMAND:
                    self._events.append(Committed(index, term, command[1:], token))
                elif command[:1] == VOTERS:
                    self._events.append(VotersCommitted(VoterSet.decode(command[1:]), token))
            self._delivered = applied

    def _note_hand_over(self) -> None:
        if self._hands_over and not self._guard.handing_over.is_under_way:
            self._hands_over = False
            if self._raft.role() is Role.LEADER:
                self._events.append(HandOverFailed())

    def _note_leadership(self) -> None:
        raft = self._raft
        now = Leadership(raft.term(), raft.leader_id(), leading=raft.role() is Role.LEADER)
        before = self._leadership
        if now == before:
            return
        if before.leading and (not now.leading or now.term != before.term):
            self._events.extend(Undecided(token) for token in sorted(self._undecided))
            self._undecided.clear()
            raft.forget_commands()
            self._events.extend(Undecided(token) for token in self._guard.reading.abandon())
        self._leadership = now
        self._events.append(now)

    def next_deadline_s(self) -> float:
        """When ``step`` is due though nothing came in."""
        deadline_s = self._guard.next_deadline_s()
        if self._raft.role() is not Role.LEADER:
            return deadline_s
        if self._guard.is_alone and self._journal.commit_index < self._journal.last_index:
            return 0.0  # The only voter is its own majority: it commits at its next tick.
        return min(deadline_s, self._raft.next_heartbeat_s())

    def status(self) -> QuorumStatus:
        """This voter's view."""
        raft, journal = self._raft, self._journal
        leading = raft.role() is Role.LEADER
        peers = raft.match_index() if leading else {}
        # The engine goes on naming a leader that died, until there is another one.
        missed = not leading and self._guard.elections.misses_leader()
        return QuorumStatus(
            node_id=self._node_id,
            role=raft.role(),
            term=raft.term(),
            leader_id=_NOBODY if missed else raft.leader_id(),
            commit_index=journal.commit_index,
            applied_index=self._delivered,
            last_index=journal.last_index,
            match_index={**peers, self._node_id: journal.last_index} if leading else {},
            directory_id=journal.directory_id,
            voters=journal.voters,
            voters_index=journal.voters_index,
            directories={peer: self._guard.directory_of(peer) for peer in peers},
            hearings={peer: self._guard.hearing_of(peer) for peer in peers},
            catching_up=next(iter(self._guard.changing.addresses().items()), None),
            awaited=self._guard.founding.missing,
            founder_id=self._guard.founding.founder_id,
            needs_permission=self._guard.founding.needs_permission,
            founding_refusals=dict(self._guard.founding.refusals),
            leaders_commit_index=0 if leading else self._guard.leaders_commit,
        )

    def close(self) -> None:
        """Write what is left and let go of the files."""
        self._journal.close()
