"""The Fetcher against answers, errors and seeks in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.client.core.backoff import Backoff
from penstock.client.core.fetch_events import (
    Added,
    CancelFetch,
    Event,
    FetchAnswered,
    Fetched,
    FetchFailed,
    MadeAnew,
    OutOfRange,
    PositionFound,
    PositionLost,
    RefreshMetadata,
    Removed,
    SendFetch,
    Woken,
)
from penstock.client.core.fetcher import Fetcher, FetcherSettings
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.subscription import Position
from penstock.client.model import ConsumerRecord
from penstock.v1 import metadata_pb2
from penstock.wire.errors import (
    CorruptRecordError,
    NetworkError,
    NotLeaderError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import RecordData, encode_batch, offset_patch
from penstock.wire.stalls import StallReason

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)
PATIENCE_MS = 60_000.0


def batch(base: int, count: int) -> bytes:
    records = [RecordData(1, None, b"%d" % (base + number), ()) for number in range(count)]
    return encode_batch(records, base_offset=base, leader_epoch=0)


def take(fetcher: Fetcher, limit: int, now_ms: float) -> list[ConsumerRecord]:
    return [record for run in fetcher.take(limit, now_ms) for record in run.records]


def led(
    *leaders: tuple[int, int], index: int = 1, topic_id: bytes = b"t" * 16
) -> metadata_pb2.DescribeTopicsResponse:
    response = metadata_pb2.DescribeTopicsResponse(metadata_index=index)
    topic = response.topics.add(name="t", topic_id=topic_id)
    for number, (leader, epoch) in enumerate(leaders):
        topic.partitions.add(partition=number, leader=leader, leader_epoch=epoch)
    return response


def make(
    *leaders: tuple[int, int], max_partition_bytes: int = 1_000, prefetch_max_bytes: int = 10_000
) -> tuple[Fetcher, MetadataCache]:
    metadata = MetadataCache()
    metadata.apply(led(*leaders), 0)
    fetcher = Fetcher(
        FetcherSettings(
            max_partition_bytes=max_partition_bytes,
            max_bytes=5_000,
            prefetch_max_bytes=prefetch_max_bytes,
            max_wait_ms=500,
            request_timeout_ms=10_000,
            damage_patience_ms=PATIENCE_MS,
        ),
        metadata,
        Backoff(20, 200, lambda: 0.5),
    )
    return fetcher, metadata


def start(fetcher: Fetcher, partition: TopicPartition = T0, offset: int = 0) -> list[SendFetch]:
    fetcher.handle(Added((partition,)), 0)
    effects = fetcher.handle(PositionFound(partition, Position(offset)), 0)
    return [effect for effect in effects if isinstance(effect, SendFetch)]


def test_it_fetches_ahead_and_hands_out_in_order() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher, offset=3)
    assert (fetch.node_id, fetch.wanted[0].offset) == (1, 3)
    answer = FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 5) + batch(5, 5)),))
    [following] = fetcher.handle(answer, 1)
    assert isinstance(following, SendFetch)
    assert following.wanted[0].offset == 10
    assert following.wanted[0].last_fetched_epoch == 0
    assert fetcher.cursor(T0) == 3
    assert [record.offset for record in take(fetcher, 1, 0)] == [3, 4]
    assert fetcher.cursor(T0) == 5
    assert [record.offset for record in take(fetcher, 99, 0)] == [5, 6, 7, 8, 9]
    assert fetcher.cursor(T0) == 10
    fetcher.validate()


def test_what_stands_behind_an_open_transaction_says_so_when_it_lasts() -> None:
    fetcher, _ = make((1, 0), (1, 0))

    def answer(fetch: SendFetch, end: int, high: int, *, at: float, count: int = 0) -> SendFetch:
        begin = fetch.wanted[0].offset
        data = batch(begin, count) if count else b""
        result = Fetched(T0, None, data, end, high_watermark=high)
        [following] = fetcher.handle(FetchAnswered(fetch.fetch_id, (result,)), at)
        assert isinstance(following, SendFetch)
        return following

    [fetch] = start(fetcher)
    fetch = answer(fetch, 5, 9, at=0, count=5)
    assert fetcher.held_back(60_000) is None  # There is something to hand out.
    assert len(take(fetcher, 99, 0)) == 5
    assert fetcher.held_back(999) is None  # Transactions come and go.
    trouble = fetcher.held_back(12_000)
    assert trouble is not None
    assert trouble.retriable
    assert trouble.reason is StallReason.OPEN_TRANSACTION
    assert "partition t-0" in trouble.message
    assert "its last stable offset 5 " in trouble.message
    assert "12 s" in trouble.message

    fetch = answer(fetch, 5, 30, at=13_000)  # What is appended behind it changes nothing.
    assert "20 s" in str(fetcher.held_back(20_000))
    fetcher.set_paused((T0,), paused=True)
    assert fetcher.held_back(20_000) is None
    fetcher.set_paused((T0,), paused=False)

    fetch = answer(fetch, 6, 30, at=21_000, count=1)  # The mark, and the next that is open.
    assert len(take(fetcher, 99, 0)) == 1
    assert fetcher.held_back(21_999) is None
    assert "2 s" in str(fetcher.held_back(23_000))
    fetch = answer(fetch, 30, 30, at=24_000, count=24)
    assert len(take(fetcher, 99, 0)) == 24
    assert fetcher.held_back(60_000) is None

    fetch = answer(fetch, 30, 31, at=60_000)
    assert fetcher.held_back(70_000) is not None
    fetcher.handle(PositionFound(T0, Position(10)), 70_000)  # Somebody seeks back: all is to come.
    assert fetcher.held_back(80_000) is None


def test_of_several_that_are_held_back_the_one_that_is_for_longest_is_named() -> None:
    fetcher, _ = make((1, 0), (1, 0))
    [first] = start(fetcher, T0)
    held = Fetched(T0, None, b"", 0, high_watermark=1)
    fetcher.handle(FetchAnswered(first.fetch_id, (held,)), 5_000)
    [second] = [one for one in start(fetcher, T1) if one.wanted[0].partition == T1]
    held = Fetched(T1, None, b"", 0, high_watermark=1)
    fetcher.handle(FetchAnswered(second.fetch_id, (held,)), 2_000)
    assert "partition t-1 (and 1 more)" in str(fetcher.held_back(9_000))


def test_more_than_was_asked_for_is_handed_out_while_it_is_little() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    data = batch(0, 5) + batch(5, 5) + batch(10, 5)
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 1)
    first, second = fetcher.take(1, 1, ahead_bytes=len(batch(0, 5)) + 1)
    assert [record.offset for record in first.records] == [0, 1, 2, 3, 4]
    assert (second.partition, len(second.records)) == (T0, 5)
    assert first.size_bytes == len(batch(0, 5))
    assert [len(run.records) for run in fetcher.take(1, 1)] == [5]
    fetcher.validate()


def test_it_stops_fetching_a_partition_whose_buffer_is_full() -> None:
    fetcher, _ = make((1, 0), max_partition_bytes=50)
    [fetch] = start(fetcher)
    answer = FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 5)),))
    assert fetcher.handle(answer, 1) == []
    take(fetcher, 5, 0)
    assert [type(effect) for effect in fetcher.handle(Woken(), 2)] == [SendFetch]


def test_an_answer_that_a_seek_overtook_is_dropped() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    fetcher.handle(PositionFound(T0, Position(7)), 1)
    effects = fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 5)),)), 2)
    assert take(fetcher, 99, 0) == []
    [again] = [effect for effect in effects if isinstance(effect, SendFetch)]
    assert again.wanted[0].offset == 7


def test_a_removed_or_lost_partition_is_not_fetched() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    fetcher.handle(PositionLost(T0), 1)
    answer = FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 5)),))
    assert fetcher.handle(answer, 2) == []
    assert fetcher.cursor(T0) is None
    fetcher.handle(Removed((T0,)), 3)
    assert fetcher.handle(Woken(), 4) == []
    assert fetcher.partitions == frozenset()


def test_not_leader_goes_to_the_hint_or_waits_for_news() -> None:
    fetcher, metadata = make((1, 0))
    [fetch] = start(fetcher)
    refused = Fetched(T0, NotLeaderError("moved"), b"")
    effects = fetcher.handle(FetchAnswered(fetch.fetch_id, (refused,)), 1)
    assert effects == [RefreshMetadata(avoid=-1)]
    assert 1 < fetcher.next_deadline_ms() <= 21
    metadata.apply(led((2, 1), index=2), 2)
    [moved] = fetcher.handle(Woken(), 2)
    assert isinstance(moved, SendFetch)
    assert moved.node_id == 2


def test_a_broken_fetch_is_retried_and_metadata_asked_for_elsewhere() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    effects = fetcher.handle(FetchFailed(fetch.fetch_id, NetworkError("broke")), 1)
    assert RefreshMetadata(avoid=1) in effects
    assert fetcher.trouble() is not None
    [again] = [e for e in fetcher.handle(Woken(), 30) if isinstance(e, SendFetch)]
    assert again.wanted[0].offset == 0


def test_a_silent_broker_is_asked_about_and_left_when_it_leads_no_longer() -> None:
    fetcher, metadata = make((1, 0))
    [fetch] = start(fetcher)
    assert fetcher.next_deadline_ms() == 1_500
    assert fetcher.handle(Woken(), 1_500) == [RefreshMetadata(avoid=1)]
    metadata.apply(led((2, 1), index=2), 1_500)
    effects = fetcher.handle(Woken(), 1_501)
    assert CancelFetch(fetch.fetch_id) in effects
    assert any(isinstance(effect, SendFetch) and effect.node_id == 2 for effect in effects)


def test_a_partition_without_a_leader_is_waited_for_and_named() -> None:
    fetcher, metadata = make((-1, 0))
    assert start(fetcher) == []
    trouble = fetcher.trouble()
    assert trouble is not None
    assert trouble.retriable
    assert "t-0 has no leader" in trouble.message
    metadata.apply(led((2, 1), index=2), 1)
    [fetch] = fetcher.handle(Woken(), 1)
    assert isinstance(fetch, SendFetch)
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, b""),)), 2)
    assert fetcher.trouble() is None


def test_out_of_range_asks_for_the_policy() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher, offset=9)
    error = OffsetOutOfRangeError("no 9")
    effects = fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, error, b""),)), 1)
    assert effects == [OutOfRange(T0, 9, -1, error)]
    assert fetcher.cursor(T0) is None


def test_partitions_of_a_broker_share_a_fetch() -> None:
    fetcher, _ = make((1, 0), (1, 0))
    fetcher.handle(Added((T0, T1)), 0)
    fetcher.handle(PositionFound(T0, Position(0)), 0)
    [second] = fetcher.handle(PositionFound(T1, Position(0)), 0)
    assert isinstance(second, SendFetch)
    fetcher.handle(FetchAnswered(1, (Fetched(T0, None, batch(0, 1)),)), 1)
    effects = fetcher.handle(FetchAnswered(2, (Fetched(T1, None, batch(0, 1)),)), 1)
    assert len(take(fetcher, 99, 0)) == 2
    assert all(isinstance(effect, SendFetch) for effect in effects)


class Brokers:
    """Three, with 30 partitions that have records without end, or none at all."""

    def __init__(self, prefetch_max_bytes: int) -> None:
        self.fetcher, _ = make(
            *((1 + number % 3, 0) for number in range(30)),
            max_partition_bytes=200,
            prefetch_max_bytes=prefetch_max_bytes,
        )
        self.names = tuple(TopicPartition("t", number) for number in range(30))
        self.silent: set[TopicPartition] = set()
        self.pending: list[SendFetch] = []
        self.seen: dict[TopicPartition, int] = dict.fromkeys(self.names, 0)
        self.most_bytes = 0
        self.feed(Added(self.names))
        for name in self.names:
            self.feed(PositionFound(name, Position(0)))

    def feed(self, event: Event) -> None:
        for effect in self.fetcher.handle(event, 0):
            assert isinstance(effect, SendFetch)
            self.pending.append(effect)
        self.fetcher.validate()
        self.most_bytes = max(self.most_bytes, self.fetcher.buffered_bytes)

    def answer(self, fetch: SendFetch) -> None:
        left = fetch.max_bytes
        results = []
        for wanted in fetch.wanted:
            one = batch(wanted.offset, 1)
            count = 0 if wanted.partition in self.silent else min(200, left) // len(one)
            data = b"".join(batch(wanted.offset + number, 1) for number in range(count))
            left -= len(data)
            results.append(Fetched(wanted.partition, None, data))
        if left < fetch.max_bytes or not self.silent:
            self.pending.remove(fetch)
            self.feed(FetchAnswered(fetch.fetch_id, tuple(results)))

    def answer_all(self) -> None:
        for _ in range(20):
            for fetch in list(self.pending):
                self.answer(fetch)

    def take(self, limit: int) -> None:
        for record in take(self.fetcher, limit, 0):
            name = TopicPartition("t", record.partition)
            assert record.offset == self.seen[name]
            self.seen[name] += 1
        self.feed(Woken())


@given(st.lists(st.sampled_from([0, 1]), min_size=30, max_size=30))
@example([0] * 30)
@example([0, 1] * 15)
def test_a_broker_gets_its_turn_while_others_have_nothing_and_take_all_the_room(
    which: list[int],
) -> None:
    fetcher, _ = make((1, 0), (2, 0), (3, 0), (1, 0), prefetch_max_bytes=2_000)
    partitions = [TopicPartition("t", number) for number in range(4)]
    fetcher.handle(Added(tuple(partitions)), 0)
    waiting: list[SendFetch] = []
    asked: list[int] = []

    def carry_out(event: Event, now_ms: float) -> None:
        sent = [step for step in fetcher.handle(event, now_ms) if isinstance(step, SendFetch)]
        waiting.extend(sent)
        asked.extend(fetch.node_id for fetch in sent)

    for partition in partitions:
        carry_out(PositionFound(partition, Position(0)), 0)
    for now_ms, index in enumerate(which):
        fetch = waiting.pop(index % len(waiting))
        nothing = tuple(Fetched(wanted.partition, None, b"") for wanted in fetch.wanted)
        carry_out(FetchAnswered(fetch.fetch_id, nothing), now_ms)
    assert set(asked) == {1, 2, 3}
    assert min(asked.count(node) for node in (1, 2, 3)) >= 3
    fetcher.validate()


def test_prefetching_keeps_to_its_bound_however_many_partitions_there_are() -> None:
    brokers = Brokers(2_000)
    brokers.answer_all()
    assert 1_000 < brokers.most_bytes <= 2_000
    for _ in range(200):
        brokers.take(3)
        brokers.answer_all()
    assert brokers.most_bytes <= 2_000
    assert min(brokers.seen.values()) >= 3  # And nobody starves.


def test_brokers_that_have_nothing_do_not_keep_another_from_being_asked() -> None:
    brokers = Brokers(2_000)
    brokers.silent = set(brokers.names) - {T1}
    for _ in range(50):
        brokers.take(9)
        brokers.answer_all()
    assert brokers.seen[T1] >= 50


def test_however_tight_the_bound_reading_goes_on() -> None:
    brokers = Brokers(0)
    for _ in range(300):
        brokers.take(9)
        brokers.answer_all()
    assert brokers.most_bytes <= 200
    assert min(brokers.seen.values()) >= 3


def test_paused_partitions_give_their_room_to_others() -> None:
    brokers = Brokers(2_000)
    brokers.answer_all()
    paused = brokers.names[:25]
    brokers.fetcher.set_paused(paused, paused=True)
    for _ in range(100):
        brokers.take(9)
        brokers.answer_all()
    assert min(brokers.seen[name] for name in brokers.names[25:]) >= 50
    assert brokers.most_bytes <= 2_000
    brokers.fetcher.set_paused(paused, paused=False)
    for _ in range(200):
        brokers.take(9)
        brokers.answer_all()
    assert min(brokers.seen.values()) >= 3


class World:
    """One partition's log, leaders that move, answers that come late, cut short or not at all."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.total = 60
        self.batches: list[tuple[int, bytes]] = []  # The offset after each, and its bytes.
        base = 0
        while base < self.total:
            count = min(self.chance.randint(1, 9), self.total - base)
            self.batches.append((base + count, batch(base, count)))
            base += count
        self.fetcher, self.metadata = make((1, 0), max_partition_bytes=300)
        self.leader, self.epoch = 1, 0
        self.pending: list[SendFetch] = list(start(self.fetcher))
        self.seen: list[int] = []
        self.seeks = True
        self.now = 0.0

    def feed(self, event: Event) -> None:
        for effect in self.fetcher.handle(event, self.now):
            if isinstance(effect, SendFetch):
                self.pending.append(effect)
            elif isinstance(effect, CancelFetch):
                self.pending = [one for one in self.pending if one.fetch_id != effect.fetch_id]
        self.fetcher.validate()

    def step(self) -> None:
        self.now += self.chance.choice((1, 5, 60))
        choice = self.chance.random()
        if choice < 0.5 and self.pending:
            self.answer(self.pending.pop(self.chance.randrange(len(self.pending))))
        elif choice < 0.55:
            self.leader = 3 - self.leader
            self.epoch += 1
            self.metadata.apply(led((self.leader, self.epoch), index=self.epoch + 2), self.now)
        elif choice < 0.6 and self.seen and self.seeks:
            back = self.chance.randrange(len(self.seen))
            self.seen = self.seen[:back]
            self.feed(PositionFound(T0, Position(back)))
        elif choice < 0.8:
            taken = take(self.fetcher, self.chance.randint(1, 10), self.now)
            self.seen += [record.offset for record in taken]
        self.feed(Woken())

    def answer(self, fetch: SendFetch) -> None:
        if self.chance.random() < 0.15:
            self.feed(FetchFailed(fetch.fetch_id, NetworkError("broke")))
        elif fetch.node_id != self.leader:
            refused = Fetched(T0, NotLeaderError("moved"), b"")
            self.feed(FetchAnswered(fetch.fetch_id, (refused,)))
        elif self.chance.random() < 0.1:
            damaged = Fetched(T0, CorruptRecordError("a bit flipped"), b"")
            self.feed(FetchAnswered(fetch.fetch_id, (damaged,)))
        else:
            left = [data for end, data in self.batches if end > fetch.wanted[0].offset]
            cut = b"".join(left)[: self.chance.choice((90, 200, 400))]
            first = left[0] if left else b""
            data = cut if len(cut) >= len(first) else first  # At least one whole batch.
            if first and self.chance.random() < 0.1:  # What the checksum covers comes damaged.
                place = self.chance.randrange(17, len(first))
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            self.feed(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_records_come_in_order_each_once_whatever_happens(seed: int) -> None:
    world = World(seed)
    for step in range(2_000):
        world.seeks = step < 1_000  # Where they never end, neither does the reading.
        if len(world.seen) >= world.total:
            break
        world.step()
        assert world.seen == list(range(len(world.seen)))
    assert len(world.seen) == world.total


NEW_ID = b"n" * 16


def test_a_position_is_given_up_when_another_topic_has_the_name() -> None:
    fetcher, metadata = make((1, 5))
    [fetch] = start(fetcher)
    assert fetch.wanted[0].topic_id == b"t" * 16
    [following] = fetcher.handle(
        FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 5)),)), 1
    )
    assert isinstance(following, SendFetch)
    take(fetcher, 2, 0)
    metadata.apply(led((1, 0), index=2, topic_id=NEW_ID), 2)
    assert fetcher.handle(Woken(), 2) == [MadeAnew(T0, 5)]
    assert take(fetcher, 99, 0) == []
    assert fetcher.cursor(T0) is None
    # What the old topic still answers is of no use, and nothing is fetched meanwhile.
    late = FetchAnswered(following.fetch_id, (Fetched(T0, None, batch(5, 5)),))
    assert fetcher.handle(late, 3) == []
    [fetch] = fetcher.handle(PositionFound(T0, Position(0), NEW_ID), 4)
    assert isinstance(fetch, SendFetch)
    assert (fetch.wanted[0].topic_id, fetch.wanted[0].offset) == (NEW_ID, 0)
    assert fetch.wanted[0].leader_epoch == 0
    fetcher.validate()


