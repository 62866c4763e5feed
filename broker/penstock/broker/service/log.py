"""The Log service: what clients ask of the broker that leads a partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import grpc

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.fetch import BOUNDLESS, Room
from penstock.broker.service.producing import ProducedLogs, ProduceStream, Producing
from penstock.broker.service.unsent import Unsent
from penstock.broker.traffic_metrics import PRODUCE
from penstock.raft_meta.arriving import Arrivals, Arrived
from penstock.raft_meta.guarding import Guarded, refusing_malformed
from penstock.v1 import log_pb2
from penstock.v1.log_pb2_grpc import LogServicer as LogServicerBase
from penstock.v1.log_pb2_grpc import add_LogServicer_to_server
from penstock.wire.errors import (
    AccessForbiddenError,
    PenstockError,
)
from penstock.wire.laden import FETCH_RESPONSE, PRODUCE_REQUEST, Laden


class PartitionLogs(ProducedLogs, Protocol):
    """What this service asks of the replica manager."""

    async def fetch(
        self, request: log_pb2.FetchRequest, room: Room = BOUNDLESS
    ) -> Laden[log_pb2.FetchResponse]:
        """Answer a fetch by long poll, of no more than there is room for."""
        ...

    async def find_times(self, request: log_pb2.ListOffsetsRequest) -> None:
        """Read what an offset query needs of the disk, in threads."""
        ...

    def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        """Answer an offset query."""
        ...

    def offset_for_leader_epoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        """Answer where epochs ended."""
        ...

    async def delete_records(
        self, request: log_pb2.DeleteRecordsRequest
    ) -> log_pb2.DeleteRecordsResponse:
        """Move log starts up."""
        ...


class LogServicer(LogServicerBase):
    """Answers clients. Every refusal is a typed error in the response; the stream lives on.

    What carries records has them beside it here: add it to a server by ``add_log_servicer``.
    """

    def __init__(
        self,
        logs: PartitionLogs,
        image: MetadataImage,
        metrics: BrokerMetrics,
        unsent: Unsent | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._logs = logs
        self._arrivals = arrivals
        self._unsent = unsent
        self._image = image
        self._metrics = metrics
        self._producing = Producing(logs, metrics, self._check_not_internal)
        # Its requests come by a stream, of which Guarded tells neither the meter nor the arrivals.
        self._observe_produce = metrics.traffic.unary(PRODUCE)
        self._count_stream = metrics.traffic.stream(PRODUCE)

    async def Produce(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Laden[log_pb2.ProduceRequest]], context: Any
    ) -> AsyncIterator[log_pb2.ProduceResponse]:
        """Append in the order of the requests; answer each when its acknowledgement is there."""
        arrived: Arrived = int if self._arrivals is None else self._arrivals(context.peer())
        stream = ProduceStream(self._producing, request_iterator, self._observe_produce, arrived)
        self._count_stream(1)
        try:
            async with refusing_malformed(context):
                async for response in stream.responses():
                    yield response
        finally:
            self._count_stream(-1)
            stream.close()

    async def ProduceOnce(
        self, request: log_pb2.ProduceOnceRequest, context: Any
    ) -> log_pb2.ProduceOnceResponse:
        """The unary twin."""
        answered: asyncio.Future[log_pb2.ProduceResponse]
        answered = asyncio.get_running_loop().create_future()

        def answer(response: log_pb2.ProduceResponse) -> None:
            if not answered.done():
                answered.set_result(response)

        self._producing.begin(PRODUCE_REQUEST.beside(request.request), answer)
        return log_pb2.ProduceOnceResponse(response=await answered)

    async def Fetch(  # type: ignore[override]
        self, request: log_pb2.FetchRequest, context: Any
    ) -> Laden[log_pb2.FetchResponse]:
        """Read by long poll."""
        if self._unsent is None:
            response = await self._logs.fetch(request)
        else:
            response = await self._fetch_into(self._unsent, request, context)
        if response.records_bytes:
            for entry, records in zip(response.message.partitions, response.records, strict=True):
                if len(records):
                    self._metrics.traffic.fetched(entry.partition.topic, len(records))
        return response

    async def _fetch_into(
        self, unsent: Unsent, request: log_pb2.FetchRequest, context: Any
    ) -> Laden[log_pb2.FetchResponse]:
        """Read what there is room for, once there is room for anything."""
        share = unsent.share(context.peer())
        context.add_done_callback(share.release)
        response = await self._logs.fetch(request, share)
        if not (share.starved and _tells_nothing(response)):
            return response
        until_s = unsent.until_s()
        try:
            while share.starved and _tells_nothing(response):
                await share.room(until_s)
                response = await self._logs.fetch(request, share)
        except PenstockError as error:
            for entry in response.message.partitions:
                entry.error.CopyFrom(error.to_proto())
        return response

    async def ListOffsets(
        self, request: log_pb2.ListOffsetsRequest, context: Any
    ) -> log_pb2.ListOffsetsResponse:
        """Find offsets by time."""
        await self._logs.find_times(request)
        return self._logs.list_offsets(request)

    async def OffsetForLeaderEpoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest, context: Any
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        """Say where leader epochs ended."""
        return self._logs.offset_for_leader_epoch(request)

    async def DeleteRecords(
        self, request: log_pb2.DeleteRecordsRequest, context: Any
    ) -> log_pb2.DeleteRecordsResponse:
        """Move log starts up, but of the cluster's own topics."""
        results = await asyncio.gather(
            *(self._delete_one(request.timeout_ms, entry) for entry in request.partitions)
        )
        return log_pb2.DeleteRecordsResponse(partitions=results)

    async def _delete_one(
        self, timeout_ms: int, entry: log_pb2.DeleteRecordsPartition
    ) -> log_pb2.DeleteRecordsPartitionResult:
        try:
            self._check_not_internal(entry.partition.topic)
        except PenstockError as error:
            return log_pb2.DeleteRecordsPartitionResult(
                partition=entry.partition, low_watermark=-1, error=error.to_proto()
            )
        request = log_pb2.DeleteRecordsRequest(timeout_ms=timeout_ms, partitions=[entry])
        response = await self._logs.delete_records(request)
        return response.partitions[0]

    def _check_not_internal(self, name: str) -> None:
        """Coordinators rely on being the only writers of their logs."""
        topic = self._image.topic(name)
        if topic is not None and topic.record.internal:
            raise AccessForbiddenError(
                f"{name} is the cluster's own topic, and only its coordinators write to it: commit "
                "offsets with a consumer or AdminClient.alter_group_offsets, and remove a group's "
                "with AdminClient.delete_groups"
            )


