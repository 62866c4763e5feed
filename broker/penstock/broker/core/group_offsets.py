"""Committed offsets of a group: who may commit and read what, and what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.broker.core.group_events import (
    CommitOffsets,
    CommitTransactionOffsets,
    GroupSettings,
)
from penstock.broker.core.group_state import GroupState
from penstock.broker.core.group_topics import Subscriptions, TopicInfo, TopicView
from penstock.broker.core.group_values import CommittedOffset, Member
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import (
    FencedMemberEpochError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    InvalidRequestError,
    OffsetMetadataTooLargeError,
    PenstockError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
    UnstableOffsetCommitError,
)
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition, format_topic_id
from penstock.wire.wording import counted


def commit(
    state: GroupState, topics: TopicView, settings: GroupSettings, event: CommitOffsets
) -> groups_pb2.CommitOffsetsResponse:
    """Store what may be stored, and say for each partition what became of it; see ``_commit``."""
    stored = _Stored(topics, settings, event.timestamp_ms, state.put_offset)
    return _commit(state, event.request, stored)


def commit_in_transaction(
    state: GroupState, topics: TopicView, settings: GroupSettings, event: CommitTransactionOffsets
) -> groups_pb2.CommitTransactionOffsetsResponse:
    """The same; what is stored is the group's when the transaction commits."""
    producer = event.producer

    def put(partition: TopicPartition, offset: CommittedOffset) -> None:
        state.put_pending(partition, offset, producer)

    stored = _Stored(topics, settings, event.timestamp_ms, put)
    response = _commit(state, event.request.commit, stored)
    return groups_pb2.CommitTransactionOffsetsResponse(commit=response)


class _Stored(NamedTuple):
    """How what is committed is stored."""

    topics: TopicView
    settings: GroupSettings
    timestamp_ms: int
    put: Callable[[TopicPartition, CommittedOffset], object]


def check_commit(state: GroupState, request: groups_pb2.CommitOffsetsRequest) -> None:
    """Raise what a commit is refused with as a whole before its partitions are looked at."""
    _committer(state, request.member_id, request.member_epoch)


def _commit(
    state: GroupState, request: groups_pb2.CommitOffsetsRequest, stored: _Stored
) -> groups_pb2.CommitOffsetsResponse:
    """Store what may be stored.

    A member may commit for a partition from the epoch on in which it last got it, for as long as
    it holds it: nobody else had it meanwhile, so a commit that crossed a newer epoch on the wire
    does no harm (KIP-1251). All else is refused: with the whole request when nothing of it can
    stand, else by partition.
    """
    topics, settings, timestamp_ms, put = stored
    try:
        member = _committer(state, request.member_id, request.member_epoch)
    except PenstockError as error:
        return groups_pb2.CommitOffsetsResponse(error=error.to_proto())
    response = groups_pb2.CommitOffsetsResponse()
    stale: StaleMemberEpochError | None = None
    stale_count = 0
    for entry in request.offsets:
        result = response.results.add(partition=entry.partition)
        try:
            info = _known_topic(topics, entry.partition)
            if member is not None:
                _check_held(state, member, request.member_epoch, info, entry.partition.partition)
            offset = _stored(entry, info, settings, timestamp_ms)
        except StaleMemberEpochError as error:
            stale, stale_count = error, stale_count + 1
            result.error.CopyFrom(error.to_proto())
        except PenstockError as error:
            result.error.CopyFrom(error.to_proto())
        else:
            partition = TopicPartition(info.name, entry.partition.partition)
            if not (request.only_forward and _is_behind(state, partition, offset)):
                put(partition, offset)
    if stale is not None and stale_count == len(request.offsets):
        return groups_pb2.CommitOffsetsResponse(error=stale.to_proto())
    return response


def fetch(
    state: GroupState, topics: TopicView, request: groups_pb2.FetchOffsetsRequest
) -> groups_pb2.FetchOffsetsResponse:
    """The committed offsets asked for, or all; -1 where there is none.

    A member is answered at its own epoch, or about partitions that it has held since the epoch
    that it names: what it would otherwise read might be older than what their holder consumed.
    """
    try:
        if request.member_id:
            _check_reader(state, topics, request)
        if request.require_stable:
            _check_stable(state, request)
        response = groups_pb2.FetchOffsetsResponse()
        if request.partitions:
            for wanted in request.partitions:
                response.offsets.append(_found(state, topics, wanted))
        else:
            response.offsets.extend(every_offset(state, topics))
    except PenstockError as error:
        return groups_pb2.FetchOffsetsResponse(error=error.to_proto())
    return response


def every_offset(state: GroupState, topics: TopicView) -> list[groups_pb2.OffsetCommit]:
    """All committed offsets of topics that exist, in order."""
    return [
        _told(partition, offset)
        for partition, offset in sorted(state.offsets.items(), key=lambda item: item[0])
        if topics.find_id(offset.topic_id) is not None
    ]


