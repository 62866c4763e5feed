"""What the active controller is told, and what it wants done.

The shell tells events in the order in which they happened, on one thread, the same on which it
applies to the ClusterState: CommandApplied comes right after ``ClusterState.apply``.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import PenstockError

# Events.


@dataclass(frozen=True, slots=True)
class BecameActive:
    """This node's BecomeControllerCommand was applied. ``state`` is read until LostLeadership."""

    controller_epoch: int
    state: ClusterState
    unconnected: frozenset[int] = frozenset()
    """Voters' nodes that this one has no connection from: they ended, or started just now."""
    voters: frozenset[int] = frozenset()
    """The nodes that hear of a new leader from Raft, if they run."""
    former_ended: bool = False
    """The process of the former active controller ended: all streams to it broke with it."""


@dataclass(frozen=True, slots=True)
class LostLeadership:
    """This node leads the quorum no longer, or shuts down."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A broker opened a heartbeat stream. Ids are never used twice in one process."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A message came on a stream."""

    stream_id: int
    request: controller_pb2.BrokerHeartbeatRequest


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A stream broke or ended, from whichever side."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class CommandApplied:
    """An entry was applied, whoever proposed it.

    ``proposal_id`` is that of the Propose effect that it answers, None for other entries.
    """

    result: cluster_pb2.CommandResult
    delta: cluster_pb2.MetadataDelta | None
    proposal_id: int | None = None


@dataclass(frozen=True, slots=True)
class ProposalFailed:
    """A Propose effect will not be applied, as far as the shell knows (a full queue)."""

    proposal_id: int


@dataclass(frozen=True, slots=True)
class StoodStill:
    """This process did nothing for so long, until now: a busy host, or somebody stopped it.

    Told before anything else that is handled after it, maybe between ``ClusterState.apply`` and its
    CommandApplied if the applying took that long. What brokers sent meanwhile may not have been
    heard yet.
    """

    lost_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline_ms`` has come."""


Event = (
    BecameActive
    | LostLeadership
    | StreamOpened
    | Heartbeat
    | StreamClosed
    | CommandApplied
    | ProposalFailed
    | StoodStill
    | Tick
)

# Effects.


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose ``command`` after setting its epoch and sequence.

    Unless LostLeadership comes first, it must be answered by one CommandApplied or
    ProposalFailed with this id.
    """

    proposal_id: int
    command: cluster_pb2.Command


@dataclass(frozen=True, slots=True)
class Reply:
    """Send on the stream."""

    stream_id: int
    response: controller_pb2.BrokerHeartbeatResponse


@dataclass(frozen=True, slots=True)
class EndStream:
    """Send the error on the stream and close it. StreamClosed may follow; it need not."""

    stream_id: int
    error: PenstockError


Effect = Propose | Reply | EndStream
