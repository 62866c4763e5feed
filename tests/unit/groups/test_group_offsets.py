from __future__ import annotations

import pytest

from penstock.broker.core.group_codec import decode
from penstock.broker.core.group_events import (
    CommitOffsets,
    ExpireOffsets,
    FetchOffsets,
    GroupSettings,
)
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import CorruptRecordError, ErrorCode, error_from_proto
from tests.unit.groups.group_harness import GROUP, Driver, FakeTopics, durable, held, replayed


@pytest.fixture
def driver() -> Driver:
    return Driver(FakeTopics(orders=4))


def code(response: object) -> ErrorCode:
    return error_from_proto(response.error).code  # type: ignore[attr-defined]


def offsets(driver: Driver, **who: object) -> dict[tuple[str, int], int]:
    response = driver.fetch(**who)  # type: ignore[arg-type]
    assert not response.HasField("error"), response.error.message
    return {(o.partition.topic, o.partition.partition): o.offset for o in response.offsets}


def two_members(driver: Driver) -> tuple[int, set[tuple[str, int]], set[tuple[str, int]]]:
    driver.heartbeat("a", 0, topics=["orders"])
    driver.heartbeat("b", 0, topics=["orders"])
    epoch = driver.describe().assignment_epoch
    kept = held(driver.pushes("a")[-1].assignment.partitions)
    driver.heartbeat("a", epoch, owned=kept)
    return epoch, kept, driver.assigned("b")


def test_a_group_without_members_takes_commits_from_outside(driver: Driver) -> None:
    response = driver.commit({("orders", 0): 5, ("orders", 1): 9}, metadata="note")
    assert [r.HasField("error") for r in response.results] == [False, False]
    assert driver.state() == "empty"
    assert offsets(driver) == {("orders", 0): 5, ("orders", 1): 9}
    (stored,) = driver.fetch([("orders", 0)]).offsets
    assert (stored.metadata, stored.leader_epoch) == ("note", -1)
    assert stored.partition.topic_id == driver.topics.find("orders").topic_id
    assert offsets(driver, partitions=[("orders", 3), ("nowhere", 0)]) == {
        ("orders", 3): -1,
        ("nowhere", 0): -1,
    }


def test_a_commit_that_only_goes_forward_leaves_what_is_further_on(driver: Driver) -> None:
    driver.commit({("orders", 0): 5, ("orders", 1): 5})
    late = {("orders", 0): 4, ("orders", 1): 6, ("orders", 2): 1}
    response = driver.commit(late, only_forward=True)
    assert [r.HasField("error") for r in response.results] == [False] * 3
    assert offsets(driver) == {("orders", 0): 5, ("orders", 1): 6, ("orders", 2): 1}
    driver.commit({("orders", 0): 4})
    assert offsets(driver)["orders", 0] == 4


def test_no_position_in_a_topic_is_further_on_in_another_one(driver: Driver) -> None:
    driver.commit({("orders", 0): 5})
    driver.topics.make("orders", 4)
    driver.commit({("orders", 0): 1}, only_forward=True)
    assert offsets(driver) == {("orders", 0): 1}


def test_a_group_with_members_takes_none_from_outside(driver: Driver) -> None:
    driver.heartbeat("a", 0, topics=["orders"])
    assert code(driver.commit({("orders", 0): 5})) is ErrorCode.UNKNOWN_MEMBER_ID
    assert offsets(driver) == {}


def test_a_member_commits_for_what_it_holds(driver: Driver) -> None:
    epoch, kept, others = two_members(driver)
    mine, theirs = min(kept), min(others)
    response = driver.commit({mine: 1, theirs: 2}, "a", epoch)
    assert not response.HasField("error")
    assert not response.results[0].HasField("error")
    assert code(response.results[1]) is ErrorCode.STALE_MEMBER_EPOCH
    assert offsets(driver) == {mine: 1}