class _WithRecordsBeside:
    """Takes the servicer's methods from the generated code, and has records not copied."""

    def __init__(self, guarded: Any) -> None:
        self._guarded = guarded

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Called with what ``add_registered_method_handlers`` gets too."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called with a service's methods."""
        produce: Any = handlers["Produce"]
        fetch: Any = handlers["Fetch"]
        beside = {
            "Produce": grpc.stream_stream_rpc_method_handler(
                produce.stream_stream, PRODUCE_REQUEST.parse, produce.response_serializer
            ),
            "Fetch": grpc.unary_unary_rpc_method_handler(
                fetch.unary_unary, fetch.request_deserializer, _into_bytes
            ),
        }
        self._guarded.add_registered_method_handlers(service, {**handlers, **beside})


def add_log_servicer(servicer: LogServicer, guarded: Guarded) -> None:
    """Serve it."""
    server: Any = _WithRecordsBeside(guarded)  # Not all of a server: what the generated code calls.
    add_LogServicer_to_server(servicer, server)


def _into_bytes(laden: Laden[log_pb2.FetchResponse]) -> bytes:
    """The response as bytes. It loses its records, which would stay until the client took them."""
    data = FETCH_RESPONSE.to_bytes(laden)
    laden.records = []
    return data


def _tells_nothing(laden: Laden[log_pb2.FetchResponse]) -> bool:
    """Whether a client would only ask again."""
    return not laden.records_bytes and not any(
        entry.HasField("error") or entry.HasField("diverging_epoch")
        for entry in laden.message.partitions
    )
