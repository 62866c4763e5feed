"""The produce requests of clients: each appended at once, and answered when it may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import perf_counter
from typing import Final, Protocol

import structlog

from penstock.broker.core.ports import AppendInfo
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.appending import OnAppended, Target
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import Buffer
from penstock.wire.errors import InvalidRequestError, PenstockError, UnknownServerError
from penstock.wire.laden import Laden

MAX_PENDING_REQUESTS: Final = 64
"""Produce requests of one stream that are not answered yet; more are not read from it.

An answer counts until it is written to the client: one that does not read is not read from.
"""

_MAX_TIMEOUT_MS: Final = 300_000

log = structlog.get_logger()


class ProducedLogs(Protocol):
    """What producing asks of the replica manager."""

    def begin_append(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        on_end: OnAppended,
    ) -> None:
        """Append at once; ``on_end`` gets the acknowledgement asked for, or the error."""
        ...

    def begin_transactional_append(
        self,
        target: Target,
        records: Buffer,
        acks: common_pb2.Acks.ValueType,
        timeout_ms: int,
        on_end: OnAppended,
        *,
        transactional_id: str,
    ) -> None:
        """The same for batches of a transaction: appended once it may write to the partition."""
        ...

    def log_start_offset(self, topic: str, partition: int) -> int:
        """The first offset of a partition led here, or -1."""
        ...


class Producing:
    """Carries out produce requests. Used on one event loop.

    ``check_topic`` raises the typed refusal of a topic that clients may not write to.
    """

    def __init__(
        self, logs: ProducedLogs, metrics: BrokerMetrics, check_topic: Callable[[str], None]
    ) -> None:
        self._logs = logs
        self._metrics = metrics
        self._check_topic = check_topic

    def begin(
        self,
        laden: Laden[log_pb2.ProduceRequest],
        answer: Callable[[log_pb2.ProduceResponse], object],
    ) -> None:
        """Append what a request carries to all its partitions, before this returns.

        What is of a transaction may be appended later, when its coordinator has been asked.
        ``answer`` is called once, with a result for each partition in the request's order, when
        the last of them is there: perhaps before this returns. It must not raise.
        """
        request, records = laden.message, laden.records
        results: list[log_pb2.ProducePartitionResult | None] = [None] * len(records)
        sizes = [len(part) for part in records]  # Kept in place of the records, while they wait.
        left = len(results)

        def ended(at: int, outcome: AppendInfo | BaseException) -> None:
            nonlocal left
            if results[at] is not None:
                return  # Or it would count for a partition of which nothing is known yet.
            results[at] = self._result(request.partitions[at].partition, sizes[at], outcome)
            left -= 1
            if not left:
                answer(_response(request, results))

        if not left:
            answer(_response(request, results))
        timeout_ms = min(request.timeout_ms, _MAX_TIMEOUT_MS)
        begin_append = self._logs.begin_append
        if request.transactional_id:
            begin_append = partial(
                self._logs.begin_transactional_append, transactional_id=request.transactional_id
            )
        for at, entry in enumerate(request.partitions):
            on_end = partial(ended, at)
            where = entry.partition
            try:
                if not sizes[at]:
                    raise InvalidRequestError(
                        f"{where.topic}-{where.partition}: the request has no record batch"
                    )
                self._check_topic(where.topic)
            except PenstockError as error:
                on_end(error)
                continue
            target = Target(
                where.topic, where.topic_id, where.partition, entry.current_leader_epoch
            )
            begin_append(target, records[at], request.acks, timeout_ms, on_end)

    def _result(
        self,
        where: common_pb2.TopicPartition,
        size_bytes: int,
        outcome: AppendInfo | BaseException,
    ) -> log_pb2.ProducePartitionResult:
        if isinstance(outcome, AppendInfo):
            if not outcome.duplicate:  # It was counted when it was appended.
                count = outcome.last_offset - outcome.base_offset + 1
                self._metrics.traffic.produced(where.topic, size_bytes, count)
            return log_pb2.ProducePartitionResult(
                partition=where,
                base_offset=outcome.base_offset,
                log_append_time_ms=outcome.log_append_time_ms,
                log_start_offset=self._logs.log_start_offset(where.topic, where.partition),
            )
        if isinstance(outcome, PenstockError):
            self._metrics.refused(outcome)
            error = outcome
        else:
            # One broken partition must not end the stream of all the others.
            log.error(
                "produce failed", topic=where.topic, partition=where.partition, exc_info=outcome
            )
            error = UnknownServerError(
                f"{where.topic}-{where.partition}: the broker failed; see its log"
            )
        return log_pb2.ProducePartitionResult(
            partition=where, base_offset=-1, error=error.to_proto()
        )


class ProduceStream:
    """One client's stream: a reader that starts requests in order, answers as they finish."""

    def __init__(
        self,
        producing: Producing,
        requests: AsyncIterator[Laden[log_pb2.ProduceRequest]],
        observe: Callable[[float], None] = lambda _seconds: None,
        arrived: Callable[[int], object] = int,
    ) -> None:
        self._observe = observe  # Told for each request the seconds until its answer.
        self._arrived = arrived  # ... and its size, once it is whole.
        self._producing = producing
        self._requests = requests
        self._answers: asyncio.Queue[log_pb2.ProduceResponse | BaseException | None] = (
            asyncio.Queue()
        )
        self._slots = asyncio.Semaphore(MAX_PENDING_REQUESTS)
        self._pending = 0
        self._heard_all = False
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
        try:
            async for request in self._requests:
                self._arrived(request.parsed_bytes)
                await self._slots.acquire()
                self._pending += 1
                answer = partial(self._answered, request.message.acks, perf_counter())
                self._producing.begin(request, answer)
                # Else the records would stay for as long as the client sends nothing more.
                del request
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # Handed on to the stream's own task.
            self._answers.put_nowait(error)
            return
        self._heard_all = True
        self._end_if_done()

    def _answered(
        self,
        acks: common_pb2.Acks.ValueType,
        begun_s: float,
        response: log_pb2.ProduceResponse,
    ) -> None:
        self._observe(perf_counter() - begun_s)
        self._pending -= 1
        if acks == common_pb2.ACKS_NONE:
            self._slots.release()
        else:
            self._answers.put_nowait(response)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._heard_all and not self._pending:
            self._answers.put_nowait(None)


def _response(
    request: log_pb2.ProduceRequest, results: list[log_pb2.ProducePartitionResult | None]
) -> log_pb2.ProduceResponse:
    return log_pb2.ProduceResponse(
        correlation_id=request.correlation_id,
        partitions=[result for result in results if result is not None],
    )
