"""What all transactions have in common: who may go on with one, and how it is decided."""

from __future__ import annotations

from collections.abc import Iterable
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
    Participants,
    State,
    Transaction,
)
from penstock.v1 import common_pb2
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
_MAX_PARTITION_BYTES: Final = 4 * 1024 * 1024
"""What the partitions of one transaction take in its record, which stays below half of the topic's
max.message.bytes: one that could not be written would be refused after it was decided."""


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


def is_had_by(transactional_id: str, value: Transaction | None, instance_id: bytes) -> bool:
    """Whether the instance has the id, and is given the same identity again; else it takes it.

    Raises ProducerFencedError for what can only be a late copy of a request: the instance has ended
    something since, or another one has the id now.
    """
    if value is None:
        return False
    if instance_id in value.superseded:
        raise fenced(transactional_id)
    if instance_id != value.instance_id:
        return False
    if value.has_ended:
        raise fenced(transactional_id)
    return True


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


def aborted(transactional_id: str) -> PenstockError:
    """The refusal of a producer whose transaction the coordinator has aborted."""
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
    if value.has_lapsed(identity):
        return aborted(transactional_id)
    if not value.was_last(identity) or value.last_cause is Cause.FENCED:
        return foreign(transactional_id, value, identity)
    if value.last_cause is Cause.COORDINATOR:
        return aborted(transactional_id)
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
        return aborted(transactional_id)
    done = "committed" if value.last_committed else "aborted"
    return InvalidTxnStateError(
        f"the transaction of epoch {value.last.epoch} of {transactional_id!r} was {done} before, "
        "and stays so"
    )


def identity_of(event: AddPartitions | EndTransaction) -> Identity:
    """The identity that a request comes under."""
    return Identity(event.request.producer_id, event.request.producer_epoch)


def asked_for(event: AddPartitions) -> Participants:
    """The partitions that a leader asks for."""
    return frozenset(map(transaction_codec.participant, event.request.partitions))


def following(ledger: Ledger, identity: Identity) -> Identity:
    """The identity after this one. Raises NoSpareProducerIdError where that needs one."""
    if identity.epoch + 1 < ledger.settings.last_epoch:
        return Identity(identity.producer_id, identity.epoch + 1)
    return Identity(ledger.producer_id(), 0)


def decide(
    ledger: Ledger,
    entry: Entry,
    *,
    commit: bool,
    cause: Cause,
    keep: Participants = NO_PARTICIPANTS,
) -> None:
    """Decide about the open transaction, for ever: its epoch is over with this record.

    What it has of ``keep`` is in the next one with the same record, unless that gets another
    producer id. Raises NoSpareProducerIdError, and then has decided nothing.
    """
    value = ledger.present(entry)
    assert value is not None
    assert value.state is State.ONGOING, "what is decided once is not decided again"
    ended = value.identity
    exhausted = ended.epoch + 1 == ledger.settings.last_epoch
    lapses = bool(value.kept) and cause is Cause.COORDINATOR
    decided = replace(
        value,
        state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
        epoch=ended.epoch + 1,
        next_producer_id=ledger.producer_id() if exhausted else -1,
        kept=NO_PARTICIPANTS if exhausted else ledger.existing(keep & value.partitions),
        lapsed=lapses,
        updated_ms=ledger.wall_ms,
    )
    if not lapses:
        # Else its producer may not have heard how the one before ended: that is still told.
        decided = replace(decided, last=ended, last_committed=commit, last_cause=cause)
    ledger.put(entry, decided)
    ledger.settle(entry)


def give_up_kept(ledger: Ledger, entry: Entry) -> None:
    """Abort what is kept while marks of the transaction before are on their way.

    A partition that does not get its mark must not hold up those that have it, and what they have
    let in since. Where it is not there it still goes first. Raises NoSpareProducerIdError.
    """
    value = ledger.ids[entry.transactional_id]
    assert value.is_decided
    assert value.kept
    epoch = value.epoch + 1
    lapsed = replace(
        value,
        state=State.PREPARE_ABORT,
        epoch=epoch,
        next_producer_id=ledger.producer_id() if epoch == ledger.settings.last_epoch else -1,
        partitions=value.kept | entry.missing,
        start_ms=value.updated_ms,
        updated_ms=ledger.wall_ms,
        kept=NO_PARTICIPANTS,
        lapsed=True,
        carried=frozenset(entry.missing),
    )
    ledger.put(entry, lapsed)
    ledger.settle(entry)


def named(value: Transaction, partitions: Iterable[common_pb2.TopicPartition]) -> Participants:
    """Those of the transaction's partitions that have these topics' names and these numbers."""
    wanted = {(one.topic, one.partition) for one in partitions}
    if not wanted:
        return NO_PARTICIPANTS
    return frozenset(one for one in value.partitions if (one.topic, one.partition) in wanted)


def kept_ms(ledger: Ledger, value: Transaction) -> int:
    """Within how long a producer is to begin for which partitions are kept; 0 for none."""
    if not value.kept:
        return 0
    # Whoever asks for an end again has waited for the answer, and that long they are kept already.
    since_ms = value.start_ms if value.state is State.ONGOING else value.updated_ms
    pause_ms = ledger.settings.kept_pause_ms
    return max(1, min(pause_ms, since_ms + pause_ms - ledger.wall_ms))


def enlist(ledger: Ledger, entry: Entry, value: Transaction, event: AddPartitions) -> None:
    """Take partitions into the transaction, which opens with the first; answer the leader."""
    added = asked_for(event)
    is_open = value.state is State.ONGOING
    before = value.partitions if is_open else NO_PARTICIPANTS
    together = before | added
    size_bytes = transaction_codec.partitions_bytes(together)
    if size_bytes > _MAX_PARTITION_BYTES:
        raise InvalidRequestError(
            f"{len(together)} partitions in one transaction of {entry.transactional_id!r} take "
            f"{size_bytes} bytes with their topics' names; {_MAX_PARTITION_BYTES} are allowed: "
            "write to fewer in one transaction"
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
            start_ms=_start_ms(ledger, value) if is_open else now_ms,
            updated_ms=now_ms,
            kept=NO_PARTICIPANTS,
            carried=NO_PARTICIPANTS,
        )
        ledger.put(entry, opened)
        ledger.settle(entry)
    ledger.respond(entry.subject, event.request_id, event.answer())


def _start_ms(ledger: Ledger, value: Transaction) -> int:
    """When the open transaction that more is added to began, at the latest."""
    if not value.kept:
        return value.start_ms
    return min(ledger.wall_ms, value.start_ms + ledger.settings.kept_pause_ms)


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
        kept=NO_PARTICIPANTS,
        carried=NO_PARTICIPANTS,
    )
