"""A member of a consumer group, as the group's coordinator sees it (KIP-848).

=============  ===========================================================================
idle           not a member
joining        epoch 0 sent, no epoch had yet
stable         holds what it may hold
reconciling    the coordinator named another assignment; the application gives partitions
               back and takes others over, and then ``Reconciled`` acknowledges it
stale          left because the application did not poll; the next poll joins again
failed         the group refuses this member for good
=============  ===========================================================================

The stream to the coordinator may break at any time and in any state: the member keeps its
epoch and its partitions, finds the coordinator again and says who it is. Only a fencing answer
(UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH) makes it lose everything and join anew.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.core.backoff import Backoff
from penstock.client.core.subscription import Rebalance, Subscription
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    FencedMemberEpochError,
    LeaderHint,
    PenstockError,
    RequestTimedOutError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition

JOIN: Final = 0
LEAVE: Final = -1
LEAVE_FOR_A_WHILE: Final = -2

_FIRST_INTERVAL_MS: Final = 3_000.0
_SILENCE_MS: Final = 5_000.0
"""A heartbeat unanswered for so long makes the member look for the coordinator elsewhere."""
_STANDSTILL_MS: Final = 1_000.0
"""Nothing that is due is handled so late, unless the event loop stood still."""


class MemberState(enum.Enum):
    """See the module's table."""

    IDLE = "idle"
    JOINING = "joining"
    STABLE = "stable"
    RECONCILING = "reconciling"
    STALE = "stale"
    FAILED = "failed"


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The application wants these topics (again)."""

    subscription: Subscription


@dataclass(frozen=True, slots=True)
class Polled:
    """The application polls: it is alive."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The application took a record at this time, or waits for one: its last sign of life."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream to the coordinator is open."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream ended, or the coordinator could not be found."""

    error: PenstockError


@dataclass(frozen=True, slots=True)
class Received:
    """The coordinator spoke."""

    response: groups_pb2.GroupHeartbeatResponse


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The application gave back and took over (or heard that it lost) what this names."""

    change: Rebalance


@dataclass(frozen=True, slots=True)
class Leaving:
    """The consumer closes or unsubscribes."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = Subscribed | Polled | Alive | Opened | Closed | Received | Reconciled | Leaving | Ticked


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Find the coordinator and open a stream; ``hint`` is who it is, if someone knew."""

    hint: LeaderHint | None


@dataclass(frozen=True, slots=True)
class DropStream:
    """Give the stream up."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the coordinator."""

    request: groups_pb2.GroupHeartbeatRequest


@dataclass(frozen=True, slots=True)
class SendAnew:
    """Find the coordinator and send it this, the last there is to say."""

    request: groups_pb2.GroupHeartbeatRequest


@dataclass(frozen=True, slots=True)
class RebalancePending:
    """``pending_rebalance`` has something for the application."""


