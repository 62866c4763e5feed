"""What a producer says of records that it could not deliver, or could not yet.

Everything that an application has to know to go on: whether the records may have been written, and
what was in the way. Pure: it looks at a batch and at what is known of its partition.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from penstock.client.core.accumulator import Batch
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.sequencer import Sequencer
from penstock.client.core.stall_reasons import reason_of
from penstock.wire.errors import (
    BrokerFencedError,
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    CorruptRecordError,
    DeliveryTimeoutError,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    LeaderNotAvailableError,
    NetworkError,
    NotCoordinatorError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    PenstockError,
    ProducerFencedError,
    RecordTooLargeError,
    SerializationError,
    TransactionAbortableError,
    UnknownLeaderEpochError,
    UnknownProducerIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.stalls import StallReason
from penstock.wire.wording import counted

NOT_WRITTEN: Final = (
    BrokerFencedError,
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    CorruptRecordError,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    LeaderNotAvailableError,
    NotCoordinatorError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    TransactionAbortableError,
    UnknownLeaderEpochError,
    UnknownProducerIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
"""Refusals that come before the append. Not so NotLeaderError, which also answers what was
appended when the leader was deposed before the in-sync replicas had it."""
SEQUENCE: Final = (OutOfOrderSequenceError, UnknownProducerIdError, InvalidProducerEpochError)
# Of these what a leader finds only when it has looked for the batch among those it remembers.
_AFTER_SEQUENCE: Final = (DiskFullError,)
_UNANSWERED_MS: Final = 1_000.0
"""What is only not answered yet is no trouble until it has taken so long."""


class Hindrance(NamedTuple):
    """What a batch waits for: in words, its reason, and the answer that said so, if one did.

    Without a reason it is only under way.
    """

    why: str
    reason: StallReason | None
    cause: PenstockError | None = None


def hindrance(batch: Batch[Any], sequencer: Sequencer[Any], metadata: MetadataCache) -> Hindrance:
    """What is in the batch's way."""
    leader = metadata.leader(batch.partition)
    last = batch.last_error
    cause = last if isinstance(last, PenstockError) else None
    refusal = sequencer.refusal(batch.partition)
    earlier = f"an earlier batch of the partition was refused: {refusal}"
    if refusal is not None and isinstance(cause, SEQUENCE):
        return Hindrance(earlier, reason_of(refusal), refusal)  # Out of order follows from it.
    if cause is not None and leader is not None and leader.node_id < 0:
        why = f"the partition has no leader; last answer: {cause}"
        homeless = LeaderNotAvailableError(why)
        homeless.__cause__ = cause
        return Hindrance(why, StallReason.NO_LEADER, homeless)
    if cause is not None:
        return Hindrance(f"last answer: {cause}", reason_of(cause), cause)
    if batch.attempts:
        return Hindrance("the leader has not answered", StallReason.UNREACHABLE)
    if leader is None or leader.node_id < 0:
        return Hindrance("the partition has no leader", StallReason.NO_LEADER)
    if sequencer.idempotent and not sequencer.identity.real:
        return Hindrance("no broker gave a producer id", StallReason.NO_PRODUCER_ID)
    if refusal is not None:
        return Hindrance(earlier, reason_of(refusal), refusal)
    return Hindrance("earlier batches of the partition took all the time", None)


def trouble(batch: Batch[Any], found: Hindrance, now_ms: float) -> PenstockError | None:
    """What to tell of a batch that waits; its ``reason`` is set. None where nothing is wrong."""
    waited_ms = now_ms - batch.created_ms
    unheard = found.cause is None and found.reason is not StallReason.NO_LEADER
    if found.reason is None or (unheard and waited_ms < _UNANSWERED_MS):
        return None
    kind = LeaderNotAvailableError if found.reason is StallReason.NO_LEADER else NetworkError
    error = (type(found.cause) if found.cause is not None else kind)(
        f"{counted(batch.record_count, 'record')} for partition {batch.partition} "
        f"{'has' if batch.record_count == 1 else 'have'} waited for {waited_ms / 1000:.1f} s "
        f"({found.why})"
    )
    error.reason = found.reason
    error.__cause__ = found.cause
    return error


