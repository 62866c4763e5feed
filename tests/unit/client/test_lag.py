"""How far behind a consumer says that it is."""

from __future__ import annotations

import pytest

from penstock.client import AsyncConsumer, ConsumerMetrics
from penstock.wire.errors import InvalidRequestError
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, T1, fill, numbers, read


async def test_lag_counts_what_was_not_handed_out(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 10))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", max_poll_records=4
    ) as consumer:
        await read(consumer, 4)
        assert await consumer.current_lag(T0) == 6
        await read(consumer, 6)
        assert await consumer.current_lag(T0) == 0
        fill(cluster, "t", 0, numbers(10, 13))
        # What was prefetched and not handed out is lag as well.
        fetcher = consumer._engine._fetch.fetcher
        await eventually(lambda: (fetcher.end_offset(T0), fetcher.end_offset(T1)) == (13, 0))
        assert await consumer.metrics() == ConsumerMetrics({T0: 3, T1: 0})
        assert (await consumer.metrics()).records_lag_max == 3
        assert await consumer.__anext__() is not None
        assert await consumer.current_lag(T0) == 2, "iteration counts one by one"


async def test_lag_is_unknown_until_a_leader_has_answered(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 10))
    async with AsyncConsumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        await consumer.assign([T0])
        assert await consumer.current_lag(T0) is None
        assert (await consumer.metrics()).records_lag_max is None
        with pytest.raises(InvalidRequestError, match="t-1 is not assigned"):
            await consumer.current_lag(T1)
        await read(consumer, 10)
        await consumer.seek(T0, 4)
        assert await consumer.current_lag(T0) in (None, 6)
        await read(consumer, 6)
        assert await consumer.current_lag(T0) == 0
