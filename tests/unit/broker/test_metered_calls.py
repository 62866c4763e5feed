"""Calls through a real server are measured by method, and those with a trace are of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from penstock.broker.metrics import BrokerMetrics
from penstock.broker.service.log import LogServicer, add_log_servicer
from penstock.raft_meta import tracing
from penstock.raft_meta.guarding import Guarded
from penstock.v1 import replication_pb2
from penstock.v1.log_pb2_grpc import LogStub
from penstock.v1.replication_pb2_grpc import (
    ReplicationServicer,
    ReplicationStub,
    add_ReplicationServicer_to_server,
)
from tests.support import eventually
from tests.unit.broker.test_services import FakeLogs, image_with, produce, produce_once

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACED = (("traceparent", TRACEPARENT),)


class Seen(ReplicationServicer):
    """Says what trace its calls are of."""

    def __init__(self) -> None:
        self.traces: list[str] = []

    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # As the broker's.
        async for _ in request_iterator:
            self.traces.append(tracing.current())
            await context.write(replication_pb2.ReplicationFetchResponse())

    async def ReadBatches(self, request: Any, context: Any) -> Any:
        self.traces.append(tracing.current())
        if request.offset < 0:
            raise ValueError("a fault")
        return replication_pb2.ReadBatchesResponse()

    async def Locate(self, request: Any, context: Any) -> Any:
        return replication_pb2.LocateResponse()


@asynccontextmanager
async def served(metrics: BrokerMetrics, seen: Seen) -> AsyncIterator[aio.Channel]:
    server = aio.server()
    guarded: Any = Guarded(server, meter=metrics.traffic)
    logs = FakeLogs()
    logs.gate.set()
    add_log_servicer(LogServicer(logs, image_with("orders"), metrics), guarded)  # type: ignore[arg-type]  # A fake.
    add_ReplicationServicer_to_server(seen, guarded)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def value(metrics: BrokerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"penstock_{name}", labels)


async def test_calls_are_measured_by_method_also_those_that_fail() -> None:
    metrics, seen = BrokerMetrics(), Seen()
    async with served(metrics, seen) as channel:
        stub: Any = ReplicationStub(channel)
        assert value(metrics, "request_seconds_count", method="Replication.ReadBatches") is None
        await stub.ReadBatches(replication_pb2.ReadBatchesRequest())
        with pytest.raises(aio.AioRpcError):
            await stub.ReadBatches(replication_pb2.ReadBatchesRequest(offset=-1))
        assert value(metrics, "request_seconds_count", method="Replication.ReadBatches") == 2
        took = value(metrics, "request_seconds_sum", method="Replication.ReadBatches")
        assert took is not None
        assert 0 < took < 10


async def test_open_streams_are_counted() -> None:
    metrics, seen = BrokerMetrics(), Seen()
    async with served(metrics, seen) as channel:
        stub: Any = ReplicationStub(channel)
        first, second = stub.Fetch(), stub.Fetch()
        for call in (first, second):
            await call.write(replication_pb2.ReplicationFetchRequest())
            await call.read()
        assert value(metrics, "open_streams", method="Replication.Fetch") == 2
        first.cancel()
        await eventually(lambda: value(metrics, "open_streams", method="Replication.Fetch") == 1)
        await second.done_writing()
        await eventually(lambda: value(metrics, "open_streams", method="Replication.Fetch") == 0)


async def test_produce_requests_are_measured_one_by_one_with_what_they_carry() -> None:
    metrics, seen = BrokerMetrics(), Seen()
    async with served(metrics, seen) as channel:
        stub: Any = LogStub(channel)
        requests = [produce(1), produce(2)]
        answered = [answer async for answer in stub.Produce(iter(requests))]
        assert len(answered) == 2
        assert value(metrics, "request_seconds_count", method="Log.Produce") == 2
        await eventually(lambda: value(metrics, "open_streams", method="Log.Produce") == 0)
        size_bytes = sum(len(part.records) for one in requests for part in one.partitions)
        assert size_bytes > 0
        assert value(metrics, "produced_bytes_total") == size_bytes
        assert value(metrics, "topic_produced_bytes_total", topic="orders") == size_bytes


async def test_what_was_in_the_log_already_is_not_counted_again() -> None:
    metrics, logs = BrokerMetrics(), FakeLogs()
    logs.gate.set()
    servicer = LogServicer(logs, image_with("orders"), metrics)  # type: ignore[arg-type]  # A fake.
    first = await produce_once(servicer, produce(1))
    counted = value(metrics, "produced_bytes_total")
    assert counted
    logs.duplicates = True
    again = await produce_once(servicer, produce(1))
    assert not first.partitions[0].HasField("error")
    assert not again.partitions[0].HasField("error")
    assert value(metrics, "produced_bytes_total") == counted
    assert value(metrics, "produced_records_total") == 1


async def test_a_trace_reaches_the_method_and_no_other_call() -> None:
    metrics, seen = BrokerMetrics(), Seen()
    async with served(metrics, seen) as channel:
        stub: Any = ReplicationStub(channel)
        request = replication_pb2.ReadBatchesRequest()
        await stub.ReadBatches(request, metadata=TRACED)
        await stub.ReadBatches(request)
        await stub.ReadBatches(request, metadata=(("traceparent", "rubbish"),))
        call = stub.Fetch(metadata=TRACED)
        await call.write(replication_pb2.ReplicationFetchRequest())
        await call.read()
        assert seen.traces == [TRACEPARENT, "", "", TRACEPARENT]
        log: Any = LogStub(channel)
        answers = log.Produce(iter([produce(1)]), metadata=TRACED)  # One that yields.
        assert [answer.correlation_id async for answer in answers] == [1]
