"""What the consumers' tests share: filling partitions and reading them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.client import AsyncConsumer, ConsumerRecord, TopicPartition
from penstock.wire.records import RecordData, encode_batch
from tests.unit.client.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def fill(cluster: FakeCluster, topic: str, partition: int, values: Sequence[bytes]) -> None:
    for number, value in enumerate(values):
        data = encode_batch([RecordData(1_000 + number, b"k", value, ())])
        cluster.put(topic, partition, data)


def numbers(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


async def read(consumer: AsyncConsumer, count: int) -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    async with asyncio.timeout(15):
        while len(found) < count:
            found += await consumer.poll(500)
    return found


def values(records: Sequence[ConsumerRecord], partition: int = 0) -> list[bytes]:
    return [record.value for record in records if record.partition == partition]


def member(cluster: FakeCluster, **settings: Any) -> AsyncConsumer:
    settings = {
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "retry_backoff_ms": 10,
        **settings,
    }
    return AsyncConsumer(cluster.bootstrap, topics="t", **settings)


def committed(cluster: FakeCluster) -> dict[TopicPartition, int]:
    return {name: entry.offset for name, entry in cluster.groups["g"].offsets.items()}
