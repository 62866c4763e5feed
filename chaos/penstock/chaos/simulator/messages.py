"""What brokers say to each other in the simulator: as penstock.v1.Replication, as plain values."""

from __future__ import annotations

from typing import NamedTuple

from penstock.broker.core.ports import EpochEnd
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition


class Hello(NamedTuple):
    """The first message of a follower."""

    node_id: int
    broker_epoch: int


class Position(NamedTuple):
    """Where a follower's log stands."""

    key: TopicIdPartition
    leader_epoch: int
    log_end_offset: int
    last_epoch: int
    log_start_offset: int
    knows_no_producers: bool


class Stop(NamedTuple):
    """The follower follows the partition no longer on this stream."""

    key: TopicIdPartition


class Ack(NamedTuple):
    """The answer to a push: partition, leader epoch, durable end, start."""

    sequence: int
    entries: tuple[tuple[TopicIdPartition, int, int, int], ...]


class Push(NamedTuple):
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


class Pushes(NamedTuple):
    """One message of the leader."""

    sequence: int
    pushes: tuple[Push, ...]
