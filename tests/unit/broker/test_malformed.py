"""Bytes that are no message end the call as the sender's mistake, not as the broker's."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio

from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.log import LogServicer, add_log_servicer
from penstock.broker.service.metadata import MetadataServicer
from penstock.raft_meta.guarding import Guarded
from penstock.v1 import log_pb2, metadata_pb2, replication_pb2
from penstock.v1.log_pb2_grpc import LogStub
from penstock.v1.metadata_pb2_grpc import MetadataStub, add_MetadataServicer_to_server
from penstock.v1.replication_pb2_grpc import (
    ReplicationServicer,
    add_ReplicationServicer_to_server,
)
from tests.unit.broker.test_metadata_service import founded, no_internal_topic
from tests.unit.broker.test_services import FakeLogs, image_with, produce

GARBAGE = b"\xff\xff\xff"


class Echo(ReplicationServicer):
    """A stream whose method writes by itself."""

    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # As the broker's.
        async for _ in request_iterator:
            await context.write(replication_pb2.ReplicationFetchResponse())

    async def ReadBatches(self, request: Any, context: Any) -> Any:
        return replication_pb2.ReadBatchesResponse()

    async def Locate(self, request: Any, context: Any) -> Any:
        return replication_pb2.LocateResponse()


@asynccontextmanager
async def served() -> AsyncIterator[aio.Channel]:
    server = aio.server()
    image = image_with("orders")
    guarded: Any = Guarded(server)
    logs = FakeLogs()
    logs.gate.set()
    add_log_servicer(
        LogServicer(logs, image, BrokerMetrics()),  # type: ignore[arg-type]  # A fake.
        guarded,
    )
    add_MetadataServicer_to_server(MetadataServicer(1, image, no_internal_topic, founded), guarded)
    add_ReplicationServicer_to_server(Echo(), guarded)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def outcome(channel: aio.Channel, method: str, kind: str) -> tuple[StatusCode, str]:
    call: Any = getattr(channel, kind)(method)
    try:
        if kind == "unary_unary":
            await call(GARBAGE)
        elif kind == "unary_stream":
            await call(GARBAGE).read()
        else:
            stream = call()
            await stream.write(GARBAGE)
            await stream.read()
            return await stream.code(), await stream.details()
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("garbage was answered")


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/penstock.v1.Log/ListOffsets", "unary_unary"),
        ("/penstock.v1.Log/Fetch", "unary_unary"),
        ("/penstock.v1.Log/Produce", "stream_stream"),
        ("/penstock.v1.Metadata/Watch", "unary_stream"),
        ("/penstock.v1.Replication/Fetch", "stream_stream"),
    ],
)
async def test_garbage_is_the_senders_mistake(
    method: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as channel:
        with caplog.at_level(logging.INFO):
            code, details = await outcome(channel, method, kind)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "no message of this method; send what penstock.v1 describes" in details
    # gRPC's poller may still speak up on the closed event loop of another test: not our doing.
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def test_what_is_sound_is_answered_as_without_the_guard() -> None:
    async with served() as channel:
        stub: Any = LogStub(channel)
        answered = [answer async for answer in stub.Produce(iter([produce(1), produce(2)]))]
        assert {answer.correlation_id for answer in answered} == {1, 2}
        assert await stub.ProduceOnce(log_pb2.ProduceOnceRequest(request=produce(3)))
        metadata: Any = MetadataStub(channel)
        described = await metadata.DescribeTopics(
            metadata_pb2.DescribeTopicsRequest(all_topics=True)
        )
        assert [topic.name for topic in described.topics] == ["orders"]
        watch = metadata.Watch(metadata_pb2.WatchRequest())
        assert (await watch.read()).ByteSize()
        watch.cancel()


def test_what_is_taken_for_garbage_is_garbage() -> None:
    with pytest.raises(DecodeError):
        log_pb2.ListOffsetsRequest.FromString(GARBAGE)
