"""How long a stream's micro-batches take while a few records a second come, and what waiting costs
when none do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from children import cpu_seconds, percentile
from clusters import node_pids
from spark_flows import Flows
from spark_footprint import watching_cpu

from penstock.cli.local_cluster import LocalCluster
from penstock.client import AdminClient, Producer

TRICKLE: Final = "trickle"
_NODES: Final = 3
_PAUSE_S: Final = 0.05
_SETTLE_S: Final = 3.0
_VALUES: Final = [b"%0100d" % number for number in range(10)]


@dataclass(frozen=True, slots=True)
class Trigger:
    """The micro-batches of one query that had rows, without the first ones."""

    query: str
    batches: int
    p50_ms: float
    p99_ms: float
    goal_ms: float
    stages_ms: Mapping[str, float]
    """The median of each stage that Spark tells of."""
    load_average: float


@dataclass(frozen=True, slots=True)
class Rest:
    """A query to which nothing comes: percent of a core."""

    spark_cpu_percent: float
    nodes_cpu_percent: float


class Triggers:
    """Queries over a topic into which a few records come."""

    def __init__(self, flows: Flows, warm_up: int) -> None:
        self._flows = flows
        self._warm_up = warm_up
        with AdminClient(flows.cluster.bootstrap) as admin:
            admin.create_topic(TRICKLE, 1, _NODES)

    def queries(self) -> dict[str, tuple[Callable[[str], Any], float]]:
        """By name what starts each, writing to a topic, and the goal for the median in ms."""
        return {
            "read, dropped": (self._dropped, 500.0),
            "topic to topic": (self._copied, 500.0),
            "counts by window, append": (self._appended, 1000.0),
            "counts, complete": (self._completed, 1000.0),
            "counts by window, update in foreachBatch": (self._updated, 1000.0),
        }

    def _dropped(self, _topic: str) -> Any:
        return self._flows.reading(TRICKLE).writeStream.format("noop")

    def _copied(self, topic: str) -> Any:
        return self._sink(self._flows.reading(TRICKLE).select("key", "value"), topic)

    def _appended(self, topic: str) -> Any:
        return self._sink(_as_records(self._windows()), topic).outputMode("append")

    def _completed(self, topic: str) -> Any:
        counts = self._flows.reading(TRICKLE).groupBy("value").count()
        return self._sink(_as_records(counts), topic).outputMode("complete")

    def _updated(self, topic: str) -> Any:
        options = self._flows.sink_options(topic)

        def write(rows: Any, _batch: int) -> None:
            rows.write.format("penstock").mode("append").options(**options).save()

        counts = _as_records(self._windows())
        return counts.writeStream.outputMode("update").foreachBatch(write)

    def _windows(self) -> Any:
        from pyspark.sql import functions as sf  # noqa: PLC0415 - it takes a second.

        records = self._flows.reading(TRICKLE).withWatermark("timestamp", "1 second")
        return records.groupBy(sf.window("timestamp", "1 second"), "value").count()

    def _sink(self, frame: Any, topic: str) -> Any:
        return frame.writeStream.format("penstock").options(**self._flows.sink_options(topic))

    def measured(self, name: str, batches: int, rest_s: float = 0.0) -> tuple[Trigger, Rest | None]:
        """Micro-batches of one query while records come, and then what it takes for so long
        without them.
        """
        make, goal_ms = self.queries()[name]
        with self._flows.written_topic(0, repeats=True) as topic:
            query = self._flows.checkpointed(make(topic)).start()
            try:
                with trickling(self._flows.cluster):
                    warm = _batches(query, self._warm_up + batches)[self._warm_up :]
                load = os.getloadavg()[0]
                query.processAllAvailable()  # To stop it in a batch would be to have it fail.
                rest = self._at_rest(rest_s) if rest_s else None
            finally:
                query.stop()
        whole = [one["triggerExecution"] for one in warm]
        stages = {
            stage: percentile([one.get(stage, 0) for one in warm], 50)
            for stage in sorted({stage for one in warm for stage in one})
        }
        found = Trigger(
            name, len(warm), percentile(whole, 50), percentile(whole, 99), goal_ms, stages, load
        )
        return found, rest

    def _at_rest(self, seconds: float) -> Rest:
        time.sleep(_SETTLE_S)
        nodes = node_pids(self._flows.cluster)
        nodes_s = cpu_seconds(nodes)
        with watching_cpu(nodes) as spark:
            time.sleep(seconds)
        nodes_s = cpu_seconds(nodes) - nodes_s
        return Rest(100 * spark.seconds() / seconds, 100 * nodes_s / seconds)


def _as_records(counts: Any) -> Any:
    return counts.selectExpr("value AS key", "cast(count AS string) AS value")


def _batches(query: Any, count: int) -> list[dict[str, float]]:
    """Of the query's first so many micro-batches that had rows, the milliseconds of each stage."""
    found: dict[int, dict[str, float]] = {}
    while len(found) < count:
        if (failure := query.exception()) is not None:
            raise failure
        for progress in query.recentProgress:
            if progress.numInputRows:
                found[progress.batchId] = dict(progress.durationMs)
        time.sleep(_PAUSE_S)
    return [stages for _, stages in sorted(found.items())][:count]


@contextmanager
def trickling(cluster: LocalCluster) -> Iterator[None]:
    """Records come, ten every twentieth of a second."""
    over = threading.Event()

    def write() -> None:
        with Producer(cluster.bootstrap) as producer:
            while not over.wait(_PAUSE_S):
                producer.send_many(TRICKLE, _VALUES).result(60)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
