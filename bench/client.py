"""What a record costs the client and the cluster, in every way to write and to read it.

Three nodes, a topic of six partitions with three replicas each, acks=all, flush.policy=os, and for
each row a client of its own: a process of `penstock bench`, with the client's defaults. The records
that are read were written before by such a client, in the batches that it made.

CPU is that of the client, from the first send to the last acknowledgement (or read), and of it and
all three nodes together. Of several rounds the fastest counts, each row for itself. Exit status 1
when a goal is missed. Set TMPDIR to choose the disk.

A virtual machine whose host takes back memory that is free pays for each page again when it is used
again: ten times as much as the write itself, and a row here writes a gigabyte. --warm-memory-mb
has so much touched and freed before each row, so that all begin alike.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from children import cpu_seconds
from clusters import local_cluster, node_pids

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient

_NODES: Final = 3
_PARTITIONS: Final = 6
_CONFIGS: Final = {"segment.bytes": str(256 * 1024 * 1024), "min.insync.replicas": "2"}
_COMMAND: Final = (sys.executable, "-m", "penstock.cli", "bench")
_READ_SIZE_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class Goal:
    """The least records a second, and the most CPU seconds a million records cost."""

    records_per_s: float
    client_cpu_s_per_million: float | None = None
    all_cpu_s_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One way to write records of one size, or to read what was written."""

    benchmark: str
    mode: str
    size_bytes: int
    goal: Goal

    @property
    def name(self) -> str:
        """As --cases takes it."""
        return f"{self.mode}-{self.size_bytes}"


CASES: Final = (
    Case("produce", "send", 100, Goal(600_000, 1.2, 1.8)),
    Case("produce", "many", 100, Goal(1_200_000, 0.4, 1.1)),
    Case("produce", "send", 1_000, Goal(200_000)),
    Case("produce", "many", 1_000, Goal(200_000)),
    Case("consume", "iterate", 100, Goal(900_000)),
    Case("consume", "poll_batch", 100, Goal(1_800_000)),
    Case("consume", "arrow", 100, Goal(5_000_000)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one client reached."""

    case: str
    records: int
    records_per_s: float
    mb_per_s: float
    client_cpu_s_per_million: float
    nodes_cpu_s_per_million: float
    p50_ms: float
    p99_ms: float
    goal: Goal
    load_average: float

    @property
    def all_cpu_s_per_million(self) -> float:
        """Of the client and of all nodes."""
        return self.client_cpu_s_per_million + self.nodes_cpu_s_per_million

    @property
    def missed(self) -> tuple[str, ...]:
        """The goals that are missed."""
        most = (
            ("client CPU", self.client_cpu_s_per_million, self.goal.client_cpu_s_per_million),
            ("CPU of all", self.all_cpu_s_per_million, self.goal.all_cpu_s_per_million),
        )
        return (
            *(("records/s",) if self.records_per_s < self.goal.records_per_s else ()),
            *(what for what, value, goal in most if goal is not None and value > goal),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--records", type=int, default=3_000_000, help="of 100 B; a third of 1 KB")
    parser.add_argument("--rounds", type=int, default=3, help="of each row, in turns")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--warm-memory-mb", type=int, default=0, metavar="MB", help="to touch before each row"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name in options.cases]
    rounds = run_all(cases, options.records, options.rounds, options.warm_memory_mb)
    best = [
        max((row for row in rounds if row.case == case.name), key=lambda row: row.records_per_s)
        for case in cases
    ]
    if options.json:
        print_json({"rows": [_told(row) for row in best], "rounds": [_told(row) for row in rounds]})
    else:
        show(best)
    return 1 if any(row.missed for row in best) else 0


def run_all(cases: Sequence[Case], records: int, rounds: int, warm_memory_mb: int) -> list[Row]:
    """Every case, in turns, each time with a client process of its own."""
    with local_cluster(_NODES, {"flush.policy": "os"}) as (cluster, _):
        reading = [case for case in cases if case.benchmark == "consume"]
        if reading:
            make_topic(cluster, "read")
            ask(cluster, "produce", "send", "read", records, _READ_SIZE_BYTES)
        rows = []
        for number in range(rounds):
            for case in cases:
                topic = "read"
                if case.benchmark == "produce":
                    # A topic of its own: what an earlier one has still to write is no part of it.
                    topic = f"written-{case.name}-{number}"
                    make_topic(cluster, topic)
                warm_memory(warm_memory_mb)
                count = records if case.size_bytes == _READ_SIZE_BYTES else max(1, records // 3)
                rows.append(measure(cluster, case, topic, count))
        return rows


def warm_memory(megabytes: int) -> None:
    """Have so much memory given to this machine, and free it again."""
    if megabytes:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, megabytes * 1024 * 1024, flags=flags).close()


def make_topic(cluster: LocalCluster, name: str) -> None:
    """A topic that all nodes have."""
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(name, _PARTITIONS, _NODES, _CONFIGS)


def measure(cluster: LocalCluster, case: Case, topic: str, records: int) -> Row:
    """Write or read so many records once."""
    nodes = node_pids(cluster)
    used = cpu_seconds(nodes)
    answer = ask(cluster, case.benchmark, case.mode, topic, records, case.size_bytes)
    used = cpu_seconds(nodes) - used
    return Row(
        case=case.name,
        records=answer["records"],
        records_per_s=answer["records_per_s"],
        mb_per_s=answer["mb_per_s"],
        client_cpu_s_per_million=answer["cpu_s_per_million"],
        nodes_cpu_s_per_million=used / answer["records"] * 1e6,
        p50_ms=answer["p50_ms"],
        p99_ms=answer["p99_ms"],
        goal=case.goal,
        load_average=os.getloadavg()[0],
    )


def ask(  # noqa: PLR0917 - a command line has so many parts.
    cluster: LocalCluster, benchmark: str, mode: str, topic: str, records: int, size_bytes: int
) -> dict[str, Any]:
    """The figures of one run of `penstock bench`. Ends the benchmark when it fails."""
    command = [
        *_COMMAND, benchmark, "--mode", mode, "--topic", topic, "--records", str(records),
        "--size", str(size_bytes), "--bootstrap", cluster.bootstrap, "--output", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])}: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def show(rows: Sequence[Row]) -> None:
    """Print the figures beside the goals."""
    columns = ("records/s", "goal", "client CPU-s/M", "goal ", "all CPU-s/M", "goal  ", "MB/s")
    more = ("p50 ms", "p99 ms", "load")
    print_table(
        ("case", *columns, *more, "missed"),
        [
            (
                row.case,
                f"{row.records_per_s:,.0f}",
                f"{row.goal.records_per_s:,.0f}",
                f"{row.client_cpu_s_per_million:.2f}",
                row.goal.client_cpu_s_per_million,
                f"{row.all_cpu_s_per_million:.2f}",
                row.goal.all_cpu_s_per_million,
                f"{row.mb_per_s:.0f}",
                f"{row.p50_ms:.1f}",
                f"{row.p99_ms:.1f}",
                f"{row.load_average:.1f}",
                row.missed or None,
            )
            for row in rows
        ],
        right=(*columns, *more),
    )


def _told(row: Row) -> dict[str, Any]:
    return {
        **asdict(row),
        "all_cpu_s_per_million": row.all_cpu_s_per_million,
        "missed": row.missed,
    }


if __name__ == "__main__":
    sys.exit(main())
