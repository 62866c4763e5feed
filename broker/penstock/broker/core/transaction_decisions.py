"""What all transactions have in common: who may go on with one, and how it is decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import AddPartitions, EndTransaction
from penstock.broker.core.transaction_ledger import Entry, Ledger
from penstock.broker.core.transaction_values import (
    NO_PARTICIPANTS,
    NO_START,
    Cause,
    Identity,
    State,
    Transaction,
)
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidRequestError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    PenstockError,
    ProducerFencedError,
    TransactionAbortableError,
)

INSTANCE_ID_BYTES: Final = 16
_MAX_PARTITIONS: Final = 100_000
"""In one transaction: their record stays below the max.message.bytes of the topic."""


def check_new(timeout_ms: int, instance_id: bytes, max_timeout_ms: int) -> None:
    """Raise a typed error for what no producer can be given an identity with."""
    if len(instance_id) != INSTANCE_ID_BYTES:
        raise InvalidRequestError(
            f"instance_id has {len(instance_id)} bytes; a transactional producer sends "
            f"{INSTANCE_ID_BYTES} random ones, the same in each request of its life"
        )
    if not 1 <= timeout_ms <= max_timeout_ms:
        raise InvalidTransactionTimeoutError(
            f"a transaction timeout of {timeout_ms} ms; 1 to {max_timeout_ms} are allowed: choose "
            "another, or raise transaction.max.timeout.ms of the brokers"
        )


def unknown_id(transactional_id: str) -> PenstockError:
    """The refusal of a producer whose transactional id the coordinator does not know."""
    return InvalidProducerIdMappingError(
        f"the transactional id {transactional_id!r} has no producer: nobody asked for it, or it "
        "was not used for transactional.id.expiration.ms; make a new producer"
    )


def fenced(transactional_id: str) -> PenstockError:
    """The refusal of a producer that has the id no more."""
    return ProducerFencedError(
        f"another producer has the transactional id {transactional_id!r} now; close this one"
    )


def _aborted(transactional_id: str) -> PenstockError:
    return TransactionAbortableError(
        f"the transaction of {transactional_id!r} was aborted by its timeout, or from outside; "
        "abort it and begin anew"
    )


def foreign(transactional_id: str, value: Transaction, identity: Identity) -> PenstockError:
    """The refusal of an identity that is neither the present nor the last one."""
    present = value.identity
    if identity.producer_id == present.producer_id and identity.epoch > present.epoch:
        return InvalidProducerEpochError(
            f"epoch {identity.epoch} of the transactional id {transactional_id!r} was never given "
            f"to a producer; it is at {present.epoch}"
        )
    return fenced(transactional_id)


def why_no_partitions(
    transactional_id: str, value: Transaction, identity: Identity
) -> PenstockError | None:
    """Why no partitions are added to the transaction of an identity; None where they may be."""
    if identity == value.identity and value.is_owned:
        return None
    if not value.was_last(identity) or value.last_cause is Cause.FENCED:
        return foreign(transactional_id, value, identity)
    if value.last_cause is Cause.COORDINATOR:
        return _aborted(transactional_id)
    return InvalidTxnStateError(
        f"the transaction of epoch {identity.epoch} of {transactional_id!r} has ended; nothing is "
        "added to it"
    )


def why_not_ended(
    transactional_id: str, value: Transaction, *, commit: bool
) -> PenstockError | None:
    """What a producer that ends its last transaction (again) is refused with; None for success."""
    if value.last_cause is Cause.FENCED:
        return fenced(transactional_id)
    if value.last_committed == commit:
        return None
    if commit and value.last_cause is Cause.COORDINATOR:
        return _aborted(transactional_id)
    done = "committed" if value.last_committed else "aborted"
    return InvalidTxnStateError(
        f"the transaction of epoch {value.last.epoch} of {transactional_id!r} was {done} before, "
        "and stays so"
    )


def identity_of(event: AddPartitions | EndTransaction) -> Identity:
    """The identity that a request comes under."""
    return Identity(event.request.producer_id, event.request.producer_epoch)


def following(ledger: Ledger, identity: Identity) -> Identity:
    """The identity after this one. Raises NoSpareProducerIdError where that needs one."""
    if identity.epoch + 1 < ledger.settings.last_epoch:
        return Identity(identity.producer_id, identity.epoch + 1)
    return Identity(ledger.producer_id(), 0)


def decide(ledger: Ledger, entry: Entry, *, commit: bool, cause: Cause) -> None:
    """Decide about the open transaction, for ever: its epoch is over with this record.

    Raises NoSpareProducerIdError, and then has decided nothing.
    """
    value = ledger.ids[entry.transactional_id]
    assert value.state is State.ONGOING, "what is decided once is not decided again"
    last = value.identity
    exhausted = last.epoch + 1 == ledger.settings.last_epoch
    decided = replace(
        value,
        state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
        epoch=last.epoch + 1,
        last=last,
        last_committed=commit,
        last_cause=cause,
        next_producer_id=ledger.producer_id() if exhausted else -1,
        updated_ms=ledger.wall_ms,
    )
    ledger.put(entry, decided)
    ledger.settle(entry)


def enlist(ledger: Ledger, entry: Entry, value: Transaction, event: AddPartitions) -> None:
    """Take partitions into the transaction, which opens with the first; answer the leader."""
    added = frozenset(map(transaction_codec.participant, event.request.partitions))
    is_open = value.state is State.ONGOING
    before = value.partitions if is_open else NO_PARTICIPANTS
    together = before | added
    if len(together) > _MAX_PARTITIONS:
        raise InvalidRequestError(
            f"{len(together)} partitions in one transaction of {entry.transactional_id!r}; "
            f"{_MAX_PARTITIONS} are allowed: commit more often"
        )
    gone = ledger.unknown_topic(added - before)
    if gone is not None:
        raise CoordinatorNotAvailableError(
            f"the coordinator of {entry.transactional_id!r} does not know the topic {gone!r} by "
            "this id, yet or any more; ask again"
        )
    if not is_open or together != before:
        now_ms = ledger.wall_ms
        identity = value.identity
        opened = replace(
            value,
            state=State.ONGOING,
            producer_id=identity.producer_id,
            epoch=identity.epoch,
            next_producer_id=-1,
            partitions=together,
            start_ms=value.start_ms if is_open else now_ms,
            updated_ms=now_ms,
        )
        ledger.put(entry, opened)
        ledger.settle(entry)
    ledger.respond(entry.subject, event.request_id, event.answer())


def resting(ledger: Ledger, value: Transaction, identity: Identity) -> Transaction:
    """The value of an id without an open transaction, at ``identity``."""
    return replace(
        value,
        state=State.EMPTY,
        producer_id=identity.producer_id,
        epoch=identity.epoch,
        next_producer_id=-1,
        partitions=NO_PARTICIPANTS,
        start_ms=NO_START,
        updated_ms=ledger.wall_ms,
    )
