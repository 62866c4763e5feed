"""Random lives of a group, over a network that holds messages back and a coordinator that dies.

Members, the streams between them and the coordinator, the write queue, and the log are modelled;
the shard of groups is the real one. What must hold after every step:

* exclusive: what a member that the coordinator knows believes to own, it is the holder of;
* no zombie: a commit is only taken from the member that holds the partition, and has held it
  since the epoch that the commit names (kept track of here by watching the records);
* replay: the state is what the records say;
* and when things calm down: complete, balanced within one, and everybody knows it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.broker.core.group_events import (
    CommitOffsets,
    Effect,
    ExpireOffsets,
    GroupSettings,
    Heartbeat,
    Loaded,
    Persist,
    Respond,
    Send,
    ShardEvent,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_state import Change, GroupState
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.unit.groups.group_harness import GROUP, FakeTopics, durable, replayed

SESSION_MS = 1_000
SETTINGS = GroupSettings(assignment_interval_ms=50, retry_ms=100)
REJOIN = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH)


@dataclass
class Client:
    """A member as a process: what it believes, and its stream."""

    member_id: str
    instance_id: str
    topics: frozenset[str]
    stream_id: int
    epoch: int = 0
    owned: set[TopicIdPartition] = field(default_factory=set)
    wanted: set[TopicIdPartition] = field(default_factory=set)
    first: bool = True  # Nothing was sent on this stream yet.
    report: bool = False  # What it owns changed since it was last said.
    join_is_said: bool = False  # ... on this stream, and there was no answer yet.
    gone: bool = False  # It left, or its process died.
    outbox: deque[groups_pb2.GroupHeartbeatRequest] = field(default_factory=deque)
    inbox: deque[groups_pb2.GroupHeartbeatResponse] = field(default_factory=deque)

    def speak(self) -> None:
        if self.epoch == 0 and self.join_is_said:
            return  # As the client's members do: a late second join would free what it reads.
        self.join_is_said = self.epoch == 0
        request = groups_pb2.GroupHeartbeatRequest(
            group_id=GROUP,
            member_id=self.member_id,
            member_epoch=self.epoch,
            group_instance_id=self.instance_id,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=2 * SESSION_MS,
        )
        if self.first or self.epoch == 0:
            request.subscription.topics.extend(sorted(self.topics))
        if self.epoch > 0 and (self.first or self.report):
            request.owned.SetInParent()
            for topic_id, number in sorted(self.owned):
                request.owned.partitions.add(topic_id=topic_id, partitions=[number])
        self.first = self.report = False
        self.outbox.append(request)

    def reopen(self, stream_id: int) -> None:
        self.stream_id, self.first, self.join_is_said = stream_id, True, False

    def leave(self, epoch: int) -> None:
        self.owned.clear()
        self.outbox.append(
            groups_pb2.GroupHeartbeatRequest(
                group_id=GROUP,
                member_id=self.member_id,
                member_epoch=epoch,
                group_instance_id=self.instance_id,
            )
        )
        self.gone = True

    def hear(self) -> None:
        """Take the next message of the coordinator."""
        response = self.inbox.popleft()
        if self.gone:
            return
        if response.HasField("error"):
            if response.error.code not in REJOIN:
                self.join_is_said = False  # It may be said again.
            elif not self.join_is_said:
                self.owned.clear()
                self.wanted.clear()
                if self.epoch != 0:
                    self.epoch = 0
                    self.speak()
            return
        self.join_is_said = False
        self.epoch = response.member_epoch
        if response.HasField("assignment"):
            self.wanted = {
                TopicIdPartition(TopicId(entry.topic_id), number)
                for entry in response.assignment.partitions
                for number in entry.partitions
            }
            if self.wanted == self.owned:  # There is nothing to do but to say so.
                self.report = True
                self.speak()

    @property
    def must_change(self) -> bool:
        return not self.gone and self.owned != self.wanted

    def obey(self) -> None:
        """Give back and take up what the assignment says, and acknowledge it."""
        self.owned = set(self.wanted)
        self.report = True
        self.speak()


@dataclass
class Waiting:
    """Changes on their way, and what is to be told when they are committed."""

    changes: list[Change] = field(default_factory=list)
    told: list[Send | Respond] = field(default_factory=list)


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.topics = FakeTopics()
        self.now_ms = 1_000_000
        self.committed: list[Change] = []
        self.waiting: list[Waiting] = []
        self.clients: dict[str, Client] = {}
        self.old: list[Client] = []  # Streams that were given up, with messages on the way.
        self.made = 0
        self.streams = 0
        # Since which member epoch each partition has been held, by watching.
        self.held: dict[TopicIdPartition, tuple[str, int]] = {}
        self.commits: dict[int, ErrorCode | None] = {}
        self.shard = self._start()

    @initialize(counts=st.lists(st.integers(1, 5), min_size=1, max_size=2))
    def begin(self, counts: list[int]) -> None:
        for number, count in enumerate(counts):
            self.topics.make(f"t{number}", count)
            self._handle(TopicsChanged(frozenset({f"t{number}"})))

    # ------------------------------------------------------------------ the coordinator's shell

    def _start(self) -> GroupShard:
        self.shard = replayed(self.topics, SETTINGS, self.committed)
        self._handle(Loaded())
        return self.shard

    @property
    def state(self) -> GroupState | None:
        group = self.shard.groups.get(GROUP)
        return None if group is None else group.state

    def _handle(self, event: ShardEvent) -> list[Effect]:
        effects = self.shard.handle(event, self.now_ms)
        for effect in effects:
            if isinstance(effect, Persist):
                self.waiting.append(Waiting(list(effect.changes)))
            elif self.waiting:
                self.waiting[-1].told.append(effect)
            else:
                self._tell(effect)
        self._watch()
        return effects

    def _tell(self, effect: Send | Respond) -> None:
        if isinstance(effect, Send):
            for client in self.clients.values():
                if client.stream_id == effect.stream_id:
                    client.inbox.append(effect.response)

    def _watch(self) -> None:
        """Follow who holds what since when."""
        self.held = self._holders(self.state, self.held)

    @staticmethod
    def _holders(
        state: GroupState | None, before: dict[TopicIdPartition, tuple[str, int]]
    ) -> dict[TopicIdPartition, tuple[str, int]]:
        holders: dict[TopicIdPartition, tuple[str, int]] = {}
        for member_id, member in (state.members if state else {}).items():
            epoch = state.epochs.assignment_epoch if member.is_away else member.epoch
            for partition in member.assigned | member.revoking:
                assert partition not in holders
                known = before.get(partition)
                same = known is not None and known[0] == member_id
                holders[partition] = known if same else (member_id, epoch)
        return holders

    def _watch_again(self) -> None:
        """Follow the whole history, as the log has it."""
        self.held = {}
        shard = GroupShard(self.topics, SETTINGS)
        for change in self.committed:
            shard.replay(change.key, change.value)
            group = shard.groups.get(GROUP)
            self.held = self._holders(None if group is None else group.state, self.held)

    # ------------------------------------------------------------------ rules: members

    def _client(self, data: st.DataObject, *, present: bool = True) -> Client | None:
        names = [name for name, c in self.clients.items() if c.gone is not present]
        return self.clients[data.draw(st.sampled_from(sorted(names)))] if names else None

    @rule(static=st.booleans(), both=st.booleans())
    def join(self, static: bool, both: bool) -> None:
        if sum(not client.gone for client in self.clients.values()) >= 6:
            return
        self.made += 1
        self.streams += 1
        known = sorted(self.topics.names())
        topics = frozenset(known if both else known[:1])
        client = Client(f"m{self.made}", f"i{self.made}" if static else "", topics, self.streams)
        self.clients[client.member_id] = client
        client.speak()

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        if client := self._client(data):
            client.speak()

    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        names = sorted(name for name, c in self.clients.items() if c.must_change)
        if names:
            self.clients[data.draw(st.sampled_from(names))].obey()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if client := self._client(data):
            client.leave(-1)

    @rule(data=st.data())
    def restart_static(self, data: st.DataObject) -> None:
        names = sorted(n for n, c in self.clients.items() if c.instance_id and not c.gone)
        if not names:
            return
        client = self.clients[data.draw(st.sampled_from(names))]
        client.leave(-2)
        while client.outbox:
            self._deliver(client)
        self.made += 1
        self.streams += 1
        again = Client(f"m{self.made}", client.instance_id, client.topics, self.streams)
        self.clients[again.member_id] = again
        again.speak()

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if client := self._client(data):
            client.gone = True
            client.owned.clear()
            client.outbox.clear()

    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        """The stream breaks with what was on the way; the client opens another."""
        if client := self._client(data):
            client.outbox.clear()
            client.inbox.clear()
            self.streams += 1
            client.reopen(self.streams)
            client.speak()

    @rule(data=st.data())
    def resubscribe(self, data: st.DataObject) -> None:
        client = self._client(data)
        known = sorted(self.topics.names())
        if client and known and client.epoch > 0:
            client.topics = data.draw(st.frozensets(st.sampled_from(known), min_size=1))
            client.first = True  # Says everything again.
            client.speak()

    # ------------------------------------------------------------------ rules: the network

    def _deliver(self, client: Client) -> None:
        request = client.outbox.popleft()
        self._handle(Heartbeat(GROUP, client.stream_id, request, "host"))

    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver_to_coordinator(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            names = sorted(name for name, c in self.clients.items() if c.outbox)
            if names:
                self._deliver(self.clients[data.draw(st.sampled_from(names))])

    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver_to_member(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            names = sorted(name for name, c in self.clients.items() if c.inbox)
            if names:
                self.clients[data.draw(st.sampled_from(names))].hear()

    # ------------------------------------------------------------------ rules: commits

    @rule(data=st.data(), behind=st.integers(0, 3))
    def commit(self, data: st.DataObject, behind: int) -> None:
        """Anybody commits for anything, in the present epoch or one gone by."""
        everything = [
            (info, number)
            for name in sorted(self.topics.names())
            if (info := self.topics.find(name)) is not None
            for number in range(info.partition_count)
        ]
        if not everything or not self.clients:
            return
        client = self.clients[data.draw(st.sampled_from(sorted(self.clients)))]
        info, number = data.draw(st.sampled_from(everything))
        epoch = max(client.epoch - behind, 1)
        request = groups_pb2.CommitOffsetsRequest(
            group_id=GROUP,
            member_id=client.member_id,
            member_epoch=epoch,
            offsets=[
                groups_pb2.OffsetCommit(
                    partition=common_pb2.TopicPartition(topic=info.name, partition=number),
                    offset=self.now_ms,
                )
            ],
        )
        held = self.held.get(TopicIdPartition(info.topic_id, number))
        state = self.state
        member = state.members.get(client.member_id) if state else None
        (answer,) = [
            e
            for e in self._handle(CommitOffsets(GROUP, 1, request, self.now_ms))
            if isinstance(e, Respond)
        ]
        taken = not answer.response.HasField("error") and not (
            answer.response.results[0].HasField("error")
        )
        if taken:
            assert held is not None, "nobody holds it"
            assert held[0] == client.member_id, "another member holds it"
            assert epoch >= held[1], "it was another member's in that epoch"
        elif member is not None and member.epoch == epoch and not member.is_away:
            assert held is None or held[0] != client.member_id, "a holder was refused"

    # ------------------------------------------------------------------ rules: topics and time

    @rule(which=st.integers(0, 1), more=st.integers(1, 2))
    def grow_topic(self, which: int, more: int) -> None:
        info = self.topics.find(f"t{which}")
        if info is not None and info.partition_count < 8:
            self.topics.grow(info.name, info.partition_count + more)
            self._handle(TopicsChanged(frozenset({info.name})))

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def make_topic_anew(self, which: int, count: int) -> None:
        name = f"t{which}"
        removed = frozenset()
        if self.topics.find(name) is not None:
            removed = frozenset({self.topics.delete(name).topic_id})
        self.topics.make(name, count)
        self._handle(TopicsChanged(frozenset({name}), removed))

    @rule(by_ms=st.sampled_from([1, 50, 200, 600]))
    def time_passes(self, by_ms: int) -> None:
        end_ms = self.now_ms + by_ms
        while (at_ms := self.shard.next_deadline_ms) is not None and at_ms <= end_ms:
            self.now_ms = max(self.now_ms, at_ms)
            self._handle(Tick())
        self.now_ms = end_ms

    @rule(ahead_ms=st.sampled_from([0, SETTINGS.offsets_retention_ms]))
    def offsets_expire(self, ahead_ms: int) -> None:
        """What is in use stays; the wall clock may jump."""
        state = self.state
        held = {p.topic_id for p in self.held}
        before = {} if state is None else dict(state.offsets)
        self._handle(ExpireOffsets(self.now_ms + ahead_ms))
        after = {} if self.state is None else self.state.offsets
        assert all(p in after for p, offset in before.items() if offset.topic_id in held)

    # ------------------------------------------------------------------ rules: the log

    @rule(count=st.integers(1, 5))
    def writes_commit(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            write = self.waiting.pop(0)
            self.committed += write.changes
            for effect in write.told:
                self._tell(effect)

    @precondition(lambda self: self.waiting)
    @rule()
    def writes_are_refused(self) -> None:
        """Nothing that waits was appended: it is taken back, and told as errors."""
        changes = [change for write in self.waiting for change in write.changes]
        self.shard.revert(changes, self.now_ms)
        for write in self.waiting:
            for effect in write.told:
                if isinstance(effect, Send) and effect.is_reply:
                    error = common_pb2.Error(code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
                    self._tell(
                        Send(
                            GROUP,
                            effect.stream_id,
                            groups_pb2.GroupHeartbeatResponse(error=error),
                            is_reply=True,
                        )
                    )
        self.waiting.clear()
        self._watch()

    @rule(data=st.data())
    def coordinator_dies(self, data: st.DataObject) -> None:
        """A new one finds what was committed, and any first part of what was not."""
        pending = [change for write in self.waiting for change in write.changes]
        self.committed += pending[: data.draw(st.integers(0, len(pending)))]
        self.waiting.clear()
        self._watch_again()
        self.shard = replayed(self.topics, SETTINGS, self.committed)
        self._handle(Loaded())
        for client in self.clients.values():
            client.outbox.clear()
            client.inbox.clear()
            if not client.gone:
                self.streams += 1
                client.reopen(self.streams)
                client.speak()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def sound(self) -> None:
        self.shard.validate()

    @invariant()
    def exclusive(self) -> None:
        state = self.state
        for client in self.clients.values():
            if state is None or client.gone or client.member_id not in state.members:
                continue
            for partition in client.owned:
                assert state.owner(partition) == client.member_id, (
                    f"{client.member_id} reads {partition}, the coordinator gave it to "
                    f"{state.owner(partition)}"
                )

    @invariant()
    def replayable(self) -> None:
        pending = [change for write in self.waiting for change in write.changes]
        again = replayed(self.topics, SETTINGS, self.committed + pending)
        assert durable(again) == durable(self.shard)

    def teardown(self) -> None:
        """Things calm down; then all is as it should be."""
        self._drain()
        for client in self.clients.values():
            if not client.gone:
                client.outbox.clear()
                client.inbox.clear()
                self.streams += 1
                client.reopen(self.streams)
        # Long enough for dead members' sessions; the living speak all the while.
        for _ in range(16):
            for client in self.clients.values():
                if not client.gone:
                    client.speak()
            self._drain()
            self.time_passes(250)
        self._drain()
        self._check_calm()

    def _drain(self) -> None:
        for _ in range(200):
            busy = bool(self.waiting)
            self.writes_commit(len(self.waiting))
            for client in list(self.clients.values()):
                while client.outbox:
                    busy = True
                    self._deliver(client)
                while client.inbox:
                    busy = True
                    client.hear()
                if client.must_change:
                    busy = True
                    client.obey()
            self.exclusive()
            self.sound()
            if not busy:
                self._check_all_given_back()
                return
        raise AssertionError("the members and the coordinator never come to rest")

    def _check_all_given_back(self) -> None:
        """Whoever has heard everything and done it has nothing left to give back."""
        for client in self.clients.values():
            member = self.state.members.get(client.member_id) if self.state else None
            if member is not None and not client.gone:
                assert not member.revoking, f"{client.member_id} gave back what was asked of it"

    def _check_calm(self) -> None:
        alive = {c.member_id: c for c in self.clients.values() if not c.gone}
        state = self.state
        if not alive:
            assert state is None or not state.members
            return
        assert state is not None
        assert set(state.members) == set(alive)
        owned: set[TopicIdPartition] = set()
        for member_id, client in alive.items():
            member = state.members[member_id]
            assert client.owned == member.assigned == member.target
            assert client.epoch == member.epoch
            assert not owned & client.owned
            owned |= client.owned
        wanted = {
            TopicIdPartition(info.topic_id, number)
            for client in alive.values()
            for name in client.topics
            if (info := self.topics.find(name)) is not None
            for number in range(info.partition_count)
        }
        assert owned == wanted
        if len({client.topics for client in alive.values()}) == 1:
            loads = [len(client.owned) for client in alive.values()]
            assert max(loads) - min(loads) <= 1


def test_random_lives_of_a_group() -> None:
    run_state_machine_as_test(
        GroupMachine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None),
    )
