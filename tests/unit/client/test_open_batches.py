"""What ends an open batch's taking in of records, each of which it would take for the asking."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.client import AsyncProducer, ClientClosedError, Producer
from penstock.client.core.partitioner import partition_for_key
from penstock.v1 import log_pb2
from tests.support import eventually, wait_until
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster, FakeNode

KEYS = [b"key%d" % number for number in range(24)]


async def test_keys_go_where_they_hash_to_once_the_topic_has_more_partitions(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", 1)
    async with AsyncProducer(
        cluster.bootstrap, linger_ms=60_000, metadata_max_age_ms=100
    ) as producer:
        first = await producer.send("t", b"opens a batch", key=KEYS[0])
        cluster.add_partitions("t", 8)
        await eventually(lambda: producer._engine.metadata.partition_count("t") == 8)
        futures = [await producer.send("t", b"v", key=key) for key in KEYS]
        await producer.flush()
        assert (await first).partition == 0
        places = [(await future).partition for future in futures]
    assert places == [partition_for_key(key, 8) for key in KEYS]


def test_nothing_is_taken_in_once_the_producer_closes(background: Background) -> None:
    cluster = background.cluster
    background.run(lambda: cluster.add_topic("t"))
    go = threading.Event()

    async def hold(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        await asyncio.to_thread(go.wait, 30)
        return None

    cluster.on_produce = hold
    producer = Producer(
        cluster.bootstrap,
        linger_ms=0,
        enable_idempotence=False,
        max_in_flight_requests_per_connection=1,
    )
    first = producer.send("t", b"first")
    wait_until(lambda: bool(cluster.produced), "the first to be under way")
    second = producer.send("t", b"opens a batch that has to wait")
    closing = threading.Thread(target=producer.close)
    closing.start()
    try:
        wait_until(lambda: producer._closed, "the close to begin")
        with pytest.raises(ClientClosedError):
            producer.send("t", b"too late")
    finally:
        go.set()
        closing.join(30)
    assert [first.result(0).offset, second.result(0).offset] == [0, 1]
    assert cluster.values("t") == [b"first", b"opens a batch that has to wait"]
