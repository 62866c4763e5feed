"""The values that transactions consist of, as their coordinator keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.wire.ids import TopicId

LAST_EPOCH: Final = 32_767
"""The largest producer epoch. Only marks are written under it: no producer is ever given it."""

NO_START: Final = -1

REMEMBERED_INSTANCES: Final = 5
"""So many that had an id before are known: a late copy of a request of theirs is refused."""

KEPT_PAUSE_MS: Final = 1_000
"""What was kept of a transaction is aborted this and its timeout after that was decided: whoever
begins within so long has the whole timeout for the next one."""


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
    NOBODY; ``last_committed`` and ``last_cause`` say how, and by whom. ``superseded`` are instances
    that had the id before ``instance_id`` has, the newest last. ``kept`` are partitions of a
    transaction that is decided which are in the next one already, or all of an open one that has
    nothing else. Where such a one ``lapsed``, nobody but the coordinator having decided about it,
    ``last`` is the one before it: its producer may not have heard of that one's end yet. Where the
    mark of that one was not known to be there, it goes first: these partitions are ``carried``.
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
    superseded: tuple[bytes, ...] = ()
    kept: Participants = NO_PARTICIPANTS
    lapsed: bool = False
    carried: Participants = NO_PARTICIPANTS

    def superseding(self) -> tuple[bytes, ...]:
        """``superseded`` of who takes the id from its instance."""
        return (*self.superseded, self.instance_id)[-REMEMBERED_INSTANCES:]

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
    def last_outcome(self) -> Outcome:
        """What the marks of the last transaction say, where the next one was kept or has lapsed."""
        return Outcome(self.last.producer_id, self.last.epoch + 1, self.last_committed)

    def has_lapsed(self, identity: Identity) -> bool:
        """Whether that of ``identity`` lapsed, since the last one was decided."""
        return self.lapsed and identity == (self.last.producer_id, self.last.epoch + 1)

    def continued(self) -> Transaction:
        """The transaction that has what was kept, once the marks of the one before are there."""
        return replace(self, state=State.ONGOING, partitions=self.kept, start_ms=self.updated_ms)

    @property
    def is_owned(self) -> bool:
        """Whether a producer has, or may ask for, ``identity``.

        Nobody is told the identity that follows a transaction that was aborted to take the id from
        its producer.
        """
        return self.last_cause is not Cause.FENCED


UNKNOWN_PRODUCER: Final = -1


class Winner(NamedTuple):
    """An attempt that a commit of its group is for; its producer id is no other attempt's.

    It is UNKNOWN_PRODUCER where the record is from before it was written down. Then the numbers are
    enough: none began under them after the commit.
    """

    task: int
    attempt: int
    producer_id: int


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """The last commit of a group of attempts; ``winners`` are those that commit."""

    epoch_number: int
    winners: tuple[Winner, ...]
    committed_ms: int
    ends_group: bool = False
    """Whether no other commit is to follow, so that this one is forgotten in time."""
    metadata: bytes = b""
    """The engine's own."""

    def is_for(self, winners: Iterable[Winner]) -> bool:
        """Whether these are its winners, in any order."""
        unnamed = {one[:2] for one in self.winners if one.producer_id == UNKNOWN_PRODUCER}
        known = {
            one._replace(producer_id=UNKNOWN_PRODUCER) if one[:2] in unnamed else one
            for one in winners
        }
        return known == set(self.winners)


class Outcome(NamedTuple):
    """How a transaction ends: what its marks say, and under which producer id and epoch."""

    producer_id: int
    epoch: int
    commit: bool
