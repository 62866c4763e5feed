"""Offsets in transactions: pending until the mark, and the same whoever reads the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock.broker.core import group_codec
from penstock.broker.core.group_codec import epochs_key
from penstock.broker.core.group_events import (
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    ExpireOffsets,
    GroupSettings,
    Loaded,
    Marked,
    Persist,
    ShardEvent,
    TopicsChanged,
)
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_state import Change
from penstock.broker.core.group_values import CommittedOffset, Producer
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import CorruptRecordError, ErrorCode
from penstock.wire.ids import TopicPartition
from tests.unit.groups.group_harness import GROUP, Driver, FakeTopics, durable

ORDERS = ("orders", 0)
OTHER = ("orders", 1)
P7, P8 = Producer(7, 0), Producer(8, 0)


def ended(producer: Producer) -> Producer:
    """What the mark of the producer's transaction is written under."""
    return Producer(producer.producer_id, producer.producer_epoch + 1)


def driver() -> Driver:
    return Driver(FakeTopics(orders=4))


def offsets(shard: Driver, **more: Any) -> dict[int, int]:
    response = shard.fetch(**more)
    assert not response.HasField("error"), response.error.message
    return {entry.partition.partition: entry.offset for entry in response.offsets}


def test_a_position_counts_when_its_transaction_commits() -> None:
    shard = driver()
    shard.commit({ORDERS: 1})
    answer = shard.commit_in_transaction({ORDERS: 5, OTHER: 6})
    assert [result.HasField("error") for result in answer.results] == [False, False]
    assert offsets(shard) == {0: 1}
    assert not shard.mark(ended(P7), commit=True)  # The log says it; nothing is to be written.
    assert offsets(shard) == {0: 5, 1: 6}


def test_a_position_is_dropped_when_its_transaction_aborts() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    assert GROUP in shard.shard.groups
    shard.mark(ended(P7), commit=False)
    assert GROUP not in shard.shard.groups
    shard.commit({ORDERS: 1})
    shard.commit_in_transaction({ORDERS: 5}, producer=Producer(7, 1))
    shard.mark(Producer(7, 2), commit=False)
    assert offsets(shard) == {0: 1}


def test_the_records_say_whose_they_are() -> None:
    shard = driver()
    effects = shard.do(
        CommitTransactionOffsets(
            GROUP,
            1,
            groups_pb2.CommitTransactionOffsetsRequest(
                producer_id=7,
                producer_epoch=3,
                commit=groups_pb2.CommitOffsetsRequest(
                    group_id=GROUP,
                    offsets=[
                        groups_pb2.OffsetCommit(
                            partition=common_pb2.TopicPartition(topic="orders"), offset=1
                        )
                    ],
                ),
            ),
            0,
        )
    )
    (written,) = [effect for effect in effects if isinstance(effect, Persist)]
    assert written.producer == Producer(7, 3)
    assert [change.number for change in written.changes] == [shard.shard.appended]


def test_what_is_newer_in_the_log_stays() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    shard.commit({ORDERS: 9})
    shard.mark(ended(P7), commit=True)
    assert offsets(shard) == {0: 9}
    # Of two transactions the later write counts, in whatever order they end.
    shard.commit_in_transaction({ORDERS: 10, OTHER: 20}, producer=P7._replace(producer_epoch=1))
    shard.commit_in_transaction({ORDERS: 11}, producer=P8)
    shard.mark(ended(P8), commit=True)
    shard.mark(Producer(7, 2), commit=True)
    assert offsets(shard) == {0: 11, 1: 20}
    shard.commit_in_transaction({ORDERS: 12}, producer=Producer(7, 2))
    shard.commit_in_transaction({ORDERS: 13}, producer=Producer(8, 1))
    shard.mark(Producer(7, 3), commit=True)
    assert offsets(shard) == {0: 12, 1: 20}
    shard.mark(Producer(8, 2), commit=True)
    assert offsets(shard) == {0: 13, 1: 20}


def test_a_mark_ends_what_was_written_before_it() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    shard.appends = False
    shard.commit_in_transaction({ORDERS: 6, OTHER: 6})  # On its way: the log will refuse it.
    shard.mark(ended(P7), commit=True)
    assert offsets(shard) == {0: 5}