def test_a_position_found_for_an_older_topic_is_not_applied_to_the_new_one() -> None:
    fetcher, metadata = make((1, 0))
    fetcher.handle(Added((T0,)), 0)
    metadata.apply(led((1, 0), index=2, topic_id=NEW_ID), 1)
    assert fetcher.handle(PositionFound(T0, Position(7), b"t" * 16), 2) == [MadeAnew(T0, 7)]
    assert fetcher.cursor(T0) is None


def test_a_topic_that_is_gone_is_asked_for_until_it_is_back() -> None:
    fetcher, metadata = make((1, 0))
    [fetch] = start(fetcher)
    denial = metadata_pb2.DescribeTopicsResponse(metadata_index=2)
    denial.topics.add(name="t", error=UnknownTopicOrPartitionError("no t").to_proto())
    for now in (1, 200, 400):
        metadata.apply(denial, now)
    gone = Fetched(T0, UnknownTopicOrPartitionError("no t"), b"")
    fetcher.handle(FetchAnswered(fetch.fetch_id, (gone,)), 400)
    for now in (1_000, 2_000):
        assert fetcher.handle(Woken(), now) == [RefreshMetadata(avoid=-1)]
        absence = fetcher.absence()
        assert isinstance(absence, UnknownTopicOrPartitionError)
        assert fetcher.error(T0) is None
    metadata.apply(led((1, 0), index=3), 3_000)
    assert fetcher.absence() is None
    assert [type(effect) for effect in fetcher.handle(Woken(), 3_000)] == [SendFetch]


