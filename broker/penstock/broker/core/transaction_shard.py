"""The transactional ids, and groups of task attempts, of one partition of ``__transaction_state``.

======================== ================================================== ====================
state                    meaning                                            leaves by
======================== ================================================== ====================
(no record)              the id has no producer                             init -> EMPTY;
                                                                            begin -> ONGOING
EMPTY                    no transaction; the identity may be a producer's   first partition ->
                                                                            ONGOING; end, init:
                                                                            the next epoch;
                                                                            idle -> no record
ONGOING                  partitions are in the transaction (an attempt's    end, timeout, init,
                         is open from when it begins, without any)          a person: PREPARE_*
PREPARE_COMMIT,          decided, for ever, under the next epoch already;   all marks are there:
PREPARE_ABORT            marks are on their way                             as EMPTY; where
                                                                            partitions were
                                                                            kept, as ONGOING; an
                                                                            attempt, once its
                                                                            number is decided
                                                                            -> no record
ONGOING, and the         decided by the group's record, as above            all marks are there:
attempt's group is at                                                       no record
its number or beyond
======================== ================================================== ====================

That all marks are there is no state of the record: it is known, and is written down with what comes
next, or by ``note_after_ms``. Partitions that the producer's EndTransaction keeps are in the next
transaction from then on, which counts as open (docs/adr/0013): it has a deadline, and whatever ends
it sends marks to all of them, since their leaders may append its batches without asking. Its
timeout, or a person, does so before all marks of the transaction before are there: where they are
not, they go first. See docs/adr/0012-transactions.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.broker.core import transaction_decisions as decisions
from penstock.broker.core import transaction_describe
from penstock.broker.core.transaction_attempts import Attempts, attempt_of
from penstock.broker.core.transaction_events import (
    AbortTransaction,
    AddPartitions,
    BeginAttempt,
    Change,
    CommitGroup,
    DescribeTransaction,
    Effect,
    EndTransaction,
    Event,
    InitProducerId,
    KnownTopics,
    LastCommitted,
    ListTransactions,
    Loaded,
    MarkDone,
    MarksCommitted,
    ProducerIdGiven,
    ProducerIdRefused,
    Request,
    Tick,
    TopicsRemoved,
    TransactionSettings,
)
from penstock.broker.core.transaction_ids import TransactionalIds
from penstock.broker.core.transaction_ledger import (
    Entry,
    Group,
    Ledger,
    NoSpareProducerIdError,
)
from penstock.broker.core.transaction_values import Cause, Participant, State
from penstock.wire.errors import (
    ConcurrentTransactionsError,
    InvalidTxnStateError,
    PenstockError,
    TransactionalIdNotFoundError,
)
from penstock.wire.transactional_ids import check_commit_group

_HEAP_SLACK: Final = 64
"""So many deadlines that do not count any more are kept without a look at their share."""


class TransactionShard:
    """All transactions of one partition: replayed from its records, then changed by events.

    First every record of the partition goes through ``replay``, then ``Loaded`` is handled once,
    when all of them are committed, and then whatever happens. ``next_deadline_ms`` says when a Tick
    is due.
    """

    def __init__(self, topics: KnownTopics, settings: TransactionSettings) -> None:
        self._ledger: Final = Ledger(topics, settings)
        self._ids: Final = TransactionalIds(self._ledger)
        self._attempts: Final = Attempts(self._ledger)
        self._ready: deque[Request] = deque()
        self._without_id: deque[Request] = deque()  # They wait for a producer id.
        # Deadlines by entry or group, and a heap of them. One that moved on stays in the heap, and
        # is found to have done so when its time comes: a transaction costs no entry of its own.
        self._deadlines: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    @property
    def ledger(self) -> Ledger:
        """What is known; to be read only."""
        return self._ledger

    @property
    def next_deadline_ms(self) -> int | None:
        """When to handle a Tick, at the latest; None for never. There may be nothing to do then."""
        while self._heap and self._queued.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def replay(self, key: bytes, value: bytes | None) -> bool:
        """Take over one record; False for a kind that this version does not know.

        Raises CorruptRecordError when it is not what a coordinator writes.
        """
        return self._ledger.replay(key, value)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event at a time of the monotonic clock."""
        wall_ms = event.wall_ms if isinstance(event, Loaded | Tick) else None
        self._ledger.begin(now_ms, wall_ms)
        match event:
            case MarksCommitted():
                for done in event.marks:
                    self._mark_done(done)
            case Tick():
                self._tick()
            case Loaded():
                self._loaded()
            case TopicsRemoved():
                self._topics_removed(event)
            case ProducerIdGiven():
                self._ledger.add_spare_id(event.producer_id)
            case ProducerIdRefused():
                self._refuse_for_want_of_ids(event.error)
            case LastCommitted() | ListTransactions() | DescribeTransaction():
                transaction_describe.answer(self._ledger, event)
            case _:
                self._ready.append(event)
        self._go_on()
        return self._ledger.take_effects()

    def _loaded(self) -> None:
        for entry in self._ledger.entries():
            if entry.attempt is None:
                self._ledger.settle(entry)
        for group in self._ledger.groups():
            self._attempts.loaded(group)

    def revert(self, changes: Sequence[Change], now_ms: int) -> None:
        """Take back changes that could not be written: all of them, in the order of effects."""
        ledger = self._ledger
        ledger.begin(now_ms)
        for change in reversed(changes):
            ledger.undo(change)
        changed: dict[str, set[str]] = {}
        for change in changes:
            names = changed.setdefault(change.subject, set())
            if not change.is_group:
                names.add(change.name)
        for subject, names in changed.items():
            group = ledger.group(subject)
            group.retry_ms = now_ms + ledger.settings.retry_ms
            for name in {subject, *group.attempts, *names}:
                # Marks that were to go out behind these changes did not.
                entry = ledger.entry(name)
                ledger.unsettle(entry)
                entry.retry_ms = now_ms + ledger.settings.retry_ms
        self._schedule()

    # ------------------------------------------------------------------ requests

    def _go_on(self) -> None:
        """Handle what may be handled now, until nothing more may."""
        while True:
            self._release()
            if self._without_id and self._ledger.has_spare_id:
                self._take(self._without_id.popleft())
            elif self._ready:
                self._take(self._ready.popleft())
            else:
                return

    def _take(self, request: Request) -> None:
        try:
            self._dispatch(request)
        except NoSpareProducerIdError:
            self._without_id.append(request)
        except PenstockError as error:
            self._ledger.refuse(_subject(self._ledger, request), request, error)

    def _dispatch(self, event: Request) -> None:
        match event:
            case InitProducerId():
                self._ids.init(self._settled(event.request.transactional_id), event)
            case AddPartitions():
                entry = self._settled(event.request.transactional_id)
                self._of(entry).add_partitions(entry, event)
            case EndTransaction():
                entry = self._settled(event.request.transactional_id)
                self._of(entry).end(entry, event)
            case AbortTransaction():
                self._abort(self._settled(event.request.transactional_id), event)
            case BeginAttempt():
                attempt = attempt_of(event.request)
                self._attempts.begin(self._settled(attempt.transactional_id), event)
            case CommitGroup():
                check_commit_group(event.request.group)
                self._attempts.commit(event)

    def _settled(self, transactional_id: str) -> Entry:
        entry = self._ledger.entry(transactional_id)
        self._ledger.settle(entry)
        return entry

    def _of(self, entry: Entry) -> TransactionalIds | Attempts:
        return self._ids if entry.attempt is None else self._attempts

    def _abort(self, entry: Entry, event: AbortTransaction) -> None:
        name = entry.transactional_id
        value = self._ledger.present(entry)
        if value is None:
            raise TransactionalIdNotFoundError(f"there is no transactional id {name!r}")
        by_group = entry.attempt is not None and entry.outcome is not None
        if entry.is_ending and value.kept:
            decisions.give_up_kept(self._ledger, entry)
            self._ledger.respond(entry.subject, event.request_id, event.answer())
            return
        if value.state is not State.ONGOING or by_group:
            raise InvalidTxnStateError(
                f"no transaction of {name!r} is open, or it is decided; describe it to see which"
            )
        decisions.decide(self._ledger, entry, commit=False, cause=Cause.COORDINATOR)
        self._ledger.respond(entry.subject, event.request_id, event.answer())

    def _refuse_for_want_of_ids(self, error: PenstockError) -> None:
        while self._without_id:
            request = self._without_id.popleft()
            self._ledger.refuse(_subject(self._ledger, request), request, error)

    # ------------------------------------------------------------------ marks

    def _mark_done(self, done: MarkDone) -> None:
        if done.transactional_id not in self._ledger.ending:
            return
        entry = self._ledger.entry(done.transactional_id)
        under = done.producer_id, done.producer_epoch
        if entry.outcome is not None and entry.outcome[:2] == under:
            self._there(entry, done.partitions)
        elif entry.behind and self._ledger.ids[done.transactional_id].last_outcome[:2] == under:
            self._ledger.go_on_behind(entry, done.partitions)

    def _topics_removed(self, event: TopicsRemoved) -> None:
        for name in sorted(self._ledger.ending):
            entry = self._ledger.entry(name)
            gone = {one for one in entry.missing if one.topic_id in event.topic_ids}
            self._there(entry, gone)

    def _there(self, entry: Entry, partitions: Iterable[Participant]) -> None:
        partitions = frozenset(partitions)
        entry.missing -= partitions
        entry.behind -= partitions
        if not entry.missing:
            self._ledger.ending.discard(entry.transactional_id)
            entry.note_ms = self._ledger.now_ms + self._ledger.settings.note_after_ms

    # ------------------------------------------------------------------ what follows from it

    def _release(self) -> None:
        """Go on with what has ended: forget attempts, and have those handled who waited."""
        while touched := self._schedule():
            for one in touched.values():
                if isinstance(one, Entry):
                    if one.attempt is not None:
                        self._attempts.forget_if_done(one)
                    if one.is_ending:
                        continue
                elif not one.waiting or self._attempts.is_held_up(one):
                    continue
                self._ready.extend(one.waiting)
                one.waiting.clear()

    def _schedule(self) -> dict[str, Entry | Group]:
        """Note the deadlines of what was touched, and return it."""
        touched = self._ledger.take_touched()
        for key, one in touched.items():
            deadline_ms = self._deadline_of(one)
            if deadline_ms is None:
                self._deadlines.pop(key, None)
                continue
            self._deadlines[key] = deadline_ms
            queued_ms = self._queued.get(key)
            if queued_ms is None or deadline_ms < queued_ms:
                self._queue(key, deadline_ms)
        return touched

    def _queue(self, key: str, deadline_ms: int) -> None:
        self._queued[key] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, key))
        if len(self._heap) > 2 * len(self._queued) + _HEAP_SLACK:
            # Deadlines that came forward left their old places behind, which may be days away.
            self._heap = [(queued_ms, one) for one, queued_ms in self._queued.items()]
            heapq.heapify(self._heap)

    def _deadline_of(self, one: Entry | Group) -> int | None:
        deadlines = [request.give_up_ms for request in one.waiting]
        if isinstance(one, Entry):
            self._ledger.note_expiry(one)
            # What could not be done when it was due is not tried again all the time.
            due_ms = self._of(one).deadline_ms(one) if one.retry_ms is None else one.retry_ms
            if due_ms is not None:
                deadlines.append(due_ms)
        else:
            due_ms = self._attempts.group_deadline_ms(one)
            if due_ms is not None:
                deadlines.append(due_ms)
            elif deadlines and not self._attempts.is_held_up(one):
                # What they waited for was taken back.
                deadlines.append(self._ledger.now_ms + self._ledger.settings.retry_ms)
        return min(deadlines, default=None)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        now_ms = self._ledger.now_ms
        while (deadline_ms := self.next_deadline_ms) is not None and deadline_ms <= now_ms:
            _, key = heapq.heappop(self._heap)
            del self._queued[key]
            real_ms = self._deadlines.get(key)
            if real_ms is None:
                continue
            if real_ms > now_ms:
                self._queue(key, real_ms)
                continue
            del self._deadlines[key]
            if key.startswith("g"):
                group = self._ledger.group(key[1:])
                self._refuse_late(group, group.name)
                self._attempts.group_due(group)
            else:
                self._entry_due(self._settled(key[1:]))

    def _entry_due(self, entry: Entry) -> None:
        self._refuse_late(entry, entry.subject)
        entry.retry_ms = None
        try:
            self._of(entry).due(entry)
        except NoSpareProducerIdError:
            entry.retry_ms = self._ledger.now_ms + self._ledger.settings.retry_ms

    def _refuse_late(self, one: Entry | Group, subject: str) -> None:
        waiting, one.waiting = one.waiting, []
        for request in waiting:
            if request.give_up_ms > self._ledger.now_ms:
                one.waiting.append(request)
                continue
            error = ConcurrentTransactionsError(
                f"marks of the transaction before of {subject!r} are still on their way; ask again"
            )
            self._ledger.refuse(subject, request, error)

    # ------------------------------------------------------------------ for tests

    def validate(self) -> None:
        """Assert what must hold between events."""
        assert not self._ready
        assert len(self._heap) <= 2 * len(self._queued) + _HEAP_SLACK + 1
        assert not self._ledger.touched
        assert not (self._without_id and self._ledger.has_spare_id)
        self._ledger.validate()
        for entry in self._ledger.entries():
            key = f"i{entry.transactional_id}"
            deadline_ms = self._deadlines.get(key)
            assert deadline_ms is None or self._queued[key] <= deadline_ms
            if entry.waiting:
                assert entry.is_ending or entry.retry_ms is not None
                assert deadline_ms is not None
            value = self._ledger.present(entry)
            by_group = entry.attempt is not None and self._ledger.is_decided_by_group(entry.attempt)
            if value is not None and value.state is State.ONGOING and not by_group:
                assert deadline_ms is not None, "an open transaction without a deadline"
                may_take_ms = self._ledger.may_take_ms(value)
                assert entry.expires_ms <= self._ledger.now_ms + may_take_ms
            assert (entry.transactional_id in self._ledger.ending) == entry.is_ending


def _subject(ledger: Ledger, request: Request) -> str:
    """What an answer to the request is about."""
    match request:
        case BeginAttempt() | CommitGroup():
            return request.request.group
        case _:
            return ledger.entry(request.request.transactional_id).subject
