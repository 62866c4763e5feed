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
7. ``following``: only no-ops, commands and voter sets are entries; nothing else that the engine can
   say is passed on.
8. ``reading`` (thesis 6.4): a majority echoes a round that began after the read did.

And what Raft has and the engine has not: ``handing_over`` (thesis 3.10), ``founding`` and
``changing`` (6; thesis 4): who votes, and how that changes; ``levels``: with which software.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Final

from penstock.raft_meta.elections import Elections, RaftTiming
from penstock.raft_meta.journal import LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import Hearing, MachineState, Role
from penstock.raft_meta.rules.changing import Changing
from penstock.raft_meta.rules.desk import (
    MAX_COMMAND_BYTES,
    Desk,
    Engine,
    EngineMessage,
    Message,
)
from penstock.raft_meta.rules.following import Following
from penstock.raft_meta.rules.founding import Founding
from penstock.raft_meta.rules.handing_over import HandingOver
from penstock.raft_meta.rules.levels import Levels
from penstock.raft_meta.rules.reading import Reading
from penstock.raft_meta.rules.replicating import Replicating
from penstock.raft_meta.rules.snapshotting import Receiving, Sending
from penstock.raft_meta.rules.terms import Terms
from penstock.raft_meta.rules.voting import Voting
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.voters import Address

