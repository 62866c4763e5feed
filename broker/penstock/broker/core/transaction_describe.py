"""What is told of transactions to who asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import (
    DescribeTransaction,
    LastCommitted,
    ListTransactions,
    Question,
)
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_values import NO_START, Cause, Identity, State, Transaction
from penstock.v1 import transactions_pb2
from penstock.wire.errors import TransactionalIdNotFoundError
from penstock.wire.ids import TopicIdPartition as Where

EMPTY: Final = transactions_pb2.TRANSACTION_STATE_EMPTY
ONGOING: Final = transactions_pb2.TRANSACTION_STATE_ONGOING
PREPARE_COMMIT: Final = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT
PREPARE_ABORT: Final = transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT
KEPT: Final = transactions_pb2.TRANSACTION_STATE_KEPT

_SAMPLE_SIZE: Final = 1_000

_KEPT_PAUSES: Final = 2
"""So many pauses, its producer has surely given up what it did not use: one is not on the dot."""


def answer(ledger: Ledger, event: Question) -> None:
    """Answer a question."""
    match event:
        case LastCommitted():
            ledger.respond(event.group, event.request_id, _last_committed(ledger, event.group))
        case ListTransactions():
            ledger.respond(None, event.request_id, _list(ledger, event))
        case DescribeTransaction():
            entry = ledger.entry(event.transactional_id)
            ledger.respond(entry.subject, event.request_id, _describe(ledger, entry))


def _state_of(ledger: Ledger, entry: Entry, value: Transaction) -> int:
    """Where an id is, as :meth:`Ledger.present` says: that all marks are there shows before it is
    written down. What is kept may be in use or not, until its pause is over: a living producer
    that does not use it has given it up by then.
    """
    is_open = value.state is State.ONGOING
    if entry.outcome is None or (is_open and entry.attempt is None):
        is_new = ledger.wall_ms - value.start_ms < _KEPT_PAUSES * ledger.settings.kept_pause_ms
        return KEPT if is_open and value.kept and is_new else value.state.value
    if entry.is_done:
        return EMPTY
    return PREPARE_COMMIT if entry.outcome.commit else PREPARE_ABORT


def holders(
    ledger: Ledger, names: Iterable[str], places: Mapping[int, Set[Where]]
) -> Iterator[tuple[int, Where, str]]:
    """Who of these ids will end a transaction in one of ``places``, which are by producer id.

    A partition is in the record before its leader appends, and no less known until its mark is
    there. So what is open in a log, and found nowhere afterwards, was forgotten for good.
    """
    for name in names:
        value = ledger.ids.get(name)
        wanted = None if value is None else places.get(value.producer_id)
        if value is None or wanted is None or value.state is State.EMPTY:
            continue
        entry = ledger.known(name)
        is_open = value.partitions if entry is None or entry.outcome is None else entry.missing
        for one in (*is_open, *value.kept):
            where = Where(one.topic_id, one.partition)
            if where in wanted:
                yield value.producer_id, where, name


def _last_committed(ledger: Ledger, group: str) -> transactions_pb2.LastCommittedResponse:
    last = ledger.commits.get(group)
    if last is None:
        return transactions_pb2.LastCommittedResponse(epoch_number=-1)
    return transactions_pb2.LastCommittedResponse(
        epoch_number=last.epoch_number,
        winners=map(transaction_codec.winner_proto, last.winners),
        metadata=last.metadata,
    )


def _list(ledger: Ledger, event: ListTransactions) -> transactions_pb2.ListTransactionsResponse:
    """A page. No order is kept for it: transactions would pay for what people seldom ask."""
    request = event.request
    response = transactions_pb2.ListTransactionsResponse()
    names = _first(list(filter(event.after.__lt__, ledger.ids)), event.limit + 1)
    if len(names) > event.limit:
        names.pop()
        response.next_page_token = names[-1]
    for name in names:
        entry = ledger.known(name)
        value = None if entry is None else ledger.present(entry)
        assert entry is not None, "a record without an entry"
        assert value is not None
        state = _state_of(ledger, entry, value)
        if request.states and state not in request.states:
            continue
        goes_on = state not in (EMPTY, KEPT)
        duration_ms = ledger.wall_ms - value.start_ms if goes_on else 0
        if duration_ms < request.min_duration_ms:
            continue
        response.transactions.add(
            transactional_id=entry.transactional_id,
            producer_id=_identity(entry, value).producer_id,
            state=state,
            since_ms=_since_ms(ledger, entry, value, state),
        )
    return response


def _first(names: list[str], count: int) -> list[str]:
    """The first ``count`` of them in order, without sorting all: a sample says how far they go."""
    step = max(1, len(names) // _SAMPLE_SIZE)
    sample = sorted(names[::step])
    place = 2 * count // step + 1
    if place < len(sample):
        few = [name for name in names if name <= sample[place]]
        if len(few) >= count:
            names = few
    return sorted(names)[:count]


def _since_ms(ledger: Ledger, entry: Entry, value: Transaction, state: int) -> int:
    if state in (ONGOING, KEPT):
        return value.start_ms
    commit = None if entry.attempt is None else ledger.commits.get(entry.attempt.group)
    if _is_decided_by_group(entry, value) and commit is not None:
        return commit.committed_ms
    return value.updated_ms


def _is_decided_by_group(entry: Entry, value: Transaction) -> bool:
    return entry.attempt is not None and entry.outcome is not None and not value.is_decided


def _last_end(entry: Entry, value: Transaction) -> tuple[Cause, bool]:
    """Who decided about the last transaction that has ended, and whether to commit it."""
    if entry.outcome is not None and _is_decided_by_group(entry, value):
        return Cause.GROUP, entry.outcome.commit
    if value.lapsed:
        return Cause.COORDINATOR, False
    return value.last_cause, value.last_committed


def _identity(entry: Entry, value: Transaction) -> Identity:
    """What logs know the transaction by: while marks are on their way, what these are under."""
    if entry.is_ending:
        return Identity(value.producer_id, value.epoch)
    return value.identity


def _describe(ledger: Ledger, entry: Entry) -> transactions_pb2.TransactionDescription:
    name = entry.transactional_id
    value = ledger.present(entry)
    if value is None:
        error = TransactionalIdNotFoundError(f"there is no transactional id {name!r}")
        return transactions_pb2.TransactionDescription(
            transactional_id=name, error=error.to_proto()
        )
    state = _state_of(ledger, entry, value)
    identity = _identity(entry, value)
    by_group = _is_decided_by_group(entry, value)
    last_cause, last_committed = _last_end(entry, value)
    # What is kept may be open again before all marks of the transaction before are there.
    is_ending = state not in (ONGOING, KEPT)
    partitions = value.kept | entry.missing if is_ending else value.partitions
    return transactions_pb2.TransactionDescription(
        transactional_id=name,
        state=state,  # type: ignore[arg-type]  # The same numbers.
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch + by_group,
        transaction_timeout_ms=value.timeout_ms,
        start_ms=NO_START if state == EMPTY else value.start_ms,
        partitions=transaction_codec.topic_partitions(partitions),
        last_cause=last_cause.value,  # type: ignore[arg-type]  # The same numbers.
        last_committed=last_committed,
    )
