"""Why a client makes no progress, as a value that programs can compare."""

from __future__ import annotations

import enum


class StallReason(enum.Enum):
    """What is in a client's way. All but UNAUTHORISED and REFUSED may mend by themselves."""

    NO_LEADER = "no leader"
    """A partition has no leader, or another one than was asked."""
    UNREACHABLE = "unreachable"
    """A broker's address cannot be reached, or does not answer."""
    UNAUTHORISED = "unauthorised"
    """This client may not read, or write, there."""
    UNDER_MIN_ISR = "under min ISR"
    """Fewer replicas are in sync than must acknowledge a record."""
    NO_PRODUCER_ID = "no producer id"
    """No broker has given an idempotent producer its id yet."""
    COORDINATOR_UNAVAILABLE = "coordinator unavailable"
    """The group or the transactional id has no coordinator now, or one that is loading."""
    WAITING_FOR_TRANSACTION = "waiting for transaction"
    """The transaction before has not ended everywhere yet."""
    OPEN_TRANSACTION = "open transaction"
    """What comes next is behind a transaction that is open, and only what is committed is read."""
    WAITING_FOR_REBALANCE = "waiting for rebalance"
    """The group has not told this member yet what it has."""
    WAITING_FOR_POSITION = "waiting for position"
    """Where reading begins is not found yet."""
    TOPIC_ABSENT = "topic absent"
    """The topic or partition does not exist (any more)."""
    DAMAGED = "damaged"
    """What came is damaged, and asked for, or sent, again."""
    REFUSED = "refused"
    """Something else; the message says what."""
