"""Rules 3 and 4, the leader's side (Raft 5.3): what is sent, and which answers count.

A refusal sends the leader back a whole term, and refusals of what was sent before that are void.
Answers count in their own term, up to the log's end.
"""

from __future__ import annotations

from penstock.raft_meta.appending import encode_entries
from penstock.raft_meta.journal import FIRST_INDEX, RaftSafetyError
from penstock.raft_meta.quorum import OLDEST_LEVEL
from penstock.raft_meta.rules.desk import MAX_BATCH_BYTES, Desk, EngineMessage, Message
from penstock.raft_meta.rules.snapshotting import Sending
from penstock.raft_meta.rules.terms import Terms
from penstock.v1 import raft_pb2


class Replicating:
    """Many small appends of one tick leave as one message, and each has a round of its own."""

    def __init__(self, desk: Desk, terms: Terms, sending: Sending) -> None:
        self._desk = desk
        self._terms = terms
        self._sending = sending
        self._open_appends: dict[int, tuple[Message, int]] = {}

    def on_reply(self, peer: int, message: Message) -> None:
        """A follower acknowledges or refuses."""
        desk = self._desk
        if not self._terms.is_current(peer, message) or not desk.leads:
            return
        if peer not in desk.observers and not desk.counts(peer, message):
            self._hear_of_directory(peer, message)
            desk.dropped += 1
            return
        reply, progress = message.append_entries_reply, desk.progress(peer)
        # Of an earlier round it is an answer of whoever had the number before, maybe.
        known = progress.began < reply.round <= progress.round
        if not known or reply.next_index > desk.journal.last_index + 1:
            desk.dropped += 1
            return
        if peer in desk.observers and progress.directory_id not in (b"", message.directory_id):
            self._observe_anew(peer, message)
            return
        progress.echoed = max(progress.echoed, reply.round)
        progress.heard_s = desk.now_s
        progress.directory_id = message.directory_id
        progress.level = max(reply.supported_metadata_version, OLDEST_LEVEL)
        progress.applied_index = reply.applied_index if reply.HasField("applied_index") else None
        desk.engine.saw(peer)
        if self._sending.is_under_way(peer):
            self._sending.on_reply(peer, reply)
        elif reply.success:
            desk.engine.acknowledge(peer, reply.next_index - 1)
            self._sending.acknowledged(peer, reply.next_index - 1)
        elif reply.reset and reply.round > progress.void_until:
            progress.void_until = progress.round
            hint = max(reply.next_index, FIRST_INDEX + 1)
            desk.engine.send_from(peer, hint)
            if hint != progress.last_hint:
                desk.engine.hurry()
            progress.last_hint = hint

    def _observe_anew(self, peer: int, message: Message) -> None:
        """An observer answers out of another directory: what the one before held is not in it."""
        desk, progress = self._desk, self._desk.progress(peer)
        desk.dropped += 1
        progress.begin_term(desk.now_s)
        progress.directory_id = message.directory_id
        self._sending.forget(peer)
        desk.engine.stop_observing(peer)
        desk.engine.observe(peer)
        desk.engine.hurry()

    def _hear_of_directory(self, peer: int, message: Message) -> None:
        """A voter answers out of another directory: it is another voter, and does not count."""
        if peer in self._desk.peers:
            self._desk.progress(peer).directory_id = message.directory_id

    def send(self, peer: int, message: EngineMessage) -> None:
        """Queue the engine's entries for a peer."""
        if message["prevLogIdx"] is None:
            raise RaftSafetyError(f"the engine lost the entry before those for node {peer}")
        entries = message["entries"]
        size = sum(len(entry[0]) for entry in entries)
        if self._extend(peer, message, size):
            return
        progress = self._desk.progress(peer)
        progress.round += 1
        append = raft_pb2.AppendEntries(
            previous_index=message["prevLogIdx"],
            previous_term=message["prevLogTerm"],
            commit_index=message["commit_index"],
            round=progress.round,
            entries=encode_entries(entries),
        )
        queued = Message(append_entries=append)
        self._desk.queue(peer, queued)
        self._open_appends[peer] = (queued, size)

    def _extend(self, peer: int, message: EngineMessage, size: int) -> bool:
        """Put the entries into the message queued before, if they follow on it."""
        queued, queued_size = self._open_appends.get(peer, (None, 0))
        if queued is None or queued_size + size > MAX_BATCH_BYTES:
            return False
        append = queued.append_entries
        follows = append.previous_index + len(append.entries) == message["prevLogIdx"]
        if queued.term != self._desk.engine.term() or not follows:
            return False
        append.entries.extend(encode_entries(message["entries"]))
        append.commit_index = max(append.commit_index, message["commit_index"])
        self._open_appends[peer] = (queued, queued_size + size)
        return True

    def close_batches(self) -> None:
        """What is queued leaves now: nothing may be put into it any more."""
        self._open_appends.clear()
