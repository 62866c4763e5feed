"""The Log service: what clients ask of the broker that leads a partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import AppendInfo
from penstock.broker.metrics import BrokerMetrics
from penstock.raft_meta.guarding import refusing_malformed
from penstock.v1 import common_pb2, log_pb2
from penstock.v1.log_pb2_grpc import LogServicer as LogServicerBase
from penstock.wire.errors import (
    AccessForbiddenError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    PenstockError,
    UnknownServerError,
)

MAX_PENDING_REQUESTS: Final = 64
"""Produce requests of one stream that are not answered yet; more are not read from it.

An answer counts until it is written to the client: one that does not read is not read from.
"""

_MAX_TIMEOUT_MS: Final = 300_000

log = structlog.get_logger()


class PartitionLogs(Protocol):
    """What this service asks of the replica manager."""

    async def append(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        records: bytes,
        *,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        current_leader_epoch: int = -1,
    ) -> AppendInfo:
        """Append, and wait for the acknowledgement asked for."""
        ...

    def log_start_offset(self, topic: str, partition: int) -> int:
        """The first offset of a partition led here, or -1."""
        ...

    async def fetch(self, request: log_pb2.FetchRequest) -> log_pb2.FetchResponse:
        """Answer a fetch by long poll."""
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
    """Answers clients. Every refusal is a typed error in the response; the stream lives on."""

    def __init__(self, logs: PartitionLogs, image: MetadataImage, metrics: BrokerMetrics) -> None:
        self._logs = logs
        self._image = image
        self._metrics = metrics

    async def Produce(
        self, request_iterator: AsyncIterator[log_pb2.ProduceRequest], context: Any
    ) -> AsyncIterator[log_pb2.ProduceResponse]:
        """Append in the order of the requests; answer each when its acknowledgement is there."""
        stream = _ProduceStream(self, request_iterator)
        try:
            async with refusing_malformed(context):
                async for response in stream.responses():
                    yield response
        finally:
            stream.close()

    async def ProduceOnce(
        self, request: log_pb2.ProduceOnceRequest, context: Any
    ) -> log_pb2.ProduceOnceResponse:
        """The unary twin."""
        return log_pb2.ProduceOnceResponse(response=await self.produce(request.request))

    async def Fetch(self, request: log_pb2.FetchRequest, context: Any) -> log_pb2.FetchResponse:
        """Read by long poll."""
        response = await self._logs.fetch(request)
        self._metrics.fetched(response)
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

    async def produce(self, request: log_pb2.ProduceRequest) -> log_pb2.ProduceResponse:
        """Append what one request carries to all its partitions side by side."""
        results = await asyncio.gather(
            *(self._produce_one(request, entry) for entry in request.partitions)
        )
        return log_pb2.ProduceResponse(correlation_id=request.correlation_id, partitions=results)

    async def _produce_one(
        self, request: log_pb2.ProduceRequest, entry: log_pb2.ProducePartition
    ) -> log_pb2.ProducePartitionResult:
        where = entry.partition
        result = log_pb2.ProducePartitionResult(partition=where, base_offset=-1)
        try:
            _check_produce(request, entry)
            self._check_not_internal(where.topic)
            info = await self._logs.append(
                where.topic,
                where.topic_id,
                where.partition,
                entry.records,
                acks=request.acks,
                timeout_ms=min(request.timeout_ms, _MAX_TIMEOUT_MS),
                current_leader_epoch=entry.current_leader_epoch,
            )
        except PenstockError as error:
            self._metrics.refused(error)
            result.error.CopyFrom(error.to_proto())
        except Exception:
            # One broken partition must not end the stream of all the others.
            log.exception("produce failed", topic=where.topic, partition=where.partition)
            failure = UnknownServerError(
                f"{where.topic}-{where.partition}: the broker failed; see its log"
            )
            result.error.CopyFrom(failure.to_proto())
        else:
            self._metrics.produced(len(entry.records))
            result.base_offset = info.base_offset
            result.log_append_time_ms = info.log_append_time_ms
            result.log_start_offset = self._logs.log_start_offset(where.topic, where.partition)
        return result


class _ProduceStream:
    """One client's stream: a reader that starts requests in order, answers as they finish.

    Tasks start in the order of their creation and append before they first wait, so requests
    reach each partition's log in the order in which they came.
    """

    def __init__(
        self, servicer: LogServicer, requests: AsyncIterator[log_pb2.ProduceRequest]
    ) -> None:
        self._servicer = servicer
        self._requests = requests
        self._answers: asyncio.Queue[log_pb2.ProduceResponse | BaseException | None] = (
            asyncio.Queue()
        )
        self._slots = asyncio.Semaphore(MAX_PENDING_REQUESTS)
        self._pending: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    async def responses(self) -> AsyncIterator[log_pb2.ProduceResponse]:
        """The answers until the client has ended its side and all are given."""
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer
            self._slots.release()  # Whoever asks for the next one has written this one.

    def close(self) -> None:
        """Stop reading. Appends that were started go on: they may be acknowledged elsewhere."""
        self._reader.cancel()

    async def _read(self) -> None:
        end: BaseException | None = None
        try:
            async for request in self._requests:
                await self._slots.acquire()
                task = asyncio.create_task(self._answer(request))
                self._pending.add(task)
                task.add_done_callback(self._pending.discard)
            if self._pending:
                await asyncio.wait(self._pending)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # Handed on to the stream's own task.
            end = error
        self._answers.put_nowait(end)

    async def _answer(self, request: log_pb2.ProduceRequest) -> None:
        answered = False
        try:
            response = await self._servicer.produce(request)
            if request.acks != common_pb2.ACKS_NONE:
                self._answers.put_nowait(response)
                answered = True
        finally:
            if not answered:
                self._slots.release()


def _check_produce(request: log_pb2.ProduceRequest, entry: log_pb2.ProducePartition) -> None:
    if request.acks not in (common_pb2.ACKS_NONE, common_pb2.ACKS_LEADER, common_pb2.ACKS_ALL):
        raise InvalidRequiredAcksError(
            f"acks={request.acks} is not known; send ACKS_NONE, ACKS_LEADER or ACKS_ALL"
        )
    if request.transactional_id:
        raise InvalidRequestError("this broker's version has no transactions")
    if not entry.records:
        raise InvalidRequestError(
            f"{entry.partition.topic}-{entry.partition.partition}: the request has no record batch"
        )
