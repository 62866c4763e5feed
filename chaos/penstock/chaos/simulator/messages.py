"""What brokers say to each other in the simulator: as penstock.v1.Replication, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.broker.core.ports import EpochEnd
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a follower."""

    node_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a follower's log stands."""

    key: TopicIdPartition
    leader_epoch: int
    log_end_offset: int
    last_epoch: int
    log_start_offset: int
    knows_no_producers: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """The follower follows the partition no longer on this stream."""

    key: TopicIdPartition


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a push: partition, leader epoch, durable end, start."""

    sequence: int
    entries: tuple[tuple[TopicIdPartition, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Push:
    """What the leader says about one partition."""

    key: TopicIdPartition
    leader_epoch: int
    high_watermark: int = -1
    log_start_offset: int = -1
    base_offset: int = -1
    records: bytes = b""
    diverging: EpochEnd | None = None
    error: ErrorCode | None = None
    producers: bytes = b""


@dataclass(frozen=True, slots=True)
class Pushes:
    """One message of the leader."""

    sequence: int
    pushes: tuple[Push, ...]