def test_a_mark_that_is_sent_again_does_not_end_the_next_transaction() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    shard.mark(ended(P7), commit=True)
    shard.commit_in_transaction({ORDERS: 6, OTHER: 7}, producer=Producer(7, 1))
    shard.mark(ended(P7), commit=True)
    assert offsets(shard) == {0: 5}
    shard.mark(Producer(7, 2), commit=True)
    assert offsets(shard) == {0: 6, 1: 7}


def test_a_transaction_that_commits_often_holds_the_last_position_only() -> None:
    shard = driver()
    for offset in range(50):
        shard.commit_in_transaction({ORDERS: offset})
    pending = shard.shard.groups[GROUP].state.pending
    assert [len(pending.of(partition)) for partition in pending] == [2]
    shard.mark(ended(P7), commit=True)
    assert offsets(shard) == {0: 49}


def test_who_needs_a_stable_position_is_told_to_wait() -> None:
    shard = driver()
    shard.commit({ORDERS: 1, OTHER: 2})
    shard.commit_in_transaction({ORDERS: 5})
    for partitions in ([ORDERS], [OTHER, ORDERS], None):
        refused = shard.fetch(partitions, stable=True)
        assert refused.error.code == ErrorCode.UNSTABLE_OFFSET_COMMIT
        assert "producer 7" in refused.error.message
    assert offsets(shard, partitions=[OTHER], stable=True) == {1: 2}
    assert offsets(shard) == {0: 1, 1: 2}
    shard.mark(ended(P7), commit=False)
    assert offsets(shard, stable=True) == {0: 1, 1: 2}


def test_a_zombie_is_refused_as_it_is_for_any_commit() -> None:
    shard = driver()
    joined = shard.heartbeat("m", 0, topics=["orders"], session_timeout_ms=10_000)
    for member_id, epoch, code in (
        ("gone", 1, ErrorCode.UNKNOWN_MEMBER_ID),
        ("m", joined.member_epoch + 1, ErrorCode.FENCED_MEMBER_EPOCH),
        ("", -1, ErrorCode.UNKNOWN_MEMBER_ID),
        ("m", joined.member_epoch - 1, ErrorCode.STALE_MEMBER_EPOCH),
    ):
        answer = shard.commit_in_transaction({ORDERS: 5}, member_id, epoch)
        assert answer.error.code == code
    assert not shard.shard.groups[GROUP].state.pending
    answer = shard.commit_in_transaction({ORDERS: 5}, "m", joined.member_epoch)
    assert not answer.HasField("error")
    refused = groups_pb2.CommitOffsetsRequest(group_id=GROUP, member_id="gone")
    with pytest.raises(Exception, match="no member 'gone'"):
        shard.shard.check_commit(refused)


def test_a_deleted_group_gets_nothing_from_a_transaction_that_commits_later() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    assert not shard.delete().HasField("error")
    assert GROUP not in shard.shard.groups
    assert shard.changes[-1].value is None  # Whoever reads the log must see it as well.
    shard.mark(ended(P7), commit=True)
    assert GROUP not in shard.shard.groups


def test_a_deleted_offset_gets_nothing_from_a_transaction_that_commits_later() -> None:
    shard = driver()
    shard.commit({OTHER: 1})
    shard.commit_in_transaction({ORDERS: 5})
    answer = shard.forget([ORDERS])
    assert not answer.results[0].HasField("error")
    shard.mark(ended(P7), commit=True)
    assert offsets(shard) == {1: 1}


def test_offsets_of_a_deleted_topic_are_forgotten_in_transactions_too() -> None:
    shard = driver()
    shard.commit_in_transaction({ORDERS: 5})
    gone = shard.topics.delete("orders")
    shard.topics_changed("orders", removed=gone)
    shard.mark(ended(P7), commit=True)
    assert GROUP not in shard.shard.groups
    # A topic of that name made anew is another one.
    shard.topics.make("orders", 4)
    shard.commit_in_transaction({ORDERS: 6}, producer=Producer(7, 1))
    shard.topics_changed("orders", removed=gone)
    shard.mark(Producer(7, 2), commit=True)
    assert offsets(shard) == {0: 6}


