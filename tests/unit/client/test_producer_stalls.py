"""A producer whose records are not acknowledged says why, while they wait."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from penstock.client import AsyncProducer, DeliveryTimeoutError, StallReason, producer_engine
from penstock.v1 import log_pb2
from penstock.wire.errors import (
    AccessForbiddenError,
    CoordinatorNotAvailableError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    PenstockError,
    UnknownServerError,
)
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_producer import refusal


async def trouble_of(producer: AsyncProducer) -> PenstockError:
    found: list[PenstockError] = []

    async def look() -> bool:
        trouble = await producer.trouble()
        if trouble is not None:
            found.append(trouble)
        return bool(found)

    deadline = asyncio.get_running_loop().time() + 20
    while not await look():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)  # Between two looks, up to the deadline.
    return found[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotEnoughReplicasError("too few"), StallReason.UNDER_MIN_ISR),
        (NotEnoughReplicasAfterAppendError("too few"), StallReason.UNDER_MIN_ISR),
        (NotLeaderError("not I"), StallReason.NO_LEADER),
        (UnknownServerError("who knows"), StallReason.REFUSED),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
async def test_what_brokers_answer_is_the_reason(
    cluster: FakeCluster, error: PenstockError, reason: StallReason
) -> None:
    cluster.add_topic("t")
    mended = asyncio.Event()

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return None if mended.is_set() else refusal(request, error)

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap, retry_backoff_ms=20) as producer:
        assert await producer.trouble() is None
        futures = [await producer.send("t", b"v") for _ in range(3)]
        trouble = await trouble_of(producer)
        assert trouble.reason is reason
        assert type(trouble) is type(error)
        assert "3 records for partition t-0 have waited for " in trouble.message
        assert error.message in trouble.message
        mended.set()
        for future in futures:
            await asyncio.wait_for(future, 20)
        assert await producer.trouble() is None


async def test_a_partition_without_a_leader_and_a_silent_one_are_told_apart(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=1)
    go = asyncio.Event()

    async def hang(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        await go.wait()
        return None

    cluster.on_produce = hang
    async with AsyncProducer(cluster.bootstrap, metadata_max_age_ms=100) as producer:
        silent = await producer.send("t", b"v")
        assert await producer.trouble() is None  # It is only under way.
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.UNREACHABLE
        assert "the leader has not answered" in trouble.message
        go.set()
        await asyncio.wait_for(silent, 20)
        cluster.move("t", 0, -1)
        await eventually(lambda: not producer._engine.metadata.available("t"))
        homeless = await producer.send("t", b"v")
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.NO_LEADER
        assert "has no leader" in trouble.message
        cluster.move("t", 0, 1)
        await asyncio.wait_for(homeless, 20)


async def test_a_leader_that_is_none_any_more_is_not_what_is_in_the_way(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t", leader=1)

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, NotEnoughReplicasError("too few"))

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap, metadata_max_age_ms=100) as producer:
        future = await producer.send("t", b"v")
        assert (await trouble_of(producer)).reason is StallReason.UNDER_MIN_ISR
        cluster.move("t", 0, -1)
        await eventually(lambda: not producer._engine.metadata.available("t"))
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.NO_LEADER
        assert "has no leader; last answer: " in trouble.message
        cluster.on_produce = None
        cluster.move("t", 0, 1)
        await asyncio.wait_for(future, 20)


async def test_a_producer_without_an_id_says_so(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    cluster.no_producer_ids = CoordinatorNotAvailableError("no id today")
    async with AsyncProducer(cluster.bootstrap, delivery_timeout_ms=3_000) as producer:
        future = await producer.send("t", b"v")
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.NO_PRODUCER_ID
        with pytest.raises(DeliveryTimeoutError, match="producer id") as caught:
            await future
        assert caught.value.reason is StallReason.NO_PRODUCER_ID


async def test_what_is_refused_for_good_is_no_stall(cluster: FakeCluster) -> None:
    cluster.add_topic("t")

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return refusal(request, AccessForbiddenError("not you"))

    cluster.on_produce = refuse
    async with AsyncProducer(cluster.bootstrap) as producer:
        with pytest.raises(AccessForbiddenError):
            await producer.send_and_wait("t", b"v")
        assert await producer.trouble() is None


async def test_a_stall_is_logged_while_it_lasts(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producer_engine, "_STALL_MS", 100.0)
    cluster.add_topic("t")
    mended = asyncio.Event()

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return None if mended.is_set() else refusal(request, NotEnoughReplicasError("too few"))

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if "not acknowledged" in one.message]

    cluster.on_produce = refuse
    with caplog.at_level(logging.WARNING, "penstock.client"):
        async with AsyncProducer(cluster.bootstrap, retry_backoff_ms=20) as producer:
            future = await producer.send("t", b"v")
            await eventually(lambda: len(told()) >= 2)
            assert "1 record for partition t-0" in told()[0]
            assert "too few" in told()[0]
            mended.set()
            await asyncio.wait_for(future, 20)
            before = len(told())
            await producer.send_and_wait("t", b"v")
            await asyncio.sleep(0.3)  # Nothing is to happen in what would be three stalls.
            assert len(told()) == before


async def test_a_stall_is_logged_when_it_has_lasted_so_long_whenever_it_began(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producer_engine, "_STALL_MS", 2_000.0)
    cluster.add_topic("t")
    mended = asyncio.Event()

    async def refuse(node: FakeNode, request: log_pb2.ProduceRequest) -> Any:
        return None if mended.is_set() else refusal(request, NotEnoughReplicasError("too few"))

    with caplog.at_level(logging.WARNING, "penstock.client"):
        async with AsyncProducer(cluster.bootstrap, retry_backoff_ms=20) as producer:
            await producer.send_and_wait("t", b"v")
            await asyncio.sleep(1)  # The stall begins half-way between two looks that were even.
            cluster.on_produce = refuse
            future = await producer.send("t", b"v")
            await eventually(lambda: "records are not acknowledged" in caplog.text)
            mended.set()
            await asyncio.wait_for(future, 20)
    told = re.search(r"1 record for partition t-0 has waited for ([0-9.]+) s", caplog.text)
    assert told is not None
    assert 2 <= float(told[1]) < 2.9
