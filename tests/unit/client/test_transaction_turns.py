"""Wishes about one producer's transactions that come while another is carried out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.client import AsyncProducer, GroupMetadata, TopicPartition
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    PenstockError,
    RequestTimedOutError,
)
from tests.support import eventually
from tests.unit.client.conftest import Background


async def test_a_wish_is_bounded_by_its_own_time(background: Background) -> None:
    background.cluster.add_topic("a")
    fake = background.cluster.transactions
    asked: list[str] = []

    def told(what: str, _request: Any) -> PenstockError | None:
        asked.append(what)
        return CoordinatorLoadInProgressError("not yet") if "Offsets" in what else None

    fake.on_ask = told
    producer = AsyncProducer(background.cluster.bootstrap, transactional_id="t")
    await producer.begin_transaction()
    await producer.send("a", b"1")
    offsets = {TopicPartition("a", 0): 1}
    sending = asyncio.ensure_future(
        producer.send_offsets_to_transaction(offsets, GroupMetadata("g"))
    )
    await eventually(lambda: any("Offsets" in one for one in asked))
    async with asyncio.timeout(10):  # max_block_ms is a minute.
        with pytest.raises(RequestTimedOutError, match="nothing was done"):
            await producer.abort_transaction(timeout_ms=100)
        await producer.close(timeout_ms=100)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
