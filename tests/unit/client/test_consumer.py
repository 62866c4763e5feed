from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from penstock.client import (
    AsyncConsumer,
    AsyncProducer,
    ClientClosedError,
    CorruptRecordError,
    InvalidGroupIdError,
    InvalidRequestError,
    NoOffsetError,
    OffsetOutOfRangeError,
    SerializationError,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from penstock.v1 import log_pb2
from penstock.wire.errors import NotLeaderError
from penstock.wire.records import RecordData, encode_batch
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.reading import T0, T1, fill, numbers, read, values


async def test_every_partition_is_read_in_order_and_followed(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    for partition in range(3):
        fill(cluster, "t", partition, numbers(0, 20))
    async with AsyncConsumer(
        cluster.bootstrap, topics=["t"], auto_offset_reset="earliest"
    ) as consumer:
        found = await read(consumer, 60)
        for partition in range(3):
            assert values(found, partition) == numbers(0, 20)
        assert [record.offset for record in found if record.partition == 1] == list(range(20))
        first = found[0]
        assert (first.topic, first.key, first.timestamp_ms, first.headers) == ("t", b"k", 1_000, ())
        async with AsyncProducer(cluster.bootstrap) as producer:
            await producer.send_and_wait("t", b"new", partition=2)
        assert values(await read(consumer, 1), 2) == [b"new"]


async def test_latest_begins_at_the_end(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, topics="t") as consumer:
        assert await consumer.poll(100) == []
        assert await consumer.position(T0) == 5
        fill(cluster, "t", 0, [b"new"])
        await cluster.wake()
        assert values(await read(consumer, 1)) == [b"new"]


async def test_reset_none_raises_until_a_position_is_given(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", group_id="g", auto_offset_reset="none"
    ) as consumer:
        with pytest.raises(NoOffsetError, match=r"t-0.*'g'.*seek"):
            await read(consumer, 1)
        await consumer.seek(T0, 1)
        assert values(await read(consumer, 2)) == numbers(1, 3)


async def test_iteration_hands_out_one_by_one(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        found = []
        async for record in consumer:
            found.append(record.value)
            assert await consumer.position(T0) == record.offset + 1
            if len(found) == 10:
                break
    assert found == numbers(0, 10)


async def test_poll_limits_and_batches(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 10))
    fill(cluster, "t", 1, numbers(0, 10))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", max_poll_records=7
    ) as consumer:
        counts = []
        while sum(counts) < 20:
            batches = await consumer.poll_batch(5_000, 4 if not counts else None)
            assert set(batches) <= {T0, T1}
            counts.append(sum(len(batch) for batch in batches.values()))
        assert counts[0] <= 4
        assert max(counts) <= 7
        assert await consumer.poll(0) == []


async def test_seeking(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    async with AsyncConsumer(cluster.bootstrap) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 7)
        assert values(await read(consumer, 3)) == numbers(7, 10)
        await consumer.seek_to_beginning()
        assert await consumer.position(T0) == 0
        assert values(await read(consumer, 10)) == numbers(0, 10)
        await consumer.seek_to_end(T0)
        assert await consumer.position(T0) == 10
        times = {T0: 1_004}
        found = (await consumer.offsets_for_times(times))[T0]
        assert found is not None
        assert (found.offset, found.timestamp_ms) == (4, 1_004)
        assert await consumer.offsets_for_times({T0: 9_999}) == {T0: None}
        assert await consumer.beginning_offsets([T0]) == {T0: 0}
        assert await consumer.end_offsets([T0]) == {T0: 10}
        assert await consumer.partitions_for("t") == (0,)
        with pytest.raises(InvalidRequestError, match="t-1 is not assigned"):
            await consumer.seek(T1, 0)


async def test_a_position_inside_a_batch_skips_what_is_before_it(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    records = [RecordData(1, None, value, ()) for value in numbers(0, 10)]
    cluster.put("t", 0, encode_batch(records))
    async with AsyncConsumer(cluster.bootstrap) as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 6)
        assert values(await read(consumer, 4)) == numbers(6, 10)


async def test_paused_partitions_hand_out_nothing_and_lose_nothing(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    fill(cluster, "t", 1, numbers(0, 5))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        await consumer.assign([T0, T1])
        await consumer.pause(T0)
        assert consumer.paused() == {T0}
        found = await read(consumer, 5)
        assert values(found, 1) == numbers(0, 5)
        assert await consumer.poll(50) == []
        await consumer.resume(T0)
        assert values(await read(consumer, 5)) == numbers(0, 5)


async def test_a_moved_leader_is_followed(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    fill(cluster, "t", 0, numbers(0, 3))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        assert values(await read(consumer, 3)) == numbers(0, 3)
        cluster.move("t", 0, 2)
        fill(cluster, "t", 0, numbers(3, 6))
        await cluster.wake()
        assert values(await read(consumer, 3)) == numbers(3, 6)
        await cluster.nodes[2].stop()
        cluster.move("t", 0, 3)
        fill(cluster, "t", 0, numbers(6, 9))
        assert values(await read(consumer, 3)) == numbers(6, 9)


async def test_a_hung_leader_is_left_when_another_leads(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    fill(cluster, "t", 0, numbers(0, 3))
    asked = asyncio.Event()

    async def hang(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        if node.number == 1:
            asked.set()
            await asyncio.sleep(60)  # A hung broker: the fetch is cancelled long before.

    cluster.on_fetch = hang
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", fetch_max_wait_ms=100
    ) as consumer:
        assert await consumer.poll(100) == []
        await asked.wait()
        cluster.move("t", 0, 2)
        assert values(await read(consumer, 3)) == numbers(0, 3)


async def test_a_position_out_of_range_follows_the_policy(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    cluster.partition("t").start = 4
    cluster.partition("t").batches = cluster.partition("t").batches[4:]
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 1)
        assert values(await read(consumer, 6)) == numbers(4, 10)
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="none") as consumer:
        await consumer.assign([T0])
        await consumer.seek(T0, 50)
        with pytest.raises(OffsetOutOfRangeError, match="50"):
            await read(consumer, 1)
        await consumer.seek(T0, 9)
        assert values(await read(consumer, 1)) == numbers(9, 10)


async def test_a_cut_log_is_read_on_from_the_cut(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 4))
    told = False

    async def diverge(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        nonlocal told
        if request.partitions[0].fetch_offset == 4 and not told:
            told = True
            assert request.partitions[0].last_fetched_epoch == 0
            response = log_pb2.FetchResponse()
            result = response.partitions.add(partition=request.partitions[0].partition)
            result.diverging_epoch.leader_epoch = 0
            result.diverging_epoch.end_offset = 2
            return response
        return None

    cluster.on_fetch = diverge
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        assert values(await read(consumer, 4)) == numbers(0, 4)
        assert values(await read(consumer, 2)) == numbers(2, 4)


async def test_a_corrupt_batch_names_its_place_and_can_be_skipped(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    log = cluster.partition("t")
    base, following, data = log.batches[1]
    log.batches[1] = (base, following, data[:-1] + bytes([data[-1] ^ 1]))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", default_api_timeout_ms=100
    ) as consumer:
        assert values(await read(consumer, 1)) == [b"0"]
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"t-0, offset 1.*Seek to 2"):
                await consumer.poll(5_000)
        await consumer.seek(T0, 2)
        assert values(await read(consumer, 1)) == [b"2"]


async def test_an_answer_that_is_garbage_is_reported_not_swallowed(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))

    async def garbage(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        response = log_pb2.FetchResponse()
        for entry in request.partitions:
            response.partitions.add(partition=entry.partition, records=b"\xff" * 100)
        return response

    cluster.on_fetch = garbage
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", default_api_timeout_ms=100
    ) as consumer:
        with pytest.raises(
            CorruptRecordError, match="t-0, offset 0: the batch at byte 0 has magic -1"
        ):
            await read(consumer, 1)


async def test_deserialisers_and_their_failures(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, [b'{"a":1}', b"not json", b"3"])
    async with AsyncConsumer(
        cluster.bootstrap,
        topics="t",
        auto_offset_reset="earliest",
        key_deserializer="str",
        value_deserializer="json",
    ) as consumer:
        [first] = await read(consumer, 1)
        assert (first.key, first.value) == ("k", {"a": 1})
        with pytest.raises(SerializationError, match=r"value.*t-0@1.*value_deserializer='bytes'"):
            await consumer.poll(5_000)
        await consumer.seek(T0, 2)
        assert (await read(consumer, 1))[0].value == 3


async def test_memory_for_prefetching_is_bounded(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 4)
    for partition in range(4):
        fill(cluster, "t", partition, [b"x" * 1_000] * 100)
    async with AsyncConsumer(
        cluster.bootstrap,
        topics="t",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=10_000,
        prefetch_max_bytes=20_000,
        max_poll_records=1,
    ) as consumer:
        seen = 0
        while seen < 400:
            seen += len(await consumer.poll(5_000))
            buffered = consumer._engine._fetch.fetcher.buffered_bytes
            assert buffered <= 20_000 + 4 * 11_000  # One answer a partition beyond the bound.


async def test_an_unknown_topic_is_an_error_that_names_the_near_one(cluster: FakeCluster) -> None:
    cluster.add_topic("orders")
    async with AsyncConsumer(cluster.bootstrap, topics="order", group_id="g") as consumer:
        with pytest.raises(UnknownTopicOrPartitionError, match="did you mean 'orders'"):
            await consumer.poll(100)
        cluster.add_topic("order")
        assert await consumer.poll(100) == []
    async with AsyncConsumer(cluster.bootstrap) as consumer:
        with pytest.raises(InvalidRequestError, match="no partition 9; it has 0 to 0"):
            await consumer.assign([TopicPartition("orders", 9)])


async def test_subscribe_and_assign_exclude_each_other(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, topics="t") as consumer:
        with pytest.raises(InvalidRequestError, match="unsubscribe"):
            await consumer.assign([T0])
        await consumer.unsubscribe()
        await consumer.assign([T0])
        assert consumer.assignment() == {T0}
        with pytest.raises(InvalidRequestError, match="unsubscribe"):
            consumer.subscribe("t")
        with pytest.raises(InvalidGroupIdError):
            await consumer.commit()


async def test_a_pattern_without_a_group_and_new_partitions_are_followed(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("logs-a")
    cluster.add_topic("other")
    fill(cluster, "logs-a", 0, [b"a"])
    async with AsyncConsumer(
        cluster.bootstrap,
        topics=re.compile("logs-.*"),
        auto_offset_reset="earliest",
        metadata_max_age_ms=100,
    ) as consumer:
        assert (await read(consumer, 1))[0].topic == "logs-a"
        cluster.add_topic("logs-b")
        fill(cluster, "logs-b", 0, [b"b"])
        assert (await read(consumer, 1))[0].topic == "logs-b"
        assert {entry.topic for entry in consumer.assignment()} == {"logs-a", "logs-b"}


async def test_a_topic_that_a_pattern_takes_in_later_is_read_from_its_start(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("logs-a")
    fill(cluster, "logs-a", 0, [b"before"])
    async with AsyncConsumer(
        cluster.bootstrap,
        topics=re.compile("logs-.*"),
        auto_offset_reset="latest",
        metadata_max_age_ms=100,
    ) as consumer:
        while not consumer.assignment():
            await consumer.poll(10)
        assert await consumer.position(TopicPartition("logs-a", 0)) == 1
        cluster.add_topic("logs-b")
        fill(cluster, "logs-b", 0, [b"new"])
        assert values(await read(consumer, 1)) == [b"new"]


async def test_a_retriable_refusal_of_a_fetch_is_retried(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 2))
    left = 3

    async def refuse(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            return None
        response = log_pb2.FetchResponse()
        for entry in request.partitions:
            error = NotLeaderError("not yet").to_proto()
            response.partitions.add(partition=entry.partition, error=error)
        return response

    cluster.on_fetch = refuse
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        assert values(await read(consumer, 2)) == numbers(0, 2)


@pytest.mark.parametrize("settings", [{}, {"group_id": "g"}])
async def test_closing_wakes_who_waits_for_records(
    cluster: FakeCluster, settings: dict[str, Any]
) -> None:
    cluster.add_topic("t")
    for wait in (anext, lambda consumer: consumer.poll(60_000)):
        consumer = AsyncConsumer(cluster.bootstrap, topics="t", **settings)
        waiting = asyncio.ensure_future(wait(consumer))
        await eventually(lambda consumer=consumer: bool(consumer.assignment()))
        await consumer.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(waiting, 5)


async def test_closing_wakes_who_waits_for_the_cluster(cluster: FakeCluster) -> None:
    waits = asyncio.Event()

    async def hang(node: FakeNode) -> None:
        waits.set()
        await asyncio.Event().wait()

    cluster.add_topic("t")
    cluster.on_describe = hang
    consumer = AsyncConsumer(cluster.bootstrap, topics="t")
    waiting = asyncio.ensure_future(consumer.poll(60_000))
    await asyncio.wait_for(waits.wait(), 5)
    await consumer.close()
    with pytest.raises(ClientClosedError):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("settings", [{}, {"group_id": "g"}])
async def test_reading_nothing_is_refused(cluster: FakeCluster, settings: dict[str, Any]) -> None:
    cluster.add_topic("t")
    async with AsyncConsumer(cluster.bootstrap, **settings) as consumer:
        with pytest.raises(InvalidRequestError, match=r"subscribe\(\).*assign\(\)"):
            await consumer.poll(0)
        with pytest.raises(InvalidRequestError, match="nothing to read"):
            await anext(consumer)
        await consumer.assign([T0])
        assert await consumer.poll(0) == []
        await consumer.unsubscribe()
        with pytest.raises(InvalidRequestError, match="nothing to read"):
            await consumer.poll(0)


@pytest.mark.parametrize(
    "pattern",
    [re.compile("t+", re.IGNORECASE), re.compile("(?s)t."), re.compile(b"t"), re.compile("")],
)
async def test_a_pattern_that_could_not_be_kept_to_is_refused(
    cluster: FakeCluster, pattern: Any
) -> None:
    async with AsyncConsumer(cluster.bootstrap, group_id="g") as consumer:
        with pytest.raises(InvalidRequestError, match="pattern"):
            consumer.subscribe(pattern)
        consumer.subscribe(re.compile("t+", re.ASCII))


async def test_what_is_written_while_a_time_is_looked_for_is_not_skipped(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))  # Of 1970.
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="by_duration:PT1H"
    ) as consumer:
        ask = consumer._engine._leaders.list_offsets
        asked: list[int] = []

        async def then_a_record_comes(times_ms: dict[TopicPartition, int], *rest: Any) -> Any:
            answer = await ask(times_ms, *rest)
            asked.append(times_ms[T0])
            if len(asked) == 1:
                now_ms = int(time.time() * 1000)
                cluster.put("t", 0, encode_batch([RecordData(now_ms, None, b"new", ())]))
            return answer

        monkeypatch.setattr(consumer._engine._leaders, "list_offsets", then_a_record_comes)
        assert values(await read(consumer, 1)) == [b"new"]
