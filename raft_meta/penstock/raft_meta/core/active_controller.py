"""The active controller: the one that watches time, and proposes what follows from it.

It decides nothing by itself: every change is a proposal that the state machine may refuse.

=====================================  ==========================================================
what happens                           what the controller does
=====================================  ==========================================================
a broker heartbeats, is fenced, wants  unfence it, once it has seen the metadata as they were when
to serve                               it was fenced, its own registration among them
its stream breaks                      fence it after disconnect_grace_ms, unless it comes back
its stream breaks after it was told    fence it at once
that it may stop
nothing is heard from it               fence it after session_timeout_ms
this process stood still               no time of that is a broker's silence
this controller becomes active         give everybody a whole session_timeout_ms to find it, but
                                       takeover_grace_ms to nodes that seem to be gone
most brokers found it by roll_call_ms  fence those that did not, if they must know of it
it wants to be fenced                  fence it
it wants to shut down                  move its leaderships away, then let it stop
another leads than is preferred        elect the preferred leader once it is in sync, if it lacks
                                       enough of its leaderships (leader.imbalance.*)
=====================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.controller_events import (
    BecameActive,
    CommandApplied,
    Effect,
    EndStream,
    Event,
    Heartbeat,
    LostLeadership,
    ProposalFailed,
    Propose,
    Reply,
    StoodStill,
    StreamClosed,
    StreamOpened,
    Tick,
)
from penstock.raft_meta.core.model import Broker
from penstock.raft_meta.core.sessions import LivenessSettings, Session, after_a_stall
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    DuplicateBrokerRegistrationError,
    InvalidRequestError,
    NetworkError,
    NotControllerError,
    PenstockError,
    StaleBrokerEpochError,
)

_BALANCE: Final = None  # In the place of a session: the proposal of a balancing round.


class ActiveController:
    """The decisions. ``handle`` is the only mutator; not thread-safe.

    Call ``handle(Tick(), now_ms)`` when ``next_deadline_ms()`` has come; ask for the deadline
    again after every event. Nothing is to be done in between: there is no polling.
    """

    def __init__(self, settings: LivenessSettings | None = None) -> None:
        self._own_times = settings or LivenessSettings()
        self._times = self._own_times  # With what the cluster shares, while active.
        self._state: ClusterState | None = None  # Set while active.
        self._epoch = 0
        self._changed_index = 0  # Of the last change that brokers are told of.
        self._sessions: dict[int, Session] = {}  # By node id; every unfenced broker has one.
        self._streams: dict[int, int | None] = {}  # Open streams and the nodes that use them.
        self._proposals: dict[int, Session | None] = {}  # What is in flight.
        self._last_proposal_id = 0
        self._roll_call_at_ms: int | None = None  # Set from the takeover on, until it was held.
        self._told: Collection[int] = ()  # Who lives knows of the takeover, of these nodes.
        self._balance_at_ms: int | None = None
        self._balancing = False  # A round's proposal is in flight.

    @property
    def is_active(self) -> bool:
        """This node is the active controller, as far as it knows."""
        return self._state is not None

    @property
    def changed_index(self) -> int:
        """The index of the last change that brokers are told of."""
        return self._changed_index

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event in; what is to be done, in order."""
        match event:
            case BecameActive():
                return self._on_became_active(event, now_ms)
            case LostLeadership():
                return self._on_lost_leadership()
            case StreamOpened(stream_id):
                return self._on_stream_opened(stream_id)
            case Heartbeat(stream_id, request):
                return self._on_heartbeat(stream_id, request, now_ms)
            case StreamClosed(stream_id):
                return self._on_stream_closed(stream_id, now_ms)
            case CommandApplied():
                return self._on_applied(event, now_ms)
            case ProposalFailed(proposal_id):
                return self._on_proposal_failed(proposal_id, now_ms)
            case StoodStill(lost_ms):
                return self._on_stood_still(lost_ms, now_ms)
            case Tick():
                return self._on_tick(now_ms)

    def next_deadline_ms(self) -> int | None:
        """When the next Tick is wanted; None while nothing depends on time."""
        if self._state is None:
            return None
        # A broker may be unregistered in the state already, and CommandApplied be about to come.
        brokers = self._state.brokers
        dues = [
            session.deadline_ms(brokers[node_id])
            for node_id, session in self._sessions.items()
            if node_id in brokers
        ]
        if not self._balancing:
            dues.append(self._balance_at_ms)
        if any(not session.has_come for session in self._sessions.values()):
            dues.append(self._roll_call_at_ms)
        return min((due for due in dues if due is not None), default=None)

    def registration_conflict(
        self, registration: cluster_pb2.RegisterBrokerCommand, now_ms: int
    ) -> DuplicateBrokerRegistrationError | None:
        """Why the process should not be registered now: another one lives under its node id.

        Two processes with one node id would fence each other in turns. A killed process is no
        conflict: its stream breaks; nor is one that is silent for half of the session timeout.
        """
        session = self._sessions.get(registration.node_id)
        if self._state is None or session is None or session.stream_id is None:
            return None
        broker = self._state.brokers[session.node_id]
        silent_ms = now_ms - session.heard_at_ms
        if (
            broker.incarnation_id == registration.incarnation_id
            or broker.fenced
            or session.wants_shutdown
            or silent_ms * 2 >= self._times.session_timeout_ms
        ):
            return None
        return DuplicateBrokerRegistrationError(
            f"node {broker.node_id} is running already, at {broker.host}:{broker.port}: give "
            f"each node its own node.id, or stop the other process first"
        )

    # Leadership.

    def _on_became_active(self, event: BecameActive, now_ms: int) -> list[Effect]:
        effects = self._on_lost_leadership()  # A newer epoch: whatever is open belongs to an older.
        self._state = event.state
        self._epoch = event.controller_epoch
        self._changed_index = event.state.applied_index
        self._times = self._own_times.shared(event.state.cluster_configs)
        self._adopt(now_ms, event.unconnected)
        self._roll_call_at_ms = now_ms + self._times.roll_call_ms
        self._told = frozenset(self._sessions) if event.former_ended else event.voters
        self._plan_balancing(now_ms)
        return effects

    def _on_lost_leadership(self) -> list[Effect]:
        error = NotControllerError("this node is not the active controller any more; ask another")
        effects: list[Effect] = [EndStream(stream_id, error) for stream_id in self._streams]
        self._state = None
        self._sessions.clear()
        self._streams.clear()
        self._proposals.clear()
        self._roll_call_at_ms = None
        self._balance_at_ms = None
        self._balancing = False
        return effects

    def _adopt(self, now_ms: int, unconnected: Collection[int] = ()) -> None:
        """Watch every unfenced broker, and nobody whose registration is over.

        That a broker is silent says nothing by itself before it had a whole session's time to come:
        on busy machines those that were fenced for less brought the next controller down with the
        work. A node without a Raft connection has died, as one whose stream breaks, or it started
        just now and its broker is another process.
        """
        assert self._state is not None
        for node_id, broker in sorted(self._state.brokers.items()):
            if not broker.fenced and node_id not in self._sessions:
                seems_gone = node_id in unconnected
                times = self._times
                wait_ms = times.takeover_grace_ms if seems_gone else times.session_timeout_ms
                self._sessions[node_id] = Session(
                    node_id, broker.broker_epoch, now_ms + wait_ms, wait_ms
                )

    # Streams.

    def _on_stream_opened(self, stream_id: int) -> list[Effect]:
        if self._state is None:
            return [EndStream(stream_id, NotControllerError("this node is not the active one"))]
        self._streams[stream_id] = None
        return []

    def _on_stream_closed(self, stream_id: int, now_ms: int) -> list[Effect]:
        node_id = self._streams.pop(stream_id, None)
        session = None if node_id is None else self._sessions.get(node_id)
        if session is None or session.stream_id != stream_id:
            return []
        session.disconnected(now_ms, self._times)
        return self._review(session, now_ms)

    def _end(self, stream_id: int, error: PenstockError, now_ms: int) -> list[Effect]:
        return [*self._on_stream_closed(stream_id, now_ms), EndStream(stream_id, error)]

    def _on_heartbeat(
        self, stream_id: int, request: controller_pb2.BrokerHeartbeatRequest, now_ms: int
    ) -> list[Effect]:
        if self._state is None or stream_id not in self._streams:
            return []  # It was ended; what was on its way does not count.
        broker = self._state.brokers.get(request.node_id)
        refusal = self._refusal(stream_id, broker, request)
        if refusal is not None or broker is None:
            return [] if refusal is None else self._end(stream_id, refusal, now_ms)
        session = self._sessions.get(broker.node_id)
        if session is None:
            session = Session(broker.node_id, broker.broker_epoch, now_ms)
            session.unfence_index = self._changed_index
            self._sessions[broker.node_id] = session
        effects: list[Effect] = []
        if session.stream_id not in (None, stream_id):
            replaced = session.stream_id
            self._streams.pop(replaced, None)
            error = NetworkError(f"broker {broker.node_id} opened a newer heartbeat stream")
            effects.append(EndStream(replaced, error))
        self._streams[stream_id] = broker.node_id
        session.stream_id = stream_id
        session.heard(request, now_ms, self._times)
        session.reply = None  # A heartbeat is always answered.
        return effects + self._tell(session, now_ms) + self._review(session, now_ms)

    def _refusal(
        self,
        stream_id: int,
        broker: Broker | None,
        request: controller_pb2.BrokerHeartbeatRequest,
    ) -> PenstockError | None:
        if self._streams[stream_id] not in (None, request.node_id):
            return InvalidRequestError(
                f"a heartbeat stream of broker {self._streams[stream_id]} cannot speak for "
                f"broker {request.node_id}"
            )
        if broker is None:
            return BrokerIdNotRegisteredError(f"broker {request.node_id} must register first")
        if broker.broker_epoch != request.broker_epoch:
            return StaleBrokerEpochError(
                f"broker {request.node_id} is registered with broker epoch "
                f"{broker.broker_epoch}, not {request.broker_epoch}: it must register anew"
            )
        return None

    # Proposals.

    def _propose(self, session: Session | None, command: cluster_pb2.Command) -> Propose:
        self._last_proposal_id += 1
        self._proposals[self._last_proposal_id] = session
        return Propose(self._last_proposal_id, command)

    def _review(self, session: Session, now_ms: int) -> list[Effect]:
        """Propose what the broker's session calls for, unless something is in flight."""
        if session.proposal_id is not None or now_ms < session.retry_at_ms:
            return []
        session.retry_at_ms = -1
        assert self._state is not None
        wish = session.wish(self._state.brokers[session.node_id], now_ms)
        if wish is None:
            return []
        proposal = self._propose(session, wish)
        session.proposal_id = proposal.proposal_id
        return [proposal]

    def _settle(self, proposal_id: int, now_ms: int, *, failed: bool) -> Session | None:
        """Take a proposal out of flight; the session that it was about, if that is still on."""
        if proposal_id not in self._proposals:
            return None  # Of an earlier leadership.
        session = self._proposals.pop(proposal_id)
        retry_at_ms = now_ms + self._times.retry_ms
        if session is _BALANCE:
            self._balancing = False
            if failed:
                self._balance_at_ms = retry_at_ms
            return None
        session.proposal_id = None
        if failed:
            session.retry_at_ms = retry_at_ms
        return session if self._sessions.get(session.node_id) is session else None

    def _on_proposal_failed(self, proposal_id: int, now_ms: int) -> list[Effect]:
        self._settle(proposal_id, now_ms, failed=True)
        return []

    def _on_applied(self, event: CommandApplied, now_ms: int) -> list[Effect]:
        if self._state is None:
            return []
        effects: list[Effect] = []
        settled: Session | None = None
        if event.proposal_id is not None:
            failed = event.result.HasField("error")
            settled = self._settle(event.proposal_id, now_ms, failed=failed)
        if event.delta is not None:
            effects += self._on_changes(event.delta, now_ms)
        if settled is not None and self._sessions.get(settled.node_id) is settled:
            effects += self._review(settled, now_ms)
        return effects

    def _on_changes(self, delta: cluster_pb2.MetadataDelta, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        self._changed_index = delta.index
        if delta.HasField("cluster_configs"):
            self._reconfigure(now_ms)
        for record in delta.brokers:
            session = self._sessions.get(record.node_id)
            if session is not None and record.fenced:
                session.unfence_index = delta.index
        if delta.brokers or delta.removed_brokers:
            effects += self._end_stale_sessions(now_ms)
            self._adopt(now_ms)
        for session in self._sessions.values():
            if delta.brokers or session.wants_shutdown:
                effects += self._tell(session, now_ms)
        self._plan_balancing(now_ms)
        return effects

    def _reconfigure(self, now_ms: int) -> None:
        """Go by the settings that the cluster shares now, for what begins from now on."""
        assert self._state is not None
        self._times = self._own_times.shared(self._state.cluster_configs)
        if self._balance_at_ms is not None:
            self._balance_at_ms = min(self._balance_at_ms, now_ms + self._times.balance_interval_ms)
        if not self._times.balance:
            self._balance_at_ms = None

    def _end_stale_sessions(self, now_ms: int) -> list[Effect]:
        """Forget sessions of registrations that are over."""
        assert self._state is not None
        effects: list[Effect] = []
        for node_id, session in list(self._sessions.items()):
            broker = self._state.brokers.get(node_id)
            if broker is not None and broker.broker_epoch == session.broker_epoch:
                continue
            del self._sessions[node_id]
            if session.stream_id is not None:
                error: PenstockError = StaleBrokerEpochError(
                    f"broker {node_id} registered anew; this process is the older one"
                )
                if broker is None:
                    error = BrokerIdNotRegisteredError(f"broker {node_id} was unregistered")
                effects += self._end(session.stream_id, error, now_ms)
        return effects

    def _tell(self, session: Session, now_ms: int) -> list[Effect]:
        """Answer on the broker's stream, unless what there is to say was said."""
        assert self._state is not None
        if session.stream_id is None or session.request is None:
            return []
        broker = self._state.brokers[session.node_id]
        reply = (broker.fenced, session.may_shut_down(self._state, broker, now_ms))
        if reply == session.reply:
            return []
        session.reply = reply
        response = controller_pb2.BrokerHeartbeatResponse(
            fenced=reply[0],
            may_shut_down=reply[1],
            sequence=session.request.sequence,
            controller_epoch=self._epoch,
            metadata_index=self._changed_index,
        )
        return [Reply(session.stream_id, response)]

    # Time.

    def _on_tick(self, now_ms: int) -> list[Effect]:
        due_ms = self.next_deadline_ms()
        if self._state is None or due_ms is None or now_ms < due_ms:
            return []
        self._call_the_roll(now_ms)
        effects: list[Effect] = []
        for session in self._sessions.values():
            if session.wants_shutdown:
                effects += self._tell(session, now_ms)
            effects += self._review(session, now_ms)
        return effects + self._balance(now_ms)

    def _call_the_roll(self, now_ms: int) -> None:
        """Give up those who did not come since the takeover, if most brokers did.

        They are as silent as brokers of a busy host, but there most would be silent: it can't be
        that many are fenced at once. A broker that may still wait for the former active controller
        to answer has its whole session.
        """
        if self._roll_call_at_ms is None or now_ms < self._roll_call_at_ms:
            return
        self._roll_call_at_ms = None
        assert self._state is not None
        brokers = self._state.brokers
        watched = [s for s in self._sessions.values() if not brokers[s.node_id].fenced]
        missing = [session for session in watched if not session.has_come]
        if 2 * len(missing) >= len(watched):
            return
        for session in missing:
            if session.node_id in self._told:
                session.fence_at_ms = min(session.fence_at_ms, now_ms)

    def _on_stood_still(self, lost_ms: int, now_ms: int) -> list[Effect]:
        """Count silence in time that this process was awake: who is gone is fenced all the same."""
        for session in self._sessions.values():
            session.stood_still(lost_ms, now_ms)
        if self._roll_call_at_ms is not None:
            wait_ms = self._times.roll_call_ms
            due_ms = self._roll_call_at_ms
            self._roll_call_at_ms = after_a_stall(due_ms, wait_ms, lost_ms, now_ms)
        return []

    # Balancing.

    def _plan_balancing(self, now_ms: int) -> None:
        assert self._state is not None
        wanted = self._times.balance and self._state.not_preferred_count > 0
        if wanted and self._balance_at_ms is None:
            self._balance_at_ms = now_ms + self._times.balance_interval_ms

    def _balance(self, now_ms: int) -> list[Effect]:
        """Give leaderships back to the preferred leaders that are in sync again."""
        if self._state is None or self._balance_at_ms is None or self._balancing:
            return []
        if now_ms < self._balance_at_ms:
            return []
        self._balance_at_ms = None  # Planned again by the next change.
        command = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_PREFERRED)
        lacking = self._state.lacking_leaderships(self._times.balance_threshold_percent)
        for (topic_id, number), partition in self._state.all_partitions():
            preferred = partition.replicas[0]
            if partition.leader == preferred or preferred not in partition.isr:
                continue
            broker = self._state.brokers.get(preferred)
            if preferred not in lacking or broker is None or not broker.usable:
                continue
            if not broker.drained_since_ms:
                command.partitions.add(topic_id=topic_id, partition=number)
                if len(command.partitions) == self._times.balance_batch:
                    break
        if not command.partitions:
            return []
        self._balancing = True
        return [self._propose(_BALANCE, cluster_pb2.Command(elect_leaders=command))]