_NOBODY: Final = -1
_ANSWERS: Final = frozenset({"vote", "pre_vote_reply", "append_entries_reply", "term_notice"})
"""Nobody but a voter or observer is asked anything, so that nobody else has an answer. Leaders and
candidates are heard whoever they are: they may be of a voter set that is not here yet."""

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
        configured: Collection[int],
        addresses: Mapping[int, Address],
        journal: LmdbJournal,
        timing: RaftTiming,
        rng: random.Random,
        load_snapshot: Callable[[], Snapshot | None],
        supported_level: int,
        machine: Callable[[], MachineState | None],
        why_unreadable: Callable[[bytes], str],
    ) -> None:
        self._desk = desk = Desk(
            node_id=node_id,
            journal=journal,
            timing=timing,
            load_snapshot=load_snapshot,
            supported_level=supported_level,
            machine=machine,
            why_unreadable=why_unreadable,
        )
        self.elections = Elections(node_id, timing, rng)
        self.bounced: list[int] = []  # The engine's request ids of commands that it forwarded.
        self.reading = Reading(desk)
        self.handing_over = HandingOver(desk)
        self._terms = Terms(desk, self.elections)
        self.founding = Founding(desk, configured, addresses)
        self._sending = Sending(desk)
        self.levels = Levels(desk)
        self.changing = Changing(desk, self.handing_over, self.levels, self._sending.forget)
        self._voting = Voting(desk, self._terms, self.elections, self.handing_over)
        following = Following(desk, self._terms)
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
            "invitation": self.founding.on_invitation,
            "invitation_reply": self.founding.on_reply,
        }

    def bind(self, engine: Engine, now_s: float) -> None:
        """Take charge of an engine. Nothing was sent or received before."""
        self._desk.engine = engine
        self._desk.now_s = now_s
        self.elections.restart_timer(now_s)
        self._take_voters()

    @property
    def dropped(self) -> int:
        """Messages that were malformed, or from nobody who may send them."""
        return self._desk.dropped

    @property
    def leaders_commit(self) -> int:
        """Up to where a leader said last that the log is decided; 0 before any was heard."""
        return self._desk.leaders_commit

    @property
    def is_alone(self) -> bool:
        """This node is the only voter."""
        return self._desk.is_voter and not self._desk.peers

    def directory_of(self, peer: int) -> bytes:
        """The directory that a voter or observer last answered this leader out of."""
        return self._desk.progress(peer).directory_id

    def first_needed(self, index: int) -> int:
        """Where the log is to begin that could begin at ``index``: some may need more of it."""
        return self._sending.first_needed(index)

    def hearing_of(self, peer: int) -> Hearing:
        """How this leader hears a voter or observer."""
        return self._desk.hearing(peer)

    def _take_voters(self) -> None:
        """Count with the newest voter set of the log, committed or not (thesis 4.1).

        Whatever may have put one into the log, or cut one off, is followed by a call of this
        before the engine counts anything again.
        """
        desk = self._desk
        if desk.journal.voters is desk.voters:
            return
        before = set(desk.peers)
        desk.take_voters(desk.journal.voters)
        desk.engine.set_voters(desk.peers, is_voter=desk.is_voter)
        self.elections.count_with(desk.majority)
        now = set(desk.peers)
        for gone in before - now:
            self._sending.forget(gone)
        if desk.leads:
            for peer in now - before - desk.observers:
                desk.progress(peer).begin_term(desk.now_s)
                desk.engine.connect(peer)
            desk.observers -= now
            desk.engine.hurry()
        else:
            self.elections.restart_timer(desk.now_s)

    # From the network.

    def receive(self, peer: int, message: Message, now_s: float) -> None:
        """Take a message of a peer whose identity is established. A malformed one is dropped."""
        self._desk.now_s = now_s
        kind = message.WhichOneof("message") or ""
        handler = self._handlers.get(kind)
        if (
            handler is None
            or peer == self._desk.node_id
            or peer < 0
            or not 0 <= message.term <= self._desk.engine.term() + MAX_TERM_STEP
            or (kind in _ANSWERS and not self._is_known(peer))
        ):
            self._desk.dropped += 1
            return
        handler(peer, message)
        self._take_voters()

    def _is_known(self, peer: int) -> bool:
        return peer in self._desk.peers or peer in self._desk.observers

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

    def stood_still(self, since_s: float, now_s: float) -> None:
        """From ``since_s`` until now this process heard nobody, whoever spoke."""
        self._desk.now_s = now_s
        lost_s = self.elections.stood_still(since_s, now_s)
        if lost_s > 0 and self._desk.leads:
            self._desk.engine.forgive_silence(lost_s)

    def resign(self, now_s: float, *, even_alone: bool) -> None:
        """Lead no more: enter the next term, as if a peer had. Nothing happens to a follower.

        The only voter goes on, since nobody else could lead; ``even_alone`` it ends the term all
        the same, and leads another one next.
        """
        desk = self._desk
        desk.now_s = now_s
        if desk.leads and (desk.peers or even_alone):
            peer = desk.peers[0] if desk.peers else _NOBODY
            self._terms.step_down(peer, desk.engine.term() + 1)

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
            # Followers are as patient with this leader (elections.Patience).
            self._desk.engine.count_silence_for(self.elections.least_timeout_s(now_s))
            self._sending.before_tick()
            self.handing_over.before_tick()
            self.changing.before_tick()
            return
        if self.founding.before_tick():
            self._take_voters()
            self.elections.stand_at_once(now_s)
        self._voting.before_tick()

    def after_tick(self) -> None:
        """The engine stood for election, or not, and appended what was proposed."""
        self._voting.after_tick()
        self.levels.after_tick()
        self._take_voters()

    def role_changed(self, role: Role) -> None:
        """The engine's role changed, just now and before it has acted in it."""
        desk = self._desk
        self._sending.stop()
        if self.handing_over.is_under_way:
            self.elections.patience.ended_openly()
        self.handing_over.stop()
        if role is Role.LEADER:
            self.elections.patience.leads(desk.engine.term(), desk.now_s)
        for peer in desk.peers:
            if role is Role.LEADER:
                desk.engine.connect(peer)
                desk.progress(peer).begin_term(desk.now_s)
            else:
                desk.engine.disconnect(peer)
        if role is not Role.LEADER:
            self.changing.stop()
            self.levels.stop()
        if role is Role.FOLLOWER:
            self.elections.restart_timer(desk.now_s)

    def next_deadline_s(self) -> float:
        """When ``before_tick`` has something to do, apart from the engine's heartbeats."""
        if self._desk.leads:
            return min(
                self._sending.deadline_s(),
                self.handing_over.deadline_s(),
                self.changing.deadline_s(),
            )
        return min(self._voting.deadline_s(), self.founding.deadline_s())

    def flush(self) -> list[tuple[int, Message]]:
        """Make everything durable, and only then say what may leave, in order.

        What was said in a term that ended since is void.
        """
        self._desk.journal.sync()
        self._replicating.close_batches()
        return self._desk.take_outbox()
