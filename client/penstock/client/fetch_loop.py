"""Carries out what the Fetcher decides: fetches, cancellations, and finding positions anew."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc

from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import ConsumerConfig
from penstock.client.core.backoff import Backoff
from penstock.client.core.fetch_events import (
    CancelFetch,
    Effect,
    Event,
    FetchAnswered,
    Fetched,
    FetchFailed,
    MadeAnew,
    OutOfRange,
    RefreshMetadata,
    SendFetch,
    Woken,
)
from penstock.client.core.fetcher import Fetcher, FetcherSettings
from penstock.client.core.subscription import ColumnRun, Run
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.transport import rpc_error
from penstock.v1 import common_pb2, log_pb2
from penstock.wire.batch import Buffer
from penstock.wire.errors import NetworkError, PenstockError, error_from_proto
from penstock.wire.ids import TopicPartition
from penstock.wire.laden import FETCH_RESPONSE, Laden

_LOG: Final = logging.getLogger("penstock.client")
_FETCH: Final = "/penstock.v1.Log/Fetch"
_LEADER_BACKOFF_FIRST_MS: Final = 20.0

_AHEAD_BYTES: Final = 1024 * 1024
"""What was fetched as this is decoded at a time, so that an application that takes few records each
time need not ask the event loop each time."""
_ARROW_BYTES: Final = 8 * 1024 * 1024
"""Batches of about this, decompressed, are handed out by one ``fetch_arrow``."""
MOST_ROWS: Final = 2**31 - 1
"""Of one ``fetch_arrow`` that names no number."""


class FetchLoop:
    """Belongs to one event loop. ``on_progress`` is called when there may be something to take,
    ``on_out_of_range`` when a position needs the reset policy, ``on_made_anew`` when its topic is
    another one.
    """

    def __init__(
        self,
        cluster: Cluster,
        keeper: MetadataKeeper,
        config: ConsumerConfig,
        *,
        on_progress: Callable[[], object],
        on_out_of_range: Callable[[OutOfRange], object],
        on_made_anew: Callable[[MadeAnew], object],
    ) -> None:
        self._cluster = cluster
        self._keeper = keeper
        self._config = config
        self._read_committed = config.isolation_level == "read_committed"
        self._on_progress = on_progress
        self._on_out_of_range = on_out_of_range
        self._on_made_anew = on_made_anew
        self.fetcher = Fetcher(
            FetcherSettings(
                max_partition_bytes=config.max_partition_fetch_bytes,
                max_bytes=config.fetch_max_bytes,
                prefetch_max_bytes=config.prefetch_max_bytes,
                max_wait_ms=config.fetch_max_wait_ms,
                request_timeout_ms=config.request_timeout_ms,
                damage_patience_ms=config.default_api_timeout_ms,
            ),
            cluster.metadata,
            Backoff(
                min(_LEADER_BACKOFF_FIRST_MS, config.retry_backoff_ms),
                config.retry_backoff_max_ms,
                random.random,
            ),
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def handle(self, event: Event) -> None:
        """Feed the fetcher and carry out what it wants."""
        if self._closed:
            return
        for effect in self.fetcher.handle(event, now_ms()):
            self._carry_out(effect)
        self._set_timer()

    def take(self, limit: int) -> list[Run]:
        """Records for the application; fetches on at once in the room they leave."""
        try:
            return self.fetcher.take(limit, now_ms(), _AHEAD_BYTES)
        finally:
            self.handle(Woken())

    def take_columns(self, max_records: int) -> list[ColumnRun]:
        """The same as columns."""
        try:
            return self.fetcher.take_columns(max_records, _ARROW_BYTES, now_ms())
        finally:
            self.handle(Woken())

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hold partitions back."""
        self.fetcher.set_paused(partitions, paused=True)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand partitions out again."""
        self.fetcher.set_paused(partitions, paused=False)
        self.handle(Woken())

    async def close(self) -> None:
        """Stop fetching."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendFetch):
            self._tasks[effect.fetch_id] = asyncio.ensure_future(self._fetch(effect))
        elif isinstance(effect, CancelFetch):
            task = self._tasks.pop(effect.fetch_id, None)
            if task is not None:
                task.cancel()
        elif isinstance(effect, RefreshMetadata):
            self._keeper.request(effect.avoid)
        elif isinstance(effect, MadeAnew):
            self._on_made_anew(effect)
        else:
            self._on_out_of_range(effect)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.fetcher.next_deadline_ms()
        if deadline != float("inf"):
            delay_s = max(0.0, deadline - now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.handle, Woken())

    async def _fetch(self, effect: SendFetch) -> None:
        event: Event
        try:
            response = await self._ask(effect)
        except PenstockError as error:
            if not error.retriable:
                # A status speaks of the whole request: no partition may be condemned by it.
                _LOG.error("%s", error.message)
                error = NetworkError(error.message)
            event = FetchFailed(effect.fetch_id, error)
        else:
            results = results_of(response, read_committed=self._read_committed)
            event = FetchAnswered(effect.fetch_id, results)
        self._tasks.pop(effect.fetch_id, None)
        self.handle(event)
        self._on_progress()

    async def _ask(self, effect: SendFetch) -> Laden[log_pb2.FetchResponse]:
        config = self._config
        request = log_pb2.FetchRequest(
            max_wait_ms=config.fetch_max_wait_ms,
            min_bytes=min(config.fetch_min_bytes, effect.max_bytes),
            max_bytes=effect.max_bytes,
            rack_id=config.client_rack,
            isolation_level=isolation_of(config),
        )
        for wanted in effect.wanted:
            request.partitions.add(
                partition=common_pb2.TopicPartition(
                    topic=wanted.partition.topic,
                    partition=wanted.partition.partition,
                    topic_id=wanted.topic_id,
                ),
                fetch_offset=wanted.offset,
                current_leader_epoch=wanted.leader_epoch,
                last_fetched_epoch=wanted.last_fetched_epoch,
                partition_max_bytes=min(config.max_partition_fetch_bytes, effect.max_bytes),
            )
        where = self._cluster.name_of(effect.node_id)
        fetch: Any = self._cluster.channel_to(effect.node_id).unary_unary(
            _FETCH,
            request_serializer=log_pb2.FetchRequest.SerializeToString,
            response_deserializer=FETCH_RESPONSE.parse,
        )
        timeout_s = (config.fetch_max_wait_ms + config.request_timeout_ms) / 1000
        try:
            response: Laden[log_pb2.FetchResponse] = await fetch(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, where, "Log.Fetch") from None
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise NetworkError(f"{where}: {error}") from None
        return response