@dataclass(frozen=True, slots=True)
class StoodStill:
    """What was due, such as a heartbeat, is so late that the session was, or is, in danger."""

    late_ms: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The member is refused for good; the application is to hear of it."""

    error: PenstockError


Effect = OpenStream | DropStream | Send | SendAnew | RebalancePending | StoodStill | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """Who the member is and how it wants to be treated."""

    group_id: str
    member_id: str
    client_id: str
    group_instance_id: str
    assignor: str
    rack_id: str
    session_timeout_ms: int
    max_poll_interval_ms: int


class Member:
    """The state machine. ``handle`` is its only mutator."""

    def __init__(self, settings: MemberSettings, backoff: Backoff) -> None:
        self._settings = settings
        self._backoff = backoff
        self.state = MemberState.IDLE
        self.epoch = JOIN
        self.owned: frozenset[TopicPartition] = frozenset()
        self._held_since: dict[TopicPartition, int] = {}
        self._lost: frozenset[TopicPartition] = frozenset()  # Not yet told to the application.
        self._target: frozenset[TopicPartition] | None = None
        self._topic_ids: dict[str, bytes] = {}
        self._subscription = Subscription()
        self._number = 0
        self._connected = False
        self._opening = False
        self._open_at_ms = float("inf")
        self._hint: LeaderHint | None = None
        self._attempts = 0
        self._interval_ms = _FIRST_INTERVAL_MS
        self._beat_at_ms = float("inf")
        self._unanswered_ms = float("inf")  # When the oldest unanswered message was sent.
        self._spoke = False  # The coordinator may know this member.
        self._must_say_all = True
        self._must_acknowledge = False
        # A join is under way on this stream, after which nothing may be said before its answer:
        # who joins holds nothing, and the answer to a first join may have given this member
        # partitions by the time that a second one reaches the coordinator.
        self._join_is_said = False
        self._polled_ms = float("-inf")
        self._refused_since_ms = float("inf")
        self._effects: list[Effect] = []

    # --- questions --------------------------------------------------------------------------

    @property
    def in_group(self) -> bool:
        """Whether the coordinator counts, or shall count, this member."""
        return self.state in (MemberState.JOINING, MemberState.STABLE, MemberState.RECONCILING)

    @property
    def held_since(self) -> Mapping[TopicPartition, int]:
        """The number of the change that gave each partition that is owned: another one when it was
        somebody else's meanwhile.
        """
        return self._held_since

    @property
    def lost(self) -> frozenset[TopicPartition]:
        """What is someone else's already, though the application has not heard of it."""
        return self._lost

    @property
    def pending_rebalance(self) -> Rebalance | None:
        """What the application must hear of before it gets more records."""
        if self._lost:
            return Rebalance(self._number, lost=tuple(sorted(self._lost)))
        if self.state is not MemberState.RECONCILING or self._target is None:
            return None
        return Rebalance(
            self._number,
            revoked=tuple(sorted(self.owned - self._target)),
            assigned=tuple(sorted(self._target - self.owned)),
        )

    def is_current(self, change: Rebalance) -> bool:
        """Whether the change is still what the coordinator wants."""
        return change.number == self._number and self.state is MemberState.RECONCILING

    def next_deadline_ms(self) -> float:
        """When to send ``Ticked`` if nothing happens before; infinity for never."""
        if not self.in_group:
            return float("inf")
        deadline = self._polled_ms + self._settings.max_poll_interval_ms
        if self._connected:
            deadline = min(deadline, self._unanswered_ms + _SILENCE_MS)
            if not self._join_is_said:
                deadline = min(deadline, self._beat_at_ms)
        elif not self._opening:
            deadline = min(deadline, self._open_at_ms)
        return deadline

    # --- changes ----------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: float) -> list[Effect]:
        """Take one event and say what to do."""
        if isinstance(event, Alive):
            # Goes before another event, which may be what a look at the clock waits for.
            self._polled_ms = max(self._polled_ms, event.at_ms)
            return []
        self._look_for_standstill(now_ms)
        match event:
            case Subscribed(subscription):
                self._subscribed(subscription, now_ms)
            case Polled():
                self._polled(now_ms)
            case Opened():
                self._opened(now_ms)
            case Closed(error):
                self._closed(error, now_ms)
            case Received(response):
                self._received(response, now_ms)
            case Reconciled(change):
                self._reconciled(change, now_ms)
            case Leaving():
                self._leave()
            case Ticked():
                pass
        self._keep_time(now_ms)
        effects, self._effects = self._effects, []
        return effects

    def _look_for_standstill(self, now_ms: float) -> None:
        """Tell a coordinator that is silent from an event loop that did not listen to it."""
        late_ms = now_ms - self.next_deadline_ms()
        if late_ms > _STANDSTILL_MS:
            # What the coordinator said meanwhile is still to be read.
            self._unanswered_ms = max(self._unanswered_ms, now_ms)
        if late_ms > self._settings.session_timeout_ms / 2:
            self._effects.append(StoodStill(late_ms))

    def _subscribed(self, subscription: Subscription, now_ms: float) -> None:
        changed = subscription != self._subscription
        self._subscription = subscription
        self._polled_ms = now_ms
        if self.state in (MemberState.IDLE, MemberState.STALE, MemberState.FAILED):
            self._join(now_ms)
        elif changed:
            self._must_say_all = True
            self._beat_at_ms = now_ms

    def _join(self, now_ms: float) -> None:
        self.state = MemberState.JOINING
        self.epoch = JOIN
        self._spoke = False
        self._own(frozenset())
        self._target = None
        self._must_say_all = True
        self._must_acknowledge = False
        self._refused_since_ms = float("inf")
        self._beat_at_ms = now_ms
        if not self._connected and not self._opening:
            self._open_at_ms = now_ms

    def _polled(self, now_ms: float) -> None:
        self._polled_ms = now_ms
        if self.state is MemberState.STALE:
            self._join(now_ms)

    def _opened(self, now_ms: float) -> None:
        self._opening = False
        self._join_is_said = False
        self._connected = True
        self._must_say_all = True
        self._refused_since_ms = float("inf")  # Another coordinator has sessions begin anew.
        self._beat_at_ms = now_ms
        self._unanswered_ms = float("inf")

    def _closed(self, error: PenstockError, now_ms: float) -> None:
        self._connected = False
        self._opening = False
        self._unanswered_ms = float("inf")
        self._look_again(error.leader, now_ms)

    def _look_again(self, hint: LeaderHint | None, now_ms: float) -> None:
        self._hint = hint
        pause = 0.0 if hint is not None and not self._attempts else self._pause_ms()
        self._open_at_ms = now_ms + pause
        self._attempts += 1

    def _pause_ms(self) -> float:
        return self._backoff.delay_ms(self._attempts)

    def _received(self, response: groups_pb2.GroupHeartbeatResponse, now_ms: float) -> None:
        self._unanswered_ms = float("inf")
        if not self.in_group:
            return
        if response.HasField("error"):
            self._refused(error_from_proto(response.error), now_ms)
            return
        if response.member_epoch < 0:
            return  # The answer to a leave, after which this member has joined again.
        self._attempts = 0
        self._refused_since_ms = float("inf")
        self._join_is_said = False
        self.epoch = response.member_epoch
        if response.heartbeat_interval_ms > 0:
            self._interval_ms = response.heartbeat_interval_ms
            self._beat_at_ms = min(self._beat_at_ms, now_ms + self._interval_ms)
        if self.state is MemberState.JOINING:
            self.state = MemberState.STABLE
        if response.HasField("assignment"):
            self._assigned(response.assignment.partitions, now_ms)

    def _assigned(self, partitions: Iterable[groups_pb2.TopicPartitions], now_ms: float) -> None:
        target: set[TopicPartition] = set()
        for entry in partitions:
            self._topic_ids[entry.topic] = entry.topic_id
            target.update(TopicPartition(entry.topic, number) for number in entry.partitions)
        self._target = frozenset(target)
        if self._target == self.owned:
            self.state = MemberState.STABLE
            self._acknowledge(now_ms)
            return
        self._reconcile()

    def _acknowledge(self, now_ms: float) -> None:
        self._must_acknowledge = True
        self._beat_at_ms = now_ms

    def _reconciled(self, change: Rebalance, now_ms: float) -> None:
        self._lost -= frozenset(change.lost)
        if change.lost:
            return
        if not self.is_current(change):
            # Overtaken by a newer assignment: nothing was taken over, but what was given back
            # is given back.
            self._own(self.owned - frozenset(change.revoked))
            self._reconsider(now_ms)
            return
        assert self._target is not None
        self._own(self._target)
        self.state = MemberState.STABLE
        self._acknowledge(now_ms)

    def _own(self, partitions: frozenset[TopicPartition]) -> None:
        self.owned = partitions
        since = self._held_since
        self._held_since = {name: since.get(name, self._number) for name in partitions}

    def _reconsider(self, now_ms: float) -> None:
        """Hold what is owned against what is wanted, after an overtaken change was carried out.

        The newest assignment may have given back what the application was just giving up.
        """
        if self._target is None or not self.in_group:
            return
        if self.owned == self._target:
            if self.state is MemberState.RECONCILING:
                self.state = MemberState.STABLE
                self._acknowledge(now_ms)
        elif self.state is MemberState.STABLE:
            self._reconcile()

    def _reconcile(self) -> None:
        self.state = MemberState.RECONCILING
        self._number += 1
        self._effects.append(RebalancePending())

    def _refused(self, error: PenstockError, now_ms: float) -> None:
        if isinstance(error, UnknownMemberIdError | FencedMemberEpochError):
            if self._join_is_said:
                return  # The answer to what was said before the join.
            self._lose_all()
            self._join(now_ms)
        elif isinstance(error, UnreleasedInstanceIdError):
            # The one before us has not left. It may have died: then its session will end.
            self._refused_since_ms = min(self._refused_since_ms, now_ms)
            if now_ms - self._refused_since_ms > self._settings.session_timeout_ms:
                self._fail(error)
            else:
                self._say_all_later(now_ms)
        elif isinstance(error, CoordinatorLoadInProgressError):
            self._say_all_later(now_ms)
        elif error.retriable:
            self._connected = False
            self._effects.append(DropStream())
            self._look_again(error.leader, now_ms)
        else:
            self._fail(error)

    def _say_all_later(self, now_ms: float) -> None:
        self._join_is_said = False
        self._must_say_all = True
        self._beat_at_ms = now_ms + self._pause_ms()
        self._attempts += 1

    def _fail(self, error: PenstockError) -> None:
        self._lose_all()
        self.state = MemberState.FAILED
        self._disconnect()
        self._effects.append(Failed(error))

    def _lose_all(self) -> None:
        """The partitions are someone else's now."""
        self._number += 1
        if self.owned:
            self._lost |= self.owned
            self._effects.append(RebalancePending())
        self._own(frozenset())
        self._target = None

    def _leave(self) -> None:
        if self.in_group and self._spoke:
            static = bool(self._settings.group_instance_id)
            goodbye = self._message(LEAVE_FOR_A_WHILE if static else LEAVE)
            self._effects.append(goodbye if self._connected else SendAnew(goodbye.request))
        self._number += 1
        self._join_is_said = False
        self.state = MemberState.IDLE
        self._own(frozenset())
        self._lost = frozenset()
        self._target = None

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._effects.append(DropStream())

    def _keep_time(self, now_ms: float) -> None:
        if not self.in_group:
            return
        if now_ms - self._polled_ms >= self._settings.max_poll_interval_ms:
            if self._connected:
                self._effects.append(self._message(LEAVE))
            self._lose_all()
            self.state = MemberState.STALE
            self.epoch = JOIN
            self._join_is_said = False
            return
        if self._connected and now_ms - self._unanswered_ms >= _SILENCE_MS:
            self._effects.append(DropStream())
            silence = RequestTimedOutError("the coordinator does not answer heartbeats")
            self._closed(silence, now_ms)
        if not self._connected:
            if not self._opening and now_ms >= self._open_at_ms:
                self._opening = True
                self._effects.append(OpenStream(self._hint))
                self._hint = None
        elif now_ms >= self._beat_at_ms and not self._join_is_said:
            self._beat(now_ms)

    def _beat(self, now_ms: float) -> None:
        self._effects.append(self._message(self.epoch))
        self._spoke = True
        self._must_say_all = False
        self._must_acknowledge = False
        self._join_is_said = self.epoch == JOIN
        self._beat_at_ms = now_ms + self._interval_ms
        self._unanswered_ms = min(self._unanswered_ms, now_ms)

    def _message(self, epoch: int) -> Send:
        settings = self._settings
        request = groups_pb2.GroupHeartbeatRequest(
            group_id=settings.group_id,
            member_id=settings.member_id,
            member_epoch=epoch,
            group_instance_id=settings.group_instance_id,
        )
        if epoch < 0:
            return Send(request)
        if self._must_say_all:
            request.rack_id = settings.rack_id
            request.session_timeout_ms = settings.session_timeout_ms
            request.rebalance_timeout_ms = settings.max_poll_interval_ms
            request.server_assignor = settings.assignor
            request.client_id = settings.client_id
            request.subscription.topics.extend(self._subscription.topics)
            request.subscription.topic_pattern = self._subscription.pattern
        if self._must_say_all or self._must_acknowledge:
            request.owned.SetInParent()
            by_topic: dict[str, list[int]] = defaultdict(list)
            for partition in sorted(self.owned):
                by_topic[partition.topic].append(partition.partition)
            for topic, numbers in by_topic.items():
                request.owned.partitions.add(
                    topic=topic, topic_id=self._topic_ids.get(topic, b""), partitions=numbers
                )
        return Send(request)

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        assert not (self._connected and self._opening)
        if self.state in (MemberState.IDLE, MemberState.JOINING, MemberState.STALE):
            assert not self.owned
        if self.state is MemberState.STABLE:
            assert self._target is None or self._target == self.owned
        assert self.epoch >= 0
        if self.state is MemberState.RECONCILING:
            assert self._target is not None
            assert self._target != self.owned
        assert self._held_since.keys() == self.owned
        assert not self.owned & self._lost or self.state is not MemberState.STABLE
