"""When to stand for election, and whom to hear: PreVote, stickiness and the election timer.

Raft 5.2 with the thesis' 9.6 (PreVote) and 6.4 (check quorum is the engine's leader fallback). The
engine has a timer of its own, which decides nothing: it may stand only when told to.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

_NEVER: Final = -math.inf
_TURN_SHARE: Final = 0.3
"""Of the least election timeout."""


@dataclass(frozen=True, slots=True)
class RaftTiming:
    """The three times of Raft, in seconds."""

    election_min_s: float
    election_max_s: float
    heartbeat_s: float


@dataclass(slots=True)
class _PreVoteRound:
    term: int
    granted: set[int] = field(default_factory=set)


class Elections:
    """One voter's election timer and pre-vote rounds. Times are those of a monotonic clock."""

    def __init__(self, node_id: int, timing: RaftTiming, rng: random.Random) -> None:
        self._node_id = node_id
        self._majority = 1
        self._timing = timing
        self._rng = rng
        self._round: _PreVoteRound | None = None
        self._leader_seen_s = _NEVER
        self.deadline_s = math.inf

    def count_with(self, majority: int) -> None:
        """So many pre-votes are a majority from now on; those of before are void."""
        self._majority = majority
        self._round = None

    def restart_timer(self, now_s: float) -> None:
        """Wait a whole timeout, drawn anew, before standing."""
        self._round = None
        self.deadline_s = now_s + self._rng.uniform(
            self._timing.election_min_s, self._timing.election_max_s
        )

    def stand_at_once(self, now_s: float) -> None:
        """There is no leader to wait for."""
        self.deadline_s = now_s

    def heard_leader(self, now_s: float) -> None:
        """The leader of the current term is alive."""
        self._leader_seen_s = now_s
        self.restart_timer(now_s)

    def lost_leader(self, now_s: float, turn: int) -> None:
        """The leader's connection broke: most likely its process died, so do not wait long.

        Only the timer is shortened; whoever still hears the leader refuses its pre-vote. All hear
        of it at once, and would split the vote: each waits for its ``turn``, counted from 0, which
        gives those before it the time of an election.
        """
        self._leader_seen_s = _NEVER
        share = self._rng.uniform(0.1, 0.2) + _TURN_SHARE * turn
        self.deadline_s = min(self.deadline_s, now_s + self._timing.election_min_s * share)

    def entered_term(self) -> None:
        """A newer term began: its leader, if it has one, was not heard yet."""
        self._leader_seen_s = _NEVER
        self._round = None

    def leader_is_alive(self, now_s: float) -> bool:
        """A leader was heard within the least timeout: candidates are not listened to."""
        return now_s < self._leader_seen_s + self._timing.election_min_s

    def is_due(self, now_s: float) -> bool:
        """The timer ran out."""
        return now_s >= self.deadline_s

    def begin_pre_vote(self, term: int, now_s: float) -> None:
        """Ask whether ``term`` could be won; ask again after a while when nobody answers."""
        self._round = _PreVoteRound(term, {self._node_id})
        self.deadline_s = now_s + self._timing.election_min_s * self._rng.uniform(0.5, 1.0)

    def count_pre_vote(self, term: int, voter: int) -> None:
        """``voter`` would grant its vote in ``term``."""
        if self._round is not None and self._round.term == term:
            self._round.granted.add(voter)

    def may_stand(self, term: int) -> bool:
        """A majority would vote for this node in ``term``."""
        return (
            self._round is not None
            and self._round.term == term
            and len(self._round.granted) >= self._majority
        )
