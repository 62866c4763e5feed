"""What Spark reads from topics: rows a second, what CPU a million of them cost, and how long an
idle stream's micro-batches take.

A topic of a local cluster of three nodes is filled with records of 100 bytes and read by
``format("penstock")`` into Spark's sink that drops all, in local mode with as many tasks at once as
``--tasks`` says:

- in batch, all of it, again and again;
- by a stream that ends where the topic does (Trigger.AvailableNow), in one micro-batch;
- by a stream that goes on (the default trigger), while a few records a second are written: the
  duration of each micro-batch, as Spark says it.

The first round of each is thrown away: a Java that has just started is slow. CPU is that of Spark's
processes (Java and Python together) and of all nodes. Exit status 1 when a goal is missed, by the
best of the rounds: 1,000,000 rows a second, and 500 ms for the median of micro-batches. Set TMPDIR
to choose the disk.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from children import cpu_seconds, percentile
from clusters import local_cluster, node_pids

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer
from penstock.pipeline import session

TOPIC: Final = "read-by-spark"
_TRICKLE: Final = "trickle"
_NODES: Final = 3
_GOAL_ROWS: Final = 1_000_000
_GOAL_MS: Final = 500
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one way of reading."""

    how: str
    rows: int
    rows_per_s: float
    spark_cpu_s_per_million: float
    nodes_cpu_s_per_million: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Trigger:
    """Micro-batches of a stream that goes on."""

    batches: int
    p50_ms: float
    p99_ms: float
    load_average: float


class Bench:
    """A session of Spark's and a cluster."""

    def __init__(self, spark: Any, cluster: LocalCluster, work: Path) -> None:
        self._spark = spark
        self._cluster = cluster
        self._work = work
        self._checkpoints = 0

    def options(self, topic: str) -> dict[str, str]:
        """Of the source."""
        return {
            "penstock.bootstrap.servers": self._cluster.bootstrap,
            "subscribe": topic,
            "startingOffsets": "earliest",
        }

    def batch(self) -> None:
        """Read the topic once."""
        reader = self._spark.read.format("penstock").options(**self.options(TOPIC))
        reader.load().write.format("noop").mode("overwrite").save()

    def stream(self) -> None:
        """The same by a stream."""
        self.start(TOPIC, availableNow=True).awaitTermination()

    def start(self, topic: str, **trigger: Any) -> Any:
        """A stream, from the topic's start, with a checkpoint of its own."""
        self._checkpoints += 1
        checkpoint = self._work / f"checkpoint-{self._checkpoints}"
        frame = self._spark.readStream.format("penstock").options(**self.options(topic)).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def measured(self, how: str, read: Callable[[], None], rows: int) -> Row:
        """What one round costs."""
        nodes = node_pids(self._cluster)
        spark_s, nodes_s, begun = spark_cpu_seconds(nodes), cpu_seconds(nodes), time.perf_counter()
        read()
        seconds = time.perf_counter() - begun
        millions = rows / 1e6
        return Row(
            how,
            rows,
            rows / seconds,
            (spark_cpu_seconds(nodes) - spark_s) / millions,
            (cpu_seconds(nodes) - nodes_s) / millions,
            os.getloadavg()[0],
        )

    def triggered(self, batches: int) -> Trigger:
        """Micro-batches while records trickle in."""
        durations: dict[int, float] = {}
        with trickling(self._cluster):
            query = self.start(_TRICKLE)
            try:
                while len(durations) < batches + 2:
                    if (failure := query.exception()) is not None:
                        raise failure
                    for progress in query.recentProgress:
                        if progress.numInputRows:
                            durations[progress.batchId] = progress.durationMs["triggerExecution"]
                    time.sleep(_PAUSE_S)
            finally:
                query.stop()
        # The first two start what the others find.
        warm = [duration for _, duration in sorted(durations.items())][2:]
        return Trigger(len(warm), percentile(warm, 50), percentile(warm, 99), os.getloadavg()[0])


def spark_cpu_seconds(nodes: Sequence[int]) -> float:
    """Of this process and all below it but the nodes."""
    total = 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        if process.pid not in nodes:
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
    return total


@contextmanager
def trickling(cluster: LocalCluster) -> Iterator[None]:
    """Records come, a few every twentieth of a second."""
    over = threading.Event()

    def write() -> None:
        with Producer(cluster.bootstrap) as producer:
            while not over.wait(_PAUSE_S):
                producer.send_many(_TRICKLE, [b"x" * 100] * 10).result(60)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def fill(cluster: LocalCluster, options: argparse.Namespace) -> int:
    """Write the topic; how many records it has."""
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, options.partitions, _NODES)
        admin.create_topic(_TRICKLE, 1, _NODES)
    values = [b"%0*d" % (options.record_bytes, number) for number in range(10_000)]
    rounds = max(1, options.records // (len(values) * options.partitions))
    with Producer(cluster.bootstrap) as producer:
        for _ in range(rounds):
            sent = [
                producer.send_many(TOPIC, values, partition=number)
                for number in range(options.partitions)
            ]
            for future in sent:
                future.result(120)
    return rounds * len(values) * options.partitions


def run_all(options: argparse.Namespace) -> tuple[list[Row], Trigger | None]:
    """Every way of reading, in turns."""
    with local_cluster(_NODES, {"flush.policy": "os"}) as (cluster, work):
        rows = fill(cluster, options)
        spark = session(
            "penstock-bench",
            master=f"local[{options.tasks},4]",
            settings={"spark.local.dir": tempfile.gettempdir(), "spark.driver.memory": "1g"},
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            bench = Bench(spark, cluster, work)
            found = [
                bench.measured(how, read, rows)
                for _ in range(options.rounds + 1)
                for how, read in (("batch", bench.batch), ("stream", bench.stream))
            ]
            trigger = bench.triggered(options.batches) if options.batches else None
        finally:
            spark.stop()
        return found[2:], trigger


def show(rows: Sequence[Row], trigger: Trigger | None) -> None:
    """Print the figures beside the goals."""
    columns = ("rows", "rows/s", "goal", "Spark CPU-s/million", "nodes'", "load")
    print_table(
        ("how", *columns),
        [
            (
                row.how,
                f"{row.rows:,}",
                f"{row.rows_per_s:,.0f}",
                f"{_GOAL_ROWS:,}",
                f"{row.spark_cpu_s_per_million:.2f}",
                f"{row.nodes_cpu_s_per_million:.2f}",
                f"{row.load_average:.1f}",
            )
            for row in rows
        ],
        right=columns,
    )
    if trigger is not None:
        print(
            f"micro-batches while records trickle in: {trigger.batches}, median "
            f"{trigger.p50_ms:.0f} ms (goal {_GOAL_MS}), 99 % within {trigger.p99_ms:.0f} ms, "
            f"load {trigger.load_average:.1f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--record-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20, help="micro-batches; 0: leave them out")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rows, trigger = run_all(options)
    if options.json:
        figures = [asdict(row) for row in rows]
        trickle = None if trigger is None else asdict(trigger)
        print_json({"goal_rows_per_s": _GOAL_ROWS, "rounds": figures, "trigger": trickle})
    else:
        show(rows, trigger)
    best = {row.how: max(one.rows_per_s for one in rows if one.how == row.how) for row in rows}
    held = min(best.values()) >= _GOAL_ROWS
    return 0 if held and (trigger is None or trigger.p50_ms <= _GOAL_MS) else 1


if __name__ == "__main__":
    sys.exit(main())