def _committer(state: GroupState, member_id: str, member_epoch: int) -> Member | None:
    """The member that commits, or None for a commit from outside of an empty group."""
    if not member_id and member_epoch <= 0:
        if state.members:
            raise UnknownMemberIdError(
                f"group {state.group_id!r} has {counted(len(state.members), 'member')}; only "
                "members may commit. Stop all of them first, or commit as a member"
            )
        return None
    return _member(state, member_id, member_epoch)


def _member(state: GroupState, member_id: str, member_epoch: int) -> Member:
    member = state.members.get(member_id)
    if member is None:
        raise UnknownMemberIdError(
            f"group {state.group_id!r} has no member {member_id!r} (any more); give up all "
            "partitions and join anew"
        )
    if member_epoch > member.epoch:
        raise FencedMemberEpochError(
            f"group {state.group_id!r}, member {member_id!r}: epoch {member_epoch} was never "
            f"given out, the member is in {member.epoch}; give up all partitions and join anew"
        )
    return member


def _stale(
    state: GroupState, member: Member, member_epoch: int, what: str
) -> StaleMemberEpochError:
    return StaleMemberEpochError(
        f"group {state.group_id!r}, member {member.member_id!r}: {what} is not the member's since "
        f"epoch {member_epoch} (it is in epoch {member.epoch}); take the newer assignment first "
        "and leave out what is no longer in it"
    )


def _check_held(
    state: GroupState, member: Member, member_epoch: int, info: TopicInfo, number: int
) -> None:
    since = state.held_since(member.member_id, TopicIdPartition(info.topic_id, number))
    if since is None or since > member_epoch:
        raise _stale(state, member, member_epoch, f"{info.name}-{number}")


def _check_reader(
    state: GroupState, topics: TopicView, request: groups_pb2.FetchOffsetsRequest
) -> None:
    member = _member(state, request.member_id, request.member_epoch)
    if request.member_epoch == member.epoch:
        return
    if not request.partitions:
        raise _stale(state, member, request.member_epoch, "what it asks for")
    for wanted in request.partitions:
        info = topics.find(wanted.topic)
        if info is not None:
            _check_held(state, member, request.member_epoch, info, wanted.partition)


def _check_stable(state: GroupState, request: groups_pb2.FetchOffsetsRequest) -> None:
    """Refuse where an open transaction decides about what is asked for (KIP-447)."""
    wanted = [TopicPartition(one.topic, one.partition) for one in request.partitions]
    for partition in wanted or state.pending:
        for pending in state.pending.of(partition):
            raise UnstableOffsetCommitError(
                f"group {state.group_id!r}: a transaction of producer "
                f"{pending.producer.producer_id} has a position for {partition} and has not ended; "
                "ask again soon"
            )


def _known_topic(topics: TopicView, partition: common_pb2.TopicPartition) -> TopicInfo:
    info = topics.find(partition.topic)
    if info is None or not 0 <= partition.partition < info.partition_count:
        raise UnknownTopicOrPartitionError(
            f"{partition.topic}-{partition.partition} does not exist (or this broker has not "
            "heard of it yet)"
        )
    if partition.topic_id and partition.topic_id != info.topic_id:
        raise UnknownTopicIdError(
            f"topic {partition.topic!r} has the id {format_topic_id(info.topic_id)}, not "
            f"{format_topic_id(partition.topic_id)}: it was deleted and made anew"
        )
    return info


def _stored(
    entry: groups_pb2.OffsetCommit, info: TopicInfo, settings: GroupSettings, timestamp_ms: int
) -> CommittedOffset:
    if entry.offset < 0:
        raise InvalidRequestError(
            f"{info.name}-{entry.partition.partition}: offset {entry.offset} is below 0"
        )
    size = len(entry.metadata.encode())
    if size > settings.max_offset_metadata_bytes:
        raise OffsetMetadataTooLargeError(
            f"{info.name}-{entry.partition.partition}: the metadata has {size} bytes, "
            f"{settings.max_offset_metadata_bytes} are allowed"
        )
    return CommittedOffset(
        entry.offset, max(entry.leader_epoch, -1), entry.metadata, timestamp_ms, info.topic_id
    )


def _is_behind(state: GroupState, partition: TopicPartition, offset: CommittedOffset) -> bool:
    """Whether the group is further on already, in the same topic."""
    before = state.offsets.get(partition)
    if before is None or before.topic_id != offset.topic_id:
        return False
    return offset.offset < before.offset