def isolation_of(config: ConsumerConfig) -> common_pb2.IsolationLevel.ValueType:
    """What a consumer may see."""
    if config.isolation_level == "read_committed":
        return common_pb2.ISOLATION_LEVEL_READ_COMMITTED
    return common_pb2.ISOLATION_LEVEL_READ_UNCOMMITTED


def results_of(
    response: Laden[log_pb2.FetchResponse], *, read_committed: bool = False
) -> tuple[Fetched, ...]:
    """What the answer says of each partition.

    A view keeps all of the answer in memory. So it serves for records that are most of it; others
    are copied: those of a partition that is paused may stay for long, and are all that is counted.
    """
    least = response.records_bytes // 2
    return tuple(
        _to_result(entry, records if len(records) > least else bytes(records), read_committed)
        for entry, records in zip(response.message.partitions, response.records, strict=True)
    )


def _to_result(
    entry: log_pb2.FetchPartitionResult, records: Buffer, read_committed: bool
) -> Fetched:
    diverging = entry.diverging_epoch.end_offset if entry.HasField("diverging_epoch") else -1
    return Fetched(
        TopicPartition(entry.partition.topic, entry.partition.partition),
        error_from_proto(entry.error) if entry.HasField("error") else None,
        records,
        entry.last_stable_offset if read_committed else entry.high_watermark,
        diverging,
        entry.records_crc if entry.HasField("records_crc") else None,
        tuple((one.producer_id, one.first_offset) for one in entry.aborted_transactions),
        entry.high_watermark,
    )
