"""Channels to brokers that left the cluster are closed; nobody hangs on one of them."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.client.cluster import Cluster
from penstock.client.config import ProducerConfig
from penstock.client.streams import BidiStream
from penstock.v1 import log_pb2, log_pb2_grpc, metadata_pb2
from penstock.wire.errors import NetworkError, PenstockError
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster


def without(cluster: Cluster, node_id: int) -> metadata_pb2.DescribeTopicsResponse:
    response = metadata_pb2.DescribeTopicsResponse(metadata_index=1_000)
    for broker in cluster.metadata.brokers.values():
        if broker.node_id != node_id:
            response.brokers.add(node_id=broker.node_id, host=broker.host, port=broker.port)
    return response


async def connected(cluster: FakeCluster) -> Cluster:
    """A client that knows broker 3 only from the cluster's own description."""
    bootstrap = ",".join(f"127.0.0.1:{cluster.nodes[number].port}" for number in (1, 2))
    client = Cluster(ProducerConfig.load(bootstrap, {"request_timeout_ms": 100}))
    await client.start()
    return client


async def test_the_channel_to_a_broker_that_is_gone_is_closed(cluster: FakeCluster) -> None:
    client = await connected(cluster)
    channels = {number: client.channel_to(number) for number in (1, 2, 3)}
    client.metadata.apply(without(client, 3), 0)
    client.retire_channels()
    assert client.address_of(3) is None
    assert client.channel_to(1) is channels[1]
    assert not client._channels.keys() - client.config.bootstrap
    await eventually(lambda: not client._retired)
    await client.close()


async def test_a_stream_whose_channel_is_closed_ends_with_an_error(cluster: FakeCluster) -> None:
    client = await connected(cluster)
    ends: list[PenstockError] = []
    answers: list[Any] = []
    opened = asyncio.Event()

    def open_call() -> Any:
        opened.set()
        return log_pb2_grpc.LogStub(client.channel_to(3)).Produce()  # type: ignore[call-arg]

    stream = BidiStream(
        open_call,
        where="broker 3",
        what="Log.Produce",
        on_message=answers.append,
        on_end=ends.append,
    )
    stream.send(log_pb2.ProduceRequest(correlation_id=1))
    await eventually(lambda: bool(answers))  # It is under way.
    client.metadata.apply(without(client, 3), 0)
    client.retire_channels()
    await eventually(lambda: bool(ends))
    assert isinstance(ends[0], NetworkError)
    await stream.finished()
    await client.close()


async def test_a_client_closes_the_channels_that_it_is_still_closing(cluster: FakeCluster) -> None:
    client = await connected(cluster)
    client.channel_to(3)
    client.metadata.apply(without(client, 3), 0)
    client.retire_channels()
    await asyncio.wait_for(client.close(), 5)
    assert not client._retired