def test_records_that_are_tiny_when_compressed_are_not_all_decoded_ahead() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    data = b"".join(batch(base, 4_000) for base in range(0, 20_000, 4_000))
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 1)
    assert len(take(fetcher, 1, 1)) == 4_000
    assert sum(len(run.records) for run in fetcher.take(1, 1, ahead_bytes=10**9)) == 12_000


def test_what_was_in_the_way_of_a_paused_partition_is_no_trouble() -> None:
    fetcher, _ = make((1, 0), (1, 0))
    [fetch] = start(fetcher)
    fetcher.handle(FetchFailed(fetch.fetch_id, NetworkError("gone")), 1)
    assert isinstance(fetcher.trouble(), NetworkError)
    fetcher.set_paused([T0], paused=True)
    assert fetcher.trouble() is None


@pytest.mark.parametrize("as_columns", [False, True])
def test_control_batches_are_gone_past_and_never_handed_out(as_columns: bool) -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    marker = encode_batch(
        [RecordData(1, b"\0\0\0\1", b"\0" * 6, ())],
        base_offset=2,
        leader_epoch=0,
        producer_id=7,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
    )
    data = batch(0, 2) + marker + batch(3, 1) + marker_at(marker, 4)
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 1)
    found: list[int] = []
    for _ in range(3):
        if as_columns:
            for run in fetcher.take_columns(99, 10**6, 1):
                found += memoryview(run.columns.offsets).cast("q").tolist()
        else:
            found += [record.offset for record in take(fetcher, 99, 1)]
    assert found == [0, 1, 3]
    assert fetcher.cursor(T0) == 5
    fetcher.validate()


def marker_at(marker: bytes, offset: int) -> bytes:
    return offset_patch(marker, offset, 0) + marker[16:]
