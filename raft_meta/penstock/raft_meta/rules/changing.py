"""How the voter set changes (Raft 6; thesis 4.1 and 4.2): one voter at a time, by a log entry.

A set is in force once it is in the log. Two that follow each other differ by one voter, so their
majorities meet; and the next is begun only when

- the last one is committed, and
- this leader has committed an entry of its own term: otherwise it may not know of a set that an
  earlier leader has in force elsewhere (the flaw of the thesis' first edition).

A new voter is an observer first (4.2.1): it gets the log and does not count, until it is caught up
and has applied what there was when it came. It must know the feature level that the log leads to.
A set is not begun whose majority does not answer now: it would be in force, and stop everything. A
leader never removes itself; it hands over first, and its successor removes it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from penstock.raft_meta.rules.desk import Desk
from penstock.raft_meta.rules.handing_over import HandingOver
from penstock.raft_meta.rules.levels import NOT_KNOWN, Levels
from penstock.raft_meta.voters import (
    ANY_DIRECTORY,
    DIRECTORY_ID_BYTES,
    Address,
    Member,
    VoterSet,
)

MOST_CATCHING_UP_S: Final = 120.0
"""No change waits longer for an observer, whatever its client would: it holds up all others."""
NO_TOKEN: Final = -1
"""Of a change that nobody asked for."""
NEVER_ANSWERED: Final = -1
"""An observer's log is not known to be behind: it was never heard."""
MOST_VOTERS: Final = 7
"""More make every commit dearer and no cluster safer."""


class Refusal(enum.Enum):
    """Why a voter set is not changed."""

    NOT_LEADER = "not leader"
    HANDED_OVER = "handed over"
    IN_PROGRESS = "in progress"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    LAST = "last"
    TOO_MANY = "too many"
    NOT_CAUGHT_UP = "not caught up"
    NOT_ENOUGH_LIVE = "not enough live"
    TOO_OLD = "too old"


@dataclass(frozen=True, slots=True)
class AddVoter:
    """Make a node a voter, with the directory that it answers out of."""

    token: int
    node_id: int
    address: Address
    give_up_s: float


