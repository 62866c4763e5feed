"""What happens to one partition replica, and what it asks for in return.

Events go into penstock.broker.core.replica.Replica.handle, effects come out of it. The log
effects (LogEffect) are to be carried out first, in their order, and at once: nothing else may be
handled in between. Then follows a LogAdvanced event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from penstock.broker.core.ports import Buffer, EpochEnd
from penstock.v1 import cluster_pb2
from penstock.wire.errors import ErrorCode


class LogView(Protocol):
    """What a replica reads of its own log; penstock.broker.core.ports.Log has it all."""

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        ...

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get."""
        ...

    @property
    def durable_offset(self) -> int:
        """Everything below survives what the flush policy promises to survive."""
        ...

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last batch, -1 for none."""
        ...

    def end_of_epoch(self, leader_epoch: int) -> EpochEnd:
        """The largest known epoch not above ``leader_epoch``, and where it ends."""
        ...


class Role(Enum):
    """What a replica does now."""

    OFFLINE = (
        "offline"  # Nobody leads, or this replica's disk failed: it neither serves nor copies.
    )
    FOLLOWER = "follower"
    LEADER = "leader"


class OutOfSync(Enum):
    """Why a follower is not in sync."""

    SLOW = "slow"  # It acknowledges, and yet had not all for replica.lag.time.max.ms.
    STUCK = "stuck"  # It lacks something and has acknowledged nothing new for as long.
    BOOTSTRAPPING = "bootstrapping"  # New or back: it copies what it lacks, or may join at once.
    OFFLINE = "offline"  # The controllers know: its broker is down or stopping, a disk failed.


@dataclass(frozen=True, slots=True)
class PartitionState:
    """A partition as the controllers committed it. Ordered by ``partition_epoch``.

    ``min_isr`` is the ``min.insync.replicas`` in force for this partition epoch, 0 when the
    controllers did not say: ones of before this was told.
    """

    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: frozenset[int]
    offline: frozenset[int] = frozenset()
    min_isr: int = 0

    @classmethod
    def from_record(cls, record: cluster_pb2.PartitionRecord) -> Self:
        """The same, of the record on the wire."""
        return cls(
            leader=record.leader,
            leader_epoch=record.leader_epoch,
            partition_epoch=record.partition_epoch,
            replicas=tuple(record.replicas),
            isr=frozenset(record.isr),
            offline=frozenset(record.offline_replicas),
            min_isr=record.min_insync_replicas,
        )


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker's registration; ``eligible``: it may join an in-sync set (unfenced and staying)."""

    broker_epoch: int
    eligible: bool


@dataclass(frozen=True, slots=True)
class IsrProposal:
    """A leader's wish, as it goes to the controllers: ``members`` are (node id, broker epoch).

    It never changes while its outcome is unknown, so that it may be sent again as it is.
    """

    leader_epoch: int
    partition_epoch: int
    members: tuple[tuple[int, int], ...]

    @property
    def isr(self) -> frozenset[int]:
        """The node ids of the new in-sync set."""
        return frozenset(node_id for node_id, _ in self.members)


# --- Events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    """The metadata says so. Known or older states (by partition epoch) are ignored.

    ``min_isr``: what the topic's configs, as the metadata have them now, make of it. It counts only
    where the state does not say.
    """

    state: PartitionState
    min_isr: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class MinIsrChanged:
    """``min.insync.replicas`` of the topic is another; for states that say none of their own."""

    min_isr: int


@dataclass(frozen=True, slots=True)
class LagMaxChanged:
    """``replica.lag.time.max.ms`` is another."""

    lag_max_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """The brokers as the metadata has them now, by node id, this one included."""

    brokers: Mapping[int, BrokerStatus]
    now_ms: int


@dataclass(frozen=True, slots=True)
class LogAdvanced:
    """The own log's start, end or durable offset moved."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class LogFailed:
    """The own disk failed: from now on this replica does nothing."""


@dataclass(frozen=True, slots=True)
class ReplicaRemoved:
    """This node has the replica no more, nor its log: nothing that comes later is for it.

    What is on its way still comes, such as the answer to a wish. Acted on, it would have a log that
    is gone stated to a leader, who would take this node for one that has it.
    """


