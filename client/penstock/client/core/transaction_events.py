"""What happens to a producer's transactions, and what they want done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.client.core.sequencer import Identity
from penstock.wire.errors import PenstockError


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
    """The application begins a transaction."""


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
    """Something of the transaction was sent to a broker."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something of the transaction will not be in it."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything that was queued has its verdict."""


@dataclass(frozen=True, slots=True)
class EndAnswered:
    """It is decided as was asked; the identity is the next transaction's."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class EndRefused:
    """The coordinator refused, for good."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class EndUnanswered:
    """The time to ask is over, and what became of it is not known."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Who waits for what was wished was cancelled, or its time is over."""


Event = (
    InitWanted
    | BeginWanted
    | EndWanted
    | IdentityGiven
    | IdentityRefused
    | Sent
    | Failed
    | Flushed
    | EndAnswered
    | EndRefused
    | EndUnanswered
    | Interrupted
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
    """Ask the coordinator; answered by EndAnswered, EndRefused or EndUnanswered."""

    identity: Identity
    commit: bool


@dataclass(frozen=True, slots=True)
class Done:
    """What was wished is over; with the error that is to be raised."""

    error: PenstockError | None = None


Effect = AskIdentity | AwaitVerdicts | DropRecords | TakeIdentity | AskEnd | Done
