"""What the active controller remembers of a broker process that it watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.model import Broker
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.cluster_config import parsed_cluster_configs


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """The times that the active controller goes by, all in milliseconds.

    ``session_timeout_ms``: silence fences after it. ``disconnect_grace_ms``: a broken stream
    fences after it, unless it is opened again. ``takeover_grace_ms``: a new active controller
    gives this long to brokers on nodes that it has no Raft connection from. All others have
    ``roll_call_ms`` if most come by then, or else a session. ``shutdown_wait_ms``: a broker that
    shuts down waits at most this long for a follower to catch up. ``balance_interval_ms``:
    leaderships go back to their preferred brokers in rounds so far apart, of at most
    ``balance_batch`` partitions, if ``balance``; to brokers that lack more than
    ``balance_threshold_percent`` of those that are theirs by preference.
    ``retry_ms``: a proposal that came to nothing is made again after it.
    """

    session_timeout_ms: int = 6000
    disconnect_grace_ms: int = 200
    takeover_grace_ms: int = 400
    shutdown_wait_ms: int = 2000
    balance_interval_ms: int = 5000
    balance_batch: int = 1000
    balance: bool = True
    balance_threshold_percent: int = 0
    retry_ms: int = 100

    @property
    def roll_call_ms(self) -> int:
        """When a new active controller looks who did not come though most did.

        Far longer than a live broker that was told needs, on a busy host too.
        """
        return max(self.takeover_grace_ms, self.session_timeout_ms // 3)

    def shared(self, configs: Mapping[str, str]) -> LivenessSettings:
        """These settings, but for those that the whole cluster shares."""
        values = parsed_cluster_configs(configs)
        fields = {_SHARED[key]: value for key, value in values.items() if key in _SHARED}
        return replace(self, **fields)


_SHARED: Final = {
    "broker.disconnect.grace.ms": "disconnect_grace_ms",
    "controller.takeover.grace.ms": "takeover_grace_ms",
    "leader.imbalance.check.interval.ms": "balance_interval_ms",
    "leader.imbalance.enable": "balance",
    "leader.imbalance.threshold.percent": "balance_threshold_percent",
}
"""Fields of LivenessSettings by the cluster's config."""


_HEAR_MS: Final = 100
"""So long after it stood still this process has heard what waited in its sockets.

One that wakes for less than that between two stalls hears nobody, and judges nobody.
"""


def after_a_stall(due_ms: int, wait_ms: int, lost_ms: int, now_ms: int) -> int:
    """When a deadline is due after this process stood still for ``lost_ms``, until now.

    That time does not count, and what waited in the sockets is heard first. But however much of
    the stall was before the deadline was set, ``wait_ms`` ahead, it is due no later than if it
    were set now; and never earlier than it was.
    """
    return min(max(due_ms + lost_ms, now_ms + _HEAR_MS), max(now_ms + wait_ms, due_ms))


