"""What users write, as the type checker must see it. Checked by test_client_typing.py, not run.

Each line that must not check carries an ignore with the reason that mypy is to give; one that does
check after all leaves it unused, which is an error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncBulkDeliveryFuture,
    AsyncConsumer,
    AsyncProducer,
    BufferExhaustedError,
    BulkDeliveryFuture,
    Consumer,
    ConsumerMetrics,
    ConsumerRecord,
    DeliveryTimeoutError,
    ErrorCode,
    Header,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    PenstockError,
    Producer,
    RebalanceListener,
    RecordMetadata,
    StallReason,
    TopicPartition,
)

# --- producing ------------------------------------------------------------------------------------


def produce() -> None:
    with Producer("localhost:9092", acks="all", linger_ms=5, compression="lz4") as producer:
        assert_type(producer, Producer)
        future = producer.send("orders", value=b"v", key=b"k", headers={"a": None})
        assert_type(future, concurrent.futures.Future[RecordMetadata])
        place = future.result(timeout=5)
        assert_type(place, RecordMetadata)
        assert_type(place.topic_partition, TopicPartition)
        assert_type(place.offset, int)
        assert_type(future.exception(), BaseException | None)
        headers: list[Header] = [("a", b"1"), ("a", None)]
        producer.send("orders", headers=headers, partition=1, timestamp_ms=0)
        producer.send("orders", headers=(("a", b"1"),))
        future.add_done_callback(on_done)
        assert_type(producer.partitions_for("orders"), int)
        assert_type(producer.trouble(), PenstockError | None)
        assert_type(producer.send_arrow("orders", object()), BulkDeliveryFuture)
        producer.flush(timeout_ms=1_000)
        producer.close(timeout_ms=None)
        many = producer.send_many("orders", [b"one", b"two"], keys=[b"k", None])
        assert_type(many, BulkDeliveryFuture)
        assert_type(many.result()[-1], RecordMetadata)
        assert_type(many.outcomes(), list[RecordMetadata | BaseException])
        producer.send_many("orders", (b"%d" % number for number in range(9)), partition=0)
        producer.send_many("orders", 7)  # type: ignore[arg-type]
        producer.send_many("orders", [b"v"], b"k", 3)  # type: ignore[call-arg]
        producer.send(b"orders", b"v")  # type: ignore[arg-type]
        producer.send("orders", b"v", partition="1")  # type: ignore[arg-type]
        producer.send("orders", b"v", headers={"a": "text"})  # type: ignore[dict-item]
        producer.send("orders", b"v", headers={1: b"v"})  # type: ignore[dict-item]
        producer.send("orders", b"v", b"k", (), 3)  # type: ignore[call-arg]
        producer.send("orders", b"v", timestamp=0)  # type: ignore[call-arg]
        producer.send()  # type: ignore[call-arg]
        producer.flush("1s")  # type: ignore[arg-type]
        future.add_done_callback(on_record)  # type: ignore[arg-type]


def on_done(done: concurrent.futures.Future[RecordMetadata]) -> None:
    assert_type(done.result().timestamp_ms, int)


def on_record(record: ConsumerRecord) -> None:
    """What is no callback of a send."""


def settings_of_producers() -> None:
    Producer(["one:9092", "two:9092"], acks=1, enable_idempotence=False)
    Producer("localhost:9092", tls_ca=Path("ca.pem"), tls_certificate="own.pem", tls_key="key.pem")
    Producer("localhost:9092", tls_ca=b"ca.pem")  # type: ignore[arg-type]
    Producer("localhost:9092", acks="most")  # type: ignore[arg-type]
    Producer("localhost:9092", acks=2)  # type: ignore[arg-type]
    Producer("localhost:9092", linger=5)  # type: ignore[call-arg]
    Producer("localhost:9092", linger_ms=0.5)  # type: ignore[arg-type]
    Producer("localhost:9092", compression="brotli")  # type: ignore[arg-type]
    Producer("localhost:9092", group_id="billing")  # type: ignore[call-arg]
    Producer(9092)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Order:
    table: int


def order_to_bytes(order: Order) -> bytes:
    return b"%d" % order.table


def bytes_to_order(data: bytes | None) -> Order | None:
    return None if data is None else Order(int(data))


def to_text(order: Order) -> str:
    return str(order.table)


def serialisers() -> None:
    Producer("localhost:9092", key_serializer="str", value_serializer=order_to_bytes)
    Producer("localhost:9092", value_serializer=lambda order: bytes([order.table]))
    Consumer("localhost:9092", key_deserializer="json", value_deserializer=bytes_to_order)
    Producer("localhost:9092", value_serializer="avro")  # type: ignore[arg-type]
    Producer("localhost:9092", value_serializer=to_text)  # type: ignore[arg-type]
    Consumer("localhost:9092", value_deserializer=order_to_bytes)  # type: ignore[arg-type]


def by_function(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    partition_count: int,
    available: Sequence[int],
) -> int:
    return available[0]


class ByObject:
    def __call__(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
    ) -> int:
        return partition_count - 1


def too_little(topic: str, key: bytes | None) -> int:
    return 0


def no_number(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    partition_count: int,
    available: Sequence[int],
) -> str:
    return "0"


def partitioners() -> None:
    Producer("localhost:9092", partitioner="round_robin")
    Producer("localhost:9092", partitioner=by_function)
    Producer("localhost:9092", partitioner=ByObject())
    Producer("localhost:9092", partitioner="random")  # type: ignore[arg-type]
    Producer("localhost:9092", partitioner=too_little)  # type: ignore[arg-type]
    Producer("localhost:9092", partitioner=no_number)  # type: ignore[arg-type]
    Producer("localhost:9092", partitioner=ByObject)  # type: ignore[arg-type]


# --- consuming ------------------------------------------------------------------------------------

P0 = TopicPartition("orders", 0)


class Listener:
    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        assert_type(partitions[0].partition, int)

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None: ...


class AsyncListener:
    async def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None: ...

    async def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    async def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None: ...


class Deaf:
    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None: ...


class Mistaken(Listener):
    def on_partitions_lost(self, partitions: Sequence[str]) -> None: ...  # type: ignore[override]


def listeners(consumer: Consumer, other: AsyncConsumer) -> None:
    found: RebalanceListener = Listener()
    consumer.subscribe(["orders"], found)
    consumer.subscribe("orders", Listener())
    consumer.subscribe(re.compile("orders-.*"))
    other.subscribe(["orders"], AsyncListener())
    other.subscribe(["orders"], listener=Listener())
    consumer.subscribe(["orders"], Deaf())  # type: ignore[arg-type]
    consumer.subscribe(["orders"], Mistaken)  # type: ignore[arg-type]
    consumer.subscribe(7)  # type: ignore[arg-type]
    consumer.subscribe(re.compile(b"orders"))  # type: ignore[arg-type]


def consume() -> None:
    with Consumer("localhost:9092", group_id="billing", topics=["orders"]) as consumer:
        assert_type(consumer, Consumer)
        for record in consumer:
            assert_type(record, ConsumerRecord)
            assert_type(record.topic_id, bytes)
            assert_type(record.key, Any)
            assert_type(record.headers, tuple[Header, ...])
            assert_type(record.position_after, OffsetAndMetadata)
            consumer.commit({record.topic_partition: record.position_after})
        assert_type(consumer.poll(10), list[ConsumerRecord])
        assert_type(consumer.poll(timeout_ms=None, max_records=5), list[ConsumerRecord])
        assert_type(consumer.poll_batch(), dict[TopicPartition, list[ConsumerRecord]])
        assert_type(consumer.fetch_arrow(10, max_records=5).num_rows, Any)  # It has no types.
        consumer.fetch_arrow("10")  # type: ignore[arg-type]
        assert_type(consumer.assignment(), frozenset[TopicPartition])
        assert_type(consumer.subscription(), tuple[str, ...])
        assert_type(consumer.paused(), frozenset[TopicPartition])
        assert_type(consumer.partitions_for("orders"), tuple[int, ...])
        assert_type(consumer.trouble(), PenstockError | None)
        if (trouble := consumer.trouble()) is not None:
            assert_type(trouble.reason, StallReason | None)
        assert_type(consumer.current_lag(P0), int | None)
        assert_type(consumer.metrics(), ConsumerMetrics)
        consumer.poll("1s")  # type: ignore[arg-type]
        consumer.poll(10, max_records=0.5)  # type: ignore[arg-type]


def settings_of_consumers() -> None:
    Consumer("localhost:9092", topics=re.compile("orders-.*"), group_instance_id="one")
    Consumer("localhost:9092", auto_offset_reset="none", enable_auto_commit=False)
    Consumer("localhost:9092", auto_offset_reset="by_duration:P3D")
    Consumer("localhost:9092", isolation_level="read_committed")
    Consumer("localhost:9092", isolation_level="committed")  # type: ignore[arg-type]
    Consumer("localhost:9092", session_timeout=5)  # type: ignore[call-arg]
    Consumer("localhost:9092", acks="all")  # type: ignore[call-arg]
    Consumer("localhost:9092", group_id=7)  # type: ignore[arg-type]
    Consumer("localhost:9092", enable_auto_commit="no")  # type: ignore[arg-type]
    Consumer("localhost:9092", ["orders"])  # type: ignore[call-arg]


def positions(consumer: Consumer) -> None:
    consumer.assign([P0])
    consumer.seek(P0, 5)
    consumer.seek_to_beginning()
    consumer.seek_to_end(P0)
    consumer.pause(P0)
    consumer.resume(P0)
    assert_type(consumer.position(P0), int)
    assert_type(consumer.beginning_offsets([P0]), dict[TopicPartition, int])
    assert_type(consumer.end_offsets([P0]), dict[TopicPartition, int])
    found = consumer.offsets_for_times({P0: 0})
    assert_type(found, dict[TopicPartition, OffsetAndTimestamp | None])
    consumer.seek(P0, found[P0].offset)  # type: ignore[union-attr]
    consumer.assign(["orders"])  # type: ignore[list-item]
    consumer.assign(P0)  # type: ignore[arg-type]
    consumer.seek("orders", 0)  # type: ignore[arg-type]
    consumer.seek(P0, "0")  # type: ignore[arg-type]
    consumer.seek_to_end([P0])  # type: ignore[arg-type]
    consumer.offsets_for_times({P0: "yesterday"})  # type: ignore[dict-item]


def commits(consumer: Consumer) -> None:
    consumer.commit()
    consumer.commit({P0: 5})
    consumer.commit({P0: OffsetAndMetadata(5, metadata="by worker 7")})
    assert_type(consumer.committed(P0), dict[TopicPartition, OffsetAndMetadata | None])
    assert_type(consumer.commit_async(), concurrent.futures.Future[None])
    consumer.commit_async({P0: 5}, callback=on_commit)
    consumer.commit({"orders": 5})  # type: ignore[dict-item]
    consumer.commit({P0: "5"})  # type: ignore[dict-item]
    consumer.commit_async(callback=on_record)  # type: ignore[arg-type]


def on_commit(error: BaseException | None) -> None:
    """A callback of commit_async."""


# --- asyncio --------------------------------------------------------------------------------------


async def produce_async() -> None:
    async with AsyncProducer("localhost:9092", partitioner=by_function) as producer:
        assert_type(producer, AsyncProducer)
        future = await producer.send("orders", b"v", headers={"a": b"1"})
        assert_type(future, asyncio.Future[RecordMetadata])
        assert_type(await future, RecordMetadata)
        assert_type(await producer.send_and_wait("orders", b"v", b"k"), RecordMetadata)
        futures = [await producer.send("orders", b"%d" % number) for number in range(3)]
        assert_type(await asyncio.gather(*futures), list[RecordMetadata])
        assert_type(await producer.partitions_for("orders"), int)
        assert_type(await producer.trouble(), PenstockError | None)
        many = await producer.send_many("orders", [b"one", b"two"])
        assert_type(many, AsyncBulkDeliveryFuture)
        assert_type((await many)[0], RecordMetadata)
        assert_type(await many.outcomes(), list[RecordMetadata | BaseException])
        await producer.flush(1_000)
        producer.send("orders", b"v").result()  # type: ignore[attr-defined]
        await producer.send(7)  # type: ignore[arg-type]
        await producer.send_and_wait("orders", b"v", partition="1")  # type: ignore[arg-type]
    AsyncProducer("localhost:9092", linger=5)  # type: ignore[call-arg]
    with AsyncProducer("localhost:9092"):  # type: ignore[attr-defined]
        pass


async def consume_async() -> None:
    async with AsyncConsumer("localhost:9092", topics="orders") as consumer:
        assert_type(consumer, AsyncConsumer)
        async for record in consumer:
            assert_type(record, ConsumerRecord)
            assert_type(record.offset, int)
        assert_type(await consumer.poll(10), list[ConsumerRecord])
        assert_type(await consumer.poll_batch(), dict[TopicPartition, list[ConsumerRecord]])
        assert_type((await consumer.fetch_arrow()).num_rows, Any)
        assert_type(await consumer.position(P0), int)
        assert_type(await consumer.committed(P0), dict[TopicPartition, OffsetAndMetadata | None])
        found = await consumer.offsets_for_times({P0: 0})
        assert_type(found, dict[TopicPartition, OffsetAndTimestamp | None])
        assert_type(consumer.assignment(), frozenset[TopicPartition])
        assert_type(await consumer.trouble(), PenstockError | None)
        assert_type(await consumer.current_lag(P0), int | None)
        await consumer.assign([P0])
        await consumer.seek(P0, 5)
        await consumer.pause(P0)
        await consumer.commit({P0: 5})
        committing = asyncio.create_task(consumer.commit())
        assert_type(committing, asyncio.Task[None])
        await consumer.seek(P0, "5")  # type: ignore[arg-type]
        await consumer.commit({"orders": 5})  # type: ignore[dict-item]
        for _ in consumer:  # type: ignore[attr-defined]
            pass
    AsyncConsumer("localhost:9092", isolation_level="committed")  # type: ignore[arg-type]
    AsyncConsumer("localhost:9092", auto_offset_reset=3)  # type: ignore[arg-type]


# --- errors ---------------------------------------------------------------------------------------


def errors(producer: Producer) -> None:
    try:
        producer.send("orders", b"v").result()
    except DeliveryTimeoutError as error:
        assert_type(error.message, str)
        assert_type(error.retriable, bool)
        assert_type(error.code, ErrorCode)
    except (BufferExhaustedError, PenstockError) as error:
        assert_type(error.refresh_metadata, bool)
        if error.retryable:  # type: ignore[attr-defined]
            return
    with contextlib.suppress(PenstockError):
        producer.flush()


# --- administration -------------------------------------------------------------------------------


def administrate() -> None:
    with AdminClient("localhost:9092") as admin:
        assert_type(admin.create_topic("orders", 6).created, bool)
        assert_type(
            admin.list_offsets({TopicPartition("t", 0): "latest"})[TopicPartition("t", 0)].offset,
            int,
        )
        assert_type(admin.list_group_offsets("g"), dict[TopicPartition, OffsetAndMetadata])
        admin.alter_group_offsets("g", {P0: 5})
        admin.list_offsets({TopicPartition("t", 0): "last"})  # type: ignore[dict-item]
        admin.create_topic("orders", "6")  # type: ignore[arg-type]
        admin.create_topic("orders", configs={"retention.ms": None})  # type: ignore[dict-item]


async def administrate_async() -> None:
    async with AsyncAdminClient("localhost:9092") as admin:
        assert_type((await admin.create_topic("orders", 6)).created, bool)
        assert admin.create_topic("orders").created  # type: ignore[attr-defined]
