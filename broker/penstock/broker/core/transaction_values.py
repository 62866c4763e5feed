"""The values that transactions consist of, as their coordinator keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.wire.ids import TopicId

LAST_EPOCH: Final = 32_767
"""The largest producer epoch. Only marks are written under it: no producer is ever given it."""

NO_START: Final = -1


class State(IntEnum):
    """Where a transactional id is; see transaction_shard. The numbers are those on disk."""

    EMPTY = 1
    ONGOING = 2
    PREPARE_COMMIT = 3
    PREPARE_ABORT = 4


class Cause(IntEnum):
    """Who decided about a transaction. The numbers are those on disk."""

    NOBODY = 0
    PRODUCER = 1
    COORDINATOR = 2  # Its timeout, or a person.
    FENCED = 3  # Another producer that took the id over.
    GROUP = 4  # A CommitGroup.


class Identity(NamedTuple):
    """What a producer writes one transaction under."""

    producer_id: int
    epoch: int


NOBODY: Final = Identity(-1, -1)


class Participant(NamedTuple):
    """A partition that a transaction writes to."""

    topic_id: TopicId
    partition: int
    topic: str


Participants = frozenset[Participant]

NO_PARTICIPANTS: Final[Participants] = frozenset()


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transactional id, as its record says; see TransactionValue in transaction_records.proto.

    ``producer_id`` and ``epoch`` are what the next batch is written under, or in PREPARE_* the
    marks. ``last`` is the last transaction that was decided since the producer got the id, or
    NOBODY; ``last_committed`` and ``last_cause`` say how, and by whom.
    """

    state: State
    producer_id: int
    epoch: int
    timeout_ms: int
    updated_ms: int
    instance_id: bytes
    last: Identity = NOBODY
    last_committed: bool = False
    last_cause: Cause = Cause.NOBODY
    start_ms: int = NO_START
    partitions: Participants = NO_PARTICIPANTS
    next_producer_id: int = -1

    @property
    def identity(self) -> Identity:
        """What the open transaction, or else the next one, is written under."""
        if self.next_producer_id != -1:
            return Identity(self.next_producer_id, 0)
        return Identity(self.producer_id, self.epoch)

    @property
    def is_decided(self) -> bool:
        """Whether the record says that marks are to be written."""
        return self.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT)

    @property
    def has_ended(self) -> bool:
        """Whether a transaction was decided since the producer was given the id."""
        return self.last != NOBODY

    def was_last(self, identity: Identity) -> bool:
        """Whether the last transaction that was decided is that of ``identity``."""
        return self.has_ended and self.last == identity

    @property
    def is_owned(self) -> bool:
        """Whether a producer has, or may ask for, ``identity``.

        Nobody is told the identity that follows a transaction that was aborted to take the id from
        its producer.
        """
        return self.last_cause is not Cause.FENCED


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """The last commit of a group of attempts; ``winners`` are the ids of those that commit."""

    epoch_number: int
    winners: tuple[str, ...]
    committed_ms: int


class Outcome(NamedTuple):
    """How a transaction ends: what its marks say, and under which producer id and epoch."""

    producer_id: int
    epoch: int
    commit: bool
