"""What those who are coordinated are told when a coordinator cannot serve them."""

from __future__ import annotations

from typing import Final

from penstock.broker.core.metadata_image import MetadataImage
from penstock.wire.errors import (
    BrokerFencedError,
    CoordinatorNotAvailableError,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    LeaderHint,
    LeaderNotAvailableError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
    StorageError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)

_UNAVAILABLE: Final = (
    NotEnoughReplicasError,
    NotEnoughReplicasAfterAppendError,
    RequestTimedOutError,
    DiskFullError,
)
_ELSEWHERE: Final = (
    NotLeaderError,
    LeaderNotAvailableError,
    FencedLeaderEpochError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    BrokerFencedError,
    StorageError,
)

_OF_A_TRANSACTION: Final = (InvalidProducerEpochError, InvalidTxnStateError)

NOTHING_APPENDED: Final = (
    NotEnoughReplicasError,
    DiskFullError,
    RecordTooLargeError,
    BrokerFencedError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
)
"""Refusals of an append that promise that nothing was written, by a broker that still leads."""


def not_coordinator(image: MetadataImage, topic: str, partition: int) -> PenstockError:
    """The refusal of a broker that does not lead a partition of an internal topic."""
    record = image.partition(topic, partition)
    where = f"{topic}-{partition}"
    broker = None if record is None else image.brokers.get(record.leader)
    if record is None or broker is None:
        return NotCoordinatorError(
            f"this broker is not the coordinator: {where} has no leader now; ask again soon"
        )
    return NotCoordinatorError(
        f"this broker is not the coordinator; broker {record.leader} leads {where} in epoch "
        f"{record.leader_epoch}",
        leader=LeaderHint(record.leader, record.leader_epoch, broker.host, broker.port),
    )


def for_coordinated(error: PenstockError) -> PenstockError:
    """What a refusal by the replicas means to those who are coordinated."""
    if isinstance(error, _UNAVAILABLE):
        return CoordinatorNotAvailableError(
            f"the change could not be made durable; try again. {error.message}"
        )
    if isinstance(error, _ELSEWHERE):
        return NotCoordinatorError(
            f"this broker is not the coordinator any more; look again. {error.message}",
            leader=error.leader,
        )
    return error


def for_others(error: PenstockError) -> PenstockError:
    """What it means to who waited behind a write of somebody else that was refused with it.

    Only the producer of a transaction is to hear that it is fenced: whoever else hears that takes
    it for the end of its own.
    """
    if isinstance(error, _OF_A_TRANSACTION):
        return CoordinatorNotAvailableError(
            "it was held up by a write of a transaction that has ended; try again"
        )
    return error