@dataclass(frozen=True, slots=True)
class FollowerPositioned:
    """A follower stated its position. ``session`` counts the streams of followers upwards."""

    node_id: int
    session: int
    broker_epoch: int
    leader_epoch: int
    log_end_offset: int
    last_epoch: int
    log_start_offset: int
    now_ms: int
    knows_no_producers: bool = False  # See Log.


@dataclass(frozen=True, slots=True)
class FollowerAcked:
    """A follower's log stands here, durably."""

    node_id: int
    session: int
    leader_epoch: int
    log_end_offset: int
    log_start_offset: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class ProposalAnswered:
    """The controllers answered the proposal made at ``proposal``'s epochs.

    ``error`` is None when it took effect; ``state`` is the partition after it, or None when the
    controllers do not know the partition. A proposal whose outcome is unknown is not answered.
    """

    proposal: IsrProposal
    error: ErrorCode | None
    state: PartitionState | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of next_deadline_ms has come."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """The leader pushed: records, a high watermark, or that this log diverges from its own."""

    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    base_offset: int
    records: Buffer
    diverging: EpochEnd | None = None
    producers: bytes = b""  # What to begin anew with, see Log.producers_below.


@dataclass(frozen=True, slots=True)
class CopyAnew:
    """The own log is damaged, and can't be mended where it lies: drop it, and copy it anew."""


Event = (
    PartitionChanged
    | MinIsrChanged
    | LagMaxChanged
    | BrokersChanged
    | LogAdvanced
    | LogFailed
    | ReplicaRemoved
    | FollowerPositioned
    | FollowerAcked
    | ProposalAnswered
    | Tick
    | Pushed
    | CopyAnew
)


# --- Effects on the log ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AssignEpoch:
    """Log.assign_epoch: this node leads from here on."""

    leader_epoch: int


@dataclass(frozen=True, slots=True)
class AppendRecords:
    """Log.append_as_follower."""

    records: Buffer


@dataclass(frozen=True, slots=True)
class TruncateTo:
    """Log.truncate_to; also when ``offset`` is the log's end, to forget empty epochs."""

    offset: int


@dataclass(frozen=True, slots=True)
class TruncateFullyAndStartAt:
    """Log.truncate_fully_and_start_at."""

    offset: int
    producers: bytes = b""


@dataclass(frozen=True, slots=True)
class AdvanceLogStart:
    """Log.advance_log_start."""

    offset: int


LogEffect = AssignEpoch | AppendRecords | TruncateTo | TruncateFullyAndStartAt | AdvanceLogStart


# --- Effects on the world -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Another role, leader or leader epoch: whatever waits on the former one is to be ended."""

    role: Role
    leader: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class HighWatermarkChanged:
    """The high watermark is this now.

    It goes back only on a follower that cut its log, or comes to lead without having flushed it.
    """

    high_watermark: int


@dataclass(frozen=True, slots=True)
class IsrChanged:
    """The committed in-sync set, as the leader acts on it, or the number it needs, is another."""

    isr: frozenset[int]
    under_min_isr: bool
    left: Mapping[int, OutOfSync]
    """Who has just left, and why."""
    joined: frozenset[int]
    """Who has just come in."""


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """Send this to the controllers until an answer comes."""

    proposal: IsrProposal


@dataclass(frozen=True, slots=True)
class StartPush:
    """The follower's log is a prefix of this one: push it what lies from ``offset`` on."""

    node_id: int
    session: int
    offset: int


@dataclass(frozen=True, slots=True)
class Diverge:
    """The follower must cut (``end.leader_epoch`` -1: all, and start at ``end.end_offset``)."""

    node_id: int
    session: int
    end: EpochEnd


@dataclass(frozen=True, slots=True)
class RefuseFollower:
    """The follower's position cannot be served."""

    node_id: int
    session: int
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class StatePosition:
    """As a follower, state the log's position to the leader; ``pause``: not at once."""

    pause: bool = False


@dataclass(frozen=True, slots=True)
class LeaderLostRecords:
    """A follower holds records of this very leadership that the leader has not.

    The leader's disk lost them. It leads no more: to go on would overwrite what was acknowledged.
    """

    node_id: int
    follower_end_offset: int
    own_end_offset: int


Effect = (
    LogEffect
    | RoleChanged
    | HighWatermarkChanged
    | IsrChanged
    | ProposeIsr
    | StartPush
    | Diverge
    | RefuseFollower
    | StatePosition
    | LeaderLostRecords
)
