"""Rules of transactions left out, in the cores or in the model of what stands around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from penstock.broker.core import transaction_decisions
from penstock.broker.core.producer_stage import ProducerStage, staged_markers
from penstock.broker.core.transaction_attempts import Attempts
from penstock.broker.core.transaction_events import (
    CommitGroup,
    EndTransaction,
    InitProducerId,
    Respond,
    SendMarks,
)
from penstock.broker.core.transaction_ids import TransactionalIds
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.transaction_values import (
    NOBODY,
    Cause,
    GroupCommit,
    Identity,
    State,
    Transaction,
)
from penstock.broker.core.transactions import EndedTransaction, Marker, OpenTransactions
from penstock.broker.core.verification import Append, Arrived, Ask, Verification
from penstock.broker.core.write_queue import TakenBack, Write, WriteQueue
from penstock.chaos.simulator import memory_log, serving
from penstock.chaos.simulator.known_bug import Bug
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.partition import SimulatedPartition, Waiter
from penstock.chaos.simulator.transactions import coordinating, marking
from penstock.chaos.simulator.transactions.coordinating import HostedTransactions
from penstock.chaos.simulator.transactions.group_bugs import GROUP_BUGS
from penstock.chaos.simulator.transactions.kept_bugs import KEPT_BUGS
from penstock.v1 import coordination_pb2
from penstock.wire.errors import ErrorCode, InvalidTxnStateError, PenstockError
from penstock.wire.ids import LeaderEpoch
from penstock.wire.transactional_ids import Attempt

TRANSACTIONS: Final[dict[str, object]] = {"transactions": True}


def _no_assertions(_: Ledger) -> None:
    """What the core asserts would be seen before what it leads to."""


# Deciding.

_decide = transaction_decisions.decide
_put = Ledger.put


def _decide_without_a_new_epoch(ledger: Ledger, entry: Entry, **how: Any) -> None:
    def put(entry: Entry, value: Any) -> None:
        _put(ledger, entry, replace(value, epoch=value.epoch - 1))

    ledger.put = put  # type: ignore[method-assign]
    try:
        _decide(ledger, entry, **how)
    finally:
        del ledger.put


def _marks_of_the_same_epoch(stage: ProducerStage, markers: Any, **where: Any) -> Any:
    """As brokers wrote them before KIP-890, which left out older ones alone."""
    offset = where.pop("base_offset")
    found: list[Any] = []
    for marker in markers:
        known = stage.entry(marker.producer_id)
        if known is not None and known.producer_epoch > marker.producer_epoch:
            continue
        newer = marker._replace(producer_epoch=marker.producer_epoch + 1)
        found += staged_markers(stage, [newer], base_offset=offset + len(found), **where)
    return found


_settle = Ledger.settle


def _settle_and_forget_a_mark(self: Ledger, entry: Entry) -> None:
    before = len(self._effects)
    _settle(self, entry)
    for place in range(before, len(self._effects)):
        effect = self._effects[place]
        if isinstance(effect, SendMarks) and len(entry.missing) > 1:
            forgotten = min(entry.missing)
            entry.missing.discard(forgotten)
            left = tuple(
                replace(mark, partitions=mark.partitions - {forgotten}) for mark in effect.marks
            )
            self._effects[place] = SendMarks(effect.subject, left)


def _marks_do_not_wait(effect: Respond | SendMarks) -> bool:
    return isinstance(effect, Respond)


def _leaders_do_not_wait(effect: Respond | SendMarks) -> bool:
    return not (
        isinstance(effect, Respond)
        and isinstance(effect.response, coordination_pb2.AddPartitionsResult)
    )


def _producers_do_not_wait(effect: Respond | SendMarks) -> bool:
    return isinstance(effect, SendMarks)


def _every_end_is_taken(_: str, __: object, **___: bool) -> PenstockError | None:
    return None


def _whoever_decided(_: str, value: Any, *, commit: bool) -> PenstockError | None:
    return None if value.last_committed == commit else InvalidTxnStateError("ended otherwise")


_end = TransactionalIds.end


def _end_whatever_is_open(self: TransactionalIds, entry: Entry, event: EndTransaction) -> None:
    value = self._ledger.ids.get(entry.transactional_id)
    if value is not None and value.state is State.ONGOING:
        event.request.producer_id, event.request.producer_epoch = value.identity
    _end(self, entry, event)


def _init_as_the_end_says(self: TransactionalIds, entry: Entry, event: InitProducerId) -> None:
    """As the core, but for the epoch that follows that of the marks."""
    value = self._ledger.ids.get(entry.transactional_id)
    if value is None or not value.is_decided or value.instance_id == event.request.instance_id:
        _init(self, entry, event)
        return
    if entry.is_ending:
        entry.waiting.append(event)
        return
    resting = replace(
        transaction_decisions.resting(self._ledger, value, value.identity),
        timeout_ms=event.request.transaction_timeout_ms,
        instance_id=event.request.instance_id,
        last=NOBODY,
        last_committed=False,
        last_cause=Cause.NOBODY,
    )
    self._ledger.put(entry, resting)
    self._ledger.settle(entry)
    self._respond(event, entry, Identity(resting.producer_id, resting.epoch))


_init = TransactionalIds.init


def _nobody_had_it_before(_: Transaction) -> tuple[bytes, ...]:
    return ()


def _nothing_is_gone(_: object, __: object) -> bool:
    return False


def _topics_stay(_: TransactionShard, __: object) -> None:
    """As if the shard did not hear of it."""


# Groups.

_commit_group = Attempts.commit


def _commit_in_two_records(self: Attempts, event: CommitGroup) -> None:
    ledger, request = self._ledger, event.request
    last = ledger.commits.get(request.group)
    is_new = last is None or request.epoch_number > last.epoch_number
    before = len(ledger._effects)
    _commit_group(self, event)
    decided = ledger.commits.get(request.group)
    if is_new and decided is not None and decided != last and len(request.winners) > 1:
        half = GroupCommit(decided.epoch_number, decided.winners[:1], decided.committed_ms)
        written = ledger._effects[before:]
        del ledger._effects[before:]
        ledger._set_group(request.group, last)
        ledger.put_group(request.group, half)
        ledger._set_group(request.group, decided)
        ledger._effects += written


def _commit_whoever_has_the_numbers(self: Attempts, event: CommitGroup) -> None:
    request = event.request
    for winner in request.winners:
        named = Attempt(request.group, request.epoch_number, winner.task, winner.attempt)
        value = self._ledger.ids.get(named.transactional_id)
        if value is not None:
            winner.producer_id = value.producer_id
    _commit_group(self, event)


_next = WriteQueue.next


def _one_record_at_a_time(self: WriteQueue[Any]) -> Write[Any] | None:
    write = _next(self)
    while write is not None and len(write.entries) > 1:
        self.refused(too_large=True)  # It is cut in two.
        write = _next(self)
    return write


def _forget_what_has_ended(self: Attempts, entry: Entry) -> None:
    if entry.is_done:
        self._forget(entry)


def _never_held_up(_: Attempts, __: object) -> bool:
    return False


# Writing.


def _held_for_what_is_in_flight(self: WriteQueue[Any], subject: str | None, item: Any) -> bool:
    write = self.in_flight
    if write is None or subject not in {None, *(entry.subject for entry in write.entries)}:
        return False
    gathered, self._gathered = self._gathered, deque()
    last, self._last = self._last, {}
    self._index(write)
    is_held = _hold(self, subject, item)
    self._gathered, self._last = gathered, last
    return is_held


_hold = WriteQueue.hold
_refused = WriteQueue.refused


def _what_waits_stays(self: WriteQueue[Any], **why: Any) -> TakenBack[Any] | None:
    gathered, last, count = list(self._gathered), dict(self._last), self.pending_count
    taken = _refused(self, **why)
    if taken is None or why.get("too_large"):
        return taken
    held = [waiting.item for write in gathered for waiting in write.held]
    behind = sum(write.count for write in gathered)
    self._gathered.extend(gathered)
    self._last, self.pending_count = last, count
    return taken._replace(
        changes=taken.changes[: len(taken.changes) - behind],
        others=[item for item in taken.others if item not in held],
    )


def _only_the_record_itself(self: WriteQueue[Any], write: Write[Any]) -> TakenBack[Any]:
    held = [waiting.item for waiting in write.held]
    return TakenBack(write.number, write.changes, held, [], for_itself=True)


# Leading.


def _append_at_once(_: Verification[Any], event: Arrived[Any], __: int) -> list[Any]:
    return [Append(event.item, verified=True)]


def _append_and_ask(self: Verification[Any], event: Arrived[Any], _: int) -> list[Any]:
    effects: list[Any] = [Append(event.item, verified=True)]
    if not event.is_open:
        effects.append(Ask(event.question, next(self._attempts)))
    return effects


def _every_mark_is_written(stage: ProducerStage, markers: Any, **where: Any) -> Any:
    offset = where.pop("base_offset")
    found: list[Any] = []
    for marker in markers:
        known = stage.entry(marker.producer_id)
        newest = -1 if known is None else known.producer_epoch
        newer = marker._replace(producer_epoch=max(marker.producer_epoch, newest + 1))
        found += staged_markers(stage, [newer], base_offset=offset + len(found), **where)
    return found


def _done_when_appended(
    self: SimulatedPartition, marker: Marker, on_done: Waiter, *, on_marked: Callable[[], object]
) -> None:
    epoch = LeaderEpoch(self.replica.leader_epoch)
    info = self.log.append_markers([marker], epoch, now_ms=self.broker.now_ms)
    if info.base_offset >= 0:
        self._has_grown()
    on_marked()
    on_done(None if self.is_leader else ErrorCode.NOT_LEADER)


# Coordinating.


def _served_at_once(_: MemoryLog, high_watermark: int) -> int:
    return high_watermark


def _taken_back(self: HostedTransactions, _: int) -> None:
    self._nothing_written(ErrorCode.COORDINATOR_NOT_AVAILABLE)


# Reading.


def _stable_at_the_end(self: OpenTransactions, high_watermark: int) -> int:
    return min(next(iter(self._first_offsets.values()), high_watermark), high_watermark)


def _nobody_is_aborted(_: MemoryLog, __: int, ___: int) -> tuple[tuple[int, int], ...]:
    return ()


_commit_stage = ProducerStage.commit


def _no_end_is_told(self: ProducerStage) -> list[EndedTransaction]:
    """A broker's own log hears of what is aborted by this."""
    _commit_stage(self)
    return []