def test_an_offset_that_a_transaction_decides_about_does_not_expire() -> None:
    shard = driver()
    shard.commit({ORDERS: 1, OTHER: 2})
    shard.commit_in_transaction({ORDERS: 5})
    late_ms = shard.now_ms + 2 * shard.settings.offsets_retention_ms
    for _ in range(2):  # The first look sees that there are no members.
        shard.do(ExpireOffsets(late_ms))
        late_ms += 2 * shard.settings.offsets_retention_ms
    assert offsets(shard) == {0: 1}
    shard.mark(ended(P7), commit=False)
    shard.do(ExpireOffsets(late_ms))
    assert GROUP not in shard.shard.groups


def test_a_group_with_nothing_but_a_pending_position_is_kept() -> None:
    shard = driver()
    joined = shard.heartbeat("m", 0, topics=["orders"], session_timeout_ms=10_000)
    shard.commit_in_transaction({ORDERS: 5}, "m", joined.member_epoch)
    shard.heartbeat("m", -1)
    assert GROUP in shard.shard.groups
    shard.mark(ended(P7), commit=False)
    assert GROUP not in shard.shard.groups
    assert shard.changes[-1].key == epochs_key(GROUP)
    assert shard.changes[-1].value is None


def test_a_record_of_a_transaction_that_is_no_offset_is_damage() -> None:
    shard = GroupShard(FakeTopics(orders=1), GroupSettings())
    with pytest.raises(CorruptRecordError, match="no offset"):
        shard.replay_transactional(P7, epochs_key(GROUP), None)
    assert not shard.replay_transactional(P7, b"", None)


# ---------------------------------------------------------------------- for any history


@dataclass
class _Write:
    """What a shard wants to have appended."""

    changes: tuple[Change, ...]
    producer: Producer | None


