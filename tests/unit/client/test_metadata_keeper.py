"""What a client says of metadata, and of a producer's id, that it does not get."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.client import AsyncProducer
from penstock.client.cluster import Cluster
from penstock.client.config import ProducerConfig
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.v1 import metadata_pb2
from penstock.wire.errors import (
    BrokerFencedError,
    ClusterNotFoundedError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
)
from tests.unit.client.fake_broker import FakeCluster, FakeNode

NOT_FOUNDED = ClusterNotFoundedError("the cluster is not founded yet; next: start node 1")


class Client:
    """A keeper of which each question is refused with ``refusal``."""

    def __init__(self, cluster: FakeCluster) -> None:
        settings = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 1}
        self._cluster = Cluster(ProducerConfig.load(cluster.bootstrap, settings))
        self.keeper = MetadataKeeper(self._cluster, lambda: None)
        self.refusal: PenstockError = NOT_FOUNDED
        self.refused = 0
        cluster.on_describe = self._refuse

    async def _refuse(self, _node: FakeNode) -> metadata_pb2.DescribeTopicsResponse:
        self.refused += 1
        return metadata_pb2.DescribeTopicsResponse(error=self.refusal.to_proto())

    async def close(self) -> None:
        await self.keeper.close()
        await self._cluster.close()


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[Client]:
    one = Client(cluster)
    yield one
    await one.close()


async def test_a_topic_that_is_waited_for_in_vain_fails_as_what_no_waiting_mends(
    client: Client,
) -> None:
    while not client.refused:
        with pytest.raises(
            ClusterNotFoundedError, match=r"'t' within .*not founded yet; next: start node 1"
        ):
            await client.keeper.await_topic("t", 500)


async def test_what_waiting_may_mend_was_waited_for_too_shortly(client: Client) -> None:
    client.refusal = NetworkError("a cable")
    with pytest.raises(RequestTimedOutError, match=r"'t' within .*; last: a cable"):
        await client.keeper.await_topic("t", 500)


async def test_why_there_is_no_metadata_is_said_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.client"):
        while client.refused < 4:
            await client.keeper.updated(1_000)
    told = [record for record in caplog.records if "metadata could not be had" in record.message]
    assert len(told) == 1


async def test_why_there_is_no_producer_id_is_said_once(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    ask_any = Cluster.ask_any
    refused = 0

    async def refuse(self: Cluster, *args: Any, **more: Any) -> Any:
        nonlocal refused
        if more["what"] == "Transactions.InitProducerId" and refused < 4:
            refused += 1
            raise BrokerFencedError(f"broker {refused} is not registered")
        return await ask_any(self, *args, **more)

    monkeypatch.setattr(Cluster, "ask_any", refuse)
    with caplog.at_level(logging.WARNING, "penstock.client"):
        async with AsyncProducer(cluster.bootstrap, retry_backoff_ms=1) as producer:
            await producer.send_and_wait("t", b"v")
    told = [record.message for record in caplog.records if "no producer id" in record.message]
    assert told == ["no producer id yet: broker 1 is not registered"]
