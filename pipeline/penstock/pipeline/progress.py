"""How far queries are: their lag and speed in Prometheus, and in the groups of their sources.

A Spark driver calls ``watch`` once; from then on it hears of every micro-batch of its session.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.client import AdminClient, ConfigurationError, PenstockError, TopicPartition
from penstock.client.config import AdminSettings
from penstock.pipeline.source.group import group_of
from penstock.pipeline.source.offsets import Offsets, from_json

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql import SparkSession

_LOG: Final = logging.getLogger("penstock.pipeline")
_SOURCE: Final = ".PythonMicroBatchStream"
_LABELS: Final = ("query",)


class Source(Protocol):
    """What Spark says of one source of a query."""

    @property
    def description(self) -> str: ...  # noqa: D102 - Spark's name for it.
    @property
    def endOffset(self) -> str: ...  # noqa: D102, N802 - where the batch ended.
    @property
    def latestOffset(self) -> str: ...  # noqa: D102, N802 - what there was then.


@dataclass(frozen=True, slots=True)
class SourceState:
    """Where a query is in the topics that it reads."""

    done: Offsets
    """For each partition the offset after all that is done, by each source that reads it."""
    lag: Mapping[TopicPartition, int]
    """How many offsets there were behind that when the batch was planned."""


def state_of(sources: Iterable[Source]) -> SourceState:
    """Of all sources of a query that read topics; others are left out."""
    done: Offsets = {}
    latest: Offsets = {}
    for source in sources:
        if _SOURCE in source.description:
            ends = _offsets(source.latestOffset)
            # Partitions that are gone keep their positions, and nobody can commit for them.
            for one, offset in _offsets(source.endOffset).items():
                if one in ends or not ends:
                    done[one] = min(offset, done.get(one, offset))
            for one, offset in ends.items():
                latest[one] = max(offset, latest.get(one, offset))
    lag = {one: max(0, latest[one] - offset) for one, offset in done.items() if one in latest}
    return SourceState(done, lag)


def _offsets(text: str | None) -> Offsets:
    """None where it is not ours: other sources in Python have offsets of another form."""
    try:
        return from_json(json.loads(text or "{}"))
    except ValueError:
        return {}


class ProgressListener(StreamingQueryListener):
    """Made by ``watch``; ``close`` ends it.

    It has a connection while queries run, and figures of those that run.
    """

    def __init__(
        self,
        connect: Callable[[], AdminClient] | None,
        group_id_prefix: str,
        gauges: Gauges | None,
        detach: Callable[[ProgressListener], object] = lambda listener: None,
    ) -> None:
        self._connect = connect
        self._prefix = group_id_prefix
        self._gauges = gauges
        self._detach = detach
        self._admin: AdminClient | None = None
        self._running: dict[str, str] = {}
        """The names, by id, under which the figures of queries are shown."""
        self._committed: dict[str, Offsets] = {}
        self._is_closed = False
        # Spark calls from a thread of its own.
        self._lock = threading.Lock()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name.
        """It is one more that runs."""
        with self._lock:
            self._running[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name.
        """A micro-batch is done."""
        progress = event.progress
        state = state_of(progress.sources)
        query_id = str(progress.id)
        with self._lock:
            if self._is_closed:
                return
            name = self._running[query_id] = progress.name or query_id
            if self._gauges is not None:
                self._gauges.show(name, progress, state.lag)
            if state.done and self._committed.get(query_id) != state.done:
                self._commit(query_id, state.done)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name.
        """Nothing has changed."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name.
        """What is committed stays: a restart goes on under the same id. Its figures go."""
        query_id = str(event.id)
        with self._lock:
            self._committed.pop(query_id, None)
            name = self._running.pop(query_id, None)
            if self._gauges is not None and name is not None:
                self._gauges.forget(name)
            if not self._running:
                self._disconnect()

    def close(self) -> None:
        """Hear no more of queries, and free the connection and the figures' names."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._disconnect()
            if self._gauges is not None:
                self._gauges.close()
        self._detach(self)

    def _disconnect(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _commit(self, query_id: str, done: Offsets) -> None:
        if self._connect is None:
            return
        group = group_of(self._prefix, query_id)
        try:
            if self._admin is None:
                self._admin = self._connect()
            self._admin.alter_group_offsets(group, done)
        except PenstockError as error:
            _LOG.warning("group %s: how far its query is was not committed: %s", group, error)
        else:
            self._committed[query_id] = done


class Gauges:
    """Queries' figures in Prometheus. Needs prometheus_client.

    Raises ConfigurationError where the registry has those of another ``watch``.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge  # noqa: PLC0415 - it is optional.

        self._where = REGISTRY if registry is None else registry
        self._shown: dict[str, set[TopicPartition]] = {}

        def gauge(name: str, what: str, labels: tuple[str, ...] = _LABELS) -> Gauge:
            return Gauge(f"penstock_query_{name}", what, labels, registry=self._where)

        try:
            self._lag = gauge(
                "lag_offsets",
                "Offsets that the query has not read yet, as of its last micro-batch.",
                (*_LABELS, "topic", "partition"),
            )
        except ValueError:
            raise ConfigurationError(
                "queries are watched already, and shown in the same registry of prometheus_client; "
                "next: close() what watch() gave before, or pass another registry"
            ) from None
        self._arriving = gauge("input_rows_per_second", "Rows that arrive.")
        self._speed = gauge("processed_rows_per_second", "Rows that a micro-batch processes.")
        self._batch = gauge("batch_id", "The last micro-batch.")
        self._took = gauge("batch_seconds", "How long the last micro-batch took.")
        self._rows = Counter(
            "penstock_query_rows", "Rows that were processed.", _LABELS, registry=self._where
        )
        self._by_query = (self._arriving, self._speed, self._batch, self._took, self._rows)

    def show(self, query: str, progress: Any, lag: Mapping[TopicPartition, int]) -> None:
        """What one progress of Spark says."""
        self._forget_lag(query, self._shown.get(query, set()) - lag.keys())
        self._shown[query] = set(lag)
        for partition, count in lag.items():
            self._lag.labels(query, partition.topic, partition.partition).set(count)
        self._arriving.labels(query).set(_number(progress.inputRowsPerSecond))
        self._speed.labels(query).set(_number(progress.processedRowsPerSecond))
        self._batch.labels(query).set(progress.batchId)
        self._took.labels(query).set(_number(progress.batchDuration) / 1000)
        self._rows.labels(query).inc(_number(progress.numInputRows))

    def forget(self, query: str) -> None:
        """A query runs no more: show nothing of it."""
        if query in self._shown:
            self._forget_lag(query, self._shown.pop(query))
            for figures in self._by_query:
                figures.remove(query)

    def _forget_lag(self, query: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self._lag.remove(query, partition.topic, str(partition.partition))

    def close(self) -> None:
        """Take all of them out of the registry."""
        for figures in (self._lag, *self._by_query):
            self._where.unregister(figures)


def _number(found: float | None) -> float:
    """Spark has nothing, or NaN, where nothing was measured."""
    return 0.0 if found is None or math.isnan(found) else found


def watch(
    spark: SparkSession,
    bootstrap_servers: str | None = None,
    *,
    group_id_prefix: str = "spark",
    registry: CollectorRegistry | None = None,
    **settings: Unpack[AdminSettings],
) -> ProgressListener:
    """Show how far the session's streaming queries are, from now on.

    With ``bootstrap_servers`` the offsets that a query is done with are committed after each
    micro-batch, under the group of its source (``groupIdPrefix``): exactly, while the source by
    itself is a batch late. With prometheus_client installed, lag and speed of the queries that run
    are gauges of ``registry`` (by default of the process), under the query's name or id; serve them
    with ``prometheus_client.start_http_server``. ``close()`` of what is returned ends it.

    A failure to commit is a warning in the log. Raises ConfigurationError for wrong settings, and
    where a registry is to show the queries of two.
    """
    connect: Callable[[], AdminClient] | None = None
    if bootstrap_servers is not None:
        connect = partial(AdminClient, bootstrap_servers, **settings)
        connect().close()  # What is wrong with the settings is said here.
    try:
        gauges: Gauges | None = Gauges(registry)
    except ImportError:
        gauges = None
    listener = ProgressListener(
        connect, group_id_prefix, gauges, detach=spark.streams.removeListener
    )
    spark.streams.addListener(listener)
    return listener
