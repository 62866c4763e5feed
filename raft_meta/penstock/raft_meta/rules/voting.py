"""Rules 4 and 5, elections (Raft 5.2, 5.4.1; thesis 9.6 and 4.2.3): who stands, who votes.

A voter votes once a term, which the engine and its journal see to; a vote counts once, and only
out of the directory that the voter set names, which they do not. The engine may stand only after a
majority would vote for it (PreVote), and candidates are ignored while a leader is alive
(stickiness). Any candidate is heard, one that this node's voter set lacks too: it may know a newer
one (thesis 4.2.2). When it comes to standing is decided in penstock.raft_meta.elections; the
exception for a planned hand-over in handing_over.
"""

from __future__ import annotations

import math

from penstock.raft_meta.elections import Elections
from penstock.raft_meta.journal import FIRST_INDEX
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.desk import Desk, EngineMessage, Message
from penstock.raft_meta.rules.handing_over import HandingOver
from penstock.raft_meta.rules.terms import Terms
from penstock.v1 import raft_pb2


class Voting:
    """Candidates' requests, votes, and the gate before the engine's candidacy."""

    def __init__(
        self, desk: Desk, terms: Terms, elections: Elections, handing_over: HandingOver
    ) -> None:
        self._desk = desk
        self._terms = terms
        self._elections = elections
        self._handing_over = handing_over
        self._votes: set[int] = set()  # Who voted for this node in its candidacy.
        self._gate_open = False

    # Of others' candidacies.

    def on_request_vote(self, peer: int, message: Message) -> None:
        """A candidate asks for a vote."""
        request, desk = message.request_vote, self._desk
        if self._terms.is_over(peer, message):
            return
        if request.last_log_index < FIRST_INDEX or not 0 <= request.last_log_term <= message.term:
            desk.dropped += 1
            return
        if self._hears_leader():
            if not self._handing_over.allows(peer, message):
                return
            self._elections.patience.ended_openly()
        if message.term > desk.engine.term():
            self._elections.entered_term()
        desk.engine.deliver(
            peer,
            {
                "type": "request_vote",
                "term": message.term,
                "last_log_index": request.last_log_index,
                "last_log_term": request.last_log_term,
            },
        )

    def _hears_leader(self) -> bool:
        return self._desk.leads or self._elections.leader_is_alive(self._desk.now_s)

    def on_pre_vote(self, peer: int, message: Message) -> None:
        """A would-be candidate asks whether it would get a vote. Nothing changes here."""
        request, desk = message.pre_vote, self._desk
        ours = (desk.journal.last_term, desk.journal.last_index)
        granted = (
            request.candidate_term > desk.engine.term()
            and (request.last_log_term, request.last_log_index) >= ours
            and not self._hears_leader()
        )
        reply = raft_pb2.PreVoteReply(candidate_term=request.candidate_term, granted=granted)
        desk.queue(peer, Message(pre_vote_reply=reply))

    def send_vote(self, peer: int) -> None:
        """The engine votes for a peer."""
        self._elections.restart_timer(self._desk.now_s)
        self._desk.queue(peer, Message(vote=raft_pb2.Vote()))

    # Of its own candidacy.

    def before_tick(self) -> None:
        """Ask for pre-votes when the timer ran out; open the gate when a majority agreed."""
        desk, elections = self._desk, self._elections
        if not desk.is_voter:
            return
        if not desk.peers:
            desk.engine.stand()  # The only voter needs nobody's leave.
            return
        next_term = desk.engine.term() + 1
        if elections.may_stand(next_term) or self._handing_over.was_called(next_term):
            self._open_gate(next_term)
        elif elections.is_due(desk.now_s):
            elections.begin_pre_vote(next_term, desk.now_s)
            request = raft_pb2.PreVote(
                candidate_term=next_term,
                last_log_index=desk.journal.last_index,
                last_log_term=desk.journal.last_term,
            )
            for peer in desk.peers:
                desk.queue(peer, Message(pre_vote=request))

    def _open_gate(self, term: int) -> None:
        desk = self._desk
        if self._handing_over.was_called(term):
            self._elections.patience.ended_openly()
        self._gate_open = True
        self._votes.clear()
        for peer in desk.peers:
            desk.engine.connect(peer)
        desk.engine.stand()
        self._elections.restart_timer(desk.now_s)

    def after_tick(self) -> None:
        """Close the gate, whether the engine went through or not: the next term needs another."""
        if self._gate_open and not self._desk.leads:
            for peer in self._desk.peers:
                self._desk.engine.disconnect(peer)
        self._gate_open = False

    def deadline_s(self) -> float:
        """When ``before_tick`` has something to do."""
        desk = self._desk
        if not desk.is_voter:
            return math.inf
        return self._elections.deadline_s if desk.peers else desk.now_s

    def on_pre_vote_reply(self, peer: int, message: Message) -> None:
        """A voter says whether it would vote."""
        if not self._desk.counts(peer, message):
            self._desk.dropped += 1
        elif message.term > self._desk.engine.term():
            self._terms.step_down(peer, message.term)
        elif message.pre_vote_reply.granted:
            self._elections.count_pre_vote(message.pre_vote_reply.candidate_term, peer)

    def send_request(self, peer: int, message: EngineMessage) -> None:
        """The engine stands, and asks a peer for its vote."""
        request = raft_pb2.RequestVote(
            last_log_index=message["last_log_index"], last_log_term=message["last_log_term"]
        )
        self._handing_over.mark(request, message["term"])
        self._desk.queue(peer, Message(request_vote=request))

    def on_vote(self, peer: int, message: Message) -> None:
        """A vote, which counts once."""
        desk = self._desk
        if not desk.counts(peer, message):
            desk.dropped += 1
            return
        if not self._terms.is_current(peer, message) or desk.engine.role() is not Role.CANDIDATE:
            return
        if peer not in self._votes:
            self._votes.add(peer)
            desk.engine.deliver(peer, {"type": "response_vote", "term": message.term})
