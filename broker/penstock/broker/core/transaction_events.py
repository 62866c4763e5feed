"""What happens to transactions, and what they want done: the words of the transaction cores.

Times called ``give_up_ms`` are of the monotonic clock: a request that still waits then is refused
as CONCURRENT_TRANSACTIONS, and may be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from google.protobuf.message import Message

from penstock.broker.core.transaction_values import (
    KEPT_PAUSE_MS,
    LAST_EPOCH,
    NO_PARTICIPANTS,
    GroupCommit,
    Participants,
    Transaction,
)
from penstock.v1 import coordination_pb2, transactions_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSettings:
    """Limits and intervals of all transactions of a broker, in milliseconds."""

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 7 * 24 * 60 * 60 * 1_000
    # That all marks of a transaction are there is written down with the next record of its id, or
    # after this.
    note_after_ms: int = 10_000
    # A producer begins its next transaction so soon after the one before, where partitions were
    # kept for it; see EndTransactionResponse.kept_ms.
    kept_pause_ms: int = KEPT_PAUSE_MS
    # What could not be written, or had no producer id, is tried again after this.
    retry_ms: int = 500
    # So many attempts of one commit have their marks sent at once; whatever else this broker serves
    # has its turn before the next ones.
    settled_at_once: int = 500
    # The largest producer epoch; a simulation comes to the end of a smaller one.
    last_epoch: int = LAST_EPOCH


class KnownTopics(Protocol):
    """The topics that exist, as the broker's metadata have them now."""

    def knows(self, topic_id: TopicId) -> bool:
        """Whether there is a topic of this id."""
        ...


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class InitProducerId:
    """A producer asks for the identity of a transactional id."""

    answer: ClassVar[type[Any]] = transactions_pb2.InitProducerIdResponse
    request_id: int
    request: transactions_pb2.InitProducerIdRequest
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class AddPartitions:
    """A leader asks whether a transaction may write to partitions of its."""

    answer: ClassVar[type[Any]] = coordination_pb2.AddPartitionsResult
    request_id: int
    request: coordination_pb2.AddPartitionsEntry
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """A producer ends its transaction."""

    answer: ClassVar[type[Any]] = transactions_pb2.EndTransactionResponse
    request_id: int
    request: transactions_pb2.EndTransactionRequest
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class AbortTransaction:
    """A person ends a transaction."""

    answer: ClassVar[type[Any]] = transactions_pb2.AbortTransactionResponse
    request_id: int
    request: transactions_pb2.AbortTransactionRequest
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """A task attempt begins."""

    answer: ClassVar[type[Any]] = transactions_pb2.BeginAttemptResponse
    request_id: int
    request: transactions_pb2.BeginAttemptRequest
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """A driver decides about all attempts up to an epoch number."""

    answer: ClassVar[type[Any]] = transactions_pb2.CommitGroupResponse
    request_id: int
    request: transactions_pb2.CommitGroupRequest
    give_up_ms: int


@dataclass(frozen=True, slots=True)
class LastCommitted:
    """A question for a group's last commit."""

    request_id: int
    group: str


@dataclass(frozen=True, slots=True)
class ListTransactions:
    """A question for transactional ids in brief: of the ``limit`` first ones after ``after``.

    Where there are more, the answer's ``next_page_token`` is the last of these.
    """

    request_id: int
    request: transactions_pb2.ListTransactionsRequest
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class DescribeTransaction:
    """A question for all about one transactional id."""

    request_id: int
    transactional_id: str


Request = (
    InitProducerId | AddPartitions | EndTransaction | AbortTransaction | BeginAttempt | CommitGroup
)
"""What may have to wait; answered with ``answer``, whose ``error`` says a refusal."""

Question = LastCommitted | ListTransactions | DescribeTransaction

# ---------------------------------------------------------------------- what else happens


@dataclass(frozen=True, slots=True)
class MarkDone:
    """The marks of one transaction are committed in these partitions, or never will be.

    The latter where one that says the opposite is: see MarkSender.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: Participants


@dataclass(frozen=True, slots=True)
class MarksCommitted:
    """Marks are committed; those of transactions that are not waited for are passed over."""

    marks: tuple[MarkDone, ...]


@dataclass(frozen=True, slots=True)
class TopicsRemoved:
    """Topics are gone, and KnownTopics knows them no more: nothing is written to them."""

    topic_ids: frozenset[TopicId]


@dataclass(frozen=True, slots=True)
class ProducerIdGiven:
    """A producer id that nobody had before and nobody else will have."""

    producer_id: int


@dataclass(frozen=True, slots=True)
class ProducerIdRefused:
    """There is no producer id now."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Loaded:
    """All records were replayed, and are committed; it is this time of the wall clock."""

    wall_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed; it is this time of the wall clock."""

    wall_ms: int


Event = (
    Request
    | Question
    | MarksCommitted
    | TopicsRemoved
    | ProducerIdGiven
    | ProducerIdRefused
    | Loaded
    | Tick
)
"""What a shard of transactions handles."""

# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Change:
    """One record to append, and what was there before. ``value`` None is a tombstone."""

    subject: str
    key: bytes
    value: bytes | None
    name: str  # The transactional id, or the group.
    is_group: bool
    before: Transaction | GroupCommit | None


@dataclass(frozen=True, slots=True)
class Persist:
    """Append this record. It becomes true when committed."""

    subject: str
    change: Change


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer a request. ``subject`` is None when the answer is about all."""

    subject: str | None
    request_id: int
    response: Message


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of one transaction, to be written to its partitions.

    Those that were ``kept`` are in the one that follows.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    commit: bool
    partitions: Participants
    kept: Participants = NO_PARTICIPANTS


@dataclass(frozen=True, slots=True)
class SendMarks:
    """Have these marks written until they are committed, and say so by MarksCommitted.

    It may come again for marks that are being sent.
    """

    subject: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class TakeProducerId:
    """Ask for a producer id, to be told by ProducerIdGiven or ProducerIdRefused."""


Effect = Persist | Respond | SendMarks | TakeProducerId
"""What is to be done, in order.

Nothing may be answered about a subject, and none of its marks sent, before all records about it
that were to be appended earlier are committed; when that fails, the changes are reverted, the
answers become errors and the marks are not sent. A mark before its decision would end a
transaction that a crash could leave open.
"""