def _all_that_is_committed(_: MemoryLog, high_watermark: int) -> int:
    return high_watermark


TRANSACTION_BUGS: Final[dict[str, Bug]] = {
    "epochs-stay-at-decisions": Bug(
        "a decision leaves the epoch as it is, and the next transaction has the same (KIP-890)",
        transaction_decisions,
        "decide",
        _decide_without_a_new_epoch,
        given=TRANSACTIONS,
        also=(
            (memory_log, "staged_markers", _marks_of_the_same_epoch),
            (Ledger, "validate", _no_assertions),
        ),
    ),
    "marks-are-forgotten": Bug(
        "one of the partitions of a transaction gets no mark",
        Ledger,
        "settle",
        _settle_and_forget_a_mark,
        given=TRANSACTIONS,
    ),
    "marks-wait-for-what-is-gone": Bug(
        "a transaction does not end that has a partition whose topic is deleted",
        TransactionShard,
        "_topics_removed",
        _topics_stay,
        ("topic",),
        given=TRANSACTIONS | {"timeout_ms": 3000},
        also=((marking, "needs_none", _nothing_is_gone),),
    ),
    "marks-before-the-decision": Bug(
        "marks are sent before the record that decides is committed",
        coordinating,
        "waits",
        _marks_do_not_wait,
        given=TRANSACTIONS,
    ),
    "partitions-are-answered-for-too-early": Bug(
        "a leader is told that a partition is in a transaction before that is committed",
        coordinating,
        "waits",
        _leaders_do_not_wait,
        given=TRANSACTIONS,
    ),
    "answers-before-the-decision": Bug(
        "clients are told of what is not committed",
        coordinating,
        "waits",
        _producers_do_not_wait,
        given=TRANSACTIONS,
    ),
    "the-last-outcome-is-not-looked-at": Bug(
        "who asks again for an end is told yes, whatever the end was",
        transaction_decisions,
        "why_not_ended",
        _every_end_is_taken,
        given=TRANSACTIONS,
    ),
    "the-cause-is-not-looked-at": Bug(
        "who asks for an end that came to pass is told yes, whoever decided it",
        transaction_decisions,
        "why_not_ended",
        _whoever_decided,
        given=TRANSACTIONS,
    ),
    "ends-are-for-whatever-is-open": Bug(
        "an end that comes late ends the transaction that is open by then",
        TransactionalIds,
        "end",
        _end_whatever_is_open,
        given=TRANSACTIONS,
    ),
    "identities-of-ends-are-given-away": Bug(
        "who takes an id over gets the identity that the one before is told at its end",
        TransactionalIds,
        "init",
        _init_as_the_end_says,
        given=TRANSACTIONS,
    ),
    "one-instance-is-remembered": Bug(
        "a copy of a request takes an id back from the instance that came between",
        Transaction,
        "superseding",
        _nobody_had_it_before,
        ("hold up a client",),
        given=TRANSACTIONS | {"left_over": 0.5},
    ),
    "group-commits-in-two-records": Bug(
        "the winners of a group's commit are decided in two records",
        Attempts,
        "commit",
        _commit_in_two_records,
        given=TRANSACTIONS,
        also=((WriteQueue, "next", _one_record_at_a_time),),
    ),
    "answers-wait-for-what-is-in-flight": Bug(
        "what tells of a record that is gathered behind a write is told before that is committed",
        WriteQueue,
        "hold",
        _held_for_what_is_in_flight,
        given=TRANSACTIONS,
    ),
    "what-waits-behind-a-refused-write-stays": Bug(
        "what was made of a record that is not written is written",
        WriteQueue,
        "refused",
        _what_waits_stays,
        given=TRANSACTIONS | {"min_isr": 3},
    ),
    "what-follows-a-record-too-large-stays": Bug(
        "as above, where one record alone is refused",
        WriteQueue,
        "_take_back_subject",
        _only_the_record_itself,
        given=TRANSACTIONS | {"too_large": 0.1},
    ),
    "winners-are-named-by-their-numbers": Bug(
        "a commit takes the work of an attempt that began again under the numbers of its winner",
        Attempts,
        "commit",
        _commit_whoever_has_the_numbers,
        given=TRANSACTIONS,
    ),
    "group-commits-overtake-attempts": Bug(
        "a group commits although attempts of its last commit have not ended",
        Attempts,
        "is_held_up",
        _never_held_up,
        ("kill coordinator", "kill leader", "slow network"),
        given=TRANSACTIONS | {"timeout_ms": 3000},
    ),
    "ended-attempts-are-forgotten": Bug(
        "an attempt that has ended is opened again by a copy of the request that began it",
        Attempts,
        "forget_if_done",
        _forget_what_has_ended,
        ("hold up a client",),
        given=TRANSACTIONS | {"left_over": 0.9, "timeout_ms": 300},
    ),
    "batches-are-not-verified": Bug(
        "a leader appends what no coordinator knows of",
        Verification,
        "_arrived",
        _append_at_once,
        given=TRANSACTIONS,
    ),
    "batches-before-the-answer": Bug(
        "a leader asks the coordinator, and appends before it is answered",
        Verification,
        "_arrived",
        _append_and_ask,
        given=TRANSACTIONS,
    ),
    "marks-end-what-began-after-them": Bug(
        "a mark that comes again ends the transaction that is open by then",
        memory_log,
        "staged_markers",
        _every_mark_is_written,
        given=TRANSACTIONS,
    ),
    "marks-are-done-when-appended": Bug(
        "a leader says that a mark is there before it is committed",
        SimulatedPartition,
        "append_marker",
        _done_when_appended,
        given=TRANSACTIONS,
    ),
    "coordinators-serve-at-once": Bug(
        "a coordinator answers by records that are not committed yet",
        coordinating,
        "served_from",
        _served_at_once,
        given=TRANSACTIONS,
    ),
    "unknown-writes-are-taken-back": Bug(
        "a record whose fate is unknown is taken for one that was not written",
        HostedTransactions,
        "_outcome_unknown",
        _taken_back,
        ("kill", "slow disk", "slow network", "stall", "split", "one way"),
        given=TRANSACTIONS | {"min_isr": 3},
    ),
    "stable-offsets-of-the-end": Bug(
        "the last stable offset goes by the log's end, and not by the high watermark",
        OpenTransactions,
        "stable_offset",
        _stable_at_the_end,
        given=TRANSACTIONS,
    ),
    "aborted-transactions-are-left-out": Bug(
        "an answer does not say which transactions are aborted",
        serving,
        "aborted_for",
        _nobody_is_aborted,
        given=TRANSACTIONS,
        also=((ProducerStage, "commit", _no_end_is_told),),
    ),
    "open-transactions-are-served": Bug(
        "readers of committed records read up to the high watermark",
        serving,
        "stable_offset",
        _all_that_is_committed,
        given=TRANSACTIONS,
    ),
    **GROUP_BUGS,
    **KEPT_BUGS,
}
