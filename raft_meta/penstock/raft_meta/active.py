"""The shell of the cluster's state machine: time, proposals and streams around the pure cores."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.active_controller import ActiveController
from penstock.raft_meta.core.cluster_state import ClusterState
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
    StoodStill,
    StreamClosed,
    StreamOpened,
    Tick,
)
from penstock.raft_meta.core.proposals import check_proposal
from penstock.raft_meta.core.sessions import LivenessSettings
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.raft_meta.metadata_stream import MetadataFeed
from penstock.raft_meta.punctuality import Punctuality
from penstock.raft_meta.quorum import FeatureLevels, Leadership, Quorum
from penstock.raft_meta.refusals import RefusalCounter, codes_in, nobody_counts
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import (
    LeaderHint,
    NotControllerError,
    PenstockError,
    error_from_proto,
)

log = structlog.get_logger()

_NOBODY: Final = -1
_UNREAD_RESPONSES: Final = 100
_CLAIM_RETRY_S: Final = 0.1
_LONGEST_PENANCE_S: Final = 10.0
_FORGIVEN_AFTER_S: Final = 60.0
_TOLD_STALL_S: Final = 1.0


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


_TOLD_REASONS: Final = 20
"""So many reasons why snapshots were refused are logged, and no more."""


class HeartbeatStream:
    """One broker's stream: what it is to be told."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self._queue: asyncio.Queue[controller_pb2.BrokerHeartbeatResponse | None] = asyncio.Queue()

    def send(self, response: controller_pb2.BrokerHeartbeatResponse) -> None:
        """Queue a response; one that only answers is dropped for a broker that does not read."""
        if self._queue.qsize() < _UNREAD_RESPONSES or response.HasField("error"):
            self._queue.put_nowait(response)

    def end(self) -> None:
        """End the stream after what is queued."""
        self._queue.put_nowait(None)

    async def responses(self) -> AsyncIterator[controller_pb2.BrokerHeartbeatResponse]:
        """What to send, as it comes."""
        while (response := await self._queue.get()) is not None:
            yield response


