"""Rows through Spark, round by round: out of a topic, into a topic, and from topic to topic."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from children import cpu_seconds
from clusters import node_pids
from spark_counting import records_in
from spark_footprint import watching_cpu

from penstock.cli.local_cluster import LocalCluster
from penstock.client import AdminClient, Producer

SOURCE: Final = "read-by-spark"
_NODES: Final = 3
_FILL_RECORDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Flow:
    """One round of one way of reading or writing."""

    how: str
    rows: int
    rows_per_s: float
    spark_cpu_s_per_million: float
    nodes_cpu_s_per_million: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much goes through, and in how many pieces."""

    read_rows: int
    written_rows: int
    record_bytes: int
    partitions: int
    tasks: int


class Flows:
    """A session of Spark's and a cluster. Each method is one round; it gives the seconds of it.

    What a batch query takes is the time of its call. Of a stream it is that of its one micro-batch,
    as Spark says it: without the seconds in which a stream starts and ends.
    """

    def __init__(self, spark: Any, cluster: LocalCluster, work: Path, sizes: Sizes) -> None:
        self.spark = spark
        self.cluster = cluster
        self.sizes = sizes
        self._work = work
        self._numbers = itertools.count()

    # --- topics -----------------------------------------------------------------------------

    def fill(self) -> int:
        """Write the topic that is read; how many records it has."""
        sizes = self.sizes
        with AdminClient(self.cluster.bootstrap) as admin:
            admin.create_topic(SOURCE, sizes.partitions, _NODES)
        values = [b"%0*d" % (sizes.record_bytes, number) for number in range(_FILL_RECORDS)]
        rounds = max(1, sizes.read_rows // (len(values) * sizes.partitions))
        with Producer(self.cluster.bootstrap) as producer:
            for _ in range(rounds):
                sent = [
                    producer.send_many(SOURCE, values, partition=number)
                    for number in range(sizes.partitions)
                ]
                for future in sent:
                    future.result(120)
        return rounds * len(values) * sizes.partitions

    @contextmanager
    def written_topic(self, rows: int, *, repeats: bool = False) -> Iterator[str]:
        """A topic for one round, which must have just so many records in the end, and then goes.
        More are no fault where what fails ``repeats``.

        They are read back, by read_committed: offsets count what transactions leave between them,
        and what was aborted, as well.
        """
        topic = f"written-by-spark-{next(self._numbers)}"
        with AdminClient(self.cluster.bootstrap) as admin:
            admin.create_topic(topic, self.sizes.partitions, _NODES)
            yield topic
            found = records_in(self.cluster.bootstrap, topic, self.sizes.partitions)
            if found < rows or (found > rows and not repeats):
                raise SystemExit(f"{rows} rows were written to {topic}, which has {found} records")
            admin.delete_topic(topic)

    # --- frames -----------------------------------------------------------------------------

    def source_options(self, topic: str) -> dict[str, str]:
        """To read it from its start."""
        return {
            "penstock.bootstrap.servers": self.cluster.bootstrap,
            "subscribe": topic,
            "startingOffsets": "earliest",
        }

    def sink_options(self, topic: str, delivery: str = "exactly-once") -> dict[str, str]:
        """To write it."""
        return {
            "penstock.bootstrap.servers": self.cluster.bootstrap,
            "topic": topic,
            "delivery": delivery,
        }

    def reading(self, topic: str) -> Any:
        """The topic as a stream."""
        return self.spark.readStream.format("penstock").options(**self.source_options(topic)).load()

    def _padded(self, frame: Any, column: str) -> Any:
        """Numbers as values of the wanted size."""
        text = f"lpad(cast({column} AS string), {self.sizes.record_bytes}, 'x')"
        return frame.selectExpr(f"cast({text} AS binary) AS value")

    def _made(self) -> Any:
        """Rows that cost hardly anything to make."""
        sizes = self.sizes
        return self._padded(self.spark.range(0, sizes.written_rows, 1, sizes.tasks), "id")

    def _made_by_stream(self) -> Any:
        """As many rows, which make one micro-batch."""
        frame = self.spark.readStream.format("rate-micro-batch")
        frame = frame.option("rowsPerBatch", self.sizes.written_rows)
        return self._padded(frame.option("numPartitions", self.sizes.tasks).load(), "value")

    def checkpointed(self, writer: Any) -> Any:
        """With a checkpoint of its own."""
        return writer.option(
            "checkpointLocation", str(self._work / f"checkpoint-{next(self._numbers)}")
        )

    # --- rounds -----------------------------------------------------------------------------

    def read_batch(self) -> float:
        """The topic, into nothing."""
        reader = self.spark.read.format("penstock").options(**self.source_options(SOURCE))
        return _timed(reader.load().write.format("noop").mode("overwrite").save)

    def read_stream(self) -> float:
        """The same by a stream."""
        return self._run(self.reading(SOURCE).writeStream.format("noop"))

    def make_batch(self) -> float:
        """Rows that are made, into nothing: what the writing rounds take without a sink."""
        return _timed(self._made().write.format("noop").mode("overwrite").save)

    def write_batch(self, delivery: str) -> float:
        """Rows that are made, into a topic."""
        rows, repeats = self.sizes.written_rows, delivery == "at-least-once"
        with self.written_topic(rows, repeats=repeats) as topic:
            writer = self._made().write.format("penstock").mode("append")
            return _timed(writer.options(**self.sink_options(topic, delivery)).save)

    def write_stream(self, delivery: str) -> float:
        """The same by a stream."""
        rows, repeats = self.sizes.written_rows, delivery == "at-least-once"
        with self.written_topic(rows, repeats=repeats) as topic:
            writer = self._made_by_stream().writeStream.format("penstock")
            return self._run(writer.options(**self.sink_options(topic, delivery)))

    def copy(self, rows: int) -> float:
        """From topic to topic, exactly once, by a stream."""
        with self.written_topic(rows) as topic:
            writer = self.reading(SOURCE).select("value").writeStream.format("penstock")
            return self._run(writer.options(**self.sink_options(topic)))

    def _run(self, writer: Any) -> float:
        query = self.checkpointed(writer).trigger(availableNow=True).start()
        query.awaitTermination()
        busy = [one.batchDuration for one in query.recentProgress if one.numInputRows]
        return sum(busy) / 1000

    def measured(self, how: str, run: Callable[[], float], rows: int) -> Flow:
        """What one round costs."""
        nodes = node_pids(self.cluster)
        nodes_s = cpu_seconds(nodes)
        with watching_cpu(nodes) as spark:
            seconds = run()
        millions = rows / 1e6
        return Flow(
            how,
            rows,
            rows / seconds,
            spark.seconds() / millions,
            (cpu_seconds(nodes) - nodes_s) / millions,
            os.getloadavg()[0],
        )


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
