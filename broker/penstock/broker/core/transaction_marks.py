"""Marks on their way from a coordinator to the leaders of partitions.

Everything for one leader goes in one request, and what comes while it is under way goes with the
next. A leader that takes long, since one of its partitions cannot commit, is sent further requests
for its other partitions. What was not written is sent again until it is, to whoever leads by then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_values import Participant, Participants

MAX_UNDER_WAY: Final = 8
"""Requests to one leader at a time."""

_PATIENCE_MS: Final = 100
"""A leader that has not answered for so long is sent another request."""

_MAX_MARKS: Final = 500
"""In one request: who writes it, and who takes its answer, does nothing else meanwhile."""

_MAX_PARTITIONS: Final = 10_000
"""Of all marks of one request: where each is refused with a message the answer still is a small
part of what a message may be."""

_ROUTED_AT_ONCE: Final = 1_000
"""Marks. The commit of a group may have ten thousand sent with one record."""

_MIN_BACKOFF_MS: Final = 50
_MAX_BACKOFF_MS: Final = 2_000


class Leaders(Protocol):
    """Who leads what, as the broker's metadata have it now."""

    def exists(self, participant: Participant) -> bool:
        """Whether the topic is known. One that is not was deleted; see Ledger.settle."""
        ...

    def leader_of(self, participant: Participant) -> int | None:
        """The node id of the leader; None while there is none, or the partition is not known."""
        ...


class Owner(NamedTuple):
    """Whom marks belong to: a partition of ``__transaction_state`` in one of its leaderships."""

    partition: int
    leader_epoch: int


@dataclass(slots=True, eq=False)
class _Sending:
    """One mark with the partitions where it is not there yet."""

    owner: Owner
    mark: Mark
    left: set[Participant]
    backoff_ms: int = _MIN_BACKOFF_MS


class Piece(NamedTuple):
    """A part of a request: one mark, in partitions of one leader. ``sending`` is the queue's."""

    mark: Mark
    coordinator_epoch: int
    partitions: tuple[Participant, ...]
    sending: object


@dataclass(frozen=True, slots=True, eq=False)
class MarkRequest:
    """What is to be sent to a leader now, and answered by MarkQueue.answered."""

    node_id: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True, eq=False)
class _Lane:
    """What one leader is to write. ``busy`` are partitions that a request under way is about."""

    queued: dict[_Sending, set[Participant]] = field(default_factory=dict)
    # With the partitions of each that have another leader since: their marks go to that one.
    under_way: dict[MarkRequest, set[Participant]] = field(default_factory=dict)
    busy: set[Participant] = field(default_factory=set)
    sent_ms: int = 0
    rests_until_ms: int = 0
    backoff_ms: int = _MIN_BACKOFF_MS


