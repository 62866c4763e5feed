"""A controller's process: the state machine, the active controller, and what brokers ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.quorum import Quorum
from penstock.chaos.simulator.scheduler import Clock, Scheduler, Timer
from penstock.raft_meta.core.active_controller import ActiveController
from penstock.raft_meta.core.cluster_state import Applied, ClusterState
from penstock.raft_meta.core.controller_events import (
    BecameActive,
    CommandApplied,
    EndStream,
    Event,
    Heartbeat,
    LostLeadership,
    ProposalFailed,
    Propose,
    Reply,
    StreamClosed,
    StreamOpened,
    Tick,
)
from penstock.raft_meta.core.sessions import LivenessSettings
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import NotControllerError

CLUSTER_ID = "simulated"


class Watcher(Protocol):
    """Looks at controllers after every entry."""

    def entry_applied(self, node_id: int, state: ClusterState) -> None:
        """A controller applied one more entry."""
        ...


@dataclass(frozen=True, slots=True)
class ControllerPlace:
    """What a controller's process stands on."""

    scheduler: Scheduler
    network: Network
    clock: Clock
    quorum: Quorum
    liveness: LivenessSettings
    watcher: Watcher


class SimulatedController:
    """One process. Its state begins with ``snapshot``, as the node's disk has it."""

    def __init__(self, node_id: int, place: ControllerPlace, snapshot: bytes | None) -> None:
        self.node_id = node_id
        self.address = -node_id
        self.alive = True
        self.state = ClusterState.restore(snapshot) if snapshot else ClusterState()
        self._place = place
        self._term = -1  # Led now, -1 when none is.
        self._sequence = 0
        self._active = ActiveController(place.liveness)
        self._timer: Timer | None = None
        self._streams: dict[int, End] = {}
        self._stream_count = 0
        self._feeds: list[End] = []
        place.quorum.join(self)

    # The quorum's member.

    @property
    def applied_index(self) -> int:
        """The last entry applied."""
        return self.state.applied_index

    def apply(self, index: int, payload: bytes) -> Applied:
        """Apply an entry, and let brokers know."""
        applied = self.state.apply(index, payload)
        self._place.watcher.entry_applied(self.node_id, self.state)
        if applied.delta is not None:
            self._feeds = [feed for feed in self._feeds if feed.is_open]
            for feed in self._feeds:
                feed.send(applied.delta)
        return applied

    def lead(self, term: int) -> None:
        """Claim the controller epoch."""
        self._term = term
        self._sequence = 0
        claim = cluster_pb2.BecomeControllerCommand(
            controller_id=self.node_id,
            cluster_id=CLUSTER_ID,
            metadata_version=METADATA_VERSION,
        )

        def claimed(applied: Applied | None) -> None:
            if applied is not None and self._term == term:
                assert not applied.result.HasField("error"), applied.result.error
                self._tell(BecameActive(term, self.state))

        self._propose(cluster_pb2.Command(become_controller=claim), claimed)

    def lead_no_more(self, term: int) -> None:
        """Forget the leadership."""
        if self._term == term and self.alive:
            self._term = -1
            self._tell(LostLeadership())

    def _propose(
        self, command: cluster_pb2.Command, on_applied: Callable[[Applied | None], None]
    ) -> None:
        self._sequence += 1
        stamped = cluster_pb2.Command()
        stamped.CopyFrom(command)
        stamped.controller_epoch = self._term
        stamped.sequence = self._sequence

        def answered(applied: Applied | None) -> None:
            if self.alive:
                on_applied(applied)

        self._place.quorum.propose(self.node_id, self._term, stamped.SerializeToString(), answered)

    # The active controller.

    def _tell(self, event: Event) -> None:
        for effect in self._active.handle(event, self._place.clock.now_ms):
            match effect:
                case Propose(proposal_id, command):
                    self._propose(command, partial(self._proposed, proposal_id))
                case Reply(stream_id, response):
                    self._streams[stream_id].send(response)
                case EndStream(stream_id, error):
                    end = self._streams.pop(stream_id)
                    end.send(controller_pb2.BrokerHeartbeatResponse(error=error.to_proto()))
                    end.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._active.next_deadline_ms()
        if due_ms is not None:
            delay_ms = due_ms - self._place.clock.now_ms
            self._timer = self._place.scheduler.after(delay_ms, self._tick, node=self.node_id)

    def _tick(self) -> None:
        self._timer = None
        if self.alive:
            self._tell(Tick())

    def _proposed(self, proposal_id: int, applied: Applied | None) -> None:
        if applied is None:
            self._tell(ProposalFailed(proposal_id))
        else:
            self._tell(CommandApplied(applied.result, applied.delta, proposal_id))

    # What brokers ask.

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Carry out ``command``: the only request there is."""
        assert method == "command"
        if not self._active.is_active:
            error = NotControllerError("not the active controller").to_proto()
            reply(cluster_pb2.CommandResult(error=error))
            return

        def applied_(applied: Applied | None) -> None:
            if applied is None:
                error = NotControllerError("not the active controller any more").to_proto()
                reply(cluster_pb2.CommandResult(error=error))
                return
            self._tell(CommandApplied(applied.result, applied.delta))
            reply(applied.result)

        self._propose(request, applied_)

    def accept(self, service: str, end: End) -> None:
        """Take a heartbeat stream or a feed of metadata."""
        if service == "metadata":
            self._feeds.append(end)
            end.send(self.state.metadata())
            return
        assert service == "heartbeat"
        self._stream_count += 1
        stream_id = self._stream_count
        self._streams[stream_id] = end
        end.on_message = lambda request: self._heartbeat(stream_id, request)
        end.on_broken = lambda: self._stream_closed(stream_id)
        self._tell(StreamOpened(stream_id))

    def _heartbeat(self, stream_id: int, request: controller_pb2.BrokerHeartbeatRequest) -> None:
        if self.alive:
            self._tell(Heartbeat(stream_id, request))

    def _stream_closed(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self._tell(StreamClosed(stream_id))
