"""What Spark reads from topics and writes to them: rows a second, what CPU a million of them cost,
how long micro-batches take, and how much memory it all wants.

On a local cluster of three nodes, with records of 100 bytes in topics of three replicas, by
``format("penstock")`` in local mode with as many tasks at once as ``--tasks`` says:

- a topic is read into Spark's sink that drops all, in batch, and by a stream that ends where the
  topic does (Trigger.AvailableNow), in one micro-batch;
- rows that Spark makes are written to a topic, in batch and in one micro-batch, exactly once and at
  least once; in batch they are dropped as well, which says what it costs to make them;
- the topic is copied to another one, exactly once, in one micro-batch;
- streams go on (the default trigger) while 200 records a second come: the duration of each
  micro-batch, as Spark says it, without state and with counts that need it;
- the first of them goes on when no more records come: what CPU it and the nodes take for nothing.

Each topic that was written is read back, by read_committed: it must have just as many records as
rows were written (at least as many, at least once). The first round of each is thrown away, and
so are the first micro-batches: a Java that has just started is slow. Of a stream the time of its
micro-batch counts, as Spark says it, and not that of its start and end. CPU is that of Spark's
processes (Java and Python together) and of all nodes. Memory is the largest sum that was seen while
rows were read, written, and came one by one: that of the one Java, which is driver and executor in
local mode, that of the driver's Python, which is this benchmark, and that of all Python processes
that Spark started. Exit status 1 when a goal is missed, by the best of the rounds and the median of
the micro-batches. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from clusters import local_cluster, node_pids
from spark_flows import Flow, Flows, Sizes
from spark_footprint import Footprint, watching
from spark_triggers import Rest, Trigger, Triggers

from penstock.cli.output import print_json, print_table
from penstock.pipeline import session

_NODES: Final = 3
_PARTS: Final = ("read", "write", "triggers")
_GOALS: Final = {
    "read, batch": 1_000_000,
    "read, stream": 1_000_000,
    "write exactly-once, batch": 400_000,
    "write exactly-once, stream": 400_000,
}


@dataclass(slots=True)
class Figures:
    """All that came out."""

    flows: list[Flow] = field(default_factory=list)
    triggers: list[Trigger] = field(default_factory=list)
    rest: Rest | None = None
    memory: dict[str, Footprint] = field(default_factory=dict)

    def missed(self) -> list[str]:
        """The goals that were not reached."""
        best: dict[str, float] = {}
        for flow in self.flows:
            best[flow.how] = max(best.get(flow.how, 0.0), flow.rows_per_s)
        slow = [how for how, rate in best.items() if rate < _GOALS.get(how, 0)]
        return slow + [one.query for one in self.triggers if one.p50_ms > one.goal_ms]


class Bench:
    """What is measured, part by part."""

    def __init__(self, flows: Flows, options: argparse.Namespace) -> None:
        self.figures = Figures()
        self._flows = flows
        self._options = options
        self._rows = 0

    def run(self) -> None:
        """All parts that are wanted."""
        parts = {"read": self._read, "write": self._write, "triggers": self._wait}
        if {"read", "write"} & set(self._options.parts):
            self._rows = self._flows.fill()
        for part in self._options.parts:
            with watching(node_pids(self._flows.cluster)) as watch:
                parts[part]()
            self.figures.memory[part] = watch.peak

    def _read(self) -> None:
        flows = self._flows
        ways = {"read, batch": flows.read_batch, "read, stream": flows.read_stream}
        self._in_turns({how: (run, self._rows) for how, run in ways.items()})

    def _write(self) -> None:
        flows, rows = self._flows, self._options.written
        ways: dict[str, tuple[Any, int]] = {"made and dropped, batch": (flows.make_batch, rows)}
        for delivery in ("exactly-once", "at-least-once"):
            ways[f"write {delivery}, batch"] = partial(flows.write_batch, delivery), rows
            ways[f"write {delivery}, stream"] = partial(flows.write_stream, delivery), rows
        ways["topic to topic, stream"] = partial(flows.copy, self._rows), self._rows
        self._in_turns(ways)

    def _in_turns(self, ways: Mapping[str, tuple[Any, int]]) -> None:
        found = [
            self._flows.measured(how, run, rows)
            for _ in range(self._options.rounds + 1)
            for how, (run, rows) in ways.items()
        ][len(ways) :]
        names = list(ways)
        self.figures.flows += sorted(found, key=lambda flow: names.index(flow.how))

    def _wait(self) -> None:
        triggers = Triggers(self._flows, self._options.warm_up)
        rest_s = self._options.idle
        for name in triggers.queries():
            trigger, rest = triggers.measured(name, self._options.batches, rest_s)
            self.figures.triggers.append(trigger)
            self.figures.rest = rest or self.figures.rest
            rest_s = 0.0


@contextmanager
def running(options: argparse.Namespace) -> Iterator[Flows]:
    """A cluster and a session."""
    sizes = Sizes(
        options.records, options.written, options.record_bytes, options.partitions, options.tasks
    )
    with local_cluster(_NODES, {"flush.policy": "os"}) as (cluster, work):
        spark = session(
            "penstock-bench",
            master=f"local[{options.tasks},4]",
            settings={"spark.local.dir": tempfile.gettempdir(), "spark.driver.memory": "1g"},
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield Flows(spark, cluster, work, sizes)
        finally:
            spark.stop()


def show(figures: Figures) -> None:
    """Print the figures beside the goals."""
    columns = ("rows", "rows/s", "goal", "Spark CPU-s/million", "nodes'", "load")
    if figures.flows:
        print_table(
            ("how", *columns),
            [
                (
                    flow.how,
                    f"{flow.rows:,}",
                    f"{flow.rows_per_s:,.0f}",
                    f"{_GOALS[flow.how]:,}" if flow.how in _GOALS else "",
                    f"{flow.spark_cpu_s_per_million:.2f}",
                    f"{flow.nodes_cpu_s_per_million:.2f}",
                    f"{flow.load_average:.1f}",
                )
                for flow in figures.flows
            ],
            right=columns,
        )
    _show_triggers(figures)
    columns = ("Java MB", "driver's Python MB", "workers MB", "workers", "all MB")
    print()
    print_table(
        ("memory at most", *columns),
        [
            (
                part,
                f"{one.java_mb:.0f}",
                f"{one.driver_python_mb:.0f}",
                f"{one.workers_mb:.0f}",
                str(one.workers),
                f"{one.total_mb:.0f}",
            )
            for part, one in figures.memory.items()
        ],
        right=columns,
    )


def _show_triggers(figures: Figures) -> None:
    if not figures.triggers:
        return
    columns = ("batches", "median ms", "goal", "99 % ms", "load")
    print()
    print_table(
        ("micro-batches of", *columns, "medians of their stages, ms"),
        [
            (
                one.query,
                str(one.batches),
                f"{one.p50_ms:.0f}",
                f"{one.goal_ms:.0f}",
                f"{one.p99_ms:.0f}",
                f"{one.load_average:.1f}",
                ", ".join(
                    f"{stage} {ms:.0f}"
                    for stage, ms in one.stages_ms.items()
                    if stage != "triggerExecution" and ms >= 1
                ),
            )
            for one in figures.triggers
        ],
        right=columns,
    )
    if figures.rest is not None:
        print(
            f"the first of them while nothing comes: Spark takes "
            f"{figures.rest.spark_cpu_percent:.0f} % of a core, all nodes together "
            f"{figures.rest.nodes_cpu_percent:.0f} %"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--records", type=int, default=3_000_000, help="to be read in a round")
    parser.add_argument("--written", type=int, default=2_000_000, help="rows written in a round")
    parser.add_argument("--record-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20, help="micro-batches of each query")
    parser.add_argument("--warm-up", type=int, default=5, help="micro-batches before those")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds of watching an idle query; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    with running(options) as flows:
        bench = Bench(flows, options)
        bench.run()
    figures = bench.figures
    if options.json:
        print_json({"goals_rows_per_s": _GOALS, **asdict(figures), "missed": figures.missed()})
    else:
        show(figures)
    return 1 if figures.missed() else 0


if __name__ == "__main__":
    sys.exit(main())