class MarkQueue:
    """The marks of all transactions that this broker coordinates. Pure; not for several threads."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        self._sending: dict[tuple[Owner, str, int, int], _Sending] = {}
        self._added: deque[tuple[_Sending, Participants]] = deque()  # Not routed yet.
        self._may_route = _ROUTED_AT_ONCE  # So many more before the next requests.
        self._lanes: dict[int, _Lane] = {}
        self._homeless: dict[_Sending, set[Participant]] = {}  # Without a leader now.
        self._later: list[tuple[int, int, _Sending, Participant]] = []  # A heap, by time.
        self._later_count = 0

    @property
    def count(self) -> int:
        """How many marks are on their way, each in one or more partitions."""
        return len(self._sending)

    def add(self, owner: Owner, marks: Iterable[Mark]) -> None:
        """Have marks written; those that are on their way already are not begun anew."""
        for mark in marks:
            key = (owner, mark.transactional_id, mark.producer_id, mark.producer_epoch)
            sending = self._sending.get(key)
            if sending is None:
                sending = self._sending[key] = _Sending(owner, mark, set())
            added = mark.partitions - sending.left
            if added:
                sending.left |= added
                self._added.append((sending, added))
        self._route_added()

    def drop(self, owner: Owner) -> None:
        """Forget the marks of a partition that is not led any more, or is loaded anew."""
        for key, sending in list(self._sending.items()):
            if key[0] == owner:
                self._forget(sending)

    def rerouted(self) -> None:
        """Leaders or topics changed: go by them.

        So do marks that are under way to who led before, which may stand still. What that one
        answers later counts where it has written them.
        """
        waiting = [self._homeless, *(lane.queued for lane in self._lanes.values())]
        self._homeless = {}
        for lane in self._lanes.values():
            lane.queued = {}
        for queued in waiting:
            for sending, participants in queued.items():
                for participant in participants:
                    self._route(sending, participant)
        for node_id, lane in list(self._lanes.items()):
            for request, moved in lane.under_way.items():
                self._follow(node_id, request, moved)

    def _follow(self, node_id: int, request: MarkRequest, moved: set[Participant]) -> None:
        """Route anew what a request under way is about and its node does not lead any more."""
        partitions = {one for piece in request.pieces for one in piece.partitions} - moved
        moves = {one for one in partitions if self._leaders.leader_of(one) != node_id}
        moved |= moves
        for piece in request.pieces if moves else ():
            assert isinstance(piece.sending, _Sending)
            for participant in moves.intersection(piece.partitions):
                self._route(piece.sending, participant)

    def next_requests(self, now_ms: int) -> list[MarkRequest]:
        """What to send now. Each is to be answered by :meth:`answered`, whatever comes of it."""
        self._may_route = _ROUTED_AT_ONCE
        self._route_added()
        while self._later and self._later[0][0] <= now_ms:
            _, _, sending, participant = heapq.heappop(self._later)
            self._route(sending, participant)
        requests = []
        for node_id, lane in self._lanes.items():
            if self._sends_at(lane, now_ms) == now_ms:
                request = self._gather(node_id, lane)
                if request is not None:
                    lane.sent_ms = now_ms
                    requests.append(request)
        return requests

    def next_deadline_ms(self, now_ms: int) -> int | None:
        """When there may be more to send without anything having happened; None for never."""
        lanes = (self._sends_at(lane, now_ms) for lane in self._lanes.values())
        times = [at_ms for at_ms in lanes if at_ms is not None]
        if self._added:
            times.append(now_ms)
        if self._later:
            times.append(self._later[0][0])
        return min(times, default=None)

    def answered(
        self, request: MarkRequest, written: Sequence[Sequence[bool]] | None, now_ms: int
    ) -> dict[Owner, list[MarkDone]]:
        """A request was answered: by piece and partition, whether the transaction has ended there.

        That is where the mark is committed, or one that says the opposite. None where nobody knows:
        it is sent again, and what is there already costs nothing. Returns what is over, by owner.
        """
        lane = self._lanes[request.node_id]
        moved = lane.under_way.pop(request)
        done: dict[Owner, list[MarkDone]] = {}
        for index, piece in enumerate(request.pieces):
            lane.busy.difference_update(piece.partitions)
            sending = piece.sending
            assert isinstance(sending, _Sending)
            committed = []
            refused = []
            for at, participant in enumerate(piece.partitions):
                if written is not None and written[index][at]:
                    committed.append(participant)
                elif participant in moved:
                    continue  # Its mark is somewhere else.
                elif written is None:
                    self._route(sending, participant)
                else:
                    refused.append(participant)
            if refused:
                self._try_later(sending, refused, now_ms)
            if committed:
                self._done(sending, committed)
                mark = piece.mark
                done.setdefault(sending.owner, []).append(
                    MarkDone(
                        mark.transactional_id,
                        mark.producer_id,
                        mark.producer_epoch,
                        frozenset(committed),
                    )
                )
        if written is None:
            lane.rests_until_ms = now_ms + lane.backoff_ms
            lane.backoff_ms = min(2 * lane.backoff_ms, _MAX_BACKOFF_MS)
        else:
            lane.rests_until_ms, lane.backoff_ms = 0, _MIN_BACKOFF_MS
        return done

    # ------------------------------------------------------------------ where each is

    def _route_added(self) -> None:
        """Route what was added, or as much of it as may be before others have their turn."""
        count = min(len(self._added), self._may_route)
        self._may_route -= count
        for _ in range(count):
            sending, added = self._added.popleft()
            for participant in sorted(added):
                self._route(sending, participant)

    def _route(self, sending: _Sending, participant: Participant) -> None:
        """Put a partition's mark where its leader is; each is in one place, or in a request."""
        if participant not in sending.left:
            return  # Its owner has gone.
        if not self._leaders.exists(participant):
            # The shard hears of the topic's end for itself.
            self._done(sending, (participant,))
            return
        node_id = self._leaders.leader_of(participant)
        if node_id is None:
            self._homeless.setdefault(sending, set()).add(participant)
            return
        lane = self._lanes.get(node_id)
        if lane is None:
            lane = self._lanes[node_id] = _Lane()
        lane.queued.setdefault(sending, set()).add(participant)

    def _try_later(
        self, sending: _Sending, participants: Iterable[Participant], now_ms: int
    ) -> None:
        """Partitions that refused must not hold up the others of their leader."""
        at_ms = now_ms + sending.backoff_ms
        # Once for all that one answer refused: many of them are no reason to wait for longer.
        sending.backoff_ms = min(2 * sending.backoff_ms, _MAX_BACKOFF_MS)
        for participant in participants:
            self._later_count += 1
            heapq.heappush(self._later, (at_ms, self._later_count, sending, participant))

    def _done(self, sending: _Sending, participants: Iterable[Participant]) -> None:
        sending.left.difference_update(participants)
        if not sending.left:
            self._forget(sending)

    def _forget(self, sending: _Sending) -> None:
        sending.left.clear()
        mark = sending.mark
        key = (sending.owner, mark.transactional_id, mark.producer_id, mark.producer_epoch)
        if self._sending.get(key) is sending:
            del self._sending[key]

    # ------------------------------------------------------------------ requests

    def _sends_at(self, lane: _Lane, now_ms: int) -> int | None:
        """When the leader may be sent what is queued, from now on; None: not by itself."""
        if not lane.queued or len(lane.under_way) >= MAX_UNDER_WAY:
            return None
        at_ms = max(now_ms, lane.rests_until_ms)
        if not lane.under_way:
            return at_ms
        if not self._has_free(lane):
            return None
        return max(at_ms, lane.sent_ms + _PATIENCE_MS)

    def _has_free(self, lane: _Lane) -> bool:
        return any(not participants <= lane.busy for participants in lane.queued.values())

    def _gather(self, node_id: int, lane: _Lane) -> MarkRequest | None:
        """A request of what is queued, but for partitions that one under way is about."""
        pieces: list[Piece] = []
        left: dict[_Sending, set[Participant]] = {}
        room = _MAX_PARTITIONS
        for sending, participants in lane.queued.items():
            wanted = participants & sending.left
            has_room = room and len(pieces) < _MAX_MARKS
            free = tuple(sorted(wanted - lane.busy)[:room]) if has_room else ()
            room -= len(free)
            if free:
                pieces.append(Piece(sending.mark, sending.owner.leader_epoch, free, sending))
            if len(free) < len(wanted):
                left[sending] = wanted.difference(free)
        lane.queued = left
        if not pieces:
            return None
        for piece in pieces:
            lane.busy.update(piece.partitions)
        request = MarkRequest(node_id, tuple(pieces))
        lane.under_way[request] = set()
        return request
