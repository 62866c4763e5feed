"""What an error of the client says of what was asked: certainly not done, or nobody knows.

`fail` promises that nothing was written and never will be, so it is said only of these errors of a
producer, and of each only where its message does not take it back ("may have been written"):

========================================  ====================================================
error                                     why it is certain
========================================  ====================================================
BrokerFencedError                         a broker refuses with these before it appends
FencedLeaderEpochError                    (as above)
LeaderNotAvailableError                   (as above)
UnknownLeaderEpochError                   (as above)
NotEnoughReplicasError                    (as above)
DiskFullError                             (as above: the room is looked at first)
CorruptRecordError                        the batch itself is refused
RecordTooLargeError                       (as above)
SerializationError                        no batch could be made
BufferExhaustedError                      it never entered the producer's memory
DeliveryTimeoutError                      only where it says "not sent", or "every attempt was
                                          refused"
========================================  ====================================================

An administrator's request changed nothing where one of these answered it and no attempt before went
unanswered, of which the client says that it "may have taken effect":

========================================  ====================================================
error                                     why it is certain
========================================  ====================================================
TopicAlreadyExistsError                   the controllers refuse with these where the command is
InvalidPartitionsError                    applied, before they change anything
InvalidReplicationFactorError             (as above)
InvalidReplicaAssignmentError             (as above)
NoReassignmentInProgressError             (as above)
UnknownTopicIdError                       (as above)
UnknownTopicOrPartitionError              so do they, or the broker that was asked
NotEnoughVotersError                      it was not carried out, as its message says
========================================  ====================================================

Everything else is `info`: NotLeaderError also answers what was appended when the leader was deposed
meanwhile; so do NotEnoughReplicasAfterAppendError, RequestTimedOutError, NetworkError and
StorageError; after OutOfOrderSequenceError and its like the producer has begun anew while an
earlier attempt may be unheard; UnknownTopicOrPartitionError comes of a topic that may have held the
records until it was deleted; ClientClosedError and UnknownServerError say nothing of the log.
"""

from __future__ import annotations

from typing import Final

from penstock.client import (
    BrokerFencedError,
    BufferExhaustedError,
    CorruptRecordError,
    DeliveryTimeoutError,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    LeaderNotAvailableError,
    NoReassignmentInProgressError,
    NotEnoughReplicasError,
    NotEnoughVotersError,
    PenstockError,
    RecordTooLargeError,
    SerializationError,
    TopicAlreadyExistsError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)

NOT_WRITTEN: Final = (
    BrokerFencedError,
    BufferExhaustedError,
    CorruptRecordError,
    DiskFullError,
    FencedLeaderEpochError,
    LeaderNotAvailableError,
    NotEnoughReplicasError,
    RecordTooLargeError,
    SerializationError,
    UnknownLeaderEpochError,
)
_DOUBT: Final = "may have been written"
_CERTAIN: Final = ("not sent", "every attempt was refused")


def is_certain(error: BaseException) -> bool:
    """Whether a producer's error promises that the record is not written and never will be."""
    message = str(error)
    if _DOUBT in message:
        return False
    if isinstance(error, DeliveryTimeoutError):
        return any(words in message for words in _CERTAIN)
    return isinstance(error, NOT_WRITTEN)


NOT_CHANGED: Final = (
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    NoReassignmentInProgressError,
    NotEnoughVotersError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
_EARLIER_DOUBT: Final = "may have taken effect"
_NOT_CARRIED_OUT: Final = "was not carried out"


def is_refused(error: BaseException) -> bool:
    """Whether an administrator's error promises that nothing was changed and never will be."""
    notes = getattr(error, "__notes__", ())
    if any(_EARLIER_DOUBT in note for note in notes):
        return False
    if isinstance(error, NotEnoughVotersError):
        return _NOT_CARRIED_OUT in str(error)
    return isinstance(error, NOT_CHANGED)


def words_of(error: BaseException) -> str:
    """``CODE: message`` for a history."""
    code = error.code.name if isinstance(error, PenstockError) else type(error).__name__
    return f"{code}: {error}"
