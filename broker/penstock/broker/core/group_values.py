"""The values that a consumer group consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.wire.ids import TopicId, TopicIdPartition

JOIN_EPOCH: Final = 0
"""The member epoch by which a member asks to join."""

LEAVE_EPOCH: Final = -1
"""The member epoch by which a member leaves for good."""

LEFT_EPOCH: Final = -2
"""The member epoch of a static member that went away for a while and keeps its assignment."""

Partitions = frozenset[TopicIdPartition]

NOTHING: Final[Partitions] = frozenset()


@dataclass(frozen=True, slots=True)
class Epochs:
    """``group_epoch`` counts changes of the group; ``assignment_epoch`` is the one that the
    target assignment was made for, by ``assignor``. ``empty_since_ms`` (of the wall clock) is when
    it was first seen that the group has no members any more; 0 while that was not seen.
    """

    group_epoch: int = 0
    assignment_epoch: int = 0
    assignor: str = ""
    empty_since_ms: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One member.

    It may read ``assigned``; it must give ``revoking`` back; it shall end up with ``target``.
    ``epoch`` is the assignment epoch that ``target`` is of, or LEFT_EPOCH.
    """

    member_id: str
    instance_id: str = ""
    rack_id: str = ""
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    topics: frozenset[str] = frozenset()
    pattern: str = ""
    server_assignor: str = ""
    epoch: int = 0
    assigned: Partitions = NOTHING
    revoking: Partitions = NOTHING
    target: Partitions = NOTHING

    @property
    def is_away(self) -> bool:
        """Whether it is a static member that left for a while: it holds nothing in fact."""
        return self.epoch == LEFT_EPOCH


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """One partition's position. ``leader_epoch`` is -1 when unknown."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    topic_id: TopicId


class Producer(NamedTuple):
    """Who writes in a transaction."""

    producer_id: int
    producer_epoch: int
