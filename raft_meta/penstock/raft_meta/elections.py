"""When to stand for election, and whom to hear: PreVote, stickiness and the election timer.

Raft 5.2 with the thesis' 9.6 (PreVote) and 6.4 (check quorum is the engine's leader fallback). The
engine has a timer of its own, which decides nothing: it may stand only when told to.

Raft is live only where an election timeout is much longer than a broadcast takes (5.6; thesis 9.3
measures how leaders are lost below that). On a host that is too busy for the configured one a new
leader is given up for dead before it has settled, and the next one too. So ``Patience`` lengthens
the timeouts where leaders are given up that turn out to live. Time in which a process stood still
is no silence of its leader's: it is not counted (``stood_still``).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

_NEVER: Final = -math.inf
_NO_TERM: Final = -1
_TURN_SHARE: Final = 0.3
"""Of the least election timeout."""
_ROUNDS_IN_VAIN: Final = 2
"""An election that succeeds needs one, and another one where messages are lost."""


@dataclass(frozen=True, slots=True)
class RaftTiming:
    """The three times of Raft, in seconds."""

    election_min_s: float
    election_max_s: float
    heartbeat_s: float


LONGEST_PATIENCE: Final = 2.0
"""Timeouts grow up to so many times the configured ones. It bounds how long a cluster waits for its
next leader, and for how long a leader that is cut off goes on to answer brokers.
"""
SETTLED_SHARE: Final = 30.0
"""A leadership has settled after so many greatest election timeouts: half a minute, by default. It
must be long beside the longest timeout, or what was just learnt is forgotten by the next election.
"""


class Patience:
    """By how much the election timeouts are lengthened: a power of two, at least 1.

    It doubles when a leadership that ended in silence, before it had settled, was given up wrongly,
    or may have been: its leader was heard again in its own term (``heard_late``), or this process
    was itself held up under it (``held_up``). It halves with each such time in which a leader goes
    on and this process is not held up.

    A leader that stays silent, one whose connection broke, and one that handed over were not lost
    for want of time, and change nothing: the next loss is noticed as fast as ever, however soon it
    comes. Every voter keeps its own, and none needs to agree with another: timeouts may be anything
    (Raft 5.2).
    """

    def __init__(self, settled_s: float) -> None:
        self._settled_s = settled_s
        self._factor = 1.0
        self._term = _NO_TERM  # Of the leader that was heard last.
        self._led_since_s = _NEVER
        self._calm_since_s = _NEVER  # A new leader, or the end of the last spell.
        self._ended_openly = True
        self._was_wrong = False  # There is a sign that its silence, if it ends so, was none.
        self._given_up_term = _NO_TERM  # Of the leader before, while there is no such sign of it.

    def leads(self, term: int, now_s: float) -> None:
        """The leader of ``term`` is alive: another one, or this node, or the one of before."""
        if term != self._term:
            is_short = now_s - self._led_since_s < self._settled_s
            is_given_up = is_short and not self._ended_openly
            before, was_wrong = self._term, self._was_wrong
            self._factor = self.factor(now_s)
            self._term, self._led_since_s, self._was_wrong = term, now_s, False
            self._calm_since_s = now_s
            self._given_up_term = before if is_given_up and not was_wrong else _NO_TERM
            if is_given_up and was_wrong:
                self._grow()
        self._ended_openly = False

    def heard_late(self, term: int) -> None:
        """The leader of ``term`` said something after that term was over: it was alive."""
        if term == self._term:
            self._was_wrong = True
        elif term == self._given_up_term:
            self._given_up_term = _NO_TERM
            self._grow()

    def held_up(self, now_s: float) -> None:
        """This process stood still until now: it may take its own silence for the leader's."""
        self._was_wrong = True
        self._factor, self._calm_since_s = self.factor(now_s), now_s

    def _grow(self) -> None:
        self._factor = min(self._factor * 2, LONGEST_PATIENCE)

    def ended_openly(self) -> None:
        """The leader is gone, or goes, and said so: by its connection, or by handing over."""
        self._ended_openly = True

    def factor(self, now_s: float) -> float:
        """What the timeouts are multiplied with now."""
        if self._factor <= 1.0:
            return 1.0
        periods = math.floor((now_s - self._calm_since_s) / self._settled_s)
        return max(self._factor * 0.5 ** min(periods, 64), 1.0)


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
        self._rounds = 0  # Of pre-votes, since a leader was heard.
        self._leader_seen_s = _NEVER
        self._accounted_s = _NEVER  # Until then, time in which this process stood still is known.
        self.patience = Patience(SETTLED_SHARE * timing.election_max_s)
        self._timeout_s = math.inf  # As it was drawn last.
        self.deadline_s = math.inf

    def count_with(self, majority: int) -> None:
        """So many pre-votes are a majority from now on; those of before are void."""
        self._majority = majority
        self._round = None

    def restart_timer(self, now_s: float) -> None:
        """Wait a whole timeout, drawn anew, before standing."""
        self._round = None
        drawn_s = self._rng.uniform(self._timing.election_min_s, self._timing.election_max_s)
        self._timeout_s = drawn_s * self.patience.factor(now_s)
        self.deadline_s = now_s + self._timeout_s

    def stand_at_once(self, now_s: float) -> None:
        """There is no leader to wait for."""
        self.deadline_s = now_s

    def heard_leader(self, term: int, now_s: float) -> None:
        """The leader of the current term is alive."""
        self.patience.leads(term, now_s)
        self._leader_seen_s = now_s
        self._rounds = 0
        self.restart_timer(now_s)

    def stood_still(self, since_s: float, now_s: float) -> float:
        """This process heard and did nothing from ``since_s`` until now: how long that is new.

        What its leader sent meanwhile waits in its sockets, so that the silence is its own. The
        timer runs on where it stood, and not out before a heartbeat's time has passed in which
        what waits is heard. Silence is thus counted in time awake: a voter that is often held up
        stands later, and not never. Spells that overlap count once, and no spell lets it wait for
        more than a whole timeout from now, as where it has heard its leader since.
        """
        lost_s = now_s - max(since_s, self._accounted_s)
        if lost_s <= 0:
            return 0.0
        self._accounted_s = now_s
        self._round = None  # Whoever granted it may have heard more since.
        self.patience.held_up(now_s)
        self._leader_seen_s = min(self._leader_seen_s + lost_s, now_s)
        deadline_s = min(self.deadline_s + lost_s, now_s + self._timeout_s)
        self.deadline_s = max(deadline_s, now_s + self._timing.heartbeat_s)
        return lost_s

    def lost_leader(self, now_s: float, turn: int) -> None:
        """The leader's connection broke: most likely its process died, so do not wait long.

        Only the timer is shortened; whoever still hears the leader refuses its pre-vote. All hear
        of it at once, and would split the vote: each waits for its ``turn``, counted from 0, which
        gives those before it the time of an election.
        """
        self._leader_seen_s = _NEVER
        self.patience.ended_openly()
        share = self._rng.uniform(0.1, 0.2) + _TURN_SHARE * turn
        self.deadline_s = min(self.deadline_s, now_s + self._timing.election_min_s * share)

    def entered_term(self) -> None:
        """A newer term began: its leader, if it has one, was not heard yet."""
        self._leader_seen_s = _NEVER
        self._round = None

    def leader_is_alive(self, now_s: float) -> bool:
        """A leader was heard within the least timeout: candidates are not listened to."""
        return now_s < self._leader_seen_s + self.least_timeout_s(now_s)

    def misses_leader(self) -> bool:
        """Nobody was heard to lead for so long that rounds of pre-votes came to nothing.

        For what others are told alone: who stands, and who is voted for, does not depend on it.
        """
        return self._rounds > _ROUNDS_IN_VAIN

    def least_timeout_s(self, now_s: float) -> float:
        """The least election timeout, as long as patience makes it now."""
        return self._timing.election_min_s * self.patience.factor(now_s)

    def is_due(self, now_s: float) -> bool:
        """The timer ran out."""
        return now_s >= self.deadline_s

    def begin_pre_vote(self, term: int, now_s: float) -> None:
        """Ask whether ``term`` could be won; ask again after a while when nobody answers."""
        self._round = _PreVoteRound(term, {self._node_id})
        self._rounds += 1
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
