"""What happens to a producer's transactions, and what they want done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.client.core.sequencer import Identity
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition


class Wish(Enum):
    """How the application wants the transaction to end."""

    COMMIT = "commit"
    ABORT = "abort"
    PREPARE = "prepare"


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitWanted:
    """The application wants the identity to be there."""


@dataclass(frozen=True, slots=True)
class BeginWanted:
    """The application begins a transaction, at this time by the clock of the ends."""

    now_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class EndWanted:
    """The application wants it to end."""

    wish: Wish


@dataclass(frozen=True, slots=True)
class IdentityGiven:
    """The coordinator gave the first identity."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class IdentityRefused:
    """It did not, and asking again does not help; or the time to ask is over."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Sent:
    """Something of the transaction was sent to a broker, for these partitions."""

    partitions: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class Failed:
    """Something of the transaction will not be in it."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything that was queued has its verdict."""


@dataclass(frozen=True, slots=True)
class EndAnswered:
    """It is decided as was asked; the identity is the next transaction's.

    ``asked_ms``: when it was first asked for. ``kept_ms``: above 0, the next one is open already
    where the producer wrote, and is to begin so long after that.
    """

    identity: Identity
    asked_ms: float = 0.0
    kept_ms: int = 0


@dataclass(frozen=True, slots=True)
class EndRefused:
    """The coordinator refused, for good."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class EndUnanswered:
    """The time to ask is over, and what became of it is not known."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class KeptUntil:
    """It is this time; what was kept is given up if it has not begun."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """What was kept is given up, and this is the identity to go on with."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class RenewalRefused:
    """The coordinator refused, for good."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Who waits for what was wished was cancelled, or its time is over."""


Answer = (
    IdentityGiven
    | IdentityRefused
    | EndAnswered
    | EndRefused
    | EndUnanswered
    | Renewed
    | RenewalRefused
)
"""What the coordinator has said, or has not in time."""

Event = (
    InitWanted
    | BeginWanted
    | EndWanted
    | Sent
    | Failed
    | Flushed
    | KeptUntil
    | Interrupted
    | Answer
)


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskIdentity:
    """Ask for the first identity; answered by IdentityGiven or IdentityRefused."""


@dataclass(frozen=True, slots=True)
class AwaitVerdicts:
    """Flush; answered by Flushed."""


@dataclass(frozen=True, slots=True)
class DropRecords:
    """Give everything up that has no verdict, on its way or not; its verdict is the error."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class TakeIdentity:
    """From now on records go under this identity, numbered from 0."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class AskEnd:
    """Ask the coordinator; answered by EndAnswered, EndRefused or EndUnanswered.

    ``keep``: where the next transaction is to be open from then on.
    """

    identity: Identity
    commit: bool
    keep: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class SwapIdentity:
    """Records go under this identity from now on, numbered from 0; nothing of them was sent.

    Where it is not real they wait for the next one.
    """

    identity: Identity


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the coordinator to abort it, until it answers: by Renewed or RenewalRefused.

    Whoever waits for a wish does not wait for this.
    """

    identity: Identity


@dataclass(frozen=True, slots=True)
class Done:
    """What was wished is over; with the error that is to be raised."""

    error: PenstockError | None = None


Effect = (
    AskIdentity | AwaitVerdicts | DropRecords | TakeIdentity | AskEnd | SwapIdentity | Renew | Done
)
