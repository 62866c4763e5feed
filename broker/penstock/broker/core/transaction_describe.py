"""What is told of transactions to who asks."""

from __future__ import annotations

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import (
    DescribeTransaction,
    LastCommitted,
    ListTransactions,
    Question,
)
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_values import NO_START, State, Transaction
from penstock.v1 import transactions_pb2
from penstock.wire.errors import TransactionalIdNotFoundError


def answer(ledger: Ledger, event: Question) -> None:
    """Answer a question."""
    match event:
        case LastCommitted():
            ledger.respond(event.group, event.request_id, _last_committed(ledger, event.group))
        case ListTransactions():
            ledger.respond(None, event.request_id, _list(ledger, event.request))
        case DescribeTransaction():
            entry = ledger.entry(event.transactional_id)
            ledger.respond(entry.subject, event.request_id, _describe(ledger, entry))


def state_of(entry: Entry, value: Transaction) -> State:
    """Where an id is: that all marks are there shows before it is written down."""
    if entry.outcome is None:
        return value.state
    if entry.is_done:
        return State.EMPTY
    return State.PREPARE_COMMIT if entry.outcome.commit else State.PREPARE_ABORT


def _last_committed(ledger: Ledger, group: str) -> transactions_pb2.LastCommittedResponse:
    last = ledger.commits.get(group)
    if last is None:
        return transactions_pb2.LastCommittedResponse(epoch_number=-1)
    return transactions_pb2.LastCommittedResponse(
        epoch_number=last.epoch_number, winners=last.winners
    )


def _list(
    ledger: Ledger, request: transactions_pb2.ListTransactionsRequest
) -> transactions_pb2.ListTransactionsResponse:
    response = transactions_pb2.ListTransactionsResponse()
    for entry in ledger.entries():
        value = ledger.ids.get(entry.transactional_id)
        if value is None:
            continue
        state = state_of(entry, value)
        if request.states and state.value not in request.states:
            continue
        duration_ms = 0 if state is State.EMPTY else ledger.wall_ms - value.start_ms
        if duration_ms < request.min_duration_ms:
            continue
        response.transactions.add(
            transactional_id=entry.transactional_id,
            producer_id=value.identity.producer_id,
            state=state.value,
        )
    return response


def _describe(ledger: Ledger, entry: Entry) -> transactions_pb2.TransactionDescription:
    name = entry.transactional_id
    value = ledger.ids.get(name)
    if value is None:
        error = TransactionalIdNotFoundError(f"there is no transactional id {name!r}")
        return transactions_pb2.TransactionDescription(
            transactional_id=name, error=error.to_proto()
        )
    state = state_of(entry, value)
    identity = value.identity
    by_group = entry.outcome is not None and not value.is_decided
    partitions = value.partitions if entry.outcome is None else frozenset(entry.missing)
    return transactions_pb2.TransactionDescription(
        transactional_id=name,
        state=state.value,  # type: ignore[arg-type]  # The same numbers.
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch + by_group,
        transaction_timeout_ms=value.timeout_ms,
        start_ms=NO_START if state is State.EMPTY else value.start_ms,
        partitions=transaction_codec.topic_partitions(partitions),
    )
