"""Programs that share the partitions of a topic as a group, and keep its positions in what they
write by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.chaos.simulator.transactions.actors import Actor
from penstock.chaos.simulator.transactions.membership import GroupMember
from penstock.chaos.simulator.transactions.positions import (
    GROUP,
    Moves,
    PositionTold,
    keeper_of,
)
from penstock.chaos.simulator.transactions.producer import MustAbort, TransactionalProducer
from penstock.chaos.simulator.transactions.reading import Cursor
from penstock.chaos.simulator.transactions.scripts import (
    Rest,
    Script,
    ScriptedProcess,
    Sleep,
    error_of,
)
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.ids import TopicIdPartition, TopicPartition
from penstock.wire.records import Record

_COMMITS: Final = 0.85
_SAYS_GOODBYE: Final = 0.5  # Of those that leave; the others are silent until they are missed.
_ROUNDS: Final = (2, 20)  # Of a membership.
_HASTY: Final = 0.2  # Of the transactions: meanwhile their member gives partitions back.
_SESSION_MS: Final = (300, 600, 1200)
_AT_LAST_MS: Final = 3000  # When everybody should be done.


@dataclass(slots=True)
class _Reading:
    """A partition that a member holds. ``position``: what the group has of it, committed."""

    cursor: Cursor
    position: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """Records that a transaction is made out of, and the position after them."""

    reading: _Reading
    records: list[Record]

    @property
    def after(self) -> int:
        return self.records[-1].offset + 1


def ask_position(
    process: ScriptedProcess, topic: str, key: TopicIdPartition, member: GroupMember | None
) -> Script:
    """Ask once for the group's position of a partition; None where it was refused.

    A member wants it only where no transaction decides about it, anybody else as it is.
    """
    request = groups_pb2.FetchOffsetsRequest(group_id=GROUP, member_epoch=-1)
    request.partitions.add(topic=topic, partition=key.partition)
    if member is not None:
        request.member_id, request.member_epoch = member.member_id, member.epoch
        request.require_stable = True
    return (yield from _asked(process, key, request))


def ask_stable_position(process: ScriptedProcess, topic: str, key: TopicIdPartition) -> Script:
    """The same as somebody who is no member, but wants it stable."""
    request = groups_pb2.FetchOffsetsRequest(group_id=GROUP, member_epoch=-1, require_stable=True)
    request.partitions.add(topic=topic, partition=key.partition)
    return (yield from _asked(process, key, request))


def _asked(
    process: ScriptedProcess, key: TopicIdPartition, request: groups_pb2.FetchOffsetsRequest
) -> Script:
    asked_at = len(process.place.history.events)
    answer = yield from process.ask(keeper_of(GROUP), "fetch offsets", request)
    if error_of(answer) is not None:
        return None
    [told] = answer.offsets
    process.note(PositionTold(asked_at, GROUP, key, told.offset, request.require_stable))
    return told.offset


class Worker(Actor):
    """A member that processes what it holds, and sends its positions with what it writes.

    It goes on with a transaction whatever it hears of the group meanwhile, and even if it has given
    partitions back, under the epoch that it began with: whether its positions still count is for
    the group to say.
    """

    contradicts = False  # It could commit what it wrote without its positions.

    def _session(self) -> Script:
        producer = self._producer()
        yield from producer.start()
        member = GroupMember(self, GROUP, self.stage.topic, self.rng.choice(_SESSION_MS))
        member.join()
        held: dict[TopicPartition, _Reading] = {}
        for _ in range(self.rng.randint(*_ROUNDS)):
            if self.stopped:
                break
            yield Rest(5, 60)
            _poll(member, held)
            yield from self._take_over(member, held)
            yield from self._process(producer, member, held)
        if self.rng.random() < _SAYS_GOODBYE:
            member.leave()
        else:
            member.abandon()

    def _take_over(self, member: GroupMember, held: dict[TopicPartition, _Reading]) -> Script:
        """Find out where to go on in what is new."""
        [topic_id] = {key.topic_id for key in self.stage.partitions()}
        for partition in sorted(member.owned - held.keys()):
            key = TopicIdPartition(topic_id, partition.partition)
            position = yield from ask_position(self, self.stage.topic, key, member)
            if position is not None:
                position = max(position, 0)
                held[partition] = _Reading(Cursor(self, key, position), position)

    def _process(
        self,
        producer: TransactionalProducer,
        member: GroupMember,
        held: dict[TopicPartition, _Reading],
    ) -> Script:
        """One transaction, where there is something to do."""
        epoch = member.epoch
        taken: list[_Taken] = []
        chosen = self.rng.sample(sorted(held), min(len(held), self.rng.choice((1, 1, 2))))
        for reading in [held[partition] for partition in chosen]:
            at = reading.cursor.offset
            records, _ = yield from reading.cursor.fetch()
            if records:
                some = records[: self.rng.randint(1, 3)]
                taken.append(_Taken(reading, some))
                reading.cursor.offset = at  # Unless it is committed.
        if not taken:
            return
        committed = yield from self._write(producer, member, epoch, held, taken)
        if committed:
            for one in taken:
                one.reading.position = one.reading.cursor.offset = one.after

    def _write(
        self,
        producer: TransactionalProducer,
        member: GroupMember,
        epoch: int,
        held: dict[TopicPartition, _Reading],
        taken: list[_Taken],
    ) -> Script:
        consumed = [(one.reading.cursor.key, record) for one in taken for record in one.records]
        yield from producer.renew()
        producer.begin(consumed, GROUP)
        for one in taken:
            reading = one.reading
            self.note(Moves(producer.txn, GROUP, reading.cursor.key, reading.position, one.after))
        producer.write(self.rng.choice(self.stage.partitions()), len(consumed))
        commit = self.rng.random() < _COMMITS
        try:
            yield from self._dawdle()
            yield from self._be_hasty(member, held)
            positions = self._positions(member, epoch, taken)
            sent = self.place.told.sends_positions(producer.txn, positions)
            yield from producer.send_positions(positions)
            sent.ok()
            yield from self._be_hasty(member, held)
        except MustAbort:
            commit = False
        committed = yield from self._finish(producer, commit=commit)
        return committed

    def _be_hasty(self, member: GroupMember, held: dict[TopicPartition, _Reading]) -> Script:
        """At times give back in the middle of a transaction what the group wants to have back."""
        if self.rng.random() < _HASTY:
            yield Sleep(0, 300)
            _poll(member, held)
            yield Sleep(0, 600)

    def _positions(
        self, member: GroupMember, epoch: int, taken: list[_Taken]
    ) -> groups_pb2.CommitOffsetsRequest:
        request = groups_pb2.CommitOffsetsRequest(
            group_id=GROUP, member_id=member.member_id, member_epoch=epoch
        )
        for one in taken:
            partition = common_pb2.TopicPartition(
                topic=self.stage.topic, partition=one.reading.cursor.key.partition
            )
            request.offsets.add(partition=partition, offset=one.after, leader_epoch=-1)
        return request


def _poll(member: GroupMember, held: dict[TopicPartition, _Reading]) -> None:
    """Give back what the group wants to have back, whatever is going on."""
    for change in member.changes():
        for partition in (*change.revoked, *change.lost):
            held.pop(partition, None)


class Onlooker(Actor):
    """Asks for the group's positions as they are; and at last, for each until it is stable."""

    def _session(self) -> Script:
        while not self.stopped:
            yield Rest(10, 200)
            key = self.rng.choice(self.stage.partitions())
            yield from ask_position(self, self.stage.topic, key, None)
        yield Sleep(_AT_LAST_MS, _AT_LAST_MS)
        for key in self.stage.partitions():
            while (yield from ask_stable_position(self, self.stage.topic, key)) is None:
                yield Sleep(20, 120)
