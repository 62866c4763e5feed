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
    LeaderNotAvailableError,
    NotEnoughReplicasError,
    PenstockError,
    RecordTooLargeError,
    SerializationError,
    UnknownLeaderEpochError,
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


def words_of(error: BaseException) -> str:
    """``CODE: message`` for a history."""
    code = error.code.name if isinstance(error, PenstockError) else type(error).__name__
    return f"{code}: {error}"
