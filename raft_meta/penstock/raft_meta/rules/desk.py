"""What the rules of one voter share: the engine, the journal, the time, and what is to be sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import OLDEST_LEVEL, Hearing, MachineState, Role
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2

MAX_COMMAND_BYTES: Final = 256 * 1024
"""The largest command. Well below the batch size at which the engine would start to pickle."""
MAX_BATCH_BYTES: Final = 1024 * 1024
"""One AppendEntries holds about so many bytes of commands."""

Message = raft_pb2.RaftExchangeRequest
EngineMessage = dict[str, Any]


class Engine(Protocol):
    """What the rules need of the engine."""

    def term(self) -> int:
        """The current term."""
        ...

    def role(self) -> Role:
        """The current role."""
        ...

    def leader_id(self) -> int:
        """The leader of the current term, or -1."""
        ...

    def match_index(self) -> Mapping[int, int]:
        """How far each peer's disk agrees, as the leader knows it."""
        ...

    def deliver(self, peer: int, message: EngineMessage) -> None:
        """Hand it a message, in its own form, that the guard has found good."""
        ...

    def connect(self, peer: int) -> None:
        """Have it send to a peer; a follower with a connected peer may stand for election."""
        ...

    def disconnect(self, peer: int) -> None:
        """Have it send nothing to a peer."""
        ...

    def stand(self) -> None:
        """Let its election timer run out."""
        ...

    def count_silence_for(self, seconds: float) -> None:
        """As the leader, step down after so long without a majority's answers."""
        ...

    def forgive_silence(self, seconds: float) -> None:
        """So much of the peers' silence was none of theirs."""
        ...

    def hurry(self) -> None:
        """Have it send AppendEntries at its next tick."""
        ...

    def acknowledge(self, peer: int, index: int) -> None:
        """The peer's disk holds the log up to ``index``."""
        ...

    def send_from(self, peer: int, index: int) -> None:
        """Go on at ``index`` for a peer."""
        ...

    def saw(self, peer: int) -> None:
        """The peer is alive and follows."""
        ...

    def install(self, snapshot: Snapshot) -> None:
        """Replace log and state by a snapshot, durably."""
        ...

    def set_voters(self, peers: Collection[int], *, is_voter: bool) -> None:
        """Count majorities over these peers and, if it is a voter, this node.

        A node that is no voter never stands.
        """
        ...

    def observe(self, peer: int) -> None:
        """As the leader, send to a peer that does not count."""
        ...

    def stop_observing(self, peer: int) -> None:
        """Send nothing to a peer that does not count."""
        ...


@dataclass(slots=True)
class Progress:
    """What a leader knows of one peer, beside what its engine does."""

    round: int = 0
    """Of the last message to it that wants an answer. Never goes back."""
    began: int = 0
    """Rounds up to this one were sent before the peer became a voter or observer, this time."""
    echoed: int = 0
    """The newest round that it answered in this term."""
    void_until: int = 0
    """Refusals of these rounds are void."""
    last_hint: int = 0
    since_s: float = 0.0
    """Since when this leader sends to it."""
    heard_s: float = -math.inf
    """When it last answered this leader."""
    directory_id: bytes = b""
    """The directory that its last answer in this term came from."""
    level: int = 0
    """The newest feature level that it knows, as it said in this term; 0: it said nothing yet."""
    applied_index: int | None = None
    """How far its state machine is, as it said in this term."""

    def begin_term(self, now_s: float) -> None:
        """This node leads from now on; nothing is heard of the peer yet."""
        self.since_s = now_s
        self.echoed = self.last_hint = 0
        self.void_until = self.round
        self.heard_s = -math.inf
        self.directory_id = b""
        self.level, self.applied_index = 0, None


