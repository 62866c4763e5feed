"""What stands between the Raft engine and the network, and makes the engine obey Raft.

The engine (pysyncobj 0.3.17) is unsafe as it comes. It never sees a message that Raft would have
it ignore, and nothing that it says leaves before its disk agrees:

1. Terms: every message carries its sender's. A newer one in an answer makes the engine step down;
   an older sender is told.
2. AppendEntries by Figure 2 of the Raft paper (penstock.raft_meta.appending).
3. A refusal sends the leader back a whole term, and refusals of what was sent before that are void.
4. Answers count in their own term, up to the log's end; a voter votes once.
5. PreVote and stickiness (penstock.raft_meta.elections): the engine may stand only after a
   majority would vote for it, and candidates are ignored while a leader is alive.
6. Snapshots are ours, not the engine's: checksummed, and taken only by a log that lacks them.
7. Only no-ops and commands are entries; nothing else that the engine can say is passed on.
8. ReadIndex: a majority echoes a round that began after the read did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from penstock.raft_meta.appending import decide, decode_entries, encode_entries
from penstock.raft_meta.elections import Elections, RaftTiming
from penstock.raft_meta.journal import FIRST_INDEX, LmdbJournal, RaftSafetyError
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.transfer import (
    RESEND_AFTER_S,
    IncomingSnapshot,
    OutgoingSnapshot,
    is_well_formed,
)
from penstock.v1 import raft_pb2

MAX_COMMAND_BYTES: Final = 256 * 1024
"""The largest command. Well below the batch size at which the engine would start to pickle."""
MAX_BATCH_BYTES: Final = 1024 * 1024
"""One AppendEntries holds about so many bytes of commands."""

Message = raft_pb2.RaftExchangeRequest
EngineMessage = dict[str, Any]


class Engine(Protocol):
    """What the guard needs of the engine."""

    def term(self) -> int:
        """The current term."""
        ...

    def role(self) -> Role:
        """The current role."""
        ...

    def leader_id(self) -> int:
        """The leader of the current term, or -1."""
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
        self._node_id = node_id
        self._peers = tuple(sorted(peers))
        self._journal = journal
        self._timing = timing
        self._load_snapshot = load_snapshot
        self._engine: Engine = None  # type: ignore[assignment]  # bind() is called first.
        self._now_s = 0.0
        self.elections = Elections(node_id, self._peers, timing, rng)
        self.bounced: list[int] = []  # The engine's request ids of commands that it forwarded.
        self.dropped = 0  # Messages that were malformed or from nobody.
        self._outbox: list[tuple[int, Message]] = []
        self._open_appends: dict[int, tuple[Message, int]] = {}
        self._votes: set[int] = set()  # Who voted for this node in its candidacy.
        self._gate_open = False
        self._round = dict.fromkeys(self._peers, 0)  # Of the last message that is answered.
        self._echoed = dict.fromkeys(self._peers, 0)
        self._void_until = dict.fromkeys(self._peers, 0)  # Refusals of these rounds are void.
        self._last_hint = dict.fromkeys(self._peers, 0)
        self._outgoing: dict[int, OutgoingSnapshot] = {}
        self._incoming: IncomingSnapshot | None = None
        self._reads: list[tuple[int, int, dict[int, int]]] = []  # Token, commit index, rounds.
        self._handlers: dict[str, Callable[[int, Message], None]] = {
            "request_vote": self._on_request_vote,
            "vote": self._on_vote,
            "append_entries": self._on_append,
            "append_entries_reply": self._on_reply,
            "snapshot_chunk": self._on_chunk,
            "pre_vote": self._on_pre_vote,
            "pre_vote_reply": self._on_pre_vote_reply,
            "term_notice": self._on_term_notice,
        }

    def bind(self, engine: Engine, now_s: float) -> None:
        """Take charge of an engine. Nothing was sent or received before."""
        self._engine = engine
        self._now_s = now_s
        self.elections.restart_timer(now_s)

    # From the network.

    def receive(self, peer: int, message: Message, now_s: float) -> None:
        """Take a message of a peer whose identity is established. A malformed one is dropped."""
        self._now_s = now_s
        handler = self._handlers.get(message.WhichOneof("message") or "")
        if handler is None or peer not in self._round or message.term < 0:
            self.dropped += 1
            return
        handler(peer, message)

    def peer_lost(self, peer: int, now_s: float) -> None:
        """The connection from a peer broke."""
        if self._engine.role() is not Role.LEADER and self._engine.leader_id() == peer:
            self.elections.lost_leader(now_s)

    def resign(self) -> None:
        """Lead no more: enter the next term, as if a peer had. Nothing happens to a follower.

        The only voter goes on: nobody else could lead.
        """
        if self._engine.role() is Role.LEADER and self._peers:
            self._step_down(self._peers[0], self._engine.term() + 1)

    def _step_down(self, peer: int, term: int) -> None:
        # The engine enters the term of a vote request, and refuses one with so old a log.
        self._engine.deliver(
            peer, {"type": "request_vote", "term": term, "last_log_index": 0, "last_log_term": -1}
        )
        self.elections.entered_term()

    def _is_current(self, peer: int, message: Message) -> bool:
        """Whether an answer is of this very term; a newer term is entered."""
        term = self._engine.term()
        if message.term > term:
            self._step_down(peer, message.term)
        return message.term == term

    def _on_term_notice(self, peer: int, message: Message) -> None:
        self._is_current(peer, message)

    def _on_request_vote(self, peer: int, message: Message) -> None:
        request, term = message.request_vote, self._engine.term()
        if message.term < term:
            self._queue(peer, Message(term_notice=raft_pb2.TermNotice()))
            return
        if request.last_log_index < FIRST_INDEX or not 0 <= request.last_log_term <= message.term:
            self.dropped += 1
            return
        if self._hears_leader():
            return
        if message.term > term:
            self.elections.entered_term()
        self._engine.deliver(
            peer,
            {
                "type": "request_vote",
                "term": message.term,
                "last_log_index": request.last_log_index,
                "last_log_term": request.last_log_term,
            },
        )

    def _hears_leader(self) -> bool:
        return self._engine.role() is Role.LEADER or self.elections.leader_is_alive(self._now_s)

    def _on_vote(self, peer: int, message: Message) -> None:
        if not self._is_current(peer, message) or self._engine.role() is not Role.CANDIDATE:
            return
        if peer not in self._votes:
            self._votes.add(peer)
            self._engine.deliver(peer, {"type": "response_vote", "term": message.term})

    def _on_pre_vote(self, peer: int, message: Message) -> None:
        request = message.pre_vote
        ours = (self._journal.last_term, self._journal.last_index)
        granted = (
            request.candidate_term > self._engine.term()
            and (request.last_log_term, request.last_log_index) >= ours
            and not self._hears_leader()
        )
        reply = raft_pb2.PreVoteReply(candidate_term=request.candidate_term, granted=granted)
        self._queue(peer, Message(pre_vote_reply=reply))

    def _on_pre_vote_reply(self, peer: int, message: Message) -> None:
        if message.term > self._engine.term():
            self._step_down(peer, message.term)
        elif message.pre_vote_reply.granted:
            self.elections.count_pre_vote(message.pre_vote_reply.candidate_term, peer)

    def _accept_leader(self, peer: int, message: Message) -> bool:
        """Whether the sender leads a term that is not over; a newer term is entered."""
        term = self._engine.term()
        if message.term < term:
            self._queue(peer, Message(term_notice=raft_pb2.TermNotice()))
            return False
        if message.term == term and self._engine.leader_id() not in (-1, peer):
            raise RaftSafetyError(
                f"node {peer} claims to lead term {term}, which {self._engine.leader_id()} leads"
            )
        self.elections.heard_leader(self._now_s)
        return True

    def _follow(self, peer: int, message: Message, commit_index: int = 0) -> None:
        # Without entries and previous entry, the engine only notes term, leader and commit index.
        self._engine.deliver(
            peer, {"type": "append_entries", "term": message.term, "commit_index": commit_index}
        )

    def _on_append(self, peer: int, message: Message) -> None:
        append = message.append_entries
        entries = decode_entries(append, message.term, MAX_COMMAND_BYTES)
        if entries is None:
            self.dropped += 1
            return
        if not self._accept_leader(peer, message):
            return
        decision = decide(self._journal, append, entries)
        if decision.fresh:
            previous = decision.fresh[0].log_index - 1
            self._engine.deliver(
                peer,
                {
                    "type": "append_entries",
                    "term": message.term,
                    "commit_index": decision.commit_index,
                    "entries": decision.fresh,
                    "prevLogIdx": previous,
                    "prevLogTerm": self._journal.term_at(previous),
                },
            )
            if self._journal.last_index != decision.fresh[-1].log_index:
                raise RaftSafetyError(
                    f"the engine did not append up to {decision.fresh[-1].log_index}"
                )
        else:
            self._follow(peer, message, decision.commit_index)
        self._reply(
            peer, append.round, success=decision.success, next_index=decision.next_index
        )  # fmt: skip

    def _reply(
        self, peer: int, round_: int, *, success: bool, next_index: int, reset: bool = True
    ) -> None:
        reply = raft_pb2.AppendEntriesReply(
            success=success, next_index=next_index, round=round_, reset=reset and not success
        )
        self._queue(peer, Message(append_entries_reply=reply))

    def _on_reply(self, peer: int, message: Message) -> None:
        if not self._is_current(peer, message) or self._engine.role() is not Role.LEADER:
            return
        reply = message.append_entries_reply
        if reply.round > self._round[peer] or reply.next_index > self._journal.last_index + 1:
            self.dropped += 1
            return
        self._echoed[peer] = max(self._echoed[peer], reply.round)
        self._engine.saw(peer)
        if peer in self._outgoing:
            self._on_snapshot_reply(peer, reply)
        elif reply.success:
            self._engine.acknowledge(peer, reply.next_index - 1)
        elif reply.reset and reply.round > self._void_until[peer]:
            self._void_until[peer] = self._round[peer]
            hint = max(reply.next_index, FIRST_INDEX + 1)
            self._engine.send_from(peer, hint)
            if hint != self._last_hint[peer]:
                self._engine.hurry()
            self._last_hint[peer] = hint

    # Snapshots.

    def _on_snapshot_reply(self, peer: int, reply: raft_pb2.AppendEntriesReply) -> None:
        outgoing = self._outgoing[peer]
        if reply.success:
            if reply.next_index <= outgoing.snapshot.index:
                return  # It answers something sent before the snapshot.
            del self._outgoing[peer]
            self._engine.connect(peer)
            self._engine.acknowledge(peer, reply.next_index - 1)
            self._engine.hurry()
        elif reply.reset:
            if reply.round == outgoing.round:
                outgoing.restart()
                self._send_chunk(peer, outgoing)
        elif outgoing.acknowledge(reply.round):
            self._send_chunk(peer, outgoing)

    def _begin_transfer(self, peer: int) -> None:
        # Disconnecting is also what stops the engine: it would go on asking for ever.
        self._engine.disconnect(peer)
        snapshot = self._load_snapshot()
        if snapshot is None or snapshot.index < self._journal.first_index:
            raise RaftSafetyError(f"the log begins at {self._journal.first_index} with no snapshot")
        outgoing = OutgoingSnapshot(snapshot, snapshot.crc)
        self._outgoing[peer] = outgoing
        self._send_chunk(peer, outgoing)

    def _send_chunk(self, peer: int, outgoing: OutgoingSnapshot, *, probe: bool = False) -> None:
        chunk = outgoing.next_chunk(self._now_s, probe=probe)
        self._round[peer] += 1
        if not probe:
            outgoing.round = self._round[peer]
        chunk.round = self._round[peer]
        chunk.commit_index = self._journal.commit_index
        self._queue(peer, Message(snapshot_chunk=chunk))

    def _continue_transfers(self) -> None:
        for peer, outgoing in self._outgoing.items():
            if self._now_s >= outgoing.chunk_sent_s + RESEND_AFTER_S:
                self._send_chunk(peer, outgoing)
            elif self._now_s >= outgoing.sent_s + self._timing.heartbeat_s:
                self._send_chunk(peer, outgoing, probe=True)

    def _on_chunk(self, peer: int, message: Message) -> None:
        chunk = message.snapshot_chunk
        if not is_well_formed(chunk, message.term):
            self.dropped += 1
            return
        if not self._accept_leader(peer, message):
            return
        self._follow(peer, message)
        last = chunk.last_index
        if last <= self._journal.commit_index or self._journal.term_at(last) == chunk.last_term:
            self._incoming = None
            self._reply(peer, chunk.round, success=True, next_index=last + 1)
            return
        if not self._collect(peer, message.term, chunk):
            self._incoming = None
            self._reply(peer, chunk.round, success=False, next_index=0)
            return
        incoming = self._incoming
        if incoming is not None and len(incoming.data) == chunk.total_bytes:
            self._incoming = None
            snapshot = Snapshot(last, chunk.last_term, bytes(incoming.data))
            if snapshot.crc != chunk.crc32c:
                self._reply(peer, chunk.round, success=False, next_index=0)
                return
            self._engine.install(snapshot)
            self._reply(peer, chunk.round, success=True, next_index=last + 1)
            return
        self._reply(peer, chunk.round, success=False, next_index=0, reset=False)

    def _collect(self, peer: int, term: int, chunk: raft_pb2.SnapshotChunk) -> bool:
        identity = IncomingSnapshot.identify(peer, term, chunk)
        if self._incoming is None or self._incoming.identity != identity:
            if chunk.offset_bytes:
                return False
            self._incoming = IncomingSnapshot(identity)
        held = len(self._incoming.data)
        if chunk.offset_bytes == held:
            self._incoming.data += chunk.data
        return chunk.offset_bytes <= held

    # ReadIndex.

    def read(self, token: int) -> bool:
        """Begin a linearizable read; False when this node does not lead. See ``reads_ready``."""
        if self._engine.role() is not Role.LEADER:
            return False
        self._reads.append((token, self._journal.commit_index, dict(self._round)))
        self._engine.hurry()
        return True

    def reads_ready(self) -> list[tuple[int, int]]:
        """Reads whose leader was confirmed after they began: their token, and their index.

        A leader knows what is committed only once an entry of its own term is.
        """
        if not self._reads or self._engine.role() is not Role.LEADER:
            return []
        commit = self._journal.commit_index
        if self._journal.term_at(commit) != self._engine.term():
            return []
        ready: list[tuple[int, int]] = []
        waiting: list[tuple[int, int, dict[int, int]]] = []
        for token, index, rounds in self._reads:
            echoes = sum(self._echoed[peer] > rounds[peer] for peer in self._peers)
            if echoes + 1 > (len(self._peers) + 1) // 2:
                ready.append((token, commit if self._is_older_term(index) else index))
            else:
                waiting.append((token, index, rounds))
        self._reads = waiting
        return ready

    def _is_older_term(self, index: int) -> bool:
        return self._journal.term_at(index) != self._engine.term()

    def abandon_reads(self) -> list[int]:
        """The tokens of all reads under way, which end here."""
        tokens = [token for token, _, _ in self._reads]
        self._reads.clear()
        return tokens

    # From the engine.

    def send(self, peer: int, message: EngineMessage) -> None:
        """Queue what the engine says; what Raft does not know is dropped."""
        match message["type"]:
            case "append_entries" if "serialized" in message:
                self._begin_transfer(peer)
            case "append_entries":
                self._send_append(peer, message)
            case "request_vote":
                request = raft_pb2.RequestVote(
                    last_log_index=message["last_log_index"],
                    last_log_term=message["last_log_term"],
                )
                self._queue(peer, Message(request_vote=request))
            case "response_vote":
                self.elections.restart_timer(self._now_s)
                self._queue(peer, Message(vote=raft_pb2.Vote()))
            case "apply_command":
                # Leadership was lost within the tick: the caller is told, the command goes nowhere.
                self.bounced.append(message["request_id"])
            case "next_node_idx":
                pass  # The guard answers for itself, having seen the whole message.
            case other:
                raise RaftSafetyError(f"the engine wants to send {other!r}")

    def _send_append(self, peer: int, message: EngineMessage) -> None:
        if message["prevLogIdx"] is None:
            raise RaftSafetyError(f"the engine lost the entry before those for node {peer}")
        entries = message["entries"]
        size = sum(len(entry[0]) for entry in entries)
        if self._extend_append(peer, message, size):
            return
        self._round[peer] += 1
        append = raft_pb2.AppendEntries(
            previous_index=message["prevLogIdx"],
            previous_term=message["prevLogTerm"],
            commit_index=message["commit_index"],
            round=self._round[peer],
            entries=encode_entries(entries),
        )
        queued = Message(append_entries=append)
        self._queue(peer, queued)
        self._open_appends[peer] = (queued, size)

    def _extend_append(self, peer: int, message: EngineMessage, size: int) -> bool:
        """Put the entries into the message queued before, if they follow on it."""
        queued, queued_size = self._open_appends.get(peer, (None, 0))
        if queued is None or queued_size + size > MAX_BATCH_BYTES:
            return False
        append = queued.append_entries
        follows = append.previous_index + len(append.entries) == message["prevLogIdx"]
        if queued.term != self._engine.term() or not follows:
            return False
        append.entries.extend(encode_entries(message["entries"]))
        append.commit_index = max(append.commit_index, message["commit_index"])
        self._open_appends[peer] = (queued, queued_size + size)
        return True

    def _queue(self, peer: int, message: Message) -> None:
        message.term = self._engine.term()
        self._outbox.append((peer, message))

    # Around the engine's tick.

    def before_tick(self, now_s: float) -> None:
        """Ask for pre-votes when the timer ran out; open the gate when a majority agreed."""
        self._now_s = now_s
        role = self._engine.role()
        if role is Role.LEADER:
            self._continue_transfers()
            return
        if not self._peers:
            return  # The only voter needs no leave: the engine elects itself.
        next_term = self._engine.term() + 1
        if self.elections.may_stand(next_term):
            self._gate_open = True
            self._votes.clear()
            for peer in self._peers:
                self._engine.connect(peer)
            self._engine.stand()
            self.elections.restart_timer(now_s)
        elif self.elections.is_due(now_s):
            self.elections.begin_pre_vote(next_term, now_s)
            request = raft_pb2.PreVote(
                candidate_term=next_term,
                last_log_index=self._journal.last_index,
                last_log_term=self._journal.last_term,
            )
            for peer in self._peers:
                self._queue(peer, Message(pre_vote=request))

    def after_tick(self) -> None:
        """Close the gate, whether the engine went through or not: the next term needs another."""
        if self._gate_open and self._engine.role() is not Role.LEADER:
            for peer in self._peers:
                self._engine.disconnect(peer)
        self._gate_open = False

    def role_changed(self, role: Role) -> None:
        """The engine's role changed, just now and before it has acted in it."""
        self._outgoing.clear()
        for peer in self._peers:
            if role is Role.LEADER:
                self._engine.connect(peer)
                self._void_until[peer] = self._round[peer]
                self._last_hint[peer] = 0
                self._echoed[peer] = 0
            else:
                self._engine.disconnect(peer)
        if role is Role.FOLLOWER:
            self.elections.restart_timer(self._now_s)

    def next_deadline_s(self) -> float:
        """When ``before_tick`` has something to do, apart from the engine's heartbeats."""
        if self._engine.role() is not Role.LEADER:
            return self.elections.deadline_s
        return min(
            (
                min(out.sent_s + self._timing.heartbeat_s, out.chunk_sent_s + RESEND_AFTER_S)
                for out in self._outgoing.values()
            ),
            default=float("inf"),
        )

    def flush(self) -> list[tuple[int, Message]]:
        """Make everything durable, and only then say what may leave, in order.

        What was said in a term that ended since is void.
        """
        self._journal.sync()
        term = self._engine.term()
        leaving = [(peer, message) for peer, message in self._outbox if message.term == term]
        self._outbox.clear()
        self._open_appends.clear()
        return leaving
