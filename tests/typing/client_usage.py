"""What users write, as the type checker must see it. Checked by test_client_typing.py, not run."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from typing import assert_type

from penstock.client import (
    AdminClient,
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    ConsumerRecord,
    OffsetAndMetadata,
    Producer,
    RecordMetadata,
    TopicPartition,
)


def produce() -> None:
    with Producer("localhost:9092", acks="all", linger_ms=5, compression="lz4") as producer:
        future = producer.send("orders", value=b"v", key=b"k", headers={"a": None})
        assert_type(future, concurrent.futures.Future[RecordMetadata])
        assert_type(future.result(), RecordMetadata)
    Producer("localhost:9092", tls_ca=Path("ca.pem"), tls_certificate="own.pem", tls_key="key.pem")
    Producer("localhost:9092", tls_ca=b"ca.pem")  # type: ignore[arg-type]
    Producer("localhost:9092", acks="most")  # type: ignore[arg-type]
    Producer("localhost:9092", linger=5)  # type: ignore[call-arg]


def consume() -> None:
    with Consumer("localhost:9092", group_id="billing", topics=["orders"]) as consumer:
        for record in consumer:
            assert_type(record, ConsumerRecord)
            assert_type(record.topic_id, bytes)
            consumer.commit({record.topic_partition: record.position_after})
        assert_type(consumer.poll(10), list[ConsumerRecord])
        assert_type(consumer.poll_batch(), dict[TopicPartition, list[ConsumerRecord]])
        partition = TopicPartition("orders", 0)
        assert_type(consumer.committed(partition), dict[TopicPartition, OffsetAndMetadata | None])
    Consumer("localhost:9092", auto_offset_reset="smallest")  # type: ignore[arg-type]


async def both() -> None:
    async with AsyncProducer("localhost:9092") as producer:
        future = await producer.send("orders", b"v")
        assert_type(future, asyncio.Future[RecordMetadata])
        assert_type(await future, RecordMetadata)
    async with AsyncConsumer("localhost:9092", topics="orders") as consumer:
        async for record in consumer:
            assert_type(record.offset, int)


def administrate() -> None:
    with AdminClient("localhost:9092") as admin:
        assert_type(admin.create_topic("orders", 6).created, bool)
        assert_type(
            admin.list_offsets({TopicPartition("t", 0): "latest"})[TopicPartition("t", 0)].offset,
            int,
        )
        admin.list_offsets({TopicPartition("t", 0): "last"})  # type: ignore[dict-item]
