"""Numbers from a topic that was deleted are not applied to the one made anew under its name:
offsets committed, offsets sought."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from penstock.client import (
    AsyncConsumer,
    Consumer,
    ConsumerRecord,
    InvalidRequestError,
    NoOffsetError,
    OffsetAndMetadata,
    OffsetOutOfRangeError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.client.core.fetch_events import OutOfRange
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, T1, fill, numbers, read, values
from tests.unit.client.test_topics_made_anew import QUICK, make_anew, noticed

GROUP: dict[str, Any] = {
    "group_id": "g",
    "topics": "t",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    **QUICK,
}


# --- commits -------------------------------------------------------------------------------------


def stored(cluster: FakeCluster) -> int | None:
    found = cluster.groups["g"].offsets.get(T0)
    return None if found is None else found.offset


async def test_an_old_offset_is_not_committed_while_a_position_in_the_new_topic_is_looked_for(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, **GROUP) as consumer:
        old = await read(consumer, 5)
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        consumer._engine._positions.catch_up()  # What the next poll does first.
        assert T0 not in consumer._engine.handout.topic_ids
        with pytest.raises(UnknownTopicIdError):
            await consumer.commit({T0: old[-1].offset + 1})
    assert stored(cluster) is None


async def test_an_old_offset_is_not_committed_beyond_what_was_read_of_the_new_topic(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, **GROUP, max_poll_records=2) as consumer:
        old = await read(consumer, 5)
        await make_anew(cluster, 20)
        assert values(await read(consumer, 2)) == numbers(0, 2)
        with pytest.raises(UnknownTopicIdError, match=r"t-0.*offset 5.*made anew.*position 2"):
            await consumer.commit({T0: old[-1].offset + 1})
        with pytest.raises(UnknownTopicIdError, match=r"t-0.*offset 5"):
            await consumer.commit({T0: OffsetAndMetadata(5, metadata="mine")})
        assert stored(cluster) is None
        await consumer.commit({T0: 1})
        assert stored(cluster) == 1
        new_id = cluster.topics["t"].topic_id
        await consumer.commit({T0: OffsetAndMetadata(5, topic_id=new_id)})
        assert stored(cluster) == 5  # Named as one of the new topic: the application knows.


@pytest.mark.parametrize("read_on", [False, True])
async def test_a_record_says_which_topic_its_position_belongs_to(
    cluster: FakeCluster, read_on: bool
) -> None:
    topic = cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, **GROUP) as consumer:
        old = await read(consumer, 5)
        assert {record.topic_id for record in old} == {topic.topic_id}
        await consumer.commit({T0: old[1].position_after})
        assert stored(cluster) == 2
        entry = (await consumer.committed(T0))[T0]
        assert entry == OffsetAndMetadata(2, 0)
        assert entry is not None
        assert entry.topic_id == topic.topic_id
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        new = await read(consumer, 20) if read_on else []
        for position in (old[-1].position_after, entry):
            with pytest.raises(UnknownTopicIdError):
                await consumer.commit({T0: position})
        assert stored(cluster) in (None, 2)
        if read_on:
            await consumer.commit({T0: new[6].position_after})
            assert stored(cluster) == 7


async def test_a_commit_in_the_background_is_refused_by_its_future(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    heard: list[BaseException | None] = []

    def poll(consumer: Consumer, count: int) -> list[ConsumerRecord]:
        found: list[ConsumerRecord] = []
        while len(found) < count:
            found += consumer.poll(500)
        return found

    consumer = await asyncio.to_thread(Consumer, cluster.bootstrap, **GROUP, max_poll_records=2)
    try:
        await asyncio.to_thread(poll, consumer, 5)
        await make_anew(cluster, 20)
        await asyncio.to_thread(poll, consumer, 2)
        future = consumer.commit_async({T0: 5}, heard.append)
        error = await asyncio.to_thread(future.exception, 10)
        assert isinstance(error, UnknownTopicIdError)
        await eventually(lambda: heard == [error])
        assert stored(cluster) is None
    finally:
        await asyncio.to_thread(consumer.close)


async def test_an_offset_of_a_topic_that_was_never_read_is_one_of_the_present_topic(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, group_id="g", **QUICK) as consumer:
        await consumer.commit({T0: 4})
        await make_anew(cluster, 9)
        await noticed_or_unknown(consumer, cluster)
        await consumer.commit({T0: 7})
    assert stored(cluster) == 7


async def noticed_or_unknown(consumer: AsyncConsumer, cluster: FakeCluster) -> None:
    assert await consumer.partitions_for("t") == (0,)
    assert await consumer.end_offsets([T0]) == {T0: 9}


@pytest.mark.parametrize("wrong", ["id", 3, None])
async def test_a_topic_id_of_a_wrong_type_is_named(cluster: FakeCluster, wrong: Any) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, group_id="g", **QUICK) as consumer:
        with pytest.raises(InvalidRequestError, match="topic_id"):
            await consumer.commit({T0: OffsetAndMetadata(4, topic_id=wrong)})


# --- seeks ---------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


async def test_a_seek_to_an_old_offset_is_dropped_when_nobody_was_told_of_the_new_topic(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", **QUICK
    ) as consumer:
        old = await read(consumer, 5)
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        with caplog.at_level(logging.WARNING, "penstock.client"):
            await consumer.seek(T0, old[4].offset)
            assert values(await read(consumer, 20)) == numbers(0, 20)
        first, second = warnings(caplog)
        assert "topic t was deleted and made anew" in first
        assert "seek to offset 4 of partition t-0 is dropped" in second
        await consumer.seek(T0, 15)  # The application was told.
        assert values(await read(consumer, 5)) == numbers(15, 20)


async def test_a_dropped_seek_is_an_error_of_the_next_poll_without_a_reset_policy(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="none", **QUICK) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 0)
        await read(consumer, 5)
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        await consumer.seek(T0, 4)
        with pytest.raises(NoOffsetError, match="'t' was deleted and made anew"):
            await read(consumer, 1)
        await consumer.seek(T0, 4)
        assert values(await read(consumer, 16)) == numbers(4, 20)


@pytest.mark.parametrize("place", ["beginning", "end"])
async def test_a_seek_to_a_place_stands_in_the_new_topic(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    reset: Any = "latest" if place == "beginning" else "earliest"
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset=reset, **QUICK) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 0)
        await read(consumer, 5)
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        with caplog.at_level(logging.WARNING, "penstock.client"):
            if place == "beginning":
                await consumer.seek_to_beginning(T0)
                assert values(await read(consumer, 20)) == numbers(0, 20)
            else:
                await consumer.seek_to_end(T0)
                assert await consumer.position(T0) == 20
    [line] = warnings(caplog)
    assert "topic t was deleted and made anew" in line


async def test_a_seek_to_a_time_stands_in_the_new_topic(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        await make_anew(cluster, 20)
        await noticed(consumer, cluster)
        found = (await consumer.offsets_for_times({T0: 1_015}))[T0]
        assert found is not None
        await consumer.seek(T0, found.offset)
        assert values(await read(consumer, 5)) == numbers(15, 20)


async def test_a_seek_while_there_is_no_topic_is_one_in_the_old_topic(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        await read(consumer, 5)
        cluster.delete_topic("t")
        await cluster.wake()
        with pytest.raises(UnknownTopicOrPartitionError):
            await read(consumer, 1)
        await consumer.seek(T0, 4)
        await make_new(cluster)
        found: list[bytes] = []
        async with asyncio.timeout(15):
            while len(found) < 20:
                try:
                    found += values(await consumer.poll(100))
                except UnknownTopicOrPartitionError:
                    continue
    assert found == numbers(0, 20)


async def make_new(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 20))
    await cluster.wake()


async def test_a_position_that_was_looked_for_meanwhile_hides_no_new_topic(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """While a position is looked for nothing is fetched that could tell one topic from another."""
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        old = await read(consumer, 5)
        cluster.delete_topic("t")
        await cluster.wake()
        metadata = consumer._engine._cluster.metadata
        await eventually(lambda: metadata.verdict("t") is not None)
        await consumer.seek_to_end(T0)
        await make_new(cluster)
        await noticed(consumer, cluster)
        with caplog.at_level(logging.WARNING, "penstock.client"):
            await consumer.seek(T0, old[4].offset)
            assert await consumer.position(T0) == 20
        assert any("seek to offset 4 of partition t-0 is dropped" in s for s in warnings(caplog))
        await consumer.seek(T0, 4)
        assert values(await read(consumer, 16)) == numbers(4, 20)


# --- positions out of range ----------------------------------------------------------------------


async def test_what_is_kept_for_the_application_changes_only_while_it_waits(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(
        cluster.bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=1, **QUICK
    ) as consumer:
        await consumer.assign([T0, T1])
        await consumer.position(T0)
        await consumer.position(T1)
        async with asyncio.timeout(10):
            assert (await anext(consumer)).value == b"0"
        handout = consumer._engine.handout
        effect = OutOfRange(T0, 5, -1, OffsetOutOfRangeError("no offset 5"))
        kept = handout._kept
        processed, before = handout.processed(), list(kept)
        with caplog.at_level(logging.WARNING, "penstock.client"):
            consumer._engine._fetch._on_out_of_range(effect)
            # The application is at its own work now; in another thread it may be iterating.
            assert handout._kept is kept
            assert list(kept) == before
            assert handout.processed() == processed
            async with asyncio.timeout(10):
                assert (await anext(consumer)).value == b"0"  # By the policy, from the start.
        assert any("out of range" in line for line in warnings(caplog))


async def test_a_position_found_for_one_partition_leaves_what_is_kept_of_another(
    cluster: FakeCluster,
) -> None:
    """Positions are found on the client's own thread, while the application's iterates."""
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest", **QUICK) as consumer:
        await consumer.assign([T0])
        assert values(await consumer.poll(5_000, 1)) == [b"0"]
        handout = consumer._engine.handout
        async with asyncio.timeout(10):
            assert (await anext(consumer)).value == b"1"
        await consumer.assign([T0, T1])
        kept, before = handout._kept, list(handout._kept)
        assert len(before) == 4, "the run that is iterated through, and those behind it"
        await eventually(lambda: T1 in handout.topic_ids)
        assert handout._kept is kept
        assert list(kept) == before