def _found(
    state: GroupState, topics: TopicView, wanted: common_pb2.TopicPartition
) -> groups_pb2.OffsetCommit:
    stored = state.offsets.get(TopicPartition(wanted.topic, wanted.partition))
    if (
        stored is not None
        and topics.find_id(stored.topic_id) is not None
        and wanted.topic_id in (b"", stored.topic_id)
    ):
        return _told(TopicPartition(wanted.topic, wanted.partition), stored)
    return groups_pb2.OffsetCommit(partition=wanted, offset=-1, leader_epoch=-1)


def _told(partition: TopicPartition, stored: CommittedOffset) -> groups_pb2.OffsetCommit:
    return groups_pb2.OffsetCommit(
        partition=common_pb2.TopicPartition(
            topic=partition.topic, partition=partition.partition, topic_id=stored.topic_id
        ),
        offset=stored.offset,
        leader_epoch=stored.leader_epoch,
        metadata=stored.metadata,
    )


def forget_topics(state: GroupState, gone: frozenset[TopicId]) -> None:
    """Delete the offsets of topics that were deleted, also those in transactions.

    Where another topic of the name has an offset too, that of the one deleted is left: it is told
    to nobody.
    """
    for partition in sorted({*state.offsets, *state.pending}):
        if _topic_ids(state, partition) <= gone:
            state.put_offset(partition, None)


def _topic_ids(state: GroupState, partition: TopicPartition) -> set[TopicId]:
    """The ids of the topics that the group has offsets of under this name."""
    stored = state.offsets.get(partition)
    pending = {one.offset.topic_id for one in state.pending.of(partition)}
    return pending if stored is None else pending | {stored.topic_id}


def forget_missing_topics(state: GroupState, topics: TopicView) -> None:
    """Delete the offsets of topics that do not exist.

    Only safe with a picture of the cluster that is no older than the offsets: that of a broker
    that leads the group's partition is at least as new as the election, and earlier leaders
    stopped committing at it.
    """
    known = {*state.offsets, *state.pending}
    gone = {topic_id for partition in known for topic_id in _topic_ids(state, partition)}
    forget_topics(state, frozenset(t for t in gone if topics.find_id(t) is None))


def expire(
    state: GroupState, subscriptions: Subscriptions, settings: GroupSettings, wall_ms: int
) -> None:
    """Delete the offsets that nobody uses and that were kept long enough (KIP-211).

    Those of topics that a member subscribes to, or still holds partitions of, stay, and those that
    an open transaction decides about. Of what else
    there is the time runs from the commit, and in a group that lost its last member from then on:
    what a group of a quiet topic committed long ago must not be gone when it is stopped for a day.
    """
    epochs = state.epochs
    if not state.members and epochs.group_epoch and not epochs.empty_since_ms:
        epochs = replace(epochs, empty_since_ms=wall_ms)
        state.put_epochs(epochs)
    in_use = _topics_in_use(state, subscriptions)
    for partition, offset in list(state.offsets.items()):
        if offset.topic_id in in_use or state.pending.of(partition):
            continue
        since_ms = max(offset.commit_timestamp_ms, epochs.empty_since_ms)
        if wall_ms - since_ms >= settings.offsets_retention_ms:
            state.put_offset(partition, None)


def delete(
    state: GroupState,
    topics: TopicView,
    subscriptions: Subscriptions,
    request: groups_pb2.DeleteOffsetsRequest,
) -> groups_pb2.DeleteOffsetsResponse:
    """Forget positions, but for those of topics that members read (KIP-496)."""
    if state.is_bare:
        return groups_pb2.DeleteOffsetsResponse(error=not_found(state.group_id).to_proto())
    in_use = _topics_in_use(state, subscriptions)
    response = groups_pb2.DeleteOffsetsResponse()
    for wanted in request.partitions:
        result = response.results.add(partition=wanted)
        partition = TopicPartition(wanted.topic, wanted.partition)
        info = topics.find(wanted.topic)
        if info is None or not 0 <= wanted.partition < info.partition_count:
            unknown = UnknownTopicOrPartitionError(f"{partition} does not exist")
            result.error.CopyFrom(unknown.to_proto())
        elif info.topic_id in in_use:
            error = GroupSubscribedToTopicError(
                f"group {state.group_id!r} has members that read topic {wanted.topic!r}; stop them "
                "first, or have them subscribe to other topics"
            )
            result.error.CopyFrom(error.to_proto())
        else:
            state.put_offset(partition, None)
    return response


def _topics_in_use(state: GroupState, subscriptions: Subscriptions) -> set[TopicId]:
    """The topics that members subscribe to, or hold partitions of."""
    in_use: set[TopicId] = set()
    for member in state.members.values():
        in_use.update(subscriptions.topics_of(member))
        in_use.update(topic_id for topic_id, _ in member.assigned | member.revoking)
    return in_use


def not_found(group_id: str) -> GroupIdNotFoundError:
    """The refusal for a group that does not exist."""
    return GroupIdNotFoundError(
        f"group {group_id!r} does not exist: it has no members and no committed offsets"
    )