def test_a_commit_that_crossed_a_newer_epoch_counts_for_what_was_held_throughout(
    driver: Driver,
) -> None:
    driver.heartbeat("a", 0, topics=["orders"])
    driver.heartbeat("b", 0, topics=["orders"])
    kept = held(driver.pushes("a")[-1].assignment.partitions)
    given = {("orders", n) for n in range(4)} - kept
    # Not yet given back: still a's to commit for, in the old epoch and in the new one.
    assert not driver.commit({min(given): 1}, "a", 1).results[0].HasField("error")
    assert not driver.commit({min(given): 2, min(kept): 2}, "a", 2).results[1].HasField("error")
    driver.heartbeat("a", 2, owned=kept)
    for epoch in (1, 2):
        assert code(driver.commit({min(given): 3}, "a", epoch)) is ErrorCode.STALE_MEMBER_EPOCH
    assert not driver.commit({min(kept): 3}, "a", 1).HasField("error")
    # b holds it since epoch 2 and cannot commit for it in an older one.
    assert code(driver.commit({min(given): 4}, "b", 1)) is ErrorCode.STALE_MEMBER_EPOCH
    assert offsets(driver) == {min(given): 2, min(kept): 3}


def test_what_was_lost_and_regained_cannot_be_committed_from_before(driver: Driver) -> None:
    _, kept, moved = two_members(driver)
    driver.heartbeat("b", -1)
    assert driver.assigned("a") == kept | moved
    assert code(driver.commit({min(moved): 3}, "a", 1)) is ErrorCode.STALE_MEMBER_EPOCH
    assert not driver.commit({min(moved): 3}, "a", 3).HasField("error")