def doubtful(batch: Batch[Any]) -> PenstockError:
    """It can't follow what was given up, and must not be sent again."""
    they, them, _ = _pronouns(batch)
    error = OutOfOrderSequenceError(
        f"{counted(batch.record_count, 'record')} for partition {batch.partition} cannot "
        f"follow an earlier batch that was given up, and an attempt to send {them} is "
        f"unanswered. {they} may have been written all the same; send {them} again only if "
        "a duplicate does no harm"
    )
    error.__cause__ = batch.last_error
    return error


def unmade(batch: Batch[Any], error: Exception) -> PenstockError:
    """Its bytes could not be made."""
    records = counted(batch.record_count, "record", "was")
    verdict = SerializationError(
        f"{records} not sent, for no batch of partition {batch.partition} could be made: {error!r}"
    )
    verdict.__cause__ = error
    return verdict


def stranded(batch: Batch[Any], partition_count: int) -> PenstockError:
    """Its topic was made anew, with so many partitions."""
    they, them, were = _pronouns(batch)
    what = (
        f"topic {batch.partition.topic!r} was deleted and made anew while "
        f"{counted(batch.record_count, 'record')} for its partition "
        f"{batch.partition.partition} {were} being sent"
    )
    if batch.maybe_written:
        error = UnknownTopicIdError(
            f"{what}. {they} may have been written to the deleted topic, and {were} not sent "
            f"to the new one; send {them} again to have {them} there"
        )
    else:
        error = UnknownTopicIdError(
            f"{what}, and has {partition_count} partitions now, so that {they.lower()} may belong "
            f"elsewhere. {they} {were} not written; send {them} again"
        )
    error.__cause__ = batch.last_error
    return error


def torn(topic: str) -> PenstockError:
    """A transaction has records in a topic that is gone, or was made anew."""
    return UnknownTopicIdError(
        f"topic {topic!r} was deleted, and may have been made anew, while a transaction wrote to "
        "it: what it had written there is gone"
    )


def timed_out(
    batch: Batch[Any], found: Hindrance, delivery_timeout_ms: float
) -> DeliveryTimeoutError:
    """Its time is over."""
    they, them, were = _pronouns(batch)
    if batch.maybe_written:
        outcome = (
            f"{they} may have been written all the same; send {them} again only if a "
            "duplicate does no harm"
        )
    elif batch.attempts:
        outcome = f"{they} {were} not written: every attempt was refused"
    else:
        outcome = f"{they} {were} not sent"
    error = DeliveryTimeoutError(
        f"{counted(batch.record_count, 'record')} for partition {batch.partition} {were} not "
        f"acknowledged within delivery_timeout_ms={delivery_timeout_ms:.0f} "
        f"(attempts: {batch.attempts}; {found.why}). {outcome}"
    )
    # Whoever looks for the reason and not for the time that it took finds it here.
    error.__cause__ = found.cause
    error.reason = found.reason
    return error


def for_good(batch: Batch[Any], error: PenstockError) -> PenstockError:
    """The verdict that ``error`` is, which speaks of the last attempt only."""
    if not isinstance(error, NOT_WRITTEN) or not batch.maybe_written:
        return error
    # A leader that looked for it in its log had not got it, and refuses what was made for an older
    # epoch; but it may read the rest of its own.
    was_looked_for = isinstance(error, _AFTER_SEQUENCE) and batch.producer_id >= 0
    if was_looked_for and batch.unheard_epoch < batch.last_epoch:
        return error
    they, them, _ = _pronouns(batch)
    verdict = type(error)(
        f"what became of an attempt to send {counted(batch.record_count, 'record')} for partition "
        f"{batch.partition} is unknown, and {they.lower()} may have been written all the same; "
        f"send {them} again only if a duplicate does no harm. The last attempt was refused: "
        f"{error.message}"
    )
    verdict.__cause__ = error
    return verdict


def _pronouns(batch: Batch[Any]) -> tuple[str, str, str]:
    """How a message speaks of the batch's records after naming them."""
    return ("It", "it", "was") if batch.record_count == 1 else ("They", "them", "were")