class ControllerShell:
    """Owns ClusterState and ActiveController; the quorum's StateMachine. One event loop.

    Active from the moment its BecomeController command is applied until leadership is lost.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        count_refusal: RefusalCounter = nobody_counts,
    ) -> None:
        self._config = config
        self._clock_ms = clock_ms
        self._count_refusal = count_refusal
        self._quorum: Quorum = None  # type: ignore[assignment]  # bind() is called first.
        self.state = ClusterState()
        self.feed = MetadataFeed(lambda: self.state.frozen().metadata, self.endpoint)
        self._core = ActiveController(
            LivenessSettings(
                session_timeout_ms=config.broker_session_timeout_ms,
                disconnect_grace_ms=config.broker_disconnect_grace_ms,
                takeover_grace_ms=config.takeover_grace_ms,
                balance=config.balance,
                balance_interval_ms=config.balance_interval_ms,
                balance_threshold_percent=config.balance_threshold_percent,
            )
        )
        self._epoch = 0  # The term led, 0 when not leading.
        self._renounced_epoch = 0  # The last one that was given up; it is not claimed again.
        self._renounced_ms = 0
        self._penance_s = 0.0  # How long the office is not claimed after it was given up.
        self._sequence = 0
        self._claim = b""  # The BecomeController command under way.
        self._proposal_ids: dict[bytes, int] = {}  # The core's proposals under way, by payload.
        self._streams: dict[int, HeartbeatStream] = {}
        self._stream_ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._unreadable: set[str] = set()  # What was said of snapshots; on the voter's thread.
        self._punctuality = Punctuality(self._was_late)

    @property
    def is_active(self) -> bool:
        """Whether this is the active controller. On any thread."""
        return self._core.is_active

    @property
    def levels(self) -> FeatureLevels:
        """The levels of metadata.version. None is in force before a controller was ever active."""
        return FeatureLevels(
            METADATA_VERSION,
            lambda: self.state.metadata_version if self.state.controller_epoch else 0,
            self._why_unreadable,
        )

    def _why_unreadable(self, snapshot: bytes) -> str:
        """See FeatureLevels. A reason is logged once: strangers must not fill the log."""
        try:
            ClusterState.restore(snapshot)
        except Exception as error:  # Whatever bytes lead to: somebody made them up.
            why = str(error) or type(error).__name__
        else:
            return ""
        if why not in self._unreadable and len(self._unreadable) < _TOLD_REASONS:
            self._unreadable.add(why)
            log.warning("a snapshot that is not of a voter was refused", reason=why)
        return why

    def bind(self, quorum: Quorum) -> None:
        """Take part in a quorum that this is the state machine of."""
        self._quorum = quorum
        quorum.add_leadership_listener(self._on_leadership)

    def stop(self) -> None:
        """Say farewell to everybody; nothing is proposed any more."""
        self._resign()
        self.feed.close()

    # The state machine (penstock.raft_meta.quorum.StateMachine).

    def apply(self, index: int, term: int, payload: bytes) -> bytes:
        """Apply a command to the state, and let the active controller and the brokers know."""
        self._punctuality.look()  # What it was late for is judged by the state as it was then.
        former_id = self.state.controller_id
        applied = self.state.apply(index, payload)
        if self._claim and payload == self._claim:
            self._claim = b""
            self._on_claimed(applied.result, former_id)
        else:
            proposal_id = self._proposal_ids.pop(payload, None)
            self._handle(CommandApplied(applied.result, applied.delta, proposal_id))
        if self._core.is_active:  # One of all controllers counts, and none counts twice.
            for code in codes_in(applied.result):
                self._count_refusal(applied.command, code)
        self.feed.changed(applied.delta)
        return applied.result.SerializeToString()

    def freeze(self) -> Callable[[], bytes]:
        """The whole state, to be encoded later."""
        return self.state.frozen().snapshot

    def install(self, index: int, snapshot: bytes) -> None:
        """Replace the whole state."""
        self.state = ClusterState.restore(snapshot)
        log.info("metadata snapshot taken over", index=index, size_bytes=len(snapshot))
        self.feed.replaced(self.state.applied_index, self.state.controller_epoch)

    # Leadership.

    def _on_leadership(self, leadership: Leadership) -> None:
        if self._epoch and not (leadership.leading and leadership.term == self._epoch):
            log.info("not the leader of the quorum any more", controller_epoch=self._epoch)
            self._resign()
        if leadership.leading and not self._epoch and leadership.term != self._renounced_epoch:
            self._epoch = leadership.term
            self._sequence = 0
            claim = cluster_pb2.BecomeControllerCommand(
                controller_id=self._config.node_id,
                cluster_id=self._config.cluster_id,
                metadata_version=METADATA_VERSION,
            )
            command = cluster_pb2.Command(controller_epoch=self._epoch, become_controller=claim)
            self._claim = command.SerializeToString()
            if self._is_repenting():  # What failed may fail again at once; elections are dear.
                self._claim_later(self._claim, self._penance_s)
            else:
                self._submit(self._claim)
        self.feed.changed(None)

    def _on_claimed(self, result: cluster_pb2.CommandResult, former_id: int) -> None:
        if result.HasField("error"):
            # Another cluster's state, or a term that went back: this process must not go on.
            raise error_from_proto(result.error)
        log.info("active controller", controller_epoch=self._epoch)
        status = self._quorum.status()
        self._punctuality.start()
        self._handle(
            BecameActive(
                self._epoch,
                self.state,
                status.unconnected,
                voters=frozenset(member.node_id for member in status.voters or ()),
                former_ended=former_id in status.unconnected,
            )
        )

    def _was_late(self, since_s: float) -> None:
        lost_s = asyncio.get_running_loop().time() - since_s
        if lost_s >= _TOLD_STALL_S:
            log.warning(
                "the active controller stood still; brokers are given that time",
                seconds=round(lost_s, 3),
                next_step="give this process more of the processor's time: too much runs on this "
                "machine, or it was stopped",
            )
        self._handle(StoodStill(round(lost_s * 1000)))

    def _resign(self) -> None:
        self._punctuality.stop()
        self._epoch = 0
        self._claim = b""
        self._proposal_ids.clear()
        self._handle(LostLeadership())

    def endpoint(self) -> controller_pb2.ControllerEndpoint:
        """Where the active controller is, as far as it is known here."""
        node_id = self.state.controller_id
        if node_id == self._config.node_id and not self._core.is_active:
            node_id = _NOBODY  # It was this one, until a moment ago or before a restart.
        address = None if node_id == _NOBODY else self._quorum.address_of(node_id)
        host, port = address or ("", 0)
        return controller_pb2.ControllerEndpoint(
            node_id=node_id if host else _NOBODY,
            controller_epoch=self.state.controller_epoch,
            host=host,
            port=port,
            voters=self._known_voters(),
        )

    def _known_voters(self) -> list[controller_pb2.QuorumVoter]:
        """Where controllers are found: brokers may have been told of fewer, or of others."""
        voters = self._quorum.status().voters or ()
        return [
            controller_pb2.QuorumVoter(node_id=member.node_id, host=host, port=port)
            for member in voters
            for host, port in [self._quorum.address_of(member.node_id) or member.address]
            if host
        ]

    def not_controller(self) -> NotControllerError:
        """The refusal of what the active controller alone may do, with where that one is."""
        status = self._quorum.status()
        leader, me = status.leader_id, self._config.node_id
        hint: LeaderHint | None = None
        address = self._quorum.address_of(leader)
        if leader != me and address is not None:
            hint = LeaderHint(leader, status.term, *address)
        where = f"ask node {leader}" if hint else "none is known; try again soon"
        return NotControllerError(f"controller {me} is not the active one: {where}", leader=hint)

    # Proposals.

    async def execute(
        self, command: cluster_pb2.Command, *, timeout_ms: int | None = None
    ) -> cluster_pb2.CommandResult:
        """Propose a command in this controller's epoch; its result, which may be a refusal.

        Raises NotControllerError when this is not the active controller (nothing happened),
        RequestTimedOutError when the outcome is unknown, InvalidConfigError for what is refused
        before it is proposed (core/proposals.py), and for a raise of metadata.version what
        Quorum.propose does.
        """
        if not self._core.is_active:
            raise self.not_controller()
        try:
            check_proposal(self.state, command)
        except PenstockError as error:
            self._count_refusal(command.WhichOneof("body") or "", error.code)
            raise
        wait_ms = self._config.propose_timeout_ms if timeout_ms is None else timeout_ms
        # Stamped and submitted in one go: the log's order is that of the sequences.
        raises_to = command.raise_metadata_version.metadata_version  # Or 0.
        raw = await self._quorum.propose(self._stamp(command), timeout_ms=wait_ms, level=raises_to)
        return cluster_pb2.CommandResult.FromString(raw)

    @property
    def changed_index(self) -> int:
        """The index of the last change that brokers are told of, while this node is active."""
        return self._core.changed_index

    def registration_conflict(
        self, registration: cluster_pb2.RegisterBrokerCommand
    ) -> PenstockError | None:
        """Why a process should not be registered now; None when nothing speaks against it."""
        self._punctuality.look()
        conflict = self._core.registration_conflict(registration, self._clock_ms())
        if conflict is not None:
            self._count_refusal("register_broker", conflict.code)
        return conflict

    def _stamp(self, command: cluster_pb2.Command) -> bytes:
        self._sequence += 1
        stamped = cluster_pb2.Command()
        stamped.CopyFrom(command)
        stamped.controller_epoch = self._epoch
        stamped.sequence = self._sequence
        return stamped.SerializeToString()

    def _submit(self, payload: bytes) -> None:
        try:
            future = self._quorum.submit(payload)
        except PenstockError as error:
            log.warning("a proposal was not taken", reason=error.message)
            if payload == self._claim:
                self._claim_later(payload)
                return
            proposal_id = self._proposal_ids.pop(payload, None)
            if proposal_id is not None:
                self._handle(ProposalFailed(proposal_id))
            return
        future.add_done_callback(lambda done: self._on_submitted(payload, done))

    def _claim_later(self, payload: bytes, after_s: float = _CLAIM_RETRY_S) -> None:
        """Without its claim the leader is not the active controller, and nobody else is."""
        asyncio.get_running_loop().call_later(after_s, self._claim_again, payload)

    def _claim_again(self, payload: bytes) -> None:
        if payload == self._claim:
            self._submit(payload)

    def _on_submitted(self, payload: bytes, done: asyncio.Future[bytes]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and payload == self._claim:
            # It was handing over and leads on; or it leads no more, and is told before the time.
            self._claim_later(payload)
        proposal_id = self._proposal_ids.pop(payload, None)
        if failed and proposal_id is not None:
            self._handle(ProposalFailed(proposal_id))

    # Heartbeats.

    def open_stream(self) -> HeartbeatStream:
        """A broker opened a heartbeat stream; close it in the end."""
        stream = HeartbeatStream(next(self._stream_ids))
        self._streams[stream.stream_id] = stream
        self._handle(StreamOpened(stream.stream_id))
        return stream

    def heartbeat(
        self, stream: HeartbeatStream, request: controller_pb2.BrokerHeartbeatRequest
    ) -> None:
        """A broker gave a sign of life."""
        self._handle(Heartbeat(stream.stream_id, request))

    def close_stream(self, stream: HeartbeatStream) -> None:
        """A broker's stream broke or ended."""
        if self._streams.pop(stream.stream_id, None) is not None:
            self._handle(StreamClosed(stream.stream_id))

    # The core.

    def _handle(self, event: Event) -> None:
        self._punctuality.look()  # Its own stall comes first, or others would be blamed for it.
        try:
            self._act(event)
        except Exception:
            # What is left half done here could keep brokers fenced, or unfenced, for ever. All of
            # it is made anew from the state by whoever is active next.
            log.exception("the active controller failed and gives up its office", on=repr(event))
            self._renounce()

    def _renounce(self) -> None:
        if not self._epoch:
            return  # It is not active, or gives up already.
        longer_s = 2 * self._penance_s if self._is_repenting() else _CLAIM_RETRY_S
        self._penance_s = min(longer_s, _LONGEST_PENANCE_S)
        self._renounced_ms = self._clock_ms()
        self._renounced_epoch = self._epoch
        self._quorum.renounce()
        self._resign()

    def _is_repenting(self) -> bool:
        """The office was given up not long ago."""
        if not self._renounced_epoch:
            return False
        return self._clock_ms() - self._renounced_ms < _FORGIVEN_AFTER_S * 1000

    def _act(self, event: Event) -> None:
        for effect in self._core.handle(event, self._clock_ms()):
            match effect:
                case Propose(proposal_id, command):
                    payload = self._stamp(command)
                    self._proposal_ids[payload] = proposal_id
                    self._submit(payload)
                case Reply(stream_id, response):
                    if (stream := self._streams.get(stream_id)) is not None:
                        stream.send(response)
                case EndStream(stream_id, error):
                    self._end_stream(stream_id, error)
        self._set_timer()

    def _end_stream(self, stream_id: int, error: PenstockError) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        if isinstance(error, NotControllerError) and error.leader is None:
            error = self.not_controller()
        self._count_refusal("heartbeat", error.code)
        stream.send(controller_pb2.BrokerHeartbeatResponse(error=error.to_proto()))
        stream.end()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is not None:
            delay_s = max(deadline_ms - self._clock_ms(), 0) / 1000
            # A timer may fire a little early by this clock; Tick then finds nothing due.
            self._timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(Tick())
