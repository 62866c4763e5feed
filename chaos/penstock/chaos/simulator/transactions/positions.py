"""Positions of a consumer group that its members send in transactions: what happens to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.broker.core.group_partition import partition_for_group
from penstock.wire.ids import TopicId, TopicIdPartition

OFFSETS_TOPIC: Final = "__consumer_offsets"
OFFSETS_TOPIC_ID: Final = TopicId(b"consumer-offsets")
OFFSETS_PARTITIONS: Final = 2
GROUP: Final = "workers"


def keeper_of(group: str) -> TopicIdPartition:
    """The partition that keeps a group, whose leader coordinates it."""
    return TopicIdPartition(OFFSETS_TOPIC_ID, partition_for_group(group, OFFSETS_PARTITIONS))


@dataclass(frozen=True, slots=True)
class Moves:
    """A transaction, if it commits, moves a group's position of a partition.

    ``before`` is where the records begin that it was made out of, as its producer was told or knows
    from its own last transaction; ``after`` is what it sends, the next offset.
    """

    txn: int
    group: str
    key: TopicIdPartition
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class PositionTold:
    """Somebody was told a group's position of a partition, -1 where there is none.

    ``asked_at``: how many events there were when it was asked for. ``stable``: it was to be told
    only where no open transaction decides about it.
    """

    asked_at: int
    group: str
    key: TopicIdPartition
    offset: int
    stable: bool
