"""What errors come down to for somebody who waits: the reasons of producers and consumers alike."""

from __future__ import annotations

from typing import Final

from penstock.wire.errors import (
    AccessForbiddenError,
    BootstrapError,
    BrokerFencedError,
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    CorruptRecordError,
    FencedLeaderEpochError,
    LeaderNotAvailableError,
    NetworkError,
    NotCoordinatorError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    RequestTimedOutError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    UnstableOffsetCommitError,
)
from penstock.wire.stalls import StallReason

_REASONS: Final[dict[type[PenstockError], StallReason]] = {
    AccessForbiddenError: StallReason.UNAUTHORISED,
    BootstrapError: StallReason.UNREACHABLE,
    BrokerFencedError: StallReason.NO_LEADER,
    ConcurrentTransactionsError: StallReason.WAITING_FOR_TRANSACTION,
    CoordinatorLoadInProgressError: StallReason.COORDINATOR_UNAVAILABLE,
    CoordinatorNotAvailableError: StallReason.COORDINATOR_UNAVAILABLE,
    CorruptRecordError: StallReason.DAMAGED,
    FencedLeaderEpochError: StallReason.NO_LEADER,
    LeaderNotAvailableError: StallReason.NO_LEADER,
    NetworkError: StallReason.UNREACHABLE,
    NotCoordinatorError: StallReason.COORDINATOR_UNAVAILABLE,
    NotEnoughReplicasAfterAppendError: StallReason.UNDER_MIN_ISR,
    NotEnoughReplicasError: StallReason.UNDER_MIN_ISR,
    NotLeaderError: StallReason.NO_LEADER,
    RequestTimedOutError: StallReason.UNREACHABLE,
    UnknownLeaderEpochError: StallReason.NO_LEADER,
    UnknownTopicIdError: StallReason.TOPIC_ABSENT,
    UnknownTopicOrPartitionError: StallReason.TOPIC_ABSENT,
    UnstableOffsetCommitError: StallReason.WAITING_FOR_POSITION,
}


def reason_of(error: PenstockError) -> StallReason:
    """What the error says itself, or else its kind."""
    return error.reason or _REASONS.get(type(error), StallReason.REFUSED)