class ReplayMachine(RuleBasedStateMachine):
    """A shard beside its log: what is read back is what is there, whenever and however it ended.

    Writes wait in a queue, as in the shell; a mark comes into the log at any time, and is told to
    the shard once it is committed, in the order of marks. What a mark came before is refused by
    the log, and all that waits is taken back.
    """

    GROUPS = ("a", "a", "a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.topics = FakeTopics(orders=3)
        self.settings = GroupSettings(assignment_interval_ms=0, offsets_retention_ms=1_000)
        self.shard = GroupShard(self.topics, self.settings)
        self.shard.handle(Loaded(), 0)
        self.log: list[_Write | Marked] = []
        self.queue: list[_Write] = []
        self.marks: list[Marked] = []  # In the log, and not told yet.
        self.epochs = {7: 0, 8: 0}
        self.marked_over_queue = False
        self.now_ms = 1
        self.offset = 0

    def handle(self, event: ShardEvent) -> None:
        for effect in self.shard.handle(event, self.now_ms):
            if isinstance(effect, Persist):
                self.queue.append(_Write(effect.changes, effect.producer))
        self.shard.validate()

    def request(self, group: str, numbers: set[int]) -> groups_pb2.CommitOffsetsRequest:
        self.offset += 1
        return groups_pb2.CommitOffsetsRequest(
            group_id=group,
            offsets=[
                groups_pb2.OffsetCommit(
                    partition=common_pb2.TopicPartition(topic="orders", partition=number),
                    offset=self.offset,
                )
                for number in sorted(numbers)
            ],
        )

    @rule(
        group=st.sampled_from(GROUPS),
        numbers=st.sampled_from([{0}, {0}, {0, 1}]),
        at_once=st.booleans(),
    )
    def commit(self, group: str, numbers: set[int], at_once: bool) -> None:
        self.handle(CommitOffsets(group, 1, self.request(group, numbers), self.now_ms))
        self.flush(at_once)

    def flush(self, at_once: bool) -> None:
        while at_once and self.queue:
            self.append(False)

    @rule(
        group=st.sampled_from(GROUPS),
        numbers=st.sampled_from([{0}, {0}, {0, 1}]),
        producer_id=st.sampled_from([7, 8]),
        at_once=st.sampled_from([True, True, False]),
    )
    def commit_in_transaction(
        self, group: str, numbers: set[int], producer_id: int, at_once: bool
    ) -> None:
        request = groups_pb2.CommitTransactionOffsetsRequest(
            commit=self.request(group, numbers),
            producer_id=producer_id,
            producer_epoch=self.epochs[producer_id],
        )
        self.handle(CommitTransactionOffsets(group, 1, request, self.now_ms))
        self.flush(at_once)

    @rule(what=st.sampled_from(["group", "topic", "expiry", "reload"]), ms=st.integers(1, 1_500))
    def wipe(self, what: str, ms: int) -> None:
        """What is rare, and leaves little of what was there."""
        if what == "group":
            self.handle(DeleteGroup("a", 1))
        elif what == "topic":
            info = self.topics.delete("orders")
            self.topics.make("orders", 3)
            self.handle(TopicsChanged(frozenset({"orders"}), frozenset({info.topic_id})))
        elif what == "expiry":
            self.now_ms += ms
            self.handle(ExpireOffsets(self.now_ms))
        else:
            self.reload()

    @rule(producer_id=st.sampled_from([7, 8]), commits=st.booleans())
    def mark(self, producer_id: int, commits: bool) -> None:
        self.epochs[producer_id] += 1
        mark = Marked(Producer(producer_id, self.epochs[producer_id]), commits, self.shard.appended)
        self.log.append(mark)
        self.marks.append(mark)

    @precondition(lambda self: self.marks)
    @rule(again=st.booleans())
    def tell(self, again: bool) -> None:
        mark = self.marks.pop(0)
        self.marked_over_queue |= bool(self.queue)
        for _ in range(1 + again):
            self.handle(mark)

    @precondition(lambda self: self.queue)
    @rule(full=st.sampled_from([False, False, False, True]))
    def append(self, full: bool) -> None:
        write = self.queue[0]
        producer = write.producer
        fenced = (
            producer is not None and producer.producer_epoch < self.epochs[producer.producer_id]
        )
        if full or fenced:
            self.take_back()
            return
        self.log.append(self.queue.pop(0))
        if producer is not None:
            self.shard.note_appended(write.changes)
        if not self.queue:
            self.marked_over_queue = False

    def take_back(self) -> None:
        if self.marked_over_queue:
            self.reload()
            return
        changes = [change for write in self.queue for change in write.changes]
        self.queue.clear()
        self.shard.revert(changes, self.now_ms)
        self.shard.validate()

    def reload(self) -> None:
        self.shard = self.replayed()
        self.queue.clear()
        self.marked_over_queue = False
        self.marks.clear()  # All were read.
        self.handle(Loaded())

    def replayed(self) -> GroupShard:
        shard = GroupShard(self.topics, self.settings)
        for entry in self.log:
            if isinstance(entry, Marked):
                shard.replay_marker(entry.ended, commit=entry.commit)
                continue
            for change in entry.changes:
                if entry.producer is None:
                    assert shard.replay(change.key, change.value)
                else:
                    assert shard.replay_transactional(entry.producer, change.key, change.value)
        return shard

    def teardown(self) -> None:
        self.flush(True)
        while self.marks:
            self.tell(False)
        self.flush(True)
        replayed = self.replayed()
        replayed.validate()
        assert durable(replayed) == durable(self.shard)
        assert self.counting() == {
            (group_id, partition.partition): stored.offset
            for group_id, group in replayed.groups.items()
            for partition, stored in group.state.offsets.items()
        }

    def counting(self) -> dict[tuple[str, int], int]:
        """The offsets by what the log says, told as simply as can be: of what counts the newest."""
        newest: dict[tuple[str, int], int | None] = {}
        for at, entry in enumerate(self.log):
            if isinstance(entry, Marked) or not self.counts(at, entry):
                continue
            for change in entry.changes:
                decoded = group_codec.decode(change.key, change.value)
                assert decoded is not None
                if isinstance(decoded.slot, TopicPartition):
                    assert decoded.value is None or isinstance(decoded.value, CommittedOffset)
                    newest[decoded.group_id, decoded.slot.partition] = (
                        None if decoded.value is None else decoded.value.offset
                    )
        return {key: offset for key, offset in newest.items() if offset is not None}

    def counts(self, at: int, write: _Write) -> bool:
        """Whether it is of no transaction, or of one whose mark commits it."""
        if write.producer is None:
            return True
        for entry in self.log[at:]:
            if isinstance(entry, Marked) and entry.ended.producer_id == write.producer.producer_id:
                return entry.commit
        return False


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
