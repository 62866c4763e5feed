"""A led partition of ``__consumer_offsets`` with its groups and their members' streams."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.broker.coordinator import refusals
from penstock.broker.coordinator.hosted import Held, HostedShard, HostPorts, Place
from penstock.broker.coordinator.streams import MemberStream
from penstock.broker.core import group_codec
from penstock.broker.core.group_events import (
    Effect,
    ExpireOffsets,
    GroupSettings,
    Heartbeat,
    Loaded,
    Marked,
    Persist,
    Respond,
    Send,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_reconcile import state_name
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_state import Change, GroupState
from penstock.broker.core.group_topics import TopicView
from penstock.broker.core.group_values import Epochs, Producer
from penstock.broker.core.transactions import Marker
from penstock.broker.core.write_queue import Write
from penstock.v1 import groups_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition

_RETRY_S: Final = 0.1
_LOOKS: Final = 3


@dataclass(slots=True)
class _Marks:
    """Marks of one append, after which the log ended at ``end_offset``.

    They came after what was written in transactions up to number ``up_to``.
    """

    markers: Sequence[Marker]
    end_offset: int
    up_to: int


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What the groups of all partitions share."""

    topics: TopicView
    settings: GroupSettings
    on_rebalance: Callable[[], None] = lambda: None
    """Told where the group epoch of a group rises."""


