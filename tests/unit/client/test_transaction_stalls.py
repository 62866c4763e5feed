"""What a producer says while a transaction does not begin or end."""

from __future__ import annotations

import asyncio

import pytest

from penstock.client import AsyncProducer, GroupMetadata, PenstockError, StallReason, TopicPartition
from penstock.wire.errors import (
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
)
from tests.support import eventually
from tests.unit.client.conftest import Background


@pytest.fixture
def producer(background: Background) -> AsyncProducer:
    background.cluster.add_topic("a")
    return AsyncProducer(background.cluster.bootstrap, transactional_id="t", retry_backoff_ms=10)


async def trouble_of(producer: AsyncProducer) -> PenstockError:
    await eventually(lambda: producer._engine.transactions.trouble() is not None)
    trouble = await producer.trouble()
    assert trouble is not None
    return trouble


async def test_a_coordinator_that_is_not_there(
    background: Background, producer: AsyncProducer
) -> None:
    fake = background.cluster
    fake.on_find_coordinator = lambda request: CoordinatorNotAvailableError("none now")
    async with producer:
        beginning = asyncio.create_task(producer.begin_transaction())
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.COORDINATOR_UNAVAILABLE
        assert "'t' has been asked for" in trouble.message
        assert "none now" in trouble.message
        fake.on_find_coordinator = None
        await beginning
        assert await producer.trouble() is None


@pytest.mark.parametrize("method", ["InitProducerId", "EndTransaction"])
async def test_a_transaction_before_that_has_not_ended_everywhere(
    background: Background, producer: AsyncProducer, method: str
) -> None:
    refused = True

    def told(what: str, _request: object) -> PenstockError | None:
        return ConcurrentTransactionsError("marks") if refused and what == method else None

    background.cluster.transactions.on_ask = told

    async def transact() -> None:
        async with producer.transaction():
            await producer.send_and_wait("a", b"1")

    async with producer:
        work = asyncio.create_task(transact())
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.WAITING_FOR_TRANSACTION
        assert method in trouble.message
        refused = False
        await work
        assert await producer.trouble() is None


async def test_the_coordinator_of_the_group_whose_positions_are_sent(
    background: Background, producer: AsyncProducer
) -> None:
    background.cluster.transactions.on_ask = lambda what, _: (
        CoordinatorLoadInProgressError("loading") if "Offsets" in what else None
    )
    async with producer:
        await producer.begin_transaction()
        sending = asyncio.create_task(
            producer.send_offsets_to_transaction({TopicPartition("a", 0): 1}, GroupMetadata("g"))
        )
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.COORDINATOR_UNAVAILABLE
        assert "group 'g'" in trouble.message
        background.cluster.transactions.on_ask = None
        await sending


async def test_a_coordinator_that_says_nothing(
    background: Background, producer: AsyncProducer
) -> None:
    hangs = iter(["hang"])
    background.cluster.transactions.on_ask = lambda what, _: next(hangs, None)
    async with producer:
        beginning = asyncio.create_task(producer.begin_transaction())
        trouble = await trouble_of(producer)
        assert trouble.reason is StallReason.UNREACHABLE
        assert "no answer yet" in trouble.message
        beginning.cancel()


async def test_it_is_logged_now_and_then(
    background: Background,
    producer: AsyncProducer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("penstock.client.transactional._STALL_MS", 20.0)
    background.cluster.transactions.on_ask = lambda what, _: ConcurrentTransactionsError("marks")
    async with producer:
        beginning = asyncio.create_task(producer.begin_transaction())
        await eventually(lambda: caplog.text.count("transactional id t: the coordinator") >= 2)
        beginning.cancel()
