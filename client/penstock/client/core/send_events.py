"""What happens to a Sender, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.client.core.accumulator import Batch, Splittable
from penstock.client.core.sequencer import Identity
from penstock.wire.errors import PenstockError

D = TypeVar("D", bound=Splittable)


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Woken:
    """Time has passed, records came, or metadata changed."""


@dataclass(frozen=True, slots=True)
class PartitionAnswer:
    """What a leader said to one batch."""

    error: PenstockError | None
    base_offset: int = -1
    log_append_time_ms: int = -1


@dataclass(frozen=True, slots=True)
class Answered:
    """A response came; ``answers`` are in the request's order."""

    node_id: int
    correlation_id: int
    answers: tuple[PartitionAnswer, ...]


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The stream to a broker ended: what was unanswered has an unknown outcome.

    But for the requests whose correlation ids are in ``unsent``: nothing of them left this process.
    """

    node_id: int
    error: PenstockError
    unsent: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class IdentityGiven:
    """The answer to AcquireIdentity."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class IdentityRefused:
    """No identity can be had, and asking again will not help."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Aborted:
    """The producer closes now: everything left fails with ``error``."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Dropped:
    """The transaction won't be committed: everything left fails with ``error``, and no answer that
    is still to come counts.
    """

    error: PenstockError


@dataclass(frozen=True, slots=True)
class TransactionEnded:
    """The next one has this identity; everything of the last one has its verdict."""

    identity: Identity


Event = (
    Woken
    | Answered
    | StreamBroken
    | IdentityGiven
    | IdentityRefused
    | Aborted
    | Dropped
    | TransactionEnded
)


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry(Generic[D]):
    """One batch in a request, with the leader epoch believed in."""

    batch: Batch[D]
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class SendRequest(Generic[D]):
    """Send these batches to a broker in one request."""

    node_id: int
    correlation_id: int
    entries: tuple[Entry[D], ...]


@dataclass(frozen=True, slots=True)
class ResetStream:
    """Give the stream to a broker up; its unanswered requests are taken care of."""

    node_id: int


@dataclass(frozen=True, slots=True)
class Acknowledge(Generic[D]):
    """The batch is written."""

    batch: Batch[D]
    base_offset: int
    log_append_time_ms: int


@dataclass(frozen=True, slots=True)
class Fail(Generic[D]):
    """The batch will not be written by this producer."""

    batch: Batch[D]
    error: PenstockError


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """Ask who leads now, some other broker than ``avoid`` if it is not -1."""

    avoid: int


@dataclass(frozen=True, slots=True)
class AcquireIdentity:
    """Ask for a producer id."""


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """Memory was freed, and somebody waits for it."""


@dataclass(frozen=True, slots=True)
class Spoil:
    """The transaction must not be committed, although no record of it failed."""

    error: PenstockError


Effect = (
    SendRequest[D]
    | ResetStream
    | Acknowledge[D]
    | Fail[D]
    | RefreshMetadata
    | AcquireIdentity
    | RoomFreed
    | Spoil
)
