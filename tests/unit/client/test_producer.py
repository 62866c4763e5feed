from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.client import (
    AsyncProducer,
    BufferExhaustedError,
    ClientClosedError,
    DeliveryFailedError,
    DeliveryTimeoutError,
    InvalidPartitionsError,
    RecordTooLargeError,
    RequestTimedOutError,
    SerializationError,
    UnknownTopicOrPartitionError,
)
from penstock.v1 import log_pb2
from penstock.wire.errors import (
    AccessForbiddenError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
)
from penstock.wire.records import decode_batch, parse_header
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode


def refusal(request: log_pb2.ProduceRequest, error: PenstockError) -> log_pb2.ProduceResponse:
    response = log_pb2.ProduceResponse(correlation_id=request.correlation_id)
    for entry in request.partitions:
        response.partitions.add(partition=entry.partition, error=error.to_proto())
    return response


async def test_records_arrive_in_order_with_their_places(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    async with AsyncProducer(cluster.bootstrap) as producer:
        futures = [
            await producer.send("t", b"%d" % n, partition=n % 2, timestamp_ms=n) for n in range(100)
        ]
        await producer.flush()
        places = [future.result() for future in futures]
    assert cluster.values("t", 0) == [b"%d" % n for n in range(0, 100, 2)]
    assert cluster.values("t", 1) == [b"%d" % n for n in range(1, 100, 2)]
    assert [place.offset for place in places] == [n // 2 for n in range(100)]
    assert [place.timestamp_ms for place in places] == list(range(100))


async def test_key_headers_and_null_values_are_kept(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap) as producer:
        await producer.send_and_wait("t", None, b"k", {"a": b"1", "b": None})
        await producer.send_and_wait("t", b"", None, [("a", b"1"), ("a", b"2")])
    first, second = cluster.partition("t").records()
    assert (first.key, first.value, first.headers) == (b"k", None, (("a", b"1"), ("b", None)))
    assert (second.key, second.value) == (None, b"")
    assert second.headers == (("a", b"1"), ("a", b"2"))


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_compression_arrives(cluster: FakeCluster, compression: Any) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, compression=compression) as producer:
        for _ in range(50):
            await producer.send("t", b"a" * 200)
    assert cluster.values("t") == [b"a" * 200] * 50
    header = parse_header(cluster.partition("t").batches[0][2])
    assert header.compression.name.lower() == compression


async def test_linger_gathers_and_flush_does_not_wait_for_it(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, linger_ms=60_000) as producer:
        for _ in range(10):
            await producer.send("t", b"v")
        await asyncio.wait_for(producer.flush(), 10)
        assert len(cluster.partition("t").batches) == 1


async def test_acks_0_and_1(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, acks=0) as producer:
        assert (await producer.send_and_wait("t", b"v")).offset == -1
    await eventually(lambda: cluster.values("t") == [b"v"])
    async with AsyncProducer(cluster.bootstrap, acks=1) as producer:
        assert (await producer.send_and_wait("t", b"w")).offset == 1


async def test_a_moved_leader_is_followed_by_its_hint_without_asking_for_metadata(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=1)
    async with AsyncProducer(cluster.bootstrap) as producer:
        await producer.send_and_wait("t", b"a")
        asked = 0

        async def count(node: FakeNode) -> None:
            nonlocal asked
            asked += 1

        cluster.on_describe = count
        cluster.move("t", 0, 2)
        await asyncio.wait_for(producer.send_and_wait("t", b"b"), 5)
        assert asked == 0
    assert cluster.values("t") == [b"a", b"b"]


async def test_without_a_hint_metadata_is_asked_for(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)

    async def silent(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        if node.number == 1:
            return refusal(request, NotLeaderError("not me, and I do not know who"))
        return None

    async with AsyncProducer(cluster.bootstrap) as producer:
        await producer.send_and_wait("t", b"a")
        cluster.on_produce = silent
        cluster.move("t", 0, 3)
        await asyncio.wait_for(producer.send_and_wait("t", b"b"), 5)
    assert cluster.values("t") == [b"a", b"b"]


async def test_a_dead_leader_is_replaced_at_once(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    async with AsyncProducer(cluster.bootstrap) as producer:
        await producer.send_and_wait("t", b"a")
        await cluster.nodes[1].stop()
        future = await producer.send("t", b"b")
        loop = asyncio.get_running_loop()
        await asyncio.wait([future], timeout=0.2)
        assert not future.done()
        moved = loop.time()
        cluster.move("t", 0, 2)
        await asyncio.wait_for(future, 5)
        assert loop.time() - moved < 1.0  # 0.05 s or so on an idle machine.
    assert cluster.values("t") == [b"a", b"b"]


async def test_an_answer_lost_with_its_stream_makes_no_duplicate(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    breaks = 3

    async def lose(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal breaks
        breaks -= 1
        return "append-and-break" if breaks >= 0 else None

    async with AsyncProducer(cluster.bootstrap) as producer:
        cluster.on_produce = lose
        places = await asyncio.gather(*[await producer.send("t", b"%d" % n) for n in range(10)])
    assert cluster.values("t") == [b"%d" % n for n in range(10)]
    assert [place.offset for place in places] == list(range(10))
    sent = [entry.records for _, request in cluster.produced for entry in request.partitions]
    assert len(sent) > 1
    assert len(set(sent)) == 1  # The same bytes each time.


async def test_order_is_kept_with_five_in_flight_and_random_refusals(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    count = 0

    async def sometimes(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal count
        count += 1
        if count % 4 == 1:
            return refusal(request, NotEnoughReplicasError("only 1 in sync"))
        return "append-and-break" if count % 7 == 3 else None

    cluster.on_produce = sometimes
    async with AsyncProducer(
        cluster.bootstrap, batch_size=120, linger_ms=0, retry_backoff_ms=5
    ) as producer:
        for number in range(200):
            await producer.send("t", b"%d" % number)
    assert cluster.values("t") == [b"%d" % number for number in range(200)]


async def test_a_slow_answer_is_waited_for(cluster: FakeCluster) -> None:
    cluster.add_topic("t")

    async def slow(node: FakeNode, request: log_pb2.ProduceRequest) -> None:
        await asyncio.sleep(0.3)  # Slowness itself is what is tested.

    cluster.on_produce = slow
    async with AsyncProducer(cluster.bootstrap) as producer:
        assert (await producer.send_and_wait("t", b"v")).offset == 0
    assert len(cluster.produced) == 1


async def test_a_silent_leader_is_given_up_when_another_leads(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    heard = asyncio.Event()

    async def deaf(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        if node.number != 1:
            return None
        heard.set()
        return "drop"

    async with AsyncProducer(cluster.bootstrap, request_timeout_ms=30_000) as producer:
        cluster.on_produce = deaf
        future = await producer.send("t", b"v")
        await heard.wait()
        cluster.move("t", 0, 2)
        await asyncio.wait_for(future, 5)  # Far below request_timeout_ms.
    assert cluster.values("t") == [b"v"]


async def test_delivery_timeout_bounds_everything_and_says_why(cluster: FakeCluster) -> None:
    cluster.add_topic("t")

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, NotEnoughReplicasError("in sync: 2; needed: 2 of 1, 2, 3"))

    cluster.on_produce = refuse
    # One attempt, answered long before the end: one that is under way then may be written.
    async with AsyncProducer(
        cluster.bootstrap,
        delivery_timeout_ms=1_000,
        retry_backoff_ms=60_000,
        retry_backoff_max_ms=60_000,
    ) as producer:
        with pytest.raises(DeliveryTimeoutError) as caught:
            await producer.send_and_wait("t", b"v")
    message = caught.value.message
    assert message.startswith("1 record for partition t-0 was not acknowledged within ")
    assert "It was not written: every attempt was refused" in message
    assert "delivery_timeout_ms=1000" in message
    assert "in sync: 2; needed: 2" in message


async def test_a_refusal_for_good_fails_its_records_and_the_next_ones_go_on(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")

    async def refuse_second(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        records = decode_batch(request.partitions[0].records)
        if records[0].value == b"bad":
            return refusal(request, AccessForbiddenError("not for you"))
        return None

    cluster.on_produce = refuse_second
    async with AsyncProducer(cluster.bootstrap, linger_ms=0) as producer:
        assert (await producer.send_and_wait("t", b"1")).offset == 0
        with pytest.raises(AccessForbiddenError, match="not for you"):
            await producer.send_and_wait("t", b"bad")
        assert (await producer.send_and_wait("t", b"2")).offset == 1
    assert cluster.values("t") == [b"1", b"2"]


async def test_a_batch_too_large_for_the_topic_is_split(cluster: FakeCluster) -> None:
    cluster.add_topic("t")

    async def small(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        if len(request.partitions[0].records) > 150:
            return refusal(request, RecordTooLargeError("max.message.bytes=150"))
        return None

    cluster.on_produce = small
    async with AsyncProducer(cluster.bootstrap) as producer:
        for number in range(50):
            await producer.send("t", b"%04d" % number)
        await producer.flush()
        with pytest.raises(RecordTooLargeError, match=r"max.message.bytes"):
            await producer.send_and_wait("t", b"x" * 200)
    assert cluster.values("t") == [b"%04d" % number for number in range(50)]


async def test_unknown_topic_names_the_near_one_and_fails_fast(cluster: FakeCluster) -> None:
    cluster.add_topic("orders")
    async with AsyncProducer(cluster.bootstrap) as producer:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(UnknownTopicOrPartitionError, match=r"'order'.*'orders'"):
            await producer.send("order", b"v")
        assert loop.time() - started < 5
        cluster.add_topic("order")  # Made later, it is found.
        await producer.send_and_wait("order", b"v")


async def test_a_topic_made_a_moment_ago_through_another_broker_is_found(
    cluster: FakeCluster,
) -> None:
    async with AsyncProducer(cluster.bootstrap) as producer:
        sending = asyncio.ensure_future(producer.send_and_wait("new", b"v"))
        asked = asyncio.Event()

        async def note(node: FakeNode) -> None:
            asked.set()

        cluster.on_describe = note
        await asked.wait()
        cluster.add_topic("new")
        assert (await asyncio.wait_for(sending, 5)).offset == 0


async def test_records_of_a_topic_deleted_meanwhile_fail(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap) as producer:
        await producer.send_and_wait("t", b"v")
        del cluster.topics["t"]
        cluster.index += 1
        with pytest.raises(UnknownTopicOrPartitionError):
            await asyncio.wait_for(producer.send_and_wait("t", b"v"), 10)


async def test_a_record_above_max_request_size_is_refused_at_once(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, max_request_size=1_000) as producer:
        with pytest.raises(RecordTooLargeError) as caught:
            await producer.send("t", b"v" * 1_000)
    assert "max_request_size=1000" in caught.value.message
    assert "value 1000" in caught.value.message


async def test_requests_stay_within_max_request_size(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 8, leader=1)
    async with AsyncProducer(
        cluster.bootstrap, max_request_size=2_000, batch_size=1_000, linger_ms=50
    ) as producer:
        for number in range(80):
            await producer.send("t", b"v" * 100, partition=number % 8)
    assert len(cluster.produced) > 4
    for _, request in cluster.produced:
        assert sum(len(entry.records) for entry in request.partitions) <= 2_000


async def test_bad_arguments_are_refused_at_once(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap) as producer:
        with pytest.raises(SerializationError, match=r"value.*'t'.*str is not bytes.*value_ser"):
            await producer.send("t", "text")
        with pytest.raises(SerializationError, match=r"key.*int is not bytes"):
            await producer.send("t", b"v", 7)
        with pytest.raises(SerializationError, match="header"):
            await producer.send("t", b"v", headers=[("a", "not bytes")])  # type: ignore[list-item]
        with pytest.raises(SerializationError, match="timestamp_ms=-5"):
            await producer.send("t", b"v", timestamp_ms=-5)
        with pytest.raises(InvalidPartitionsError, match="no partition 3; it has 0 to 0"):
            await producer.send("t", b"v", partition=3)
        await producer.send_and_wait("t", b"fine")
    assert cluster.values("t") == [b"fine"]


async def test_serialisers(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(
        cluster.bootstrap, key_serializer="str", value_serializer="json"
    ) as producer:
        await producer.send_and_wait("t", {"a": ["ü"]}, "key")
        with pytest.raises(SerializationError, match=r"not JSON serializable; pass what JSON can"):
            await producer.send("t", {1, 2})
        with pytest.raises(SerializationError, match="not JSON compliant"):
            await producer.send("t", {"weight": float("nan")})
        with pytest.raises(SerializationError, match="bytes is not str; pass str, or set key_ser"):
            await producer.send("t", 1, b"key")
    async with AsyncProducer(
        cluster.bootstrap,
        value_serializer=lambda number: number.to_bytes(2, "big"),
    ) as producer:
        await producer.send_and_wait("t", 258)
    assert cluster.values("t") == ['{"a":["ü"]}'.encode(), b"\x01\x02"]
    assert cluster.partition("t").records()[0].key == b"key"


async def test_a_full_buffer_blocks_and_then_raises(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    gate = asyncio.Event()

    async def closed(node: FakeNode, request: log_pb2.ProduceRequest) -> None:
        await gate.wait()

    cluster.on_produce = closed
    async with AsyncProducer(cluster.bootstrap, buffer_memory=10_000, max_block_ms=100) as producer:
        for _ in range(9):
            await producer.send("t", b"v" * 1_000)
        with pytest.raises(BufferExhaustedError, match=r"buffer_memory=10000.*max_block_ms=100"):
            await producer.send("t", b"v" * 1_000)
        gate.set()
        await producer.flush()
        await producer.send("t", b"v" * 1_000)
    assert len(cluster.values("t")) == 10


async def test_a_blocked_send_goes_on_when_there_is_room(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with AsyncProducer(cluster.bootstrap, buffer_memory=5_000) as producer:
        for _ in range(50):
            await producer.send("t", b"v" * 1_000)
    assert len(cluster.values("t")) == 50


async def test_a_failure_that_nobody_read_raises_at_flush_and_only_once(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, AccessForbiddenError("not for you"))

    cluster.on_produce = refuse
    producer = AsyncProducer(cluster.bootstrap)
    read = await producer.send("t", b"read")
    for _ in range(3):
        await producer.send("t", b"unread")
    with pytest.raises(AccessForbiddenError):
        await read
    with pytest.raises(DeliveryFailedError, match=r"3 records.*not for you") as caught:
        await producer.flush()
    assert isinstance(caught.value.__cause__, AccessForbiddenError)
    await producer.flush()
    await producer.send("t", b"unread")
    with pytest.raises(DeliveryFailedError, match=r"^1 record was not"):
        await producer.close()
    await producer.close()


async def test_flush_times_out_with_the_records_still_queued(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    gate = asyncio.Event()

    async def closed(node: FakeNode, request: log_pb2.ProduceRequest) -> None:
        await gate.wait()

    cluster.on_produce = closed
    async with AsyncProducer(cluster.bootstrap) as producer:
        future = await producer.send("t", b"v")
        with pytest.raises(
            RequestTimedOutError, match=r"^1 batch was not acknowledged within timeout_ms=50"
        ):
            await producer.flush(50)
        gate.set()
        await future


async def test_closing_in_a_hurry_fails_what_is_left(cluster: FakeCluster) -> None:
    cluster.add_topic("t")

    async def never(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return "drop"

    cluster.on_produce = never
    producer = AsyncProducer(cluster.bootstrap)
    future = await producer.send("t", b"v")
    with pytest.raises(DeliveryFailedError):
        await producer.close(50)
    with pytest.raises(ClientClosedError, match="closed before 1 record was acknowledged"):
        await future
    with pytest.raises(ClientClosedError):
        await producer.send("t", b"v")


async def test_a_garbled_answer_condemns_no_record(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    garbled = 2

    async def garble(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal garbled
        garbled -= 1
        if garbled < 0:
            return None
        return log_pb2.ProduceResponse(correlation_id=request.correlation_id)

    cluster.on_produce = garble
    async with AsyncProducer(cluster.bootstrap) as producer:
        await asyncio.wait_for(producer.send_and_wait("t", b"v"), 10)
    assert cluster.values("t") == [b"v"]


async def test_the_whole_cluster_may_be_away_for_a_while(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    async with AsyncProducer(cluster.bootstrap) as producer:
        for number in range(3):
            await producer.send_and_wait("t", b"a", partition=number)
        for node in cluster.nodes.values():
            await node.stop()
        futures = [await producer.send("t", b"b", partition=number) for number in range(3)]
        await asyncio.wait(futures, timeout=0.3)
        for node in cluster.nodes.values():
            await node.start()
        await asyncio.wait_for(asyncio.gather(*futures), 20)
    for number in range(3):
        assert cluster.values("t", number) == [b"a", b"b"]


async def test_a_record_that_waits_for_room_keeps_its_partition(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    asked: list[bytes | None] = []

    def alternate(
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
    ) -> int:
        asked.append(value)
        return (len(asked) - 1) % partition_count

    async with AsyncProducer(
        cluster.bootstrap, partitioner=alternate, buffer_memory=2_000, linger_ms=0
    ) as producer:
        values = [b"%d" % number * 500 for number in range(9)]
        for value in values:
            await producer.send("t", value)
    assert asked == values
    assert cluster.values("t", 0) == values[::2]
    assert cluster.values("t", 1) == values[1::2]


async def test_the_wait_for_metadata_and_for_room_have_one_deadline(cluster: FakeCluster) -> None:
    cluster.add_topic("full")
    cluster.add_topic("new")

    async def silent(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return "drop"

    cluster.on_produce = silent
    producer = AsyncProducer(cluster.bootstrap, buffer_memory=2_000, max_block_ms=1_000)
    stuck = await producer.send("full", b"x" * 1_500)
    loop = asyncio.get_running_loop()
    answers = loop.time() + 0.7

    async def slow(node: FakeNode) -> None:
        await asyncio.sleep(max(0.0, answers - loop.time()))  # the broker is slow

    cluster.on_describe = slow
    started = loop.time()
    with pytest.raises(BufferExhaustedError):
        await producer.send("new", b"x" * 1_500)
    assert 0.9 < loop.time() - started < 1.5
    stuck.add_done_callback(lambda _: None)  # Its failure is known.
    await producer.close(0)
