"""What members and clients are told when a coordinator cannot serve them."""

from __future__ import annotations

from typing import Final

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.topics import OFFSETS_TOPIC
from penstock.wire.errors import (
    BrokerFencedError,
    CoordinatorNotAvailableError,
    DiskFullError,
    FencedLeaderEpochError,
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

NOTHING_APPENDED: Final = (
    NotEnoughReplicasError,
    DiskFullError,
    RecordTooLargeError,
    BrokerFencedError,
)
"""Refusals of an append that promise that nothing was written, by a broker that still leads."""


def not_coordinator(image: MetadataImage, partition: int) -> PenstockError:
    """The refusal of a broker that does not lead a partition of the offsets topic."""
    record = image.partition(OFFSETS_TOPIC, partition)
    where = f"{OFFSETS_TOPIC}-{partition}"
    broker = None if record is None else image.brokers.get(record.leader)
    if record is None or broker is None:
        return NotCoordinatorError(
            f"this broker does not coordinate the group: {where} has no leader now; ask again soon"
        )
    return NotCoordinatorError(
        f"this broker does not coordinate the group; broker {record.leader} at "
        f"{broker.host}:{broker.port} leads {where} in epoch {record.leader_epoch}",
        leader=LeaderHint(record.leader, record.leader_epoch, broker.host, broker.port),
    )


def for_group(error: PenstockError) -> PenstockError:
    """What a refusal by the replicas means to a member or client of a group."""
    if isinstance(error, _UNAVAILABLE):
        return CoordinatorNotAvailableError(
            f"the group's change could not be made durable; try again. {error.message}"
        )
    if isinstance(error, _ELSEWHERE):
        return NotCoordinatorError(
            f"this broker does not coordinate the group any more; look again. {error.message}",
            leader=error.leader,
        )
    return error
