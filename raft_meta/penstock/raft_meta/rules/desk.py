"""What the rules of one voter share: the engine, the journal, the time, and what is to be sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.snapshots import Snapshot
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


@dataclass(slots=True)
class Progress:
    """What a leader knows of one peer, beside what its engine does."""

    round: int = 0
    """Of the last message to it that wants an answer. Never goes back."""
    echoed: int = 0
    """The newest round that it answered in this term."""
    void_until: int = 0
    """Refusals of these rounds are void."""
    last_hint: int = 0
    heard_s: float = -math.inf
    """When it last answered this leader."""

    def begin_term(self) -> None:
        """This node leads from now on."""
        self.echoed = self.last_hint = 0
        self.void_until = self.round
        self.heard_s = -math.inf


class Desk:
    """One voter's engine, journal, time and outbox. One thread."""

    def __init__(
        self,
        *,
        node_id: int,
        peers: Iterable[int],
        journal: LmdbJournal,
        timing: RaftTiming,
        load_snapshot: Callable[[], Snapshot | None],
    ) -> None:
        self.node_id = node_id
        self.peers = tuple(sorted(peers))
        self.journal = journal
        self.timing = timing
        self.load_snapshot = load_snapshot
        self.engine: Engine = None  # type: ignore[assignment]  # Guard.bind() is called first.
        self.now_s = 0.0
        self.dropped = 0  # Messages that were malformed or from nobody.
        self._progress: dict[int, Progress] = {}
        self._outbox: list[tuple[int, Message]] = []

    @property
    def leads(self) -> bool:
        """This node is the leader of the current term."""
        return self.engine.role() is Role.LEADER

    def progress(self, peer: int) -> Progress:
        """What is known of a peer."""
        found = self._progress.get(peer)
        if found is None:
            found = self._progress[peer] = Progress()
        return found

    def queue(self, peer: int, message: Message) -> None:
        """Have a message leave once everything said in it is on disk, stamped with the term."""
        message.term = self.engine.term()
        self._outbox.append((peer, message))

    def take_outbox(self) -> list[tuple[int, Message]]:
        """What was queued in the current term; what was said in one that ended since is void."""
        term = self.engine.term()
        leaving = [(peer, message) for peer, message in self._outbox if message.term == term]
        self._outbox.clear()
        return leaving
