"""Large answers of any kind count until they are taken, through a real server and a real client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.broker.service.taken import LARGE_BYTES, Taken
from penstock.broker.service.unsent import Unsent, UnsentLimits
from penstock.raft_meta.guarding import Encoded, Guarded
from penstock.v1 import metadata_pb2
from penstock.v1.metadata_pb2_grpc import (
    MetadataServicer,
    MetadataStub,
    add_MetadataServicer_to_server,
)
from tests.support import eventually
from tests.unit.broker.test_unsent import Counts

LIMIT_BYTES = 4 * LARGE_BYTES


class Telling(MetadataServicer):
    """Answers with as much as it is told to."""

    def __init__(self) -> None:
        self.size_bytes = LARGE_BYTES
        self.asked = 0
        self.gate = asyncio.Event()

    async def DescribeCluster(self, request: Any, context: Any) -> Any:
        self.asked += 1
        return metadata_pb2.DescribeClusterResponse(cluster_id="x" * self.size_bytes)

    async def DescribeTopics(self, request: Any, context: Any) -> Any:
        return metadata_pb2.DescribeTopicsResponse()

    async def FindCoordinator(self, request: Any, context: Any) -> Any:
        return metadata_pb2.FindCoordinatorResponse()

    async def Watch(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # As the broker's.
        brokers = [metadata_pb2.BrokerDescription(host="x" * self.size_bytes)]
        yield metadata_pb2.WatchResponse(brokers=brokers)
        await self.gate.wait()


@asynccontextmanager
async def served(
    telling: Telling, tell: Callable[[Any], Any] | None = None, **known: Any
) -> AsyncIterator[tuple[Unsent, Any]]:
    server = aio.server()
    limits = UnsentLimits(
        max_bytes=LIMIT_BYTES * 4 // 3, connection_max_bytes=LIMIT_BYTES, stalled_ms=60_000
    )
    unsent = Unsent(limits, lambda _: True, Counts())
    taken: Any = Taken(Guarded(server, tell=tell), unsent, tell, **known)
    add_MetadataServicer_to_server(telling, taken)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield unsent, MetadataStub(channel)
    finally:
        await server.stop(None)
        await unsent.stop()


async def test_what_is_taken_counts_no_more() -> None:
    async with served(Telling()) as (unsent, stub):
        for _ in range(20):
            await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        await eventually(lambda: unsent.total_bytes == 0)


async def test_a_call_waits_for_room_before_its_answer_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telling = Telling()
    async with served(telling) as (unsent, stub):
        await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        # All there is, held by another call of the same connection.
        peers: list[str] = []
        share = unsent.share
        monkeypatch.setattr(unsent, "share", lambda peer: peers.append(peer) or share(peer))
        await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        await eventually(lambda: unsent.total_bytes == 0)
        held = share(peers[0])
        held.take(LIMIT_BYTES)
        waiting = stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        await eventually(lambda: bool(unsent._waiting))
        assert telling.asked == 2
        held.release()
        await waiting
        assert telling.asked == 3
        share(peers[0]).take(LIMIT_BYTES)
        monkeypatch.setattr("penstock.broker.service.unsent._WAIT_S", 0.05)
        with pytest.raises(aio.AioRpcError, match=r"unsent.connection.max.bytes") as refused:
            await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert telling.asked == 3


async def test_what_a_stream_says_is_told_and_counts_no_more() -> None:
    telling = Telling()
    async with served(telling) as (unsent, stub):
        told = await stub.Watch(metadata_pb2.WatchRequest()).read()
        assert len(told.brokers[0].host) == LARGE_BYTES
        await eventually(lambda: unsent.total_bytes == 0)
        telling.gate.set()


@pytest.mark.parametrize("size_bytes", [1, LARGE_BYTES])
async def test_answers_of_any_size_are_told_as_the_port_tells(size_bytes: int) -> None:
    def outside(answer: Any) -> Any:
        told = type(answer)()
        told.CopyFrom(answer)
        if isinstance(told, metadata_pb2.WatchResponse):
            told.brokers[0].port = 7
        else:
            told.controller_id = 7
        return told

    telling = Telling()
    telling.size_bytes = size_bytes
    async with served(telling, outside) as (_, stub):
        told = await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        assert (told.controller_id, len(told.cluster_id)) == (7, size_bytes)
        watched = await stub.Watch(metadata_pb2.WatchRequest()).read()
        assert (watched.brokers[0].port, len(watched.brokers[0].host)) == (7, size_bytes)
        telling.gate.set()


async def test_what_is_known_as_bytes_goes_out_as_that_and_counts() -> None:
    """However small it is: others share it, and it must not be made anew for each."""
    telling = Telling()
    telling.size_bytes = 1
    known = metadata_pb2.DescribeClusterResponse(cluster_id="known").SerializeToString()
    watched = metadata_pb2.WatchResponse(metadata_index=7).SerializeToString()
    asked: list[tuple[Any, Any]] = []

    def encoded(answer: Any, tell: Any) -> bytes:
        asked.append((answer, tell))
        return watched if isinstance(answer, metadata_pb2.WatchResponse) else known

    async with served(telling, encoded=encoded) as (unsent, stub):
        told = await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        assert told.cluster_id == "known"
        assert (await stub.Watch(metadata_pb2.WatchRequest()).read()).metadata_index == 7
        await eventually(lambda: unsent.total_bytes == 0)
        telling.gate.set()
    assert [(answer.ByteSize() > 0, tell) for answer, tell in asked] == [(True, None)] * 2


class Sharing(Telling):
    """Tells all watchers the same bytes, once they are there."""

    async def Watch(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        self.asked += 1
        await self.gate.wait()
        yield Encoded(metadata_pb2.WatchResponse(metadata_index=1).SerializeToString())
        brokers = [metadata_pb2.BrokerDescription(host="x" * self.size_bytes)]
        yield Encoded(metadata_pb2.WatchResponse(brokers=brokers).SerializeToString())


async def test_who_waits_for_what_many_share_waits_for_room_too_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them were let in while nothing was to be taken."""
    telling = Sharing()
    async with served(telling) as (unsent, stub):
        peers: list[str] = []
        share = unsent.share
        monkeypatch.setattr(unsent, "share", lambda peer: peers.append(peer) or share(peer))
        telling.gate.set()
        stream = stub.Watch(metadata_pb2.WatchRequest())
        assert (await stream.read()).metadata_index == 1
        assert len((await stream.read()).brokers[0].host) == LARGE_BYTES
        await eventually(lambda: unsent.total_bytes == 0)
        telling.gate.clear()
        waiting = stub.Watch(metadata_pb2.WatchRequest())
        held = share(peers[0])
        await eventually(lambda: telling.asked == 2)
        held.take(LIMIT_BYTES)
        telling.gate.set()
        assert (await waiting.read()).metadata_index == 1
        await eventually(lambda: bool(unsent._waiting))
        assert unsent.total_bytes == LIMIT_BYTES
        held.release()
        assert len((await waiting.read()).brokers[0].host) == LARGE_BYTES


