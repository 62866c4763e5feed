"""What a consumer group is: its durable state, every change to it, and what follows from it.

The durable state is exactly what the group's records say. It changes by ``put_*`` alone, which
notes the record and how to take it back, by ``replay_*``, and by ``undo``; so replaying all
records gives the same state, and undoing the last ones gives the state before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.broker.core import group_codec
from penstock.broker.core.group_pending import PendingOffset, PendingOffsets, WriteOrder
from penstock.broker.core.group_values import (
    LEFT_EPOCH,
    CommittedOffset,
    Epochs,
    Member,
    Partitions,
    Producer,
)
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

Slot = str | TopicPartition | None
"""What a change is about: a member by its id, a partition's offset, or (None) the epochs."""

Value = Member | CommittedOffset | Epochs | None
"""What is in a slot; None for nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One record to append, and what its slot held before. ``value`` None is a tombstone."""

    group_id: str
    key: bytes
    value: bytes | None
    slot: Slot
    before: Value
    pending_before: tuple[PendingOffset, ...] = ()  # Of a partition in the slot.
    number: int = 0  # Of what is written in a transaction, its place in the order of writes.


class GroupState:
    """One group's durable state with indexes over it. Not shared between threads."""

    def __init__(self, group_id: str, order: WriteOrder | None = None) -> None:
        self.group_id: Final = group_id
        self._order = order or WriteOrder()
        self.pending: Final = PendingOffsets()
        self._epochs: Epochs | None = None
        self._members: dict[str, Member] = {}
        self._offsets: dict[TopicPartition, CommittedOffset] = {}
        # Indexes.
        self._owners: dict[TopicIdPartition, str] = {}
        self._targets: dict[TopicIdPartition, str] = {}  # Who shall hold it.
        self._instances: dict[str, str] = {}
        self._held_since: dict[str, dict[TopicIdPartition, int]] = {}
        self._names: dict[TopicId, str] = {}  # Of topics that members hold; never changes.
        self._changes: list[Change] = []
        self._touched: set[str] = set()
        self._freed: set[TopicIdPartition] = set()

    @property
    def epochs(self) -> Epochs:
        """The epochs; all zero for a group that never had a member."""
        return self._epochs or Epochs()

    @property
    def members(self) -> Mapping[str, Member]:
        """The members by id."""
        return self._members

    @property
    def offsets(self) -> Mapping[TopicPartition, CommittedOffset]:
        """The committed offsets."""
        return self._offsets

    @property
    def is_bare(self) -> bool:
        """Whether nothing is known of the group: it does not exist."""
        kept = self._members or self._offsets or self.pending
        return self._epochs is None and not kept

    def owner(self, partition: TopicIdPartition) -> str | None:
        """The member that may read the partition, or has yet to give it back."""
        return self._owners.get(partition)

    def instance(self, instance_id: str) -> Member | None:
        """The member with this static instance id."""
        member_id = self._instances.get(instance_id)
        return None if member_id is None else self._members[member_id]

    def held_since(self, member_id: str, partition: TopicIdPartition) -> int | None:
        """The member epoch since which the member holds the partition without a break.

        After a reload this may be later than it was, never earlier. None: it does not hold it.
        """
        return self._held_since.get(member_id, {}).get(partition)

    def topic_name(self, topic_id: TopicId) -> str:
        """The name of a topic that a member holds partitions of, also once it was deleted."""
        return self._names.get(topic_id, "")

    def learn_names(self, names: Mapping[TopicId, str]) -> None:
        """Note the names of topics that are about to be assigned."""
        self._names.update(names)

    # ------------------------------------------------------------------ changing

    def put_epochs(self, epochs: Epochs | None) -> None:
        """Set the epochs, or with None forget that the group ever had members."""
        if epochs == self._epochs:
            return
        key = group_codec.epochs_key(self.group_id)
        value = None if epochs is None else group_codec.epochs_value(epochs)
        self._changes.append(Change(self.group_id, key, value, None, self._epochs))
        self._epochs = epochs

    def put_member(self, member: Member) -> None:
        """Add or replace a member. What it holds must be nobody else's."""
        before = self._members.get(member.member_id)
        if member == before:
            return
        key = group_codec.member_key(self.group_id, member.member_id)
        value = group_codec.member_value(member, self._names)
        self._changes.append(Change(self.group_id, key, value, member.member_id, before))
        self._set_member(member.member_id, member)

    def remove_member(self, member_id: str) -> None:
        """Remove a member with everything that it holds."""
        before = self._members[member_id]
        key = group_codec.member_key(self.group_id, member_id)
        self._changes.append(Change(self.group_id, key, None, member_id, before))
        self._set_member(member_id, None)

    def put_offset(self, partition: TopicPartition, offset: CommittedOffset | None) -> None:
        """Set a partition's committed offset, or with None delete it.

        What is pending of the partition is nothing any more.
        """
        before, pending = self._offsets.get(partition), self.pending.of(partition)
        if offset == before and not pending:
            return
        key = group_codec.offset_key(self.group_id, partition)
        value = None if offset is None else group_codec.offset_value(offset)
        self._changes.append(Change(self.group_id, key, value, partition, before, pending))
        self._set_offset(partition, offset)
        self.pending.drop(partition)

    def put_pending(
        self, partition: TopicPartition, offset: CommittedOffset, producer: Producer
    ) -> None:
        """Note what a partition's committed offset is to be when the transaction commits."""
        key = group_codec.offset_key(self.group_id, partition)
        value = group_codec.offset_value(offset)
        pending = PendingOffset(offset, producer, self._order.next())
        self._changes.append(
            Change(
                self.group_id,
                key,
                value,
                partition,
                self._offsets.get(partition),
                self.pending.of(partition),
                pending.number,
            )
        )
        self.pending.put(partition, pending, self._order)

    def end_transaction(self, ended: Producer, *, commit: bool, up_to: int) -> None:
        """A mark is committed that was written after number ``up_to``, and before the next.

        Nothing is to be written for it: whoever reads the log sees what the mark does.
        """
        for partition, pending in self.pending.take(ended, up_to):
            if commit:
                self._set_offset(partition, pending.offset)
                self.pending.drop(partition, before=pending.number)

    def take_changes(self) -> tuple[Change, ...]:
        """The changes since the last call, in order. Their order keeps every prefix sound."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def take_touched(self) -> set[str]:
        """The ids of members put or removed since the last call."""
        touched, self._touched = self._touched, set()
        return touched

    def take_movable(self) -> set[str]:
        """Members that may now get what they could not before, since the last call.

        Those put, and those that shall hold what somebody else gave up.
        """
        freed, self._freed = self._freed, set()
        heirs = {self._targets[partition] for partition in freed if partition in self._targets}
        return (heirs | self._touched) & self._members.keys()

    def replay(self, slot: Slot, value: Value, names: Mapping[TopicId, str]) -> None:
        """Take over what a record says, without noting a change."""
        self._names.update(names)
        self._set(slot, value)
        if isinstance(slot, TopicPartition):
            self.pending.drop(slot)

    def replay_pending(
        self, partition: TopicPartition, offset: CommittedOffset, producer: Producer
    ) -> None:
        """The same of a record in a transaction."""
        pending = PendingOffset(offset, producer, self._order.next())
        self._order.appended = pending.number
        self.pending.put(partition, pending, self._order)

    def undo(self, changes: Iterable[Change]) -> None:
        """Take back changes, the newest first."""
        for change in changes:
            self._set(change.slot, change.before)
            if isinstance(change.slot, TopicPartition):
                self.pending.restore(change.slot, change.pending_before)

    def _set(self, slot: Slot, value: Value) -> None:
        if slot is None:
            assert value is None or isinstance(value, Epochs)
            self._epochs = value
        elif isinstance(slot, TopicPartition):
            assert value is None or isinstance(value, CommittedOffset)
            self._set_offset(slot, value)
        else:
            assert value is None or isinstance(value, Member)
            self._set_member(slot, value)

    def _set_offset(self, partition: TopicPartition, offset: CommittedOffset | None) -> None:
        if offset is None:
            self._offsets.pop(partition, None)
        else:
            self._offsets[partition] = offset

    def _set_member(self, member_id: str, member: Member | None) -> None:
        self._touched.add(member_id)
        before = self._members.pop(member_id, None)
        if before is not None:
            self._forget(before)
        since_before = self._held_since.pop(member_id, {})
        if member is None:
            return
        if before is None or (before.epoch == LEFT_EPOCH) != (member.epoch == LEFT_EPOCH):
            since_before = {}
        epoch = self.epochs.assignment_epoch if member.epoch == LEFT_EPOCH else member.epoch
        since = {}
        for partition in member.assigned | member.revoking:
            self._owners[partition] = member_id
            self._freed.discard(partition)
            since[partition] = since_before.get(partition, epoch)
        self._held_since[member_id] = since
        self._targets.update(dict.fromkeys(member.target, member_id))
        self._members[member_id] = member
        if member.instance_id:
            self._instances[member.instance_id] = member_id

    def _forget(self, member: Member) -> None:
        for partition in member.assigned | member.revoking:
            if self._owners.get(partition) == member.member_id:
                del self._owners[partition]
                self._freed.add(partition)
        for partition in member.target:
            if self._targets.get(partition) == member.member_id:
                del self._targets[partition]
        if self._instances.get(member.instance_id) == member.member_id:
            del self._instances[member.instance_id]

    # ------------------------------------------------------------------ for tests

    def durable(self) -> tuple[object, ...]:
        """A copy of all that replay must bring back."""
        return self._epochs, dict(self._members), dict(self._offsets), self.pending.copy()

    def validate(self) -> None:
        """Assert what must hold between events."""
        self.pending.validate()
        owners: dict[TopicIdPartition, str] = {}
        for member_id, member in self._members.items():
            assert member.member_id == member_id
            assert not member.assigned & member.revoking
            assert member.assigned <= member.target
            for partition in member.assigned | member.revoking:
                assert partition not in owners, f"{partition} is held twice"
                owners[partition] = member_id
        assert owners == self._owners
        _disjoint(member.target for member in self._members.values())
        targets = {p: m.member_id for m in self._members.values() for p in m.target}
        assert targets == self._targets
        static = {m.instance_id: m.member_id for m in self._members.values() if m.instance_id}
        assert static == self._instances
        assert self.epochs.assignment_epoch <= self.epochs.group_epoch


def _disjoint(sets: Iterable[Partitions]) -> None:
    seen: set[TopicIdPartition] = set()
    for parts in sets:
        assert not seen & parts
        seen |= parts
