"""What stands between the Raft engine and the network, and makes the engine obey Raft.

The engine (pysyncobj 0.3.17) is unsafe as it comes. It never sees a message that Raft would have
it ignore, and nothing that it says leaves before its disk agrees. The rules, each in a module of
penstock.raft_meta.rules that names its section of the paper:

1. ``terms`` (5.1): every message carries its sender's. A newer one in an answer makes the engine
   step down; an older sender is told.
2. ``following`` (5.3, Figure 2): AppendEntries never undoes what came after it.
3. ``replicating`` (5.3): a refusal sends the leader back a whole term, and refusals of what was
   sent before that are void.
4. ``replicating``, ``voting``: answers count in their own term, up to the log's end; a voter votes
   once.
5. ``voting`` (5.2; thesis 9.6, 4.2.3): the engine may stand only after a majority would vote for
   it, and candidates are ignored while a leader is alive.
6. ``snapshotting`` (7): snapshots are ours: checksummed, and taken only by a log that lacks them.
7. ``following``: only no-ops and commands are entries; nothing else that the engine can say is
   passed on.
8. ``reading`` (thesis 6.4): a majority echoes a round that began after the read did.

And what Raft has and the engine has not: ``handing_over`` (thesis 3.10).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from penstock.raft_meta.elections import Elections, RaftTiming
from penstock.raft_meta.journal import LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.desk import (
    MAX_COMMAND_BYTES,
    Desk,
    Engine,
    EngineMessage,
    Message,
)
from penstock.raft_meta.rules.following import Following
from penstock.raft_meta.rules.handing_over import HandingOver
from penstock.raft_meta.rules.reading import Reading
from penstock.raft_meta.rules.replicating import Replicating
from penstock.raft_meta.rules.snapshotting import Receiving, Sending
from penstock.raft_meta.rules.terms import Terms
from penstock.raft_meta.rules.voting import Voting
from penstock.raft_meta.snapshots import Snapshot

__all__ = ["MAX_COMMAND_BYTES", "MAX_TERM_STEP", "Guard", "Message"]

MAX_TERM_STEP: Final = 2**32
"""No voter is ever so many elections behind: a term beyond that is no term. It would be kept for
ever, and the last one that fits into a message could have no successor.
"""


class Guard:
    """The rules of one voter. One thread, no clock, no network: see ``receive`` and ``flush``."""

    def __init__(
        self,
        *,
        node_id: int,
        peers: Iterable[int],
        journal: LmdbJournal,
        timing: RaftTiming,
        rng: random.Random,
        load_snapshot: Callable[[], Snapshot | None],
    ) -> None:
        self._desk = desk = Desk(
            node_id=node_id,
            peers=peers,
            journal=journal,
            timing=timing,
            load_snapshot=load_snapshot,
        )
        self.elections = Elections(node_id, desk.peers, timing, rng)
        self.bounced: list[int] = []  # The engine's request ids of commands that it forwarded.
        self.reading = Reading(desk)
        self.handing_over = HandingOver(desk)
        self._terms = Terms(desk, self.elections)
        self._voting = Voting(desk, self._terms, self.elections, self.handing_over)
        following = Following(desk, self._terms)
        self._sending = Sending(desk)
        self._replicating = Replicating(desk, self._terms, self._sending)
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "request_vote": self._voting.on_request_vote,
            "vote": self._voting.on_vote,
            "append_entries": following.on_append,
            "append_entries_reply": self._replicating.on_reply,
            "snapshot_chunk": Receiving(desk, self._terms, following).on_chunk,
            "pre_vote": self._voting.on_pre_vote,
            "pre_vote_reply": self._voting.on_pre_vote_reply,
            "term_notice": self._terms.on_term_notice,
            "timeout_now": self.handing_over.on_timeout_now,
        }

    def bind(self, engine: Engine, now_s: float) -> None:
        """Take charge of an engine. Nothing was sent or received before."""
        self._desk.engine = engine
        self._desk.now_s = now_s
        self.elections.restart_timer(now_s)

    @property
    def dropped(self) -> int:
        """Messages that were malformed, or from nobody who may send them."""
        return self._desk.dropped

    # From the network.

    def receive(self, peer: int, message: Message, now_s: float) -> None:
        """Take a message of a peer whose identity is established. A malformed one is dropped."""
        self._desk.now_s = now_s
        handler = self._handlers.get(message.WhichOneof("message") or "")
        if (
            handler is None
            or peer not in self._desk.peers
            or not 0 <= message.term <= self._desk.engine.term() + MAX_TERM_STEP
        ):
            self._desk.dropped += 1
            return
        handler(peer, message)

    def peer_lost(self, peer: int, now_s: float) -> None:
        """The connection from a peer broke."""
        self._desk.now_s = now_s
        engine = self._desk.engine
        if engine.role() is Role.LEADER:
            self.handing_over.peer_lost(peer)
        elif engine.leader_id() == peer:
            others = (other for other in self._desk.peers if other != peer)
            turn = sum(other < self._desk.node_id for other in others)
            self.elections.lost_leader(now_s, turn)

    def resign(self) -> None:
        """Lead no more: enter the next term, as if a peer had. Nothing happens to a follower.

        The only voter goes on: nobody else could lead.
        """
        desk = self._desk
        if desk.leads and desk.peers:
            self._terms.step_down(desk.peers[0], desk.engine.term() + 1)

    # From the engine.

    def send(self, peer: int, message: EngineMessage) -> None:
        """Queue what the engine says; what Raft does not know is dropped."""
        match message["type"]:
            case "append_entries" if "serialized" in message:
                self._sending.begin(peer)
            case "append_entries":
                self._replicating.send(peer, message)
            case "request_vote":
                self._voting.send_request(peer, message)
            case "response_vote":
                self._voting.send_vote(peer)
            case "apply_command":
                # Leadership was lost within the tick: the caller is told, the command goes nowhere.
                self.bounced.append(message["request_id"])
            case "next_node_idx":
                pass  # The guard answers for itself, having seen the whole message.
            case other:
                raise RaftSafetyError(f"the engine wants to send {other!r}")

    # Around the engine's tick.

    def before_tick(self, now_s: float) -> None:
        """What is due by the clock."""
        self._desk.now_s = now_s
        if self._desk.leads:
            self._sending.before_tick()
            self.handing_over.before_tick()
        else:
            self._voting.before_tick()

    def after_tick(self) -> None:
        """The engine stood for election, or not."""
        self._voting.after_tick()

    def role_changed(self, role: Role) -> None:
        """The engine's role changed, just now and before it has acted in it."""
        desk = self._desk
        self._sending.stop()
        self.handing_over.stop()
        for peer in desk.peers:
            if role is Role.LEADER:
                desk.engine.connect(peer)
                desk.progress(peer).begin_term()
            else:
                desk.engine.disconnect(peer)
        if role is Role.FOLLOWER:
            self.elections.restart_timer(desk.now_s)

    def next_deadline_s(self) -> float:
        """When ``before_tick`` has something to do, apart from the engine's heartbeats."""
        if self._desk.leads:
            return min(self._sending.deadline_s(), self.handing_over.deadline_s())
        return self.elections.deadline_s

    def flush(self) -> list[tuple[int, Message]]:
        """Make everything durable, and only then say what may leave, in order.

        What was said in a term that ended since is void.
        """
        self._desk.journal.sync()
        self._replicating.close_batches()
        return self._desk.take_outbox()
