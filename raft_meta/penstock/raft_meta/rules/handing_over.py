"""A leader that is to stop hands its office over (Raft thesis 3.10): nobody waits for a timeout.

It takes no proposals meanwhile, brings the most caught-up voter to its log's end and has that one
stand at once. Its candidacy is the one for which voters are not loyal to a leader that is alive:
only where the candidate says that this very leader, in the term before, has called it.
"""

from __future__ import annotations

import math
from typing import Final

from penstock.raft_meta.quorum import Role
from penstock.raft_meta.rules.desk import Desk, Message
from penstock.v1 import raft_pb2

_NOBODY: Final = -1


class HandingOver:
    """Both sides: the leader's, and the successor's. Safety rests on neither: votes are votes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._successor = _NOBODY
        self._refused: set[int] = set()  # Whose connections broke meanwhile.
        self._deadline_s = 0.0
        self._call_again_s = 0.0
        self._called_for_term = 0
        self._called_by = _NOBODY

    # The leader's side.

    @property
    def is_under_way(self) -> bool:
        """This leader takes no proposals: it waits for its successor."""
        return self._successor != _NOBODY

    def begin(self, now_s: float) -> None:
        """Hand this leader's office over within an election timeout.

        It is not under way afterwards when no voter answered lately: nobody could take over.
        """
        desk = self._desk
        desk.now_s = now_s
        if not self.is_under_way:
            self._refused.clear()
            self._deadline_s = now_s + desk.timing.election_min_s
            self._choose()

    def _choose(self) -> None:
        """Call on the most caught-up voter that answers."""
        desk, match = self._desk, self._desk.engine.match_index()
        able = [peer for peer in desk.peers if peer not in self._refused and desk.is_alive(peer)]
        self._successor = max(able, key=lambda peer: match.get(peer, 0), default=_NOBODY)
        self._call_again_s = desk.now_s
        desk.engine.hurry()

    def before_tick(self) -> None:
        """As the leader: call the successor once it has the whole log, and give up in time."""
        desk = self._desk
        if not self.is_under_way:
            return
        if desk.now_s >= self._deadline_s:
            self.stop()
        elif self._is_ready() and desk.now_s >= self._call_again_s:
            self._call_again_s = desk.now_s + desk.timing.heartbeat_s
            desk.queue(self._successor, Message(timeout_now=raft_pb2.TimeoutNow()))

    def _is_ready(self) -> bool:
        """The successor has the whole log."""
        match = self._desk.engine.match_index()
        return match.get(self._successor, 0) >= self._desk.journal.last_index

    def peer_lost(self, peer: int) -> None:
        """A connection broke: that voter is no successor."""
        if self.is_under_way:
            self._refused.add(peer)
            if peer == self._successor:
                self._choose()

    def stop(self) -> None:
        """It is over, one way or the other."""
        self._successor = _NOBODY

    def deadline_s(self) -> float:
        """When ``before_tick`` has something to do."""
        if not self.is_under_way:
            return math.inf
        # Until the successor has everything, its answers are what there is to wait for.
        return min(self._deadline_s, self._call_again_s) if self._is_ready() else self._deadline_s

    # The voters' side.

    def allows(self, candidate: int, message: Message) -> bool:
        """Whether this candidacy is the hand-over of the leader that is heard here."""
        desk, request = self._desk, message.request_vote
        if not request.HasField("handed_over_by") or message.term != desk.engine.term() + 1:
            return False
        if desk.leads:
            return self._successor == candidate
        return request.handed_over_by == desk.engine.leader_id()

    # The successor's side.

    def on_timeout_now(self, peer: int, message: Message) -> None:
        """The leader calls on this node. Anybody else, or in another term, does so in vain."""
        engine = self._desk.engine
        if (
            message.term == engine.term()
            and self._desk.is_voter
            and engine.role() is Role.FOLLOWER
            and engine.leader_id() == peer
        ):
            self._called_for_term = message.term + 1
            self._called_by = peer
        else:
            self._desk.dropped += 1

    def was_called(self, term: int) -> bool:
        """This node is to stand in ``term``, without asking first. Once."""
        if self._called_for_term != term or self._desk.engine.role() is not Role.FOLLOWER:
            return False
        return self._called_by == self._desk.engine.leader_id()

    def mark(self, request: raft_pb2.RequestVote, term: int) -> None:
        """Say in a request for a vote who called, if somebody did."""
        if self._called_for_term == term:
            request.handed_over_by = self._called_by
