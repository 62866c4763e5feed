"""The groups that one partition of ``__consumer_offsets`` keeps."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from penstock.broker.core import group_codec, group_describe, group_offsets
from penstock.broker.core.group import Group
from penstock.broker.core.group_events import (
    CommitTransactionOffsets,
    Effect,
    ExpireOffsets,
    GroupEvent,
    GroupSettings,
    ListGroups,
    Loaded,
    Marked,
    Persist,
    Respond,
    ShardEvent,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_pending import WriteOrder
from penstock.broker.core.group_state import Change
from penstock.broker.core.group_topics import Subscriptions, TopicView
from penstock.broker.core.group_values import CommittedOffset, Producer
from penstock.v1 import groups_pb2
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicPartition


class GroupShard:
    """All groups of one partition: replayed from its records, then changed by events.

    First every record of the partition goes through ``replay``, then ``Loaded`` is handled once,
    and then whatever happens. ``next_deadline_ms`` says when a Tick is due.
    """

    def __init__(self, topics: TopicView, settings: GroupSettings) -> None:
        self._topics = topics
        self._settings = settings
        self._subscriptions = Subscriptions(topics)
        self._groups: dict[str, Group] = {}
        self._order = WriteOrder()
        self._writers: dict[int, set[str]] = {}  # By producer id, groups it may have offsets in.
        # Deadlines by group, and a heap of them; an entry of the heap counts when it is the
        # group's present one.
        self._deadlines: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups that exist, by id."""
        return self._groups

    @property
    def next_deadline_ms(self) -> int | None:
        """When to handle a Tick, at the latest; None for never."""
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def replay(self, key: bytes, value: bytes | None) -> bool:
        """Take over one record; False for a kind that this version does not know.

        Raises CorruptRecordError when it is not what a coordinator writes.
        """
        replayed = group_codec.decode(key, value)
        if replayed is None:
            return False
        group = self._group(replayed.group_id)
        group.state.replay(replayed.slot, replayed.value, replayed.names)
        self._keep(group)
        return True

    def replay_transactional(self, producer: Producer, key: bytes, value: bytes | None) -> bool:
        """Take over one record of a transaction; as ``replay``."""
        replayed = group_codec.decode(key, value)
        if replayed is None:
            return False
        if not (
            isinstance(replayed.slot, TopicPartition)
            and isinstance(replayed.value, CommittedOffset)
        ):
            raise CorruptRecordError(
                f"a record of group {replayed.group_id!r} is of a transaction, but no offset"
            )
        group = self._group(replayed.group_id)
        group.state.replay_pending(replayed.slot, replayed.value, producer)
        self._writers.setdefault(producer.producer_id, set()).add(replayed.group_id)
        self._keep(group)
        return True

    def replay_marker(self, ended: Producer, *, commit: bool) -> None:
        """Take over a mark, which ends what its producer wrote in earlier epochs."""
        for group in self._written_by(ended):
            group.state.end_transaction(ended, commit=commit, up_to=self._order.appended)
            self._keep(group)
        self._forget_writer(ended.producer_id)

    @property
    def appended(self) -> int:
        """The number up to which what is written in transactions is in the log; see Marked."""
        return self._order.appended

    def note_appended(self, changes: Sequence[Change]) -> None:
        """What a transaction wrote is in the log. It is said before a mark comes after it."""
        numbers = (change.number for change in changes)
        self._order.appended = max(self._order.appended, *numbers)

    def check_commit(self, request: groups_pb2.CommitOffsetsRequest) -> None:
        """Raise what a commit is refused with whatever it commits."""
        group_offsets.check_commit(self._group(request.group_id).state, request)

    def handle(self, event: ShardEvent, now_ms: int) -> list[Effect]:
        """Take one event at a time of the monotonic clock."""
        match event:
            case ListGroups():
                listing = [group_describe.listing(group.state) for group in self._sorted()]
                response = groups_pb2.ListGroupsResponse(groups=listing)
                return [Respond(None, event.request_id, response)]
            case Tick():
                return self._tick(event, now_ms)
            case TopicsChanged() | Loaded():
                self._subscriptions.topics_changed()
                return self._handle_all(event, now_ms)
            case ExpireOffsets():
                return self._handle_all(event, now_ms)
            case Marked():
                return self._marked(event, now_ms)
            case CommitTransactionOffsets():
                return self._commit_in_transaction(event, now_ms)
            case _:
                return self._handle(self._group(event.group_id), event, now_ms)

    def revert(self, changes: Sequence[Change], now_ms: int) -> None:
        """Take back changes that could not be written: all of them, in the order of effects."""
        by_group: dict[str, list[Change]] = {}
        for change in reversed(changes):
            by_group.setdefault(change.group_id, []).append(change)
        for group_id, of_group in by_group.items():
            group = self._group(group_id)
            group.revert(of_group, now_ms)
            self._keep(group)

    def validate(self) -> None:
        """Assert what must hold between events."""
        for group_id, group in self._groups.items():
            assert group.state.group_id == group_id
            assert not group.state.is_bare
            assert self._deadlines.get(group_id) == group.next_deadline_ms
            group.validate()
            for producer_id in group.state.pending.producer_ids():
                assert group_id in self._writers[producer_id]

    def _group(self, group_id: str) -> Group:
        """The group; one that does not exist is only made when something is kept in it."""
        return self._groups.get(group_id) or Group(
            group_id, self._topics, self._subscriptions, self._settings, self._order
        )

    def _sorted(self) -> Iterator[Group]:
        return iter([self._groups[group_id] for group_id in sorted(self._groups)])

    def _handle(self, group: Group, event: GroupEvent, now_ms: int) -> list[Effect]:
        effects = group.handle(event, now_ms)
        self._keep(group)
        return effects

    def _handle_all(
        self, event: TopicsChanged | Loaded | ExpireOffsets, now_ms: int
    ) -> list[Effect]:
        effects: list[Effect] = []
        for group in self._sorted():
            effects += self._handle(group, event, now_ms)
        return effects

    def _commit_in_transaction(self, event: CommitTransactionOffsets, now_ms: int) -> list[Effect]:
        effects = self._handle(self._group(event.group_id), event, now_ms)
        if any(isinstance(effect, Persist) for effect in effects):
            self._writers.setdefault(event.request.producer_id, set()).add(event.group_id)
        return effects

    def _marked(self, event: Marked, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        for group in self._written_by(event.ended):
            effects += self._handle(group, event, now_ms)
        self._forget_writer(event.ended.producer_id)
        return effects

    def _written_by(self, producer: Producer) -> list[Group]:
        group_ids = sorted(self._writers.get(producer.producer_id, ()))
        return [self._groups[group_id] for group_id in group_ids if group_id in self._groups]

    def _forget_writer(self, producer_id: int) -> None:
        """Keep of the groups that a producer wrote in those where something is pending of it."""
        left = {
            group.state.group_id
            for group in self._written_by(Producer(producer_id, -1))
            if producer_id in group.state.pending.producer_ids()
        }
        if left:
            self._writers[producer_id] = left
        else:
            self._writers.pop(producer_id, None)

    def _tick(self, event: Tick, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        while (deadline_ms := self.next_deadline_ms) is not None and deadline_ms <= now_ms:
            _, group_id = heapq.heappop(self._heap)
            del self._deadlines[group_id]
            effects += self._handle(self._groups[group_id], event, now_ms)
        return effects

    def _keep(self, group: Group) -> None:
        """Keep a group as long as there is anything to it, and its deadline in the heap."""
        group_id = group.state.group_id
        if group.state.is_bare:
            self._groups.pop(group_id, None)
            self._deadlines.pop(group_id, None)
            return
        self._groups[group_id] = group
        deadline_ms = group.next_deadline_ms
        if deadline_ms is None:
            self._deadlines.pop(group_id, None)
        elif self._deadlines.get(group_id) != deadline_ms:
            self._deadlines[group_id] = deadline_ms
            heapq.heappush(self._heap, (deadline_ms, group_id))