def test_commits_by_strangers_and_from_the_future_are_refused(driver: Driver) -> None:
    epoch, kept, _ = two_members(driver)
    assert code(driver.commit({min(kept): 1}, "zombie", epoch)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert code(driver.commit({min(kept): 1}, "a", epoch + 1)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert code(driver.commit({min(kept): 1}, "a", 1, group="no")) is ErrorCode.UNKNOWN_MEMBER_ID
    driver.heartbeat("a", -1)
    assert code(driver.commit({min(kept): 1}, "a", epoch)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert offsets(driver) == {}


def test_a_static_member_that_went_away_commits_nothing(driver: Driver) -> None:
    driver.heartbeat("a1", 0, topics=["orders"], group_instance_id="A")
    driver.heartbeat("a1", -2, group_instance_id="A")
    assert code(driver.commit({("orders", 0): 1}, "a1", 1)) is ErrorCode.FENCED_MEMBER_EPOCH
    driver.heartbeat("a2", 0, topics=["orders"], group_instance_id="A")
    assert code(driver.commit({("orders", 0): 1}, "a1", 1)) is ErrorCode.UNKNOWN_MEMBER_ID
    assert not driver.commit({("orders", 0): 1}, "a2", 1).HasField("error")


def test_each_partition_of_a_commit_is_judged_by_itself(driver: Driver) -> None:
    response = driver.commit(
        {("orders", 0): 1, ("orders", 4): 1, ("nowhere", 0): 1, ("orders", 1): -2}
    )
    assert not response.HasField("error")
    codes = [code(r) if r.HasField("error") else None for r in response.results]
    assert codes == [
        None,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_REQUEST,
    ]
    too_large = driver.commit({("orders", 1): 1}, metadata="x" * 4097).results[0]
    assert code(too_large) is ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert offsets(driver) == {("orders", 0): 1}


def test_a_commit_for_a_topic_made_anew_is_refused(driver: Driver) -> None:
    old = driver.topics.find("orders")
    driver.topics.make("orders", 4)
    partition = common_pb2.TopicPartition(topic="orders", partition=0, topic_id=old.topic_id)
    request = groups_pb2.CommitOffsetsRequest(
        group_id="g", member_epoch=-1, offsets=[groups_pb2.OffsetCommit(partition=partition)]
    )
    driver.do(CommitOffsets("g", 1, request, 0))
    assert code(driver.answers[-1].response.results[0]) is ErrorCode.UNKNOWN_TOPIC_ID


def test_a_position_is_not_found_for_another_topic_of_the_name(driver: Driver) -> None:
    driver.commit({("orders", 0): 5})
    for topic_id, offset in ((driver.topics.find("orders").topic_id, 5), (b"x" * 16, -1)):
        partition = common_pb2.TopicPartition(topic="orders", partition=0, topic_id=topic_id)
        request = groups_pb2.FetchOffsetsRequest(
            group_id=GROUP, member_epoch=-1, partitions=[partition]
        )
        driver.do(FetchOffsets(GROUP, 1, request))
        assert [entry.offset for entry in driver.answers[-1].response.offsets] == [offset]


def test_members_read_offsets_in_their_epoch(driver: Driver) -> None:
    epoch, kept, others = two_members(driver)
    mine, theirs = min(kept), min(others)
    driver.commit({mine: 3}, "a", epoch)
    driver.commit({theirs: 4}, "b", epoch)
    assert offsets(driver, member_id="a", epoch=epoch) == {mine: 3, theirs: 4}
    assert offsets(driver, partitions=[mine], member_id="a", epoch=1) == {mine: 3}
    for partitions in ([theirs], [mine, theirs], None):
        response = driver.fetch(partitions, "a", 1)
        assert code(response) is ErrorCode.STALE_MEMBER_EPOCH
    assert code(driver.fetch(None, "a", epoch + 1)) is ErrorCode.FENCED_MEMBER_EPOCH
    assert code(driver.fetch(None, "zombie", epoch)) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_deleted_topic_takes_its_offsets_along(driver: Driver) -> None:
    driver.topics.make("returns", 1)
    driver.commit({("orders", 0): 1, ("returns", 0): 2})
    gone = driver.topics.delete("orders")
    driver.topics.make("orders", 4)
    assert offsets(driver) == {("returns", 0): 2}  # At once, whatever the records say.
    assert offsets(driver, partitions=[("orders", 0)]) == {("orders", 0): -1}
    driver.topics_changed("orders", removed=gone)
    assert [change.value for change in driver.changes[2:]] == [None]
    assert durable(replayed(driver.topics, driver.settings, driver.changes)) == durable(
        driver.shard
    )


def test_a_new_coordinator_clears_offsets_of_topics_deleted_meanwhile(driver: Driver) -> None:
    driver.commit({("orders", 0): 1})
    driver.topics.delete("orders")
    driver.reload()
    assert driver.shard.groups == {}


def test_only_an_empty_group_is_deleted(driver: Driver) -> None:
    assert code(driver.delete()) is ErrorCode.GROUP_ID_NOT_FOUND
    epoch = driver.heartbeat("a", 0, topics=["orders"]).member_epoch
    driver.commit({("orders", 0): 1}, "a", epoch)
    refused = driver.delete()
    assert code(refused) is ErrorCode.NON_EMPTY_GROUP
    assert "has 1 member; stop" in refused.error.message
    driver.heartbeat("a", -1)
    assert driver.state() == "empty"
    assert not driver.delete().HasField("error")
    assert code(driver.describe()) is ErrorCode.GROUP_ID_NOT_FOUND
    latest = {change.key: change.value for change in driver.changes}
    assert set(latest.values()) == {None}


def test_offsets_outlive_members(driver: Driver) -> None:
    epoch = driver.heartbeat("a", 0, topics=["orders"]).member_epoch
    driver.commit({("orders", 0): 11}, "a", epoch)
    driver.heartbeat("a", -1)
    driver.reload()
    assert offsets(driver) == {("orders", 0): 11}
    assert driver.heartbeat("b", 0, topics=["orders"]).member_epoch > epoch


def test_records_of_other_versions_are_skipped_and_garbage_is_named() -> None:
    assert decode(b"\xa2\x01\x00", b"x") is None  # Field 20 of a later version.
    with pytest.raises(CorruptRecordError, match="GroupRecordKey"):
        decode(b"\xff\xff", b"")
    driver = Driver(FakeTopics(orders=1))
    driver.commit({("orders", 0): 1})
    with pytest.raises(CorruptRecordError, match="OffsetCommitValue"):
        decode(driver.changes[0].key, b"\xff")


HOUR_MS = 3_600_000
RETENTION_MS = GroupSettings().offsets_retention_ms


def expire(driver: Driver, wall_ms: int) -> None:
    driver.do(ExpireOffsets(wall_ms))


def test_offsets_committed_from_outside_are_forgotten_after_their_retention(driver: Driver) -> None:
    driver.commit({("orders", 0): 5})
    committed_ms = driver.now_ms
    driver.now_ms += HOUR_MS
    driver.commit({("orders", 1): 9})
    expire(driver, committed_ms + RETENTION_MS - 1)
    assert offsets(driver) == {("orders", 0): 5, ("orders", 1): 9}
    expire(driver, committed_ms + RETENTION_MS)
    assert offsets(driver) == {("orders", 1): 9}
    assert driver.changes[-1].value is None, "a tombstone lets compaction forget it too"
    driver.reload()
    assert offsets(driver) == {("orders", 1): 9}
    expire(driver, committed_ms + RETENTION_MS + HOUR_MS)
    assert code(driver.describe()) is ErrorCode.GROUP_ID_NOT_FOUND


def test_a_group_that_is_subscribed_keeps_its_offsets(driver: Driver) -> None:
    driver.topics.make("other", 1)
    driver.commit({("orders", 0): 5, ("other", 0): 7})
    driver.heartbeat("a", 0, topics=["orders"])
    expire(driver, driver.now_ms + 2 * RETENTION_MS)
    assert offsets(driver) == {("orders", 0): 5}, "nobody reads the other topic any more"


def test_the_time_of_a_group_that_lost_its_members_runs_from_then_on(driver: Driver) -> None:
    driver.heartbeat("a", 0, topics=["orders"])
    driver.commit({("orders", 0): 5}, "a", 1)
    stopped_ms = driver.now_ms + 2 * RETENTION_MS
    driver.heartbeat("a", -1)
    expire(driver, stopped_ms)
    driver.reload()
    expire(driver, stopped_ms + RETENTION_MS - 1)
    assert offsets(driver) == {("orders", 0): 5}
    # Somebody is back for a while: the time begins again when it leaves.
    driver.heartbeat("b", 0, topics=["orders"])
    driver.heartbeat("b", -1)
    expire(driver, stopped_ms + RETENTION_MS)
    expire(driver, stopped_ms + 2 * RETENTION_MS - 1)
    assert offsets(driver) == {("orders", 0): 5}
    expire(driver, stopped_ms + 2 * RETENTION_MS)
    assert code(driver.describe()) is ErrorCode.GROUP_ID_NOT_FOUND


def test_what_a_member_has_yet_to_give_back_keeps_its_offset(driver: Driver) -> None:
    driver.topics.make("other", 1)
    driver.heartbeat("a", 0, topics=["orders"])
    driver.commit({("orders", 0): 5}, "a", 1)
    driver.heartbeat("a", 1, topics=["other"])
    expire(driver, driver.now_ms + 2 * RETENTION_MS)
    assert offsets(driver) == {("orders", 0): 5}


def test_positions_that_nobody_reads_can_be_forgotten_by_name(driver: Driver) -> None:
    driver.topics.make("other", 1)
    driver.commit({("orders", 0): 5, ("other", 0): 7})
    driver.heartbeat("a", 0, topics=["orders"])
    response = driver.forget([("orders", 0), ("other", 0), ("orders", 9)])
    refused, forgotten, unknown = response.results
    assert code(refused) is ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    assert not forgotten.HasField("error")
    assert code(unknown) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert offsets(driver) == {("orders", 0): 5}
    assert code(driver.forget([("orders", 0)], group="nobody")) is ErrorCode.GROUP_ID_NOT_FOUND


def test_a_group_whose_last_position_is_forgotten_is_gone(driver: Driver) -> None:
    driver.heartbeat("a", 0, topics=["orders"])
    driver.commit({("orders", 0): 5}, "a", 1)
    driver.heartbeat("a", -1)
    driver.forget([("orders", 0)])
    assert code(driver.describe()) is ErrorCode.GROUP_ID_NOT_FOUND
    assert durable(driver.shard) == {}
