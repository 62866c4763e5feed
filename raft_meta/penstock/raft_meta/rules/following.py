"""Rules 2 and 7, what a follower makes of AppendEntries (Raft 5.3, Figure 2).

The decision itself is in penstock.raft_meta.appending. Only no-ops, commands and voter
sets are entries.
"""

from __future__ import annotations

from penstock.raft_meta.appending import decide, decode_entries
from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.rules.desk import MAX_COMMAND_BYTES, Desk, Message
from penstock.raft_meta.rules.terms import Terms
from penstock.v1 import raft_pb2


class Following:
    """The engine gets only what is new, and the guard answers, having seen the whole message."""

    def __init__(self, desk: Desk, terms: Terms) -> None:
        self._desk = desk
        self._terms = terms

    def on_append(self, peer: int, message: Message) -> None:
        """The leader replicates, or shows that it lives."""
        append, desk = message.append_entries, self._desk
        entries = decode_entries(append, message.term, MAX_COMMAND_BYTES)
        if entries is None:
            desk.dropped += 1
            return
        if not self._terms.accept_leader(peer, message):
            return
        self.hear_commit(peer, message, append.commit_index)
        try:
            decision = decide(desk.journal, append, entries)
        except RaftSafetyError:
            # What a voter says against what is committed proves a broken promise. Anybody else has
            # promised nothing, and would have a say in who stops.
            if desk.counts(peer, message):
                raise
            desk.dropped += 1
            return
        if decision.fresh:
            previous = decision.fresh[0].log_index - 1
            desk.engine.deliver(
                peer,
                {
                    "type": "append_entries",
                    "term": message.term,
                    "commit_index": decision.commit_index,
                    "entries": decision.fresh,
                    "prevLogIdx": previous,
                    "prevLogTerm": desk.journal.term_at(previous),
                },
            )
            if desk.journal.last_index != decision.fresh[-1].log_index:
                raise RaftSafetyError(
                    f"the engine did not append up to {decision.fresh[-1].log_index}"
                )
        else:
            self.follow(peer, message, decision.commit_index)
        self.reply(
            peer, append.round, success=decision.success, next_index=decision.next_index
        )  # fmt: skip

    def hear_commit(self, peer: int, message: Message, commit_index: int) -> None:
        """Note how far the leader is. The newest word holds, so that a wrong one does not stay."""
        if self._desk.counts(peer, message):
            self._desk.leaders_commit = commit_index

    def follow(self, peer: int, message: Message, commit_index: int = 0) -> None:
        """Have the engine note term, leader and commit index, and append nothing."""
        # It appends nothing where a message has neither entries nor a previous entry.
        self._desk.engine.deliver(
            peer, {"type": "append_entries", "term": message.term, "commit_index": commit_index}
        )

    def reply(
        self, peer: int, round_: int, *, success: bool, next_index: int, reset: bool = True
    ) -> None:
        """Answer the leader."""
        reply = raft_pb2.AppendEntriesReply(
            success=success,
            next_index=next_index,
            round=round_,
            reset=reset and not success,
            supported_metadata_version=self._desk.supported_level,
        )
        machine = self._desk.machine()
        if machine is not None:
            reply.applied_index = machine.applied_index
        self._desk.queue(peer, Message(append_entries_reply=reply))
