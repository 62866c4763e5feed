"""Rule 1, terms (Raft 5.1): a newer one is entered, and a sender of an older one is told."""

from __future__ import annotations

from penstock.raft_meta.elections import Elections
from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.rules.desk import Desk, Message
from penstock.v1 import raft_pb2


class Terms:
    """Every message carries its sender's term; the engine by itself looks at some of them only."""

    def __init__(self, desk: Desk, elections: Elections) -> None:
        self._desk = desk
        self._elections = elections

    def step_down(self, peer: int, term: int) -> None:
        """Enter a newer term as a follower, without a vote."""
        # The engine enters the term of a vote request, and refuses one with so old a log.
        self._desk.engine.deliver(
            peer, {"type": "request_vote", "term": term, "last_log_index": 0, "last_log_term": -1}
        )
        self._elections.entered_term()

    def is_current(self, peer: int, message: Message) -> bool:
        """Whether an answer is of this very term; a newer term of a voter's is entered.

        One of an observer's too, since it would follow nobody of an older term: it stood in vain
        when it was a voter, say. An operator wants it in, and it costs one election.
        """
        desk = self._desk
        term = desk.engine.term()
        if message.term > term and (peer in desk.observers or desk.counts(peer, message)):
            self.step_down(peer, message.term)
        return message.term == term

    def is_over(self, peer: int, message: Message) -> bool:
        """Whether the sender's term is over; it is told."""
        if message.term >= self._desk.engine.term():
            return False
        self._desk.queue(peer, Message(term_notice=raft_pb2.TermNotice()))
        return True

    def on_term_notice(self, peer: int, message: Message) -> None:
        """A peer knows a newer term."""
        self.is_current(peer, message)

    def accept_leader(self, peer: int, message: Message) -> bool:
        """Whether the sender leads a term that is not over; a newer term is entered."""
        desk = self._desk
        if self.is_over(peer, message):
            self._elections.patience.heard_late(message.term)
            return False
        leader = desk.engine.leader_id()
        if message.term == desk.engine.term() and leader not in (-1, peer):
            if not desk.counts(peer, message):
                desk.dropped += 1
                return False
            if leader == desk.node_id or leader in desk.peers:
                raise RaftSafetyError(
                    f"node {peer} claims to lead term {message.term}, which {leader} leads"
                )
            # Who claimed it first is no voter and has promised nothing: a voter's word goes before.
        self._elections.heard_leader(message.term, desk.now_s)
        return True