class Desk:
    """One voter's engine, journal, time and outbox, and who votes. One thread.

    Whoever is in ``peers`` and answers out of the directory that the voter set names, counts.
    """

    def __init__(
        self,
        *,
        node_id: int,
        journal: LmdbJournal,
        timing: RaftTiming,
        load_snapshot: Callable[[], Snapshot | None],
        supported_level: int = OLDEST_LEVEL,
        machine: Callable[[], MachineState | None] = lambda: None,
        why_unreadable: Callable[[bytes], str] = lambda _snapshot: "",
    ) -> None:
        self.node_id = node_id
        self.journal = journal
        self.timing = timing
        self.load_snapshot = load_snapshot
        self.supported_level = supported_level
        self.machine = machine  # How far this node's state machine is; None: nobody says.
        self.why_unreadable = why_unreadable  # What speaks against a snapshot's bytes.
        self.engine: Engine = None  # type: ignore[assignment]  # Guard.bind() is called first.
        self.now_s = 0.0
        self.leaders_commit = 0  # What a leader that counts said last to be decided.
        self.dropped = 0  # Messages that were malformed, or from nobody who may send them.
        self.voters: VoterSet | None = None  # The one that the engine counts with.
        self.peers: tuple[int, ...] = ()  # The other voters.
        self.is_voter = False
        self.observers: set[int] = set()  # Who is sent the log by this leader and does not count.
        self._progress: dict[int, Progress] = {}
        self._last_round = 0  # Of all who were forgotten: rounds never go back.
        self._outbox: list[tuple[int, Message]] = []

    @property
    def leads(self) -> bool:
        """This node is the leader of the current term."""
        return self.engine.role() is Role.LEADER

    @property
    def majority(self) -> int:
        """So many voters decide."""
        return 1 if self.voters is None else self.voters.majority

    def take_voters(self, voters: VoterSet | None) -> None:
        """Count with another voter set from now on."""
        self.voters = voters
        others = () if voters is None else sorted(voters.node_ids - {self.node_id})
        self.peers = tuple(others)
        self.is_voter = voters is not None and voters.includes(
            self.node_id, self.journal.directory_id
        )
        for gone in set(self._progress) - set(others) - self.observers:
            self.forget(gone)

    def forget(self, peer: int) -> None:
        """Nothing that a peer answers from now on is about what it is sent later."""
        progress = self._progress.pop(peer, None)
        if progress is not None:
            self._last_round = max(self._last_round, progress.round)

    def counts(self, peer: int, message: Message) -> bool:
        """Whether this message is a voter's, out of the directory that keeps its promises."""
        return self.voters is not None and self.voters.includes(peer, message.directory_id)

    def progress(self, peer: int) -> Progress:
        """What is known of a voter or observer."""
        found = self._progress.get(peer)
        if found is None:
            last = self._last_round
            found = self._progress[peer] = Progress(
                round=last, began=last, void_until=last, since_s=self.now_s
            )
        return found

    def is_alive(self, peer: int) -> bool:
        """The peer answered this leader within an election timeout."""
        return self.progress(peer).heard_s > self.now_s - self.timing.election_min_s

    def hearing(self, peer: int) -> Hearing:
        """How this leader hears a voter or observer."""
        progress = self.progress(peer)
        since_s = max(progress.heard_s, progress.since_s)
        return Hearing(
            silent_ms=round((self.now_s - since_s) * 1000),
            ever_answered=math.isfinite(progress.heard_s),
            is_reachable=self.is_alive(peer),
        )

    def queue(self, peer: int, message: Message) -> None:
        """Have a message leave once everything said in it is on disk, stamped with the term."""
        message.term = self.engine.term()
        message.directory_id = self.journal.directory_id
        self._outbox.append((peer, message))

    def take_outbox(self) -> list[tuple[int, Message]]:
        """What was queued in the current term; what was said in one that ended since is void."""
        term = self.engine.term()
        leaving = [(peer, message) for peer, message in self._outbox if message.term == term]
        self._outbox.clear()
        return leaving
