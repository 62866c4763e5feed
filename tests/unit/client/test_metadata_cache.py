from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.core.backoff import Backoff, Pacer
from penstock.client.core.metadata_cache import MetadataCache, PartitionLeader
from penstock.v1 import metadata_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    InvalidTopicError,
    LeaderHint,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition

T0 = TopicPartition("t", 0)


def told(
    *leaders: tuple[int, int], index: int = 1, topic_id: bytes = b"a" * 16
) -> metadata_pb2.DescribeTopicsResponse:
    response = metadata_pb2.DescribeTopicsResponse(metadata_index=index, cluster_id="c")
    topic = response.topics.add(name="t", topic_id=topic_id)
    for number, (leader, epoch) in enumerate(leaders):
        topic.partitions.add(partition=number, leader=leader, leader_epoch=epoch)
    return response


def denied(error: PenstockError, index: int = 1) -> metadata_pb2.DescribeTopicsResponse:
    response = metadata_pb2.DescribeTopicsResponse(metadata_index=index)
    response.topics.add(name="t", error=error.to_proto())
    return response


def test_an_older_leader_epoch_never_replaces_a_newer_one() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 5), (2, 1), index=7), 0)
    cache.apply(told((3, 4), (3, 2), index=6), 0)
    assert cache.leader(T0) == PartitionLeader(1, 5)
    assert cache.leader(TopicPartition("t", 1)) == PartitionLeader(3, 2)
    assert cache.leader(TopicPartition("t", 2)) is None
    assert cache.leader(TopicPartition("t", -1)) is None


def test_a_hint_is_taken_when_it_is_news() -> None:
    cache = MetadataCache()
    assert not cache.apply_hint(T0, LeaderHint(2, 9, "h", 1))
    cache.apply(told((1, 5)), 0)
    assert not cache.apply_hint(T0, LeaderHint(2, 5, "h", 1))
    assert not cache.apply_hint(T0, LeaderHint(-1, 6, "", 0))
    assert cache.apply_hint(T0, LeaderHint(2, 6, "h", 1))
    assert cache.leader(T0) == PartitionLeader(2, 6)
    assert cache.brokers[2].port == 1
    cache.apply(told((1, 5), index=2), 0)
    assert cache.leader(T0) == PartitionLeader(2, 6)


def test_a_topic_made_anew_replaces_the_old_one_unless_the_answerer_is_behind() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 50), index=5), 0)
    cache.apply(told((2, 0), index=9, topic_id=b"b" * 16), 0)
    assert cache.leader(T0) == PartitionLeader(2, 0)
    cache.apply(told((1, 50), index=5), 0)
    assert cache.topic_id("t") == b"b" * 16


def test_a_topic_is_missing_only_when_answers_agree_for_a_while() -> None:
    cache = MetadataCache()
    error = UnknownTopicOrPartitionError("no t")
    for now in (0, 100, 200):
        cache.apply(denied(error), now)
        assert cache.verdict("t") is None
    cache.apply(denied(error), 300)
    verdict = cache.verdict("t")
    assert isinstance(verdict, UnknownTopicOrPartitionError)
    assert verdict.message == "no t"
    cache.apply(told((1, 0)), 400)
    assert cache.verdict("t") is None
    assert "t" in cache


def test_a_verdict_comes_with_an_answer_and_never_by_time_alone() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 0)), 0)
    for now in (0, 100, 200):
        cache.apply(denied(UnknownTopicOrPartitionError("no t")), now)
    # 300 ms have passed for whoever looks now, but nobody was asked again.
    assert cache.verdict("t") is None
    assert "t" in cache
    cache.apply(denied(UnknownTopicOrPartitionError("no t")), 301)
    assert cache.verdict("t") is not None
    assert "t" not in cache
    cache.validate()


def test_a_deleted_topic_does_not_come_back_by_an_answer_from_before() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 0), index=5), 0)
    for now in (0, 200, 400):
        cache.apply(denied(UnknownTopicOrPartitionError("no t"), index=7), now)
    cache.apply(told((1, 0), index=6), 500)
    assert "t" not in cache
    assert cache.verdict("t") is not None
    cache.apply(told((2, 0), index=8, topic_id=b"b" * 16), 600)
    assert cache.leader(T0) == PartitionLeader(2, 0)