@dataclass(slots=True)
class Session:
    """One registration as the active controller sees it.

    ``fence_at_ms`` says when it is taken for dead if nothing is heard, and was set ``wait_ms``
    before; it has no meaning while the broker is fenced. At most one proposal about a registration
    is in flight.
    """

    node_id: int
    broker_epoch: int
    fence_at_ms: int
    wait_ms: int = 0
    stream_id: int | None = None
    request: controller_pb2.BrokerHeartbeatRequest | None = None
    heard_at_ms: int = -1
    proposal_id: int | None = None
    retry_at_ms: int = -1
    shutdown_by_ms: int | None = None  # Set once the broker wants to shut down.
    reply: tuple[bool, bool] | None = field(default=None)  # Fenced, may shut down: as last told.
    unfence_index: int = 0  # The metadata that a fenced broker must have seen to be let in again.

    @property
    def wants_shutdown(self) -> bool:
        """The broker asked to be shut down."""
        return self.shutdown_by_ms is not None

    @property
    def has_come(self) -> bool:
        """It was heard since this controller is the active one."""
        return self.request is not None

    @property
    def told_to_stop(self) -> bool:
        """The broker was told that it may stop: when its stream breaks, it did."""
        return self.reply is not None and self.reply[1]

    def heard(
        self, request: controller_pb2.BrokerHeartbeatRequest, now_ms: int, times: LivenessSettings
    ) -> None:
        """Take note of a sign of life."""
        self.request = request
        self.heard_at_ms = now_ms
        self.wait_ms = times.session_timeout_ms
        self.fence_at_ms = now_ms + self.wait_ms
        if request.want_shutdown and self.shutdown_by_ms is None:
            self.shutdown_by_ms = now_ms + times.shutdown_wait_ms

    def disconnected(self, now_ms: int, times: LivenessSettings) -> None:
        """Take note that its stream broke."""
        grace = 0 if self.told_to_stop else times.disconnect_grace_ms
        self.stream_id = None
        self.reply = None
        self.wait_ms = grace
        self.fence_at_ms = min(self.fence_at_ms, now_ms + grace)

    def stood_still(self, lost_ms: int, now_ms: int) -> None:
        """Give the broker back the time in which it could not be heard."""
        self.fence_at_ms = after_a_stall(self.fence_at_ms, self.wait_ms, lost_ms, now_ms)
        self.heard_at_ms = min(self.heard_at_ms + lost_ms, now_ms)

    def deadline_ms(self, broker: Broker) -> int | None:
        """When the session must be looked at again, if nothing happens before."""
        if self.proposal_id is not None:
            return None
        if self.retry_at_ms >= 0:
            return self.retry_at_ms
        if broker.fenced:
            return None
        stops = broker.in_controlled_shutdown and self.stream_id is not None
        if stops and self.shutdown_by_ms is not None and not self.told_to_stop:
            return min(self.fence_at_ms, self.shutdown_by_ms)
        return self.fence_at_ms

    def wish(self, broker: Broker, now_ms: int) -> cluster_pb2.Command | None:
        """The command that brings the broker where it belongs, or None when it is there."""
        target = {"node_id": self.node_id, "broker_epoch": self.broker_epoch}
        fence = cluster_pb2.Command(fence_broker=cluster_pb2.FenceBrokerCommand(**target))
        request = self.request
        if now_ms >= self.fence_at_ms:
            return None if broker.fenced else fence
        if self.stream_id is None or request is None:
            return None
        if self.wants_shutdown:
            if broker.fenced or broker.in_controlled_shutdown:
                return None
            stop = cluster_pb2.ControlledShutdownCommand(**target)
            return cluster_pb2.Command(controlled_shutdown=stop)
        if request.want_fence:
            return None if broker.fenced else fence
        caught_up = request.metadata_index >= max(self.broker_epoch, self.unfence_index)
        if broker.fenced and caught_up and not broker.in_controlled_shutdown:
            unfence = cluster_pb2.UnfenceBrokerCommand(**target)
            return cluster_pb2.Command(unfence_broker=unfence)
        return None

    def may_shut_down(self, state: ClusterState, broker: Broker, now_ms: int) -> bool:
        """It leads nothing any more, or nothing that waiting would move away."""
        if not self.wants_shutdown:
            return False
        if broker.fenced:
            return True
        if not broker.in_controlled_shutdown:
            return False
        if state.leader_count(self.node_id) == 0 or now_ms >= (self.shutdown_by_ms or 0):
            return True
        return not _waiting_helps(state, self.node_id)


def _waiting_helps(state: ClusterState, node_id: int) -> bool:
    """A live replica of a partition that the node leads may yet get in sync."""
    usable = {broker.node_id for broker in state.brokers.values() if broker.usable}
    return any(
        partition.leader == node_id
        and not usable.isdisjoint(set(partition.replicas).difference(partition.offline))
        for _, partition in state.all_partitions()
    )