@dataclass(frozen=True, slots=True)
class RemoveVoter:
    """Make a node no voter."""

    token: int
    node_id: int


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """A change did not happen. ``behind`` is by how much an observer was behind, if that was it;
    ``level`` is the newest feature level that it knows where another one is ``needed``.
    """

    token: int
    reason: Refusal
    behind: int = NEVER_ANSWERED
    level: int = NOT_KNOWN
    needed: int = NOT_KNOWN


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A change that was asked for is in force already."""

    token: int


@dataclass(frozen=True, slots=True)
class Propose:
    """This voter set is to be appended now, in this very step."""

    token: int
    voters: VoterSet


Outcome = ChangeRefused | Unchanged | Propose


@dataclass(slots=True)
class _Catching:
    """An observer on its way. It is caught up when a round takes less than an election timeout,
    and its state machine has applied what there was at first: one that cannot is no voter.
    """

    change: AddVoter
    target: int  # The log's end when the round began.
    round_began_s: float
    to_apply: int  # The log's end when it was to be added.


class Changing:
    """The leader's side; followers take what the log says.

    A set that is proposed is appended in the very step in which it is, or never. ``forget`` ends
    what is being sent to a peer.
    """

    def __init__(
        self,
        desk: Desk,
        handing_over: HandingOver,
        levels: Levels,
        forget: Callable[[int], None],
    ) -> None:
        self._desk = desk
        self._levels = levels
        self._handing_over = handing_over
        self._forget = forget
        self._catching: _Catching | None = None
        self._founded_in_term = 0  # When the set of no log was proposed.
        self._outcomes: list[Outcome] = []

    def take_outcomes(self) -> list[Outcome]:
        """What is to be told and appended, once."""
        taken, self._outcomes = self._outcomes, []
        if not self._desk.leads:
            return [
                ChangeRefused(each.token, Refusal.NOT_LEADER) if isinstance(each, Propose) else each
                for each in taken
            ]
        return taken

    # Asked by an operator.

    def add(self, change: AddVoter, now_s: float) -> None:
        """Begin to make a node a voter; it ends with an outcome of its token."""
        desk, voters = self._desk, self._desk.voters
        desk.now_s = now_s
        if (refusal := self._not_now()) is not None:
            self._outcomes.append(ChangeRefused(change.token, refusal))
            return
        assert voters is not None
        member = voters.get(change.node_id)
        if member is not None:
            self._add_again(change, member)
        elif len(voters) >= MOST_VOTERS:
            self._outcomes.append(ChangeRefused(change.token, Refusal.TOO_MANY))
        else:
            give_up_s = min(change.give_up_s, desk.now_s + MOST_CATCHING_UP_S)
            change = replace(change, give_up_s=give_up_s)
            last = desk.journal.last_index
            self._catching = _Catching(change, last, desk.now_s, to_apply=last)
            desk.forget(change.node_id)
            desk.observers.add(change.node_id)
            desk.engine.observe(change.node_id)
            desk.engine.hurry()

    def _add_again(self, change: AddVoter, member: Member) -> None:
        """The node is a voter: this one, maybe at another address, or one that lost its disk.

        Which of them is not known of one that has not answered this leader.
        """
        found = self._directory_of(change.node_id)
        if found and not member.is_kept_in(found):
            self._outcomes.append(ChangeRefused(change.token, Refusal.DUPLICATE))
        elif not found and not self._is_of_before(member):
            self._outcomes.append(ChangeRefused(change.token, Refusal.NOT_CAUGHT_UP))
        elif member.address == change.address:
            self._outcomes.append(Unchanged(change.token))
        elif (voters := self._desk.voters) is not None:
            host, port = change.address
            moved = voters.with_member(replace(member, host=host, port=port))
            self._outcomes.append(Propose(change.token, moved))

    def _is_of_before(self, member: Member) -> bool:
        """It answers, and is of a version that has no directory ids."""
        return member.directory_id == ANY_DIRECTORY and self._desk.is_alive(member.node_id)

    def remove(self, change: RemoveVoter, now_s: float) -> None:
        """Make a node no voter; it ends with an outcome of its token.

        A node that is still to become one is not added any more.
        """
        self._desk.now_s = now_s
        if self._catching is not None and self._catching.change.node_id == change.node_id:
            self.stop_adding(self._catching.change.token)
            self._outcomes.append(Unchanged(change.token))
            return
        desk, voters = self._desk, self._desk.voters
        if (refusal := self._not_now()) is not None:
            self._outcomes.append(ChangeRefused(change.token, refusal))
            return
        assert voters is not None
        if change.node_id not in voters:
            self._outcomes.append(ChangeRefused(change.token, Refusal.UNKNOWN))
        elif len(voters) == 1:
            self._outcomes.append(ChangeRefused(change.token, Refusal.LAST))
        elif not self._would_work(VoterSet(voters.without(change.node_id))):
            self._outcomes.append(ChangeRefused(change.token, Refusal.NOT_ENOUGH_LIVE))
        elif change.node_id == desk.node_id:
            self._handing_over.begin(desk.now_s)
            handed = self._handing_over.is_under_way
            reason = Refusal.HANDED_OVER if handed else Refusal.NOT_ENOUGH_LIVE
            self._outcomes.append(ChangeRefused(change.token, reason))
        else:
            self._outcomes.append(Propose(change.token, VoterSet(voters.without(change.node_id))))

    def stop_adding(self, token: int) -> None:
        """Give up the change of this token, if its node is not caught up yet."""
        if self._catching is not None and self._catching.change.token == token:
            self._give_up(ChangeRefused(token, Refusal.NOT_CAUGHT_UP))

    def _not_now(self) -> Refusal | None:
        if not self._desk.leads or self._handing_over.is_under_way:
            return Refusal.NOT_LEADER
        proposed = any(isinstance(outcome, Propose) for outcome in self._outcomes)
        if proposed or self._catching is not None or not self._is_settled():
            return Refusal.IN_PROGRESS
        return None

    def _is_settled(self) -> bool:
        """The set in force is committed, and so is an entry of this leader's term."""
        journal = self._desk.journal
        return (
            0 < journal.voters_index <= journal.commit_index
            and journal.term_at(journal.commit_index) == self._desk.engine.term()
        )

    def _would_work(self, voters: VoterSet) -> bool:
        """A majority of these answers now."""
        desk = self._desk
        alive = sum(n == desk.node_id or desk.is_alive(n) for n in voters.node_ids)
        return alive >= voters.majority

    # By itself.

    def before_tick(self) -> None:
        """Log the founders' set, fill in directories, and bring an observer on its way."""
        desk = self._desk
        if desk.voters is None or self._handing_over.is_under_way:
            return
        if not desk.journal.voters_index:
            self._log_founders()
        elif self._catching is not None:
            self._catch_up(self._catching)
        elif any(member.directory_id == ANY_DIRECTORY for member in desk.voters):
            self._fill_in()

    def _log_founders(self) -> None:
        """The first leader's first entry after its no-op: before it there is no command.

        A set of journals of before, which nobody founded, waits until a majority can read it: a
        voter that is not upgraded yet says no directory, and takes an entry of this kind for none.
        """
        term, voters = self._desk.engine.term(), self._desk.voters
        if voters is None or self._founded_in_term == term or not self._can_be_read(voters):
            return
        self._founded_in_term = term
        self._outcomes.append(Propose(NO_TOKEN, voters))

    def _can_be_read(self, voters: VoterSet) -> bool:
        able = sum(
            bool(member.directory_id or self._directory_of(member.node_id)) for member in voters
        )
        return able >= voters.majority

    def _directory_of(self, node_id: int) -> bytes:
        """The one that a voter last answered out of; none of one of an older version."""
        desk = self._desk
        if node_id == desk.node_id:
            return desk.journal.directory_id
        return desk.progress(node_id).directory_id

    def _fill_in(self) -> None:
        """Note the directories of a set that was made when they had no ids, once all are known."""
        voters = self._desk.voters
        if voters is None or self._not_now() is not None:
            return
        known = {node_id: self._directory_of(node_id) for node_id in voters.node_ids}
        if all(len(directory) == DIRECTORY_ID_BYTES for directory in known.values()):
            members = tuple(replace(m, directory_id=known[m.node_id]) for m in voters)
            self._outcomes.append(Propose(NO_TOKEN, VoterSet(members)))

    def _catch_up(self, catching: _Catching) -> None:
        desk, change = self._desk, catching.change
        progress, needed = desk.progress(change.node_id), self._levels.needed()
        stored = desk.engine.match_index().get(change.node_id, 0)
        applied = stored if progress.applied_index is None else progress.applied_index
        if NOT_KNOWN < progress.level < needed:
            reason, level = Refusal.TOO_OLD, progress.level
            self._give_up(ChangeRefused(change.token, reason, level=level, needed=needed))
            return
        if desk.now_s >= change.give_up_s:
            behind = desk.journal.last_index - min(stored, applied)
            told = behind if math.isfinite(progress.heard_s) else NEVER_ANSWERED
            self._give_up(ChangeRefused(change.token, Refusal.NOT_CAUGHT_UP, told))
            return
        if stored < catching.target or not desk.is_alive(change.node_id):
            return
        if desk.now_s - catching.round_began_s > desk.timing.election_min_s:
            catching.target, catching.round_began_s = desk.journal.last_index, desk.now_s
        elif needed and applied >= catching.to_apply and self._is_settled():
            self._promote(change)

    def _promote(self, change: AddVoter) -> None:
        """The observer is caught up: have it count."""
        desk, voters = self._desk, self._desk.voters
        directory_id = desk.progress(change.node_id).directory_id
        if len(directory_id) != DIRECTORY_ID_BYTES or voters is None:
            return
        member = Member(change.node_id, *change.address, directory_id)
        changed = voters.with_member(member)
        if self._would_work(changed):
            self._catching = None  # It stays an observer until the set is in the log.
            self._outcomes.append(Propose(change.token, changed))
        else:
            self._give_up(ChangeRefused(change.token, Refusal.NOT_ENOUGH_LIVE))

    def _give_up(self, outcome: ChangeRefused) -> None:
        if self._catching is not None:
            peer = self._catching.change.node_id
            self._catching = None
            self._desk.observers.discard(peer)
            self._desk.engine.stop_observing(peer)
            self._forget(peer)
        self._outcomes.append(outcome)

    def stop(self) -> None:
        """This node leads no more: what was under way is another leader's business."""
        if self._catching is not None:
            self._give_up(ChangeRefused(self._catching.change.token, Refusal.NOT_LEADER))
        for peer in tuple(self._desk.observers):
            self._desk.engine.stop_observing(peer)
        self._desk.observers.clear()

    def addresses(self) -> dict[int, Address]:
        """Where those are who are sent to and are no voters."""
        if self._catching is None:
            return {}
        change = self._catching.change
        return {change.node_id: change.address}

    def deadline_s(self) -> float:
        """When ``before_tick`` has something to do; heartbeats make the rounds."""
        if self._catching is None or self._handing_over.is_under_way:
            return math.inf
        return self._catching.change.give_up_s