class HostedGroups(HostedShard[GroupShard]):
    """The groups of one partition during one leadership; see HostedShard."""

    def __init__(self, place: Place, ports: HostPorts, context: GroupContext) -> None:
        super().__init__(place, ports)
        self._context = context
        self._streams: dict[int, MemberStream] = {}
        self._expiry: asyncio.TimerHandle | None = None  # When to look for offsets to forget.
        self._marks: deque[_Marks] = deque()  # In the log, and not known to be committed.
        self._follower: asyncio.Task[None] | None = None
        self._marked_at = 0  # The write that was made last when a mark was taken over.

    def close(self, error: PenstockError) -> None:
        """Stop at once, and tell everybody who waits, and every stream, why."""
        super().close(error)
        for stream in list(self._streams.values()):
            stream.end(error)
        self._streams.clear()

    def heartbeat(self, stream: MemberStream, request: groups_pb2.GroupHeartbeatRequest) -> None:
        """Take a member's message; the answer goes to the stream. Raises when not serving."""
        self._check_serving()
        self._streams[stream.stream_id] = stream
        self._handle(Heartbeat(request.group_id, stream.stream_id, request, stream.client_host))

    def committed(self) -> dict[str, dict[TopicPartition, int]]:
        """By group the positions of partitions whose topic exists; nothing while it loads."""
        topics = self._context.topics
        groups = {} if self._shard is None else self._shard.groups
        return {
            group_id: {
                partition: entry.offset
                for partition, entry in group.state.offsets.items()
                if topics.find_id(entry.topic_id) is not None
            }
            for group_id, group in groups.items()
        }

    def count_states(self) -> tuple[Counter[str], int]:
        """Groups by state, and their members; none while it loads. On any thread."""
        shard = self._shard
        states: Counter[str] = Counter()
        members = 0
        for group in [] if shard is None else list(shard.groups.values()):
            states[_state_of(group.state)] += 1
            members += len(group.state.members)
        return states, members

    def topics_changed(self, event: TopicsChanged) -> None:
        """Topics came or went. What happens while loading is seen at its end."""
        if self._shard is not None:
            self._handle(event)

    def check_commit(self, request: groups_pb2.CommitOffsetsRequest) -> None:
        """Raise what the commit would be refused with as a whole, or when not serving."""
        self._check_serving()
        assert self._shard is not None
        self._shard.check_commit(request)

    def forget_stream(self, stream: MemberStream) -> None:
        """The stream is over."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    # ------------------------------------------------------------------ what HostedShard asks for

    def _make_shard(self) -> GroupShard:
        return GroupShard(self._context.topics, self._context.settings)

    def _loaded_event(self) -> Loaded:
        return Loaded()

    def _tick_event(self) -> Tick:
        return Tick()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist():
                if any(_raises_epoch(change) for change in effect.changes):
                    self._context.on_rebalance()
                self._persist(effect.group_id, effect.changes, effect.producer)
            case Send():
                self._send(effect)
            case Respond():
                refusal = None if effect.in_transaction else refusals.for_others
                self._respond(effect.group_id, effect.request_id, effect.response, refusal)

    def _on_loaded(self, shard: GroupShard, record_count: int) -> None:
        # Streams stayed: their members are heard again.
        self._log.info("groups loaded", groups=len(shard.groups), records=record_count)
        self._arm_expiry()
        # Those that came before the load's end were read; once more they do nothing.
        for marks in self._marks:
            marks.up_to = shard.appended
        self._follow_marks()

    def _on_halted(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _on_appending(self, write: Write[Held]) -> None:
        if write.producer is not None and self._shard is not None:
            self._shard.note_appended(write.changes)

    def _may_revert(self, number: int) -> bool:
        # What was as it was before a mark is not what is to be gone back to.
        return number > self._marked_at

    # ------------------------------------------------------------------ marks

    def marked(self, markers: Sequence[Marker], end_offset: int) -> None:
        """Marks were appended, after which the partition ended there. They count once committed."""
        up_to = 0 if self._shard is None else self._shard.appended
        self._marks.append(_Marks(markers, end_offset, up_to))
        self._follow_marks()

    def _follow_marks(self) -> None:
        if not self._marks or self._shard is None:
            return
        # A task that is cancelled before its first turn runs nothing, so it can't say that it ends.
        if self._follower is None or self._follower.done() or self._follower.cancelling():
            self._follower = self._spawn(self._take_marks(), "follow marks")

    async def _take_marks(self) -> None:
        place, replicas = self.place, self._ports.replicas
        while self._marks and self._shard is not None:
            marks = self._marks[0]
            try:
                await replicas.wait_high_watermark(place.topic, place.partition, marks.end_offset)
            except PenstockError:
                if replicas.leader_epoch_of(place.topic, place.partition) is None:
                    return  # The news that it is led elsewhere is on its way, or here.
                await asyncio.sleep(_RETRY_S)
                continue
            self._marks.popleft()
            self._take_over(marks)

    def _take_over(self, marks: _Marks) -> None:
        self._marked_at = self._queue.last_number
        for marker in marks.markers:
            if self._shard is None:
                return  # It failed, and is loaded anew, with what the log has.
            ended = Producer(marker.producer_id, marker.producer_epoch)
            self._handle(Marked(ended, marker.commit, marks.up_to))

    def _send(self, effect: Send) -> None:
        stream = self._streams.get(effect.stream_id)
        if not effect.is_reply:
            # Also with nobody there to hear it: that a dead member was removed is to be logged.
            self._hold(effect.group_id, Held(partial(self._push, stream, effect), _nothing))
        elif stream is not None:
            held = Held(
                partial(stream.reply, effect.response),
                partial(_refuse, stream, effect.response.member_id),
            )
            self._hold(effect.group_id, held)

    def _push(self, stream: MemberStream | None, effect: Send) -> None:
        if effect.response.HasField("error"):
            self._log.info(
                "member removed",
                group=effect.group_id,
                member=effect.response.member_id,
                reason=effect.response.error.message,
            )
        if stream is not None:
            stream.push(effect.response)

    # ------------------------------------------------------------------ offsets that nobody uses

    def _arm_expiry(self) -> None:
        interval_s = self._context.settings.offsets_retention_check_interval_ms / 1000
        self._expiry = asyncio.get_running_loop().call_later(interval_s, self._expire)

    def _expire(self) -> None:
        """Have groups forget offsets; a broker that may not serve leaves it to who may."""
        try:
            self._check_serving()
        except PenstockError:
            pass
        else:
            self._handle(ExpireOffsets(self._ports.wall_clock_ms()))
        if self._shard is not None:
            self._arm_expiry()


def _raises_epoch(change: Change) -> bool:
    """Whether a record says that the target assignment is to be made anew (KIP-848)."""
    if change.slot is not None or change.value is None:
        return False
    replayed = group_codec.decode(change.key, change.value)
    after = None if replayed is None else replayed.value
    before = change.before.group_epoch if isinstance(change.before, Epochs) else 0
    return isinstance(after, Epochs) and after.group_epoch > before


def _state_of(state: GroupState) -> str:
    for _ in range(_LOOKS):
        try:
            return state_name(state)
        except RuntimeError:  # A member came or went while it was looked at, on another thread.
            continue
    return "reconciling"


def _refuse(stream: MemberStream, member_id: str, error: PenstockError) -> None:
    told = refusals.for_others(error).to_proto()
    stream.reply(groups_pb2.GroupHeartbeatResponse(error=told, member_id=member_id))


def _nothing(_error: PenstockError) -> None:
    """A push that tells what did not happen is simply not sent."""