async def test_methods_that_do_not_count_wait_for_no_room() -> None:
    telling = Telling()
    telling.gate.set()
    async with served(telling, methods={"Watch"}) as (unsent, stub):
        peers: list[str] = []
        share = unsent.share
        unsent.share = lambda peer: peers.append(peer) or share(peer)  # type: ignore[method-assign]
        await stub.Watch(metadata_pb2.WatchRequest()).read()
        share(peers[0]).take(2 * LIMIT_BYTES)
        told = await stub.DescribeCluster(metadata_pb2.DescribeClusterRequest())
        assert len(told.cluster_id) == LARGE_BYTES
        assert not unsent._waiting


class Slow(Telling):
    """Takes a while to make each answer."""

    async def DescribeCluster(self, request: Any, context: Any) -> Any:
        answer = await super().DescribeCluster(request, context)
        await self.gate.wait()
        return answer


async def test_answers_that_take_a_while_count_from_where_they_begin_to_be_made() -> None:
    telling = Slow()
    async with served(telling, reserved_bytes=LIMIT_BYTES // 2) as (unsent, stub):
        ask = partial(stub.DescribeCluster, metadata_pb2.DescribeClusterRequest())
        calls = [ask() for _ in range(5)]
        await eventually(lambda: telling.asked == 2 and len(unsent._waiting) == 1)
        assert unsent.total_bytes == LIMIT_BYTES
        telling.size_bytes = 1  # Of those that wait.
        telling.gate.set()
        answers = await asyncio.gather(*calls)
        sizes = sorted(len(answer.cluster_id) for answer in answers)
        assert sizes == [1] * 3 + [LARGE_BYTES] * 2
        await eventually(lambda: unsent.total_bytes == 0)
