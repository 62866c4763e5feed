"""What a producer says of records that brokers refuse or do not answer for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.client import (
    AsyncProducer,
    DeliveryTimeoutError,
    SerializationError,
)
from penstock.client.cluster import Cluster
from penstock.v1 import common_pb2, log_pb2
from penstock.wire import records
from penstock.wire.batch import Buffer
from penstock.wire.compression import Compression
from penstock.wire.errors import (
    LeaderNotAvailableError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    UnknownErrorCodeError,
    UnknownServerError,
)
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_producer import refusal


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (NotEnoughReplicasError("too few of them"), False),
        (LeaderNotAvailableError("nobody leads"), False),
        (NotEnoughReplicasAfterAppendError("fewer since"), True),
        (NotLeaderError("deposed while it waited"), True),
        (UnknownServerError("who knows what"), True),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_timeout_says_what_may_have_become_of_the_records(
    cluster: FakeCluster, error: PenstockError, written: bool
) -> None:
    cluster.add_topic("t")

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, error)

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
    assert error.message in caught.value.message
    assert ("may have been written" in caught.value.message) == written
    assert ("not written: every attempt was refused" in caught.value.message) != written


@pytest.mark.parametrize("knows", [True, False], ids=["with a hint", "without"])
async def test_a_refusal_tells_who_leads_also_where_nothing_is_sent_again(
    cluster: FakeCluster, knows: bool
) -> None:
    cluster.add_topic("t", leader=1)

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        if node.number == 1 and not knows:
            return refusal(request, NotLeaderError("not me, and I do not know who"))
        return None  # It answers by itself, with a hint.

    async with AsyncProducer(
        cluster.bootstrap, enable_idempotence=False, retries=0, linger_ms=0
    ) as producer:
        await producer.send_and_wait("t", b"before")
        cluster.move("t", 0, leader=2)
        cluster.on_produce = refuse
        with pytest.raises(NotLeaderError):
            await producer.send_and_wait("t", b"refused")
        await _until_it_succeeds(producer)
    assert cluster.values("t")[-1] == b"after"


async def _until_it_succeeds(producer: AsyncProducer) -> None:
    """Without a hint the new leader is asked for meanwhile: a refusal more is no failure."""
    async with asyncio.timeout(60):
        while True:
            try:
                await producer.send_and_wait("t", b"after")
            except NotLeaderError:
                continue
            return


async def test_one_unheard_attempt_makes_the_outcome_unknown(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=1)
    attempts = 0

    async def break_once(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            return "break"
        return refusal(request, NotEnoughReplicasError("too few of them"))

    cluster.on_produce = break_once
    async with AsyncProducer(cluster.bootstrap, delivery_timeout_ms=3_000) as producer:
        with pytest.raises(DeliveryTimeoutError, match=r"too few.*may have been written"):
            await producer.send_and_wait("t", b"v")
    assert attempts > 1


async def test_what_no_broker_ever_accepted_a_connection_for_was_not_written(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=1)
    async with AsyncProducer(
        cluster.bootstrap, delivery_timeout_ms=3_000, retry_backoff_ms=10
    ) as producer:
        await producer.start()
        await producer.partitions_for("t")
        await cluster.nodes[1].stop()
        with pytest.raises(DeliveryTimeoutError, match="every attempt was refused") as caught:
            await producer.send_and_wait("t", b"v")
    assert "could not be reached" in caught.value.message
    assert "may have been written" not in caught.value.message
    assert "attempts: 0" not in caught.value.message


async def test_what_was_given_to_a_connection_that_broke_may_have_been_written(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=1)

    async def stop(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        task = asyncio.ensure_future(node.stop())  # It breaks this very call.
        await asyncio.shield(task)

    cluster.on_produce = stop
    async with AsyncProducer(
        cluster.bootstrap, delivery_timeout_ms=3_000, retry_backoff_ms=10
    ) as producer:
        with pytest.raises(DeliveryTimeoutError, match="may have been written"):
            await producer.send_and_wait("t", b"v")


async def test_a_producer_id_is_asked_for_again_whatever_happened(
    cluster: FakeCluster, monkeypatch: Any
) -> None:
    cluster.add_topic("t")
    ask_any = Cluster.ask_any
    failed = 0

    async def fail_twice(self: Cluster, *args: Any, **more: Any) -> Any:
        nonlocal failed
        if more["what"] == "Transactions.InitProducerId" and failed < 2:
            failed += 1
            raise ZeroDivisionError("a bug")
        return await ask_any(self, *args, **more)

    monkeypatch.setattr(Cluster, "ask_any", fail_twice)
    async with AsyncProducer(cluster.bootstrap, retry_backoff_ms=10) as producer:
        await asyncio.wait_for(producer.send_and_wait("t", b"v"), 5)
    assert failed == 2


async def test_a_refusal_that_this_version_does_not_know_is_final(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    attempts = 0

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        nonlocal attempts
        attempts += 1
        response = log_pb2.ProduceResponse(correlation_id=request.correlation_id)
        error = common_pb2.Error(code=31_000, message="too many moons")
        response.partitions.add(partition=request.partitions[0].partition, error=error)
        return response

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap) as producer:
        with pytest.raises(UnknownErrorCodeError, match=r"31000.*too many moons"):
            await asyncio.wait_for(producer.send_and_wait("t", b"v"), 5)
    assert attempts == 1


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_batch_that_cannot_be_made_fails_and_holds_nothing_up(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, idempotent: bool
) -> None:
    cluster.add_topic("t")
    compress = records.compress

    def without_memory(kind: Compression, data: Buffer) -> bytes:
        monkeypatch.setattr(records, "compress", compress)
        raise MemoryError("none left")

    async with AsyncProducer(
        cluster.bootstrap, compression="gzip", enable_idempotence=idempotent
    ) as producer:
        await producer.send_and_wait("t", b"first")
        monkeypatch.setattr(records, "compress", without_memory)
        with pytest.raises(SerializationError, match=r"1 record was not sent.*none left"):
            await asyncio.wait_for(producer.send_and_wait("t", b"lost"), 10)
        await asyncio.wait_for(producer.send_and_wait("t", b"next"), 10)
        producer._engine.accumulator.validate()
    assert cluster.values("t") == [b"first", b"next"]
    sequences = [
        records.parse_header(bytes(request.partitions[0].records)).base_sequence
        for _, request in cluster.produced
    ]
    assert sequences == ([0, 1] if idempotent else [-1, -1])
