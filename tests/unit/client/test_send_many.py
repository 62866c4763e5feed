"""Many records in one call: where each went, or why it did not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from penstock.client import (
    AsyncProducer,
    BufferExhaustedError,
    ClientClosedError,
    DeliveryFailedError,
    InvalidPartitionsError,
    InvalidRequestError,
    Producer,
    RecordTooLargeError,
    SerializationError,
)
from penstock.client.core.partitioner import partition_for_key
from penstock.v1 import log_pb2
from penstock.wire.errors import InvalidRecordError
from tests.support import eventually, wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_producer import refusal

VALUES: list[bytes | None] = [b"value %d" % number for number in range(5_000)]
KEYS: list[bytes | None] = [b"key %d" % (number % 97) for number in range(5_000)]


def test_each_value_has_its_place_in_the_order_of_the_values(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(cluster.bootstrap) as producer:
        future = producer.send_many("t", VALUES)
        places = future.result(30)
        assert len(places) == len(VALUES)
        logs = [cluster.values("t", number) for number in range(3)]
        found = [logs[place.partition][place.offset] for place in places]
        assert found == VALUES
        assert places[-1] == places[len(VALUES) - 1]
        assert places[1:3] == [places[1], places[2]]
        assert future.outcomes() == list(places)
        with pytest.raises(IndexError):
            places[len(VALUES)]
        assert producer.send_many("t", []).result(5)[:] == []


def test_keys_go_where_send_puts_them(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(cluster.bootstrap) as producer:
        places = producer.send_many("t", iter(VALUES), tuple(KEYS)).result(30)
        for place, key in zip(places, KEYS, strict=True):
            assert key is not None
            assert place.partition == partition_for_key(key, 3)
        there = producer.send_many("t", VALUES[:10], partition=2, timestamp_ms=77).result(30)
        assert {(place.partition, place.timestamp_ms) for place in there} == {(2, 77)}
    ordered = [cluster.values("t", number) for number in range(3)]
    for number in range(3):
        mine = [
            value
            for value, key in zip(VALUES, KEYS, strict=True)
            if key and partition_for_key(key, 3) == number
        ]
        assert ordered[number][: len(mine)] == mine


def test_serialisers_and_partitioners_are_asked(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(
        cluster.bootstrap,
        value_serializer="json",
        key_serializer="str",
        partitioner=lambda topic, key, value, count, available: len(key or b"") % count,
    ) as producer:
        places = producer.send_many("t", [1, "two", None], ["", "k", "kk"]).result(30)
    assert [place.partition for place in places] == [0, 1, 2]
    assert [cluster.values("t", number) for number in range(3)] == [[b"1"], [b'"two"'], [None]]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"values": [b"v", "text"]}, SerializationError),
        ({"values": [b"v"], "keys": [1]}, SerializationError),
        ({"values": [b"v"] * 3, "keys": [b"k"]}, InvalidRequestError),
        ({"values": b"bytes"}, InvalidRequestError),
        ({"values": 5}, InvalidRequestError),
        ({"values": [b"v"], "keys": "k"}, InvalidRequestError),
        ({"values": [b"v", b"v" * 2_000_000]}, RecordTooLargeError),
        ({"values": [b"v" * 600_000], "keys": [b"k" * 600_000]}, RecordTooLargeError),
        ({"values": [b"v"], "partition": 7}, InvalidPartitionsError),
        ({"values": [b"v"], "partition": "7"}, InvalidRequestError),
        ({"values": [b"v"], "timestamp_ms": -1}, SerializationError),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_anything_is_queued(
    background: Background, call: dict[str, Any], error: type[Exception]
) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t", 3))
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(error):
            producer.send_many("t", **call)
        producer.flush()
    assert [cluster.values("t", number) for number in range(3)] == [[], [], []]
    with pytest.raises(ClientClosedError):
        producer.send_many("t", [b"v"])


async def test_a_bulk_that_fails_in_part_tells_of_each(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        if any(entry.partition.partition == 1 for entry in request.partitions):
            return refusal(request, InvalidRecordError("not this one"))
        return None

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap) as producer:
        good = await producer.send_many("t", VALUES[:100], partition=0)
        bad = await producer.send_many("t", VALUES[:100], partition=1)
        assert len(await good) == 100
        with pytest.raises(DeliveryFailedError, match=r"100 of 100 records.*number 0.*not this"):
            await bad
        outcomes = await bad.outcomes()
        assert {type(outcome) for outcome in outcomes} == {InvalidRecordError}
        await producer.flush()  # Both were looked at.
        unheard = await producer.send_many("t", VALUES[:70], partition=1)
        with pytest.raises(DeliveryFailedError, match=r"^70 records"):
            await producer.flush()
        assert isinstance(unheard.exception(), DeliveryFailedError)
        await producer.flush()


async def test_a_split_batch_settles_the_bulk_when_its_parts_are(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    seen: list[int] = []

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        size = len(request.partitions[0].records)
        seen.append(size)
        if size > 30_000:
            return refusal(request, RecordTooLargeError("too much at once"))
        return None

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap, batch_size=500_000, linger_ms=300) as producer:
        future = await producer.send_many("t", VALUES)
        places = await asyncio.wait_for(future, 30)
    assert max(seen) > 30_000
    log = cluster.values("t")
    assert log == VALUES
    assert [place.offset for place in places] == list(range(len(VALUES)))


async def test_memory_that_stays_full_says_how_many_were_queued(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    go = asyncio.Event()

    async def hold(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        await go.wait()
        return None

    cluster.on_produce = hold
    async with AsyncProducer(cluster.bootstrap, buffer_memory=20_000, max_block_ms=200) as producer:
        with pytest.raises(BufferExhaustedError) as caught:
            await producer.send_many("t", VALUES)
        [note] = caught.value.__notes__
        queued = int(note.split()[2])
        assert 500 < queued < len(VALUES)
        assert note == f"the first {queued} of 5000 records were queued"
        go.set()
        await producer.flush()
        assert cluster.values("t") == VALUES[:queued]


async def test_it_waits_for_room_and_loses_nothing(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    async with AsyncProducer(cluster.bootstrap, buffer_memory=20_000) as producer:
        places = await asyncio.wait_for(await producer.send_many("t", VALUES), 30)
        assert len(places) == len(VALUES)
        await eventually(lambda: producer._engine.accumulator.used_bytes == 0)
    assert sum(len(cluster.values("t", number)) for number in range(2)) == len(VALUES)


async def test_what_comes_at_once_goes_in_few_batches(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    batches = 0

    async def count(_: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal batches
        batches += len(request.partitions)
        return None

    async with AsyncProducer(cluster.bootstrap) as producer:
        await (await producer.send("t", b"warm"))
        cluster.on_produce = count
        await producer.send_many("t", [b"v" * 100] * 10_000)
        await producer.flush()
    assert 3 <= batches <= 16


async def test_others_have_their_turn_while_many_are_queued(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    turns, queued = 0, asyncio.Event()

    async def count_turns() -> None:
        nonlocal turns
        while not queued.is_set():
            turns += 1
            await asyncio.sleep(0)

    async with AsyncProducer(cluster.bootstrap) as producer:
        await (await producer.send("t", b"warm"))
        others = asyncio.create_task(count_turns())
        await producer.send_many("t", [b"v" * 100] * 50_000)
        queued.set()
        await others
        assert turns >= 6
        await producer.flush()


def test_a_bulk_that_is_looked_at_after_it_failed_is_not_unheard(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t"))

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, InvalidRecordError("not this one"))

    cluster.on_produce = refuse
    with Producer(cluster.bootstrap) as producer:
        looked_at = producer.send_many("t", VALUES[:30])
        wait_until(looked_at.done, "the verdicts")
        assert looked_at.exception() is not None
        assert looked_at.exception() is not None
        producer.flush()
        producer.send_many("t", VALUES[:7])
        with pytest.raises(DeliveryFailedError, match=r"^7 records"):
            producer.flush()


def test_a_bulk_that_nobody_wants_any_more_goes_without_the_collector(
    background: Background,
) -> None:
    background.run(lambda: background.cluster.add_topic("t"))
    with Producer(background.cluster.bootstrap) as producer:
        future = producer.send_many("t", VALUES)
        future.result(30)
        bulk = weakref.ref(future._bulk)
        collects = gc.isenabled()
        gc.disable()
        try:
            del future
            # The client's thread may hold the batch's receipt for a moment.
            wait_until(lambda: bulk() is None, "the bulk is gone")
        finally:
            if collects:
                gc.enable()
