"""What a member's message says about the member: checked, and taken over into its record."""

from __future__ import annotations

from dataclasses import replace

from penstock.broker.core.assignors import ASSIGNORS
from penstock.broker.core.group_events import GroupSettings, Heartbeat
from penstock.broker.core.group_pattern import TopicPattern
from penstock.broker.core.group_topics import TopicView
from penstock.broker.core.group_values import (
    JOIN_EPOCH,
    LEFT_EPOCH,
    NOTHING,
    Member,
    Partitions,
)
from penstock.v1 import groups_pb2
from penstock.wire.config_keys import suggest
from penstock.wire.errors import InvalidRequestError, UnsupportedAssignorError
from penstock.wire.ids import TopicId, TopicIdPartition

_MAX_ID_CHARS = 255


def check_request(request: groups_pb2.GroupHeartbeatRequest, settings: GroupSettings) -> None:
    """Refuse what no member could mean, before anything is changed.

    Raises InvalidRequestError or UnsupportedAssignorError that names the field.
    """
    for field in ("member_id", "group_instance_id", "rack_id", "client_id"):
        if len(getattr(request, field)) > _MAX_ID_CHARS:
            raise InvalidRequestError(f"{field} is longer than {_MAX_ID_CHARS} characters")
    if not request.member_id:
        raise InvalidRequestError("member_id is empty; a member makes one up, such as a UUID")
    if request.member_epoch < LEFT_EPOCH:
        raise InvalidRequestError(f"member_epoch {request.member_epoch} has no meaning")
    if request.member_epoch == LEFT_EPOCH and not request.group_instance_id:
        raise InvalidRequestError(
            "only a static member may go away for a while: set group_instance_id, or leave with "
            "member_epoch -1"
        )
    if request.member_epoch == JOIN_EPOCH:
        _check_join(request)
    _check_timeouts(request, settings)
    _check_subscription(request.subscription, settings)
    if request.server_assignor and request.server_assignor not in ASSIGNORS:
        raise UnsupportedAssignorError(
            f"assignor {request.server_assignor!r} is not known; there are "
            f"{', '.join(sorted(ASSIGNORS))}{suggest(request.server_assignor, list(ASSIGNORS))}"
        )


def _check_join(request: groups_pb2.GroupHeartbeatRequest) -> None:
    if not request.HasField("subscription"):
        raise InvalidRequestError("a member that joins must say what it subscribes to")
    if any(entry.partitions for entry in request.owned.partitions):
        raise InvalidRequestError("a member that joins owns nothing; give up all partitions first")


def _check_timeouts(request: groups_pb2.GroupHeartbeatRequest, settings: GroupSettings) -> None:
    low, high = settings.min_session_timeout_ms, settings.max_session_timeout_ms
    if request.session_timeout_ms and not low <= request.session_timeout_ms <= high:
        raise InvalidRequestError(
            f"session_timeout_ms {request.session_timeout_ms} is outside of what this broker "
            f"allows, {low} to {high} (group.min.session.timeout.ms and its twin)"
        )
    if request.rebalance_timeout_ms < 0:
        raise InvalidRequestError(f"rebalance_timeout_ms {request.rebalance_timeout_ms} is below 0")


def _check_subscription(subscription: groups_pb2.Subscription, settings: GroupSettings) -> None:
    if len(subscription.topics) > settings.max_topics_of_member:
        raise InvalidRequestError(
            f"{len(subscription.topics)} topics are named; {settings.max_topics_of_member} are "
            "allowed. Use a topic_pattern"
        )
    if subscription.topic_pattern:
        TopicPattern.parse(subscription.topic_pattern)


def joined(member: Member | None, event: Heartbeat, settings: GroupSettings, epoch: int) -> Member:
    """The member that joins, in the place of ``member`` when that is the same one come back."""
    request = event.request
    base = member or Member(request.member_id)
    return replace(
        base,
        member_id=request.member_id,
        instance_id=request.group_instance_id or base.instance_id,
        rack_id=request.rack_id,
        client_id=request.client_id,
        client_host=event.client_host,
        session_timeout_ms=request.session_timeout_ms or settings.default_session_timeout_ms,
        rebalance_timeout_ms=(
            request.rebalance_timeout_ms or settings.default_rebalance_timeout_ms
        ),
        topics=frozenset(request.subscription.topics),
        pattern=request.subscription.topic_pattern,
        server_assignor=request.server_assignor,
        epoch=epoch,
        revoking=NOTHING,
    )


def updated(member: Member, event: Heartbeat) -> Member:
    """The member with what its message says anew; what is left out stays as it was."""
    request = event.request
    changed = replace(
        member,
        rack_id=request.rack_id or member.rack_id,
        client_id=request.client_id or member.client_id,
        client_host=event.client_host,
        session_timeout_ms=request.session_timeout_ms or member.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms or member.rebalance_timeout_ms,
        server_assignor=request.server_assignor or member.server_assignor,
    )
    if request.HasField("subscription"):
        topics = frozenset(request.subscription.topics)
        changed = replace(changed, topics=topics, pattern=request.subscription.topic_pattern)
    return changed


def owned_partitions(request: groups_pb2.GroupHeartbeatRequest, topics: TopicView) -> Partitions:
    """What the member says that it holds; a topic without an id is taken by its name."""
    owned: set[TopicIdPartition] = set()
    for entry in request.owned.partitions:
        topic_id = TopicId(entry.topic_id)
        if not topic_id:
            info = topics.find(entry.topic)
            if info is None:
                continue
            topic_id = info.topic_id
        owned.update(TopicIdPartition(topic_id, number) for number in entry.partitions)
    return frozenset(owned)
