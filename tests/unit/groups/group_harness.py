"""A shard of groups driven by hand: topics, heartbeats, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.broker.core.group_events import (
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    Effect,
    FetchOffsets,
    GroupSettings,
    Heartbeat,
    Loaded,
    Marked,
    Persist,
    Respond,
    Send,
    ShardEvent,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_state import Change
from penstock.broker.core.group_topics import TopicInfo
from penstock.broker.core.group_values import Producer
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.ids import TopicId, TopicIdPartition

GROUP = "billing"
PRODUCER = Producer(7, 0)


class FakeTopics:
    """Topics that a test makes and deletes; each time a name is made it gets another id."""

    def __init__(self, **counts: int) -> None:
        self._topics: dict[str, TopicInfo] = {}
        self._made = 0
        self.racks_of: dict[TopicIdPartition, frozenset[str]] = {}
        for name, count in counts.items():
            self.make(name, count)

    def make(self, name: str, count: int) -> TopicInfo:
        self._made += 1
        topic_id = TopicId(self._made.to_bytes(16, "big"))
        self._topics[name] = TopicInfo(name, topic_id, count)
        return self._topics[name]

    def grow(self, name: str, count: int) -> None:
        self._topics[name] = TopicInfo(name, self._topics[name].topic_id, count)

    def delete(self, name: str) -> TopicInfo:
        return self._topics.pop(name)

    def find(self, name: str) -> TopicInfo | None:
        return self._topics.get(name)

    def find_id(self, topic_id: TopicId) -> TopicInfo | None:
        return next((t for t in self._topics.values() if t.topic_id == topic_id), None)

    def racks(self, partition: TopicIdPartition) -> frozenset[str]:
        return self.racks_of.get(partition, frozenset())

    def names(self) -> Iterator[str]:
        return (name for name in self._topics if not name.startswith("__"))


Held = set[tuple[str, int]]


def held(entries: Any) -> Held:
    return {(entry.topic, number) for entry in entries for number in entry.partitions}


class Driver:
    """A shard with its clock. Checks the invariants after every event."""

    def __init__(self, topics: FakeTopics, settings: GroupSettings | None = None) -> None:
        self.topics = topics
        self.settings = settings or GroupSettings(assignment_interval_ms=0)
        self.now_ms = 1_000_000
        self.shard = GroupShard(topics, self.settings)
        self.changes: list[Change] = []
        self.appends = True  # What is to be written is in the log at once.
        self.sent: list[Send] = []
        self.answers: list[Respond] = []
        self.do(Loaded())

    def do(self, event: ShardEvent) -> list[Effect]:
        effects = self.shard.handle(event, self.now_ms)
        for effect in effects:
            match effect:
                case Persist(changes=changes):
                    self.changes += changes
                    if self.appends:
                        self.shard.note_appended(changes)
                case Send():
                    self.sent.append(effect)
                case Respond():
                    self.answers.append(effect)
        self.shard.validate()
        return effects

    def heartbeat(
        self,
        member_id: str,
        epoch: int,
        *,
        stream: int = 0,
        topics: list[str] | None = None,
        pattern: str = "",
        owned: Held | None = None,
        group: str = GROUP,
        host: str = "host",
        **fields: Any,
    ) -> groups_pb2.GroupHeartbeatResponse:
        """Send one message and return the answer; the pushes are in ``pushes``."""
        request = groups_pb2.GroupHeartbeatRequest(
            group_id=group, member_id=member_id, member_epoch=epoch, **fields
        )
        if topics is not None or pattern:
            request.subscription.CopyFrom(
                groups_pb2.Subscription(topics=topics or [], topic_pattern=pattern)
            )
        if owned is not None:
            request.owned.CopyFrom(groups_pb2.OwnedPartitions(partitions=self.wire(owned)))
        stream_id = stream or sum(map(ord, member_id))
        effects = self.do(Heartbeat(group, stream_id, request, host))
        (reply,) = [e for e in effects if isinstance(e, Send) and e.is_reply]
        assert reply.stream_id == stream_id
        return reply.response

    def wire(self, owned: Held) -> list[groups_pb2.TopicPartitions]:
        entries = []
        for name in sorted({name for name, _ in owned}):
            info = self.topics.find(name)
            entries.append(
                groups_pb2.TopicPartitions(
                    topic=name,
                    topic_id=info.topic_id if info else b"",
                    partitions=sorted(n for topic, n in owned if topic == name),
                )
            )
        return entries

    def pushes(self, member_id: str) -> list[groups_pb2.GroupHeartbeatResponse]:
        """What the member was sent without asking, since the last call."""
        found = [s for s in self.sent if not s.is_reply and s.response.member_id == member_id]
        self.sent = [s for s in self.sent if s not in found]
        return [s.response for s in found]

    def tick(self, by_ms: int = 0) -> None:
        """Let time pass, handling each deadline when it comes."""
        end_ms = self.now_ms + by_ms
        while (at_ms := self.shard.next_deadline_ms) is not None and at_ms <= end_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self.do(Tick())
        self.now_ms = end_ms

    def topics_changed(self, *names: str, removed: TopicInfo | None = None) -> None:
        gone = frozenset({removed.topic_id}) if removed else frozenset()
        self.do(TopicsChanged(frozenset(names), gone))

    def commit(
        self,
        offsets: dict[tuple[str, int], int],
        member_id: str = "",
        epoch: int = -1,
        *,
        group: str = GROUP,
        only_forward: bool = False,
        **fields: Any,
    ) -> groups_pb2.CommitOffsetsResponse:
        request = groups_pb2.CommitOffsetsRequest(
            group_id=group,
            member_id=member_id,
            member_epoch=epoch,
            only_forward=only_forward,
            offsets=[
                groups_pb2.OffsetCommit(
                    partition=common_pb2.TopicPartition(topic=topic, partition=number),
                    offset=offset,
                    leader_epoch=-1,
                    **fields,
                )
                for (topic, number), offset in offsets.items()
            ],
        )
        self.do(CommitOffsets(group, 1, request, self.now_ms))
        return self._answer()

    def commit_in_transaction(
        self,
        offsets: dict[tuple[str, int], int],
        member_id: str = "",
        epoch: int = -1,
        *,
        producer: Producer = PRODUCER,
        group: str = GROUP,
    ) -> groups_pb2.CommitOffsetsResponse:
        request = groups_pb2.CommitTransactionOffsetsRequest(
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            commit=groups_pb2.CommitOffsetsRequest(
                group_id=group,
                member_id=member_id,
                member_epoch=epoch,
                offsets=[
                    groups_pb2.OffsetCommit(
                        partition=common_pb2.TopicPartition(topic=topic, partition=number),
                        offset=offset,
                        leader_epoch=-1,
                    )
                    for (topic, number), offset in offsets.items()
                ],
            ),
        )
        self.do(CommitTransactionOffsets(group, 6, request, self.now_ms))
        answer: groups_pb2.CommitOffsetsResponse = self._answer().commit
        return answer

    def mark(self, ended: Producer, *, commit: bool, up_to: int | None = None) -> list[Effect]:
        """A mark is committed; after all that was written so far, unless ``up_to`` says less."""
        number = self.shard.appended if up_to is None else up_to
        return self.do(Marked(ended, commit, number))

    def fetch(
        self,
        partitions: list[tuple[str, int]] | None = None,
        member_id: str = "",
        epoch: int = -1,
        *,
        group: str = GROUP,
        stable: bool = False,
    ) -> groups_pb2.FetchOffsetsResponse:
        request = groups_pb2.FetchOffsetsRequest(
            group_id=group,
            member_id=member_id,
            member_epoch=epoch,
            partitions=[
                common_pb2.TopicPartition(topic=topic, partition=number)
                for topic, number in partitions or []
            ],
            require_stable=stable,
        )
        self.do(FetchOffsets(group, 2, request))
        return self._answer()

    def describe(self, group: str = GROUP) -> groups_pb2.GroupDescription:
        self.do(DescribeGroup(group, 3))
        return self._answer()

    def delete(self, group: str = GROUP) -> groups_pb2.DeleteGroupResult:
        self.do(DeleteGroup(group, 4))
        return self._answer()

    def forget(
        self, partitions: list[tuple[str, int]], group: str = GROUP
    ) -> groups_pb2.DeleteOffsetsResponse:
        request = groups_pb2.DeleteOffsetsRequest(
            group_id=group,
            partitions=[
                common_pb2.TopicPartition(topic=topic, partition=number)
                for topic, number in partitions
            ],
        )
        self.do(DeleteOffsets(group, 5, request))
        return self._answer()

    def _answer(self) -> Any:
        return self.answers.pop().response

    def assigned(self, member_id: str) -> Held:
        """What the coordinator lets the member read."""
        (member,) = [m for m in self.describe().members if m.member_id == member_id]
        return held(member.assigned)

    def state(self) -> str:
        return self.describe().state

    def reload(self, changes: list[Change] | None = None) -> None:
        """Start a new coordinator from the records."""
        self.shard = replayed(
            self.topics, self.settings, self.changes if changes is None else changes
        )
        self.do(Loaded())


def replayed(topics: FakeTopics, settings: GroupSettings, changes: list[Change]) -> GroupShard:
    """A shard that has replayed these records and not begun to serve."""
    shard = GroupShard(topics, settings)
    for change in changes:
        assert shard.replay(change.key, change.value)
    return shard


def durable(shard: GroupShard) -> dict[str, Any]:
    """All that a shard must get back by replay."""
    return {group_id: group.state.durable() for group_id, group in shard.groups.items()}
