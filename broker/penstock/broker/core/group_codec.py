"""The records of ``__consumer_offsets``: a group's values to bytes and back.

Keys are equal exactly when their bytes are, which compaction relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from penstock.broker.core.group_values import CommittedOffset, Epochs, Member, Partitions
from penstock.v1 import group_records_pb2, groups_pb2
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one record says: the group, the slot (see group_state.Slot), and what it now holds."""

    group_id: str
    slot: str | TopicPartition | None
    value: Member | CommittedOffset | Epochs | None
    names: Mapping[TopicId, str]


def _key(key: group_records_pb2.GroupRecordKey) -> bytes:
    return key.SerializeToString(deterministic=True)


def epochs_key(group_id: str) -> bytes:
    """The key of a group's epochs."""
    about = group_records_pb2.GroupMetadataKey(group_id=group_id)
    return _key(group_records_pb2.GroupRecordKey(group_metadata=about))


def member_key(group_id: str, member_id: str) -> bytes:
    """The key of a member."""
    about = group_records_pb2.GroupMemberKey(group_id=group_id, member_id=member_id)
    return _key(group_records_pb2.GroupRecordKey(group_member=about))


def offset_key(group_id: str, partition: TopicPartition) -> bytes:
    """The key of a committed offset."""
    about = group_records_pb2.OffsetCommitKey(
        group_id=group_id, topic=partition.topic, partition=partition.partition
    )
    return _key(group_records_pb2.GroupRecordKey(offset_commit=about))


def epochs_value(epochs: Epochs) -> bytes:
    """A group's epochs."""
    return group_records_pb2.GroupMetadataValue(
        group_epoch=epochs.group_epoch,
        assignment_epoch=epochs.assignment_epoch,
        assignor=epochs.assignor,
        empty_since_ms=epochs.empty_since_ms,
    ).SerializeToString()


def offset_value(offset: CommittedOffset) -> bytes:
    """A committed offset."""
    return group_records_pb2.OffsetCommitValue(
        offset=offset.offset,
        leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
        commit_timestamp_ms=offset.commit_timestamp_ms,
        topic_id=offset.topic_id,
    ).SerializeToString()


def member_value(member: Member, names: Mapping[TopicId, str]) -> bytes:
    """A member. ``names`` are those of the topics that it holds or shall hold."""
    return group_records_pb2.GroupMemberValue(
        group_instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        session_timeout_ms=member.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        subscription=subscription(member),
        member_epoch=member.epoch,
        assigned=topic_partitions(member.assigned, names),
        revoking=topic_partitions(member.revoking, names),
        target=topic_partitions(member.target, names),
        server_assignor=member.server_assignor,
    ).SerializeToString()


def subscription(member: Member) -> groups_pb2.Subscription:
    """What a member wants to read, as it is told to others."""
    return groups_pb2.Subscription(topics=sorted(member.topics), topic_pattern=member.pattern)


def topic_partitions(
    partitions: Partitions, names: Mapping[TopicId, str]
) -> list[groups_pb2.TopicPartitions]:
    """Partitions by topic, in order."""
    by_topic: dict[TopicId, list[int]] = {}
    for topic_id, number in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(number)
    return [
        groups_pb2.TopicPartitions(
            topic_id=topic_id, topic=names.get(topic_id, ""), partitions=numbers
        )
        for topic_id, numbers in by_topic.items()
    ]


def partitions_of(topics: Iterable[groups_pb2.TopicPartitions]) -> Partitions:
    """The inverse of :func:`topic_partitions`."""
    return frozenset(
        TopicIdPartition(TopicId(entry.topic_id), number)
        for entry in topics
        for number in entry.partitions
    )


def decode(key: bytes, value: bytes | None) -> Replayed | None:
    """What a record says; None for a kind of record that this version does not know.

    Raises CorruptRecordError when key or value is not what the coordinator writes.
    """
    about = _parse(group_records_pb2.GroupRecordKey, key, "key")
    kind = about.WhichOneof("key")
    if kind == "offset_commit":
        partition = TopicPartition(about.offset_commit.topic, about.offset_commit.partition)
        return Replayed(about.offset_commit.group_id, partition, _offset(value), {})
    if kind == "group_metadata":
        return Replayed(about.group_metadata.group_id, None, _epochs(value), {})
    if kind == "group_member":
        member_id = about.group_member.member_id
        member, names = _member(member_id, value)
        return Replayed(about.group_member.group_id, member_id, member, names)
    return None


def _parse(kind: type[_M], data: bytes, what: str) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptRecordError(
            f"the {what} of a group record is no {kind.DESCRIPTOR.name}: {error}"
        ) from None


def _offset(value: bytes | None) -> CommittedOffset | None:
    if value is None:
        return None
    stored = _parse(group_records_pb2.OffsetCommitValue, value, "value")
    return CommittedOffset(
        stored.offset,
        stored.leader_epoch,
        stored.metadata,
        stored.commit_timestamp_ms,
        TopicId(stored.topic_id),
    )


def _epochs(value: bytes | None) -> Epochs | None:
    if value is None:
        return None
    stored = _parse(group_records_pb2.GroupMetadataValue, value, "value")
    return Epochs(
        stored.group_epoch, stored.assignment_epoch, stored.assignor, stored.empty_since_ms
    )


def _member(member_id: str, value: bytes | None) -> tuple[Member | None, dict[TopicId, str]]:
    if value is None:
        return None, {}
    stored = _parse(group_records_pb2.GroupMemberValue, value, "value")
    names = {
        TopicId(entry.topic_id): entry.topic
        for held in (stored.assigned, stored.revoking, stored.target)
        for entry in held
        if entry.topic
    }
    member = Member(
        member_id=member_id,
        instance_id=stored.group_instance_id,
        rack_id=stored.rack_id,
        client_id=stored.client_id,
        client_host=stored.client_host,
        session_timeout_ms=stored.session_timeout_ms,
        rebalance_timeout_ms=stored.rebalance_timeout_ms,
        topics=frozenset(stored.subscription.topics),
        pattern=stored.subscription.topic_pattern,
        server_assignor=stored.server_assignor,
        epoch=stored.member_epoch,
        assigned=partitions_of(stored.assigned),
        revoking=partitions_of(stored.revoking),
        target=partitions_of(stored.target),
    )
    return member, names