def test_a_hint_about_a_deleted_topic_is_not_taken_for_the_new_one() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 0), topic_id=b"b" * 16), 0)
    assert not cache.apply_hint(T0, LeaderHint(2, 9, "h", 1), b"a" * 16)
    assert cache.leader(T0) == PartitionLeader(1, 0)
    assert cache.apply_hint(T0, LeaderHint(2, 9, "h", 1), b"b" * 16)


def test_a_known_topic_is_dropped_only_by_answers_as_new_as_it() -> None:
    cache = MetadataCache()
    cache.apply(told((1, 0), index=10), 0)
    for now in range(0, 1_000, 100):
        cache.apply(denied(UnknownTopicOrPartitionError("no t"), index=9), now)
    assert "t" in cache
    for now in range(0, 1_000, 100):
        cache.apply(denied(UnknownTopicOrPartitionError("no t"), index=10), now)
    assert "t" not in cache


def test_a_refused_name_is_final_and_a_passing_trouble_is_nothing() -> None:
    cache = MetadataCache()
    cache.apply(denied(InvalidTopicError("bad name")), 0)
    assert isinstance(cache.verdict("t"), InvalidTopicError)
    cache.forget("t")
    cache.apply(denied(CoordinatorLoadInProgressError("wait")), 0)
    assert cache.verdict("t") is None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_the_leader_epoch_known_never_falls(answers: list[tuple[int, int, int]]) -> None:
    cache = MetadataCache()
    best = -1
    for leader, epoch, index in answers:
        cache.apply(told((leader, epoch), index=index), 0)
        known = cache.leader(T0)
        assert known is not None
        best = max(best, epoch)
        assert known.leader_epoch == best
        cache.validate()


def test_backoff_doubles_up_to_its_bound_within_its_jitter() -> None:
    middle = Backoff(100, 1_000, lambda: 0.5)
    assert [middle.delay_ms(attempt) for attempt in range(6)] == [100, 200, 400, 800, 1000, 1000]
    assert middle.delay_ms(10_000) == 1_000
    assert Backoff(100, 1_000, lambda: 0.0).delay_ms(0) == 80
    assert Backoff(100, 1_000, lambda: 0.999_999).delay_ms(0) < 120


def test_the_pacer_is_quick_at_first_and_slow_in_a_long_outage() -> None:
    half = Backoff(20, 50, lambda: 0.5)
    pacer = Pacer(half, Backoff(100, 1_000, lambda: 0.5), patience=5)
    now = 0.0
    gaps = []
    for _ in range(12):
        following = pacer.next_ms(now)
        gaps.append(following - now)
        now = following
        pacer.asked(now)
    assert gaps == [0, 20, 40, 50, 50, 50, 100, 200, 400, 800, 1_000, 1_000]
    assert pacer.next_ms(now + 5_000) == now + 5_000


def naming(*brokers: int, index: int, leader: int = -1) -> metadata_pb2.DescribeTopicsResponse:
    response = told((leader, index), index=index)
    for number in brokers:
        response.brokers.add(node_id=number, host="h", port=number)
    return response


def test_brokers_that_are_gone_are_forgotten() -> None:
    cache = MetadataCache()
    cache.apply(naming(1, 2, 3, index=5), 0)
    cache.apply(naming(1, 3, index=6), 0)
    assert set(cache.brokers) == {1, 3}
    # The answerer is behind.
    cache.apply(naming(1, 2, 3, index=5), 0)
    assert set(cache.brokers) == {1, 3}
    # It does not know any broker, which cannot be.
    cache.apply(naming(index=7), 0)
    assert set(cache.brokers) == {1, 3}
    # A hint knew of a new leader before the answerer did.
    assert cache.apply_hint(T0, LeaderHint(4, 9, "h", 4))
    cache.apply(naming(1, index=7), 0)
    assert set(cache.brokers) == {1, 4}
    cache.apply(naming(1, index=10, leader=1), 0)
    assert set(cache.brokers) == {1}
