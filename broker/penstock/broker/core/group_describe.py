"""A group as it is told to people and tools."""

from __future__ import annotations

from penstock.broker.core import group_codec, group_offsets
from penstock.broker.core.group_reconcile import chosen_assignor, member_state, state_name
from penstock.broker.core.group_state import GroupState
from penstock.broker.core.group_topics import TopicView
from penstock.broker.core.group_values import Member, Partitions
from penstock.v1 import groups_pb2


def describe(state: GroupState, topics: TopicView) -> groups_pb2.GroupDescription:
    """Everything about a group, or GROUP_ID_NOT_FOUND."""
    if state.is_bare:
        error = group_offsets.not_found(state.group_id).to_proto()
        return groups_pb2.GroupDescription(group_id=state.group_id, error=error)
    return groups_pb2.GroupDescription(
        group_id=state.group_id,
        state=state_name(state),
        group_epoch=state.epochs.group_epoch,
        assignment_epoch=state.epochs.assignment_epoch,
        assignor=state.epochs.assignor or chosen_assignor(state),
        members=[_describe_member(state, member) for _, member in sorted(state.members.items())],
        offsets=group_offsets.every_offset(state, topics),
    )


def listing(state: GroupState) -> groups_pb2.GroupListing:
    """A group in brief."""
    return groups_pb2.GroupListing(
        group_id=state.group_id, state=state_name(state), member_count=len(state.members)
    )


def partitions(state: GroupState, held: Partitions) -> list[groups_pb2.TopicPartitions]:
    """Partitions that members hold or shall hold, with their topics' names."""
    names = {topic_id: state.topic_name(topic_id) for topic_id, _ in held}
    return group_codec.topic_partitions(held, names)


def _describe_member(state: GroupState, member: Member) -> groups_pb2.MemberDescription:
    return groups_pb2.MemberDescription(
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        member_epoch=member.epoch,
        assigned=partitions(state, member.assigned),
        target=partitions(state, member.target),
        subscription=group_codec.subscription(member),
        rack_id=member.rack_id,
        server_assignor=member.server_assignor,
        state=member_state(member),
    )
