"""From subscriptions to who reads what: target assignments, and the way there (KIP-848).

The order of what is put matters. Records are appended in it, and a crash may leave any prefix of
them: what is taken from members comes before what is given, so that no prefix has a partition in
two members' hands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from penstock.broker.core.assignor_values import Assignment, MemberSpec
from penstock.broker.core.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, RACK_AWARE
from penstock.broker.core.group_state import GroupState
from penstock.broker.core.group_topics import Subscriptions, TopicInfo
from penstock.broker.core.group_values import LEFT_EPOCH, NOTHING, Epochs, Member, Partitions
from penstock.wire.ids import TopicId, TopicIdPartition


def chosen_assignor(state: GroupState) -> str:
    """The assignor that most members ask for, the first by name of several; else the default."""
    votes = Counter(m.server_assignor for m in state.members.values() if m.server_assignor)
    return min(votes, key=lambda name: (-votes[name], name), default=DEFAULT_ASSIGNOR)


def is_reconciled(state: GroupState, member: Member) -> bool:
    """Whether the member holds exactly what it shall hold and knows it."""
    if member.revoking or member.assigned != member.target:
        return False
    return member.is_away or member.epoch == state.epochs.assignment_epoch


def state_name(state: GroupState) -> str:
    """The group's state as people are told it."""
    if not state.members:
        return "empty"
    if is_due(state):
        return "assigning"
    if all(is_reconciled(state, member) for member in state.members.values()):
        return "stable"
    return "reconciling"


def member_state(member: Member) -> str:
    """A member's state as people are told it; see MemberDescription.state for what each means."""
    if member.is_away:
        return "away"
    if member.revoking:
        return "revoking"
    if member.assigned != member.target:
        return "waiting"
    return "stable" if member.target else "standby"


def bump(state: GroupState) -> None:
    """Raise the group epoch: the target assignment is out of date."""
    epoch = state.epochs.group_epoch + 1
    state.put_epochs(replace(state.epochs, group_epoch=epoch, empty_since_ms=0))


def is_due(state: GroupState) -> bool:
    """Whether a target assignment is to be made, for a reason that is known already."""
    return state.epochs.group_epoch > state.epochs.assignment_epoch


def uses_racks(state: GroupState) -> bool:
    """Whether the target depends on the racks that replicas are in."""
    return chosen_assignor(state) in RACK_AWARE and any(m.rack_id for m in state.members.values())


def is_outdated(state: GroupState, subscriptions: Subscriptions) -> bool:
    """Whether the assignor would make another target today. Costs as much as making it."""
    if is_due(state):
        return False
    _, targets = _plan(state, subscriptions, chosen_assignor(state))
    return any(targets[member_id] != member.target for member_id, member in state.members.items())


def needs_assignment(state: GroupState, subscriptions: Subscriptions) -> bool:
    """Whether the target is not one for the topics that exist, or not known to all members.

    The second happens when a crash cut off the end of an assignment's records.
    """
    if is_due(state):
        return False
    epochs = state.epochs
    if state.members and not epochs.assignment_epoch:
        return True
    target: set[TopicIdPartition] = set()
    for member in state.members.values():
        if not member.is_away and member.epoch != epochs.assignment_epoch:
            return True
        target |= member.target
    return target != _wanted(state, subscriptions)


def _wanted(state: GroupState, subscriptions: Subscriptions) -> set[TopicIdPartition]:
    topics: dict[TopicId, TopicInfo] = {}
    for member in state.members.values():
        topics |= subscriptions.topics_of(member)
    return {
        TopicIdPartition(topic_id, number)
        for topic_id, info in topics.items()
        for number in range(info.partition_count)
    }


def assign(state: GroupState, subscriptions: Subscriptions) -> None:
    """Make the target assignment for the group epoch, and take from members what is not in it.

    Every member enters the epoch at once: from then on the epoch that a member names proves that
    it has seen what this assignment takes from it.
    """
    name = chosen_assignor(state)
    topics, targets = _plan(state, subscriptions, name)
    state.learn_names({topic_id: info.name for topic_id, info in topics.items()})
    epoch = state.epochs.group_epoch
    state.put_epochs(Epochs(group_epoch=epoch, assignment_epoch=epoch, assignor=name))
    for member_id in sorted(targets):
        state.put_member(_retarget(state.members[member_id], targets[member_id], epoch))


def _plan(
    state: GroupState, subscriptions: Subscriptions, assignor: str
) -> tuple[dict[TopicId, TopicInfo], Assignment]:
    """The topics subscribed to, and what each member shall have of them."""
    specs: dict[str, MemberSpec] = {}
    topics: dict[TopicId, TopicInfo] = {}
    for member_id, member in state.members.items():
        subscribed = subscriptions.topics_of(member)
        topics |= subscribed
        specs[member_id] = MemberSpec(
            frozenset(subscribed), member.target, member.instance_id, member.rack_id
        )
    counts = {topic_id: info.partition_count for topic_id, info in topics.items()}
    return topics, ASSIGNORS[assignor](specs, counts, subscriptions.racks)


def _retarget(member: Member, target: Partitions, epoch: int) -> Member:
    """What of a member's holdings stays, and what it must give back.

    A member that is away holds nothing in fact and gives back at once. What a member was asked
    to give back and shall have again it simply keeps: nobody had it meanwhile.
    """
    if member.is_away:
        return replace(member, assigned=member.assigned & target, target=target)
    held = member.assigned | member.revoking
    return replace(
        member, epoch=epoch, assigned=held & target, revoking=held - target, target=target
    )


def acknowledge(member: Member, owned: Partitions) -> Member:
    """The member after it said, in its present epoch, that it holds no more than ``owned``."""
    return replace(member, revoking=member.revoking & owned)


def grant(state: GroupState, member_ids: Iterable[str]) -> None:
    """Give to members of ``member_ids`` what they shall have and nobody holds any more.

    A member gets nothing new before it has given back what it must.
    """
    for member_id in sorted(member_ids):
        member = state.members[member_id]
        free = grantable(state, member)
        if free:
            state.put_member(replace(member, assigned=member.assigned | free))


def grantable(state: GroupState, member: Member) -> Partitions:
    """What a member may be given now."""
    if member.revoking or member.assigned == member.target:
        return NOTHING
    return frozenset(p for p in member.target - member.assigned if state.owner(p) is None)


def go_away(member: Member) -> Member:
    """A static member that left for a while: what it was to give back is free."""
    return replace(member, epoch=LEFT_EPOCH, revoking=NOTHING)
