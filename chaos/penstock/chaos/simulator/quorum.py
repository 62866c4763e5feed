"""The consensus of the controllers, idealised: one log, one leader a term, nothing lost.

The engine that does this for real has tests of its own. What is kept of it is what the state
machine and the active controller must bear: outcomes that are unknown to the proposer, entries of
a former leader that are committed after all, a former leader that does not know it yet, and
controllers that lag behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from penstock.chaos.simulator.network import Network
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.raft_meta.core.cluster_state import Applied

_WATCH_MS = 50
_COMMIT_MS = (1, 8)
_APPLY_MS = (0, 15)
_ELECTION_MS = (200, 500)


class Member(Protocol):
    """A controller, as the quorum sees it."""

    node_id: int
    alive: bool

    def apply(self, index: int, payload: bytes) -> Applied:
        """Apply the next entry."""
        ...

    @property
    def applied_index(self) -> int:
        """The last entry applied."""
        ...

    def lead(self, term: int) -> None:
        """The member leads the quorum, and has applied all that was committed before."""
        ...

    def lead_no_more(self, term: int) -> None:
        """The member learned that its term is over."""
        ...


OnApplied = Callable[[Applied | None], None]
"""Gets the outcome of a proposal, or None when it is not known to be in the log."""


@dataclass(slots=True)
class _Proposal:
    node_id: int
    payload: bytes
    on_applied: OnApplied
    arrived: bool = False  # At a majority, if the term lasts.


class Quorum:
    """The log and who leads. Members are the controllers' processes as they come and go."""

    def __init__(self, scheduler: Scheduler, network: Network, rng: Random, voters: int) -> None:
        self.entries: list[bytes] = []  # Entry i has index i + 1.
        self.term = 0
        self.leader: int | None = None
        self.members: dict[int, Member] = {}
        self._voters = range(1, voters + 1)
        self._scheduler = scheduler
        self._network = network
        self._rng = rng
        self._pending: list[_Proposal] = []
        self._waiting: dict[
            int, tuple[int, OnApplied]
        ] = {}  # By index: the proposer, and whom to tell.
        self._elected: Member | None = None  # The leader's process: another one leads nothing.
        self._unhealthy_since_ms: int | None = 0
        self._patience_ms = 0
        self._applying: set[int] = set()
        scheduler.after(0, self._watch)

    # Members.

    def join(self, member: Member) -> None:
        """A controller's process is up."""
        self.members[member.node_id] = member
        self._catch_up(member)

    def _alive(self, node_id: int) -> bool:
        member = self.members.get(node_id)
        return member is not None and member.alive

    def _has_majority(self, node_id: int) -> bool:
        near = sum(
            self._alive(other) and (other == node_id or self._network.connected(node_id, other))
            for other in self._voters
        )
        return self._alive(node_id) and near * 2 > len(self._voters)

    def _leads(self, node_id: int) -> bool:
        """The process that was elected lives, and reaches a majority."""
        return self.members[node_id] is self._elected and self._has_majority(node_id)

    # Leadership.

    def _watch(self) -> None:
        self._scheduler.after(_WATCH_MS, self._watch)
        now_ms = self._scheduler.now_ms
        if self.leader is not None and self._leads(self.leader):
            self._unhealthy_since_ms = None
            return
        if self._unhealthy_since_ms is None:
            self._unhealthy_since_ms = now_ms
            self._patience_ms = self._rng.randint(*_ELECTION_MS)
        if now_ms - self._unhealthy_since_ms >= self._patience_ms:
            self.elect()

    def elect(self) -> None:
        """Let another member lead, if any can; the one before if it is the only one."""
        able = [node for node in self._voters if self._has_majority(node)]
        others = [node for node in able if node != self.leader]
        if not able:
            return
        former, former_term = self.leader, self.term
        self.leader = self._rng.choice(others or able)
        self._elected = self.members[self.leader]
        self.term += self._rng.randint(1, 3)
        self._unhealthy_since_ms = None
        self._inherit()
        if former is not None and self._alive(former):
            member = self.members[former]
            reachable = self._network.connected(former, self.leader)
            delay_ms = self._rng.randint(1, 60) if reachable else self._rng.randint(500, 1200)
            if former == self.leader:
                member.lead_no_more(former_term)
            else:
                self._scheduler.after(delay_ms, lambda: member.lead_no_more(former_term))
        self._take_over(self.leader, self.term)

    def _inherit(self) -> None:
        """Some of what the former leader proposed is in the new leader's log, in its order."""
        pending, self._pending = self._pending, []
        kept = self._rng.randint(0, len(pending))
        for proposal in pending[:kept]:
            self._append(proposal)
        for proposal in pending[kept:]:
            delay_ms = self._rng.randint(0, 500)
            self._scheduler.after(delay_ms, partial(proposal.on_applied, None))

    def _take_over(self, node_id: int, term: int) -> None:
        member = self.members[node_id]
        if self.term != term or not member.alive:
            return
        if member.applied_index < len(self.entries):
            self._scheduler.after(2, lambda: self._take_over(node_id, term))
            return
        member.lead(term)

    # Proposals.

    def propose(self, node_id: int, term: int, payload: bytes, on_applied: OnApplied) -> None:
        """Propose an entry, as the leader of ``term``."""
        proposal = _Proposal(node_id, payload, on_applied)
        if term == self.term and node_id == self.leader:
            self._pending.append(proposal)
            self._scheduler.after(self._rng.randint(*_COMMIT_MS), lambda: self._commit(proposal))
        else:  # A former leader that does not know it: it will, and then gives up.
            self._scheduler.after(self._rng.randint(100, 600), lambda: on_applied(None))

    def _commit(self, proposal: _Proposal) -> None:
        if proposal not in self._pending:
            return
        if not self._leads(proposal.node_id):
            self._scheduler.after(_WATCH_MS, lambda: self._commit(proposal))
            return
        proposal.arrived = True
        while self._pending and self._pending[0].arrived:
            self._append(self._pending.pop(0))

    def _append(self, proposal: _Proposal) -> None:
        self.entries.append(proposal.payload)
        self._waiting[len(self.entries)] = (proposal.node_id, proposal.on_applied)
        for member in self.members.values():
            self._catch_up(member)

    def replay(self, payload: bytes) -> None:
        """Put an entry into the log that no rule of Raft would allow there: it must do nothing."""
        self._append(_Proposal(0, payload, lambda _: None))

    # Applying.

    def _catch_up(self, member: Member) -> None:
        if member.alive and id(member) not in self._applying:
            self._applying.add(id(member))
            delay_ms = self._rng.randint(*_APPLY_MS)
            self._scheduler.after(delay_ms, lambda: self._apply(member), node=member.node_id)

    def _apply(self, member: Member) -> None:
        self._applying.discard(id(member))
        if not member.alive:
            return
        if member.node_id != self.leader and not self._has_majority(member.node_id):
            self._applying.add(id(member))
            self._scheduler.after(_WATCH_MS, lambda: self._apply(member))
            return
        for _ in range(self._rng.randint(1, 20)):
            index = member.applied_index + 1
            if index > len(self.entries):
                return
            applied = member.apply(index, self.entries[index - 1])
            proposer, on_applied = self._waiting.get(index, (0, None))
            if proposer == member.node_id and on_applied is not None:
                del self._waiting[index]
                on_applied(applied)
        self._catch_up(member)
