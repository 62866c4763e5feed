"""Rule 6, snapshots (Raft 7): ours, not the engine's; checksummed, and taken only by a log that
lacks them.
"""

from __future__ import annotations

from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.rules.desk import Desk, Message
from penstock.raft_meta.rules.following import Following
from penstock.raft_meta.rules.terms import Terms
from penstock.raft_meta.snapshots import Snapshot
from penstock.raft_meta.transfer import (
    HELD_BYTES,
    HELD_S,
    RESEND_AFTER_S,
    IncomingSnapshot,
    OutgoingSnapshot,
    is_well_formed,
)
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2


class Sending:
    """The leader's side. A peer that gets a snapshot gets nothing else until it has it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._outgoing: dict[int, OutgoingSnapshot] = {}
        self._began_s: dict[int, float] = {}  # Of those who have it, and still need the log after.

    def is_under_way(self, peer: int) -> bool:
        """The peer is being sent a snapshot."""
        return peer in self._outgoing

    def begin(self, peer: int) -> None:
        """The peer needs entries that the log has no more."""
        desk = self._desk
        # Disconnecting is also what stops the engine: it would go on asking for ever.
        desk.engine.disconnect(peer)
        snapshot = desk.load_snapshot()
        if snapshot is None or snapshot.index < desk.journal.first_index:
            raise RaftSafetyError(f"the log begins at {desk.journal.first_index} with no snapshot")
        outgoing = OutgoingSnapshot(snapshot, snapshot.crc, desk.now_s)
        self._outgoing[peer] = outgoing
        self._began_s.pop(peer, None)
        self._send_chunk(peer, outgoing)

    def on_reply(self, peer: int, reply: raft_pb2.AppendEntriesReply) -> None:
        """The peer answers while it is being sent a snapshot."""
        outgoing = self._outgoing[peer]
        if reply.success:
            if reply.next_index <= outgoing.snapshot.index:
                return  # It answers something sent before the snapshot.
            del self._outgoing[peer]
            self._began_s[peer] = outgoing.began_s
            self._desk.engine.connect(peer)
            self._desk.engine.acknowledge(peer, reply.next_index - 1)
            self._desk.engine.hurry()
        elif reply.reset:
            if reply.round == outgoing.round:
                outgoing.restart()
                self._send_chunk(peer, outgoing)
        elif outgoing.acknowledge(reply.round):
            self._send_chunk(peer, outgoing)

    def _send_chunk(self, peer: int, outgoing: OutgoingSnapshot, *, probe: bool = False) -> None:
        desk = self._desk
        chunk = outgoing.next_chunk(desk.now_s, probe=probe)
        progress = desk.progress(peer)
        progress.round += 1
        if not probe:
            outgoing.round = progress.round
        chunk.round = progress.round
        chunk.commit_index = desk.journal.commit_index
        desk.queue(peer, Message(snapshot_chunk=chunk))

    def before_tick(self) -> None:
        """Send again what was not answered, and signs of life."""
        now_s = self._desk.now_s
        for peer, outgoing in self._outgoing.items():
            if now_s >= outgoing.chunk_sent_s + RESEND_AFTER_S:
                self._send_chunk(peer, outgoing)
            elif now_s >= outgoing.sent_s + self._desk.timing.heartbeat_s:
                self._send_chunk(peer, outgoing, probe=True)

    def forget(self, peer: int) -> None:
        """The peer gets nothing more."""
        self._outgoing.pop(peer, None)
        self._began_s.pop(peer, None)

    def first_needed(self, index: int) -> int:
        """Where the log is to begin, if it could begin at ``index``: there, or before it.

        Whoever is sent a snapshot needs the log from its end on, until it is no further behind
        than any other follower may be. Were that dropped under a steady load, it would be sent one
        snapshot after the other. It starts anew where its need is too old, or too large.
        """
        needs = [
            outgoing.snapshot.index
            for outgoing in self._outgoing.values()
            if self._may_hold(outgoing.began_s)
        ]
        match = self._desk.engine.match_index()
        for peer, began_s in list(self._began_s.items()):
            matched = match.get(peer, 0)
            if matched >= index or not self._may_hold(began_s):
                del self._began_s[peer]
            else:
                needs.append(matched)
        if not needs or min(needs) >= index:
            return index
        lowest = self._desk.journal.first_within(HELD_BYTES, index)
        return min((need for need in needs if lowest <= need < index), default=index)

    def acknowledged(self, peer: int, index: int) -> None:
        """A peer has the log up to ``index``: with all that is committed, it needs no more than
        any other follower.
        """
        if peer in self._began_s and index >= self._desk.journal.commit_index:
            del self._began_s[peer]

    def _may_hold(self, began_s: float) -> bool:
        return self._desk.now_s < began_s + HELD_S

    def stop(self) -> None:
        """A term ended, and with it everything that was under way."""
        self._outgoing.clear()
        self._began_s.clear()

    def deadline_s(self) -> float:
        """When ``before_tick`` has something to do."""
        heartbeat_s = self._desk.timing.heartbeat_s
        return min(
            (
                min(out.sent_s + heartbeat_s, out.chunk_sent_s + RESEND_AFTER_S)
                for out in self._outgoing.values()
            ),
            default=float("inf"),
        )


class Receiving:
    """The follower's side."""

    def __init__(self, desk: Desk, terms: Terms, following: Following) -> None:
        self._desk = desk
        self._terms = terms
        self._following = following
        self._incoming: IncomingSnapshot | None = None

    def on_chunk(self, peer: int, message: Message) -> None:
        """A part of the leader's snapshot."""
        chunk, following = message.snapshot_chunk, self._following
        if not is_well_formed(chunk, message.term):
            self._desk.dropped += 1
            return
        if not self._terms.accept_leader(peer, message):
            return
        following.hear_commit(peer, message, chunk.commit_index)
        following.follow(peer, message)
        journal, last = self._desk.journal, chunk.last_index
        if last <= journal.commit_index or journal.term_at(last) == chunk.last_term:
            self._incoming = None
            following.reply(peer, chunk.round, success=True, next_index=last + 1)
            return
        if not self._collect(peer, message.term, chunk):
            self._incoming = None
            following.reply(peer, chunk.round, success=False, next_index=0)
            return
        incoming = self._incoming
        if incoming is not None and len(incoming.data) == chunk.total_bytes:
            self._incoming = None
            voters = VoterSet.from_proto(chunk.voters) if chunk.HasField("voters") else None
            snapshot = Snapshot(last, chunk.last_term, bytes(incoming.data), voters)
            if snapshot.crc != chunk.crc32c:
                following.reply(peer, chunk.round, success=False, next_index=0)
                return
            if not self._may_install(peer, message, snapshot):
                self._desk.dropped += 1
                return
            self._desk.engine.install(snapshot)
            following.reply(peer, chunk.round, success=True, next_index=last + 1)
            return
        following.reply(peer, chunk.round, success=False, next_index=0, reset=False)

    def _may_install(self, peer: int, message: Message, snapshot: Snapshot) -> bool:
        """Whether what a whole snapshot says is to be taken over, and kept on the disk.

        A voter's is, and one that nobody can read ends this node. Anybody else has promised
        nothing, and would have a say in who stops: what it sends is read first.
        """
        desk = self._desk
        return desk.counts(peer, message) or not desk.why_unreadable(snapshot.data)

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
