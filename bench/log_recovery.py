"""How long a broker takes to start with a large log, and how much of it it reads.

One node with one partition is filled (flush.policy=os, so that as little as possible is known to be
on the disk), stopped as an operator would and started again; then some more is written to it, it is
killed and started again. Read is what the process asked the kernel for until it was ready, from the
page cache or not. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import psutil
from throughput import ONE_BROKER, Bench, cluster_of

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table

_NODE: Final = 1
_PATIENCE_SECONDS: Final = 600.0
_AFTER_MB: Final = 500


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the node."""

    after: str
    ready_seconds: float
    cpu_seconds: float
    read_mb: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=10_000, help="that the log holds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    with cluster_of(1, "os", partitions=1, configs={}) as bench:
        first = start(bench.cluster, "the first time (nothing is there)")
        _fill(bench, options.megabytes)
        clean = start(bench.cluster, "a clean stop")
        _fill(bench, min(_AFTER_MB, options.megabytes))
        bench.cluster.kill_node(_NODE)
        killed = start(bench.cluster, "SIGKILL")
    show([first, clean, killed], options.megabytes, as_json=options.json)
    return 0


def _fill(bench: Bench, megabytes: int) -> None:
    load = {"megabytes": megabytes, "request_bytes": 1_000_000, "in_flight": 3, "acks": "1"}
    bench.produce("", ONE_BROKER, **load)


def start(cluster: LocalCluster, after: str) -> Start:
    """Stop the node unless it was killed, and start it."""
    if _NODE in cluster.running:
        cluster.stop(_PATIENCE_SECONDS)
    begun = time.monotonic()
    cluster.start_node(_NODE)
    cluster.wait_ready(_PATIENCE_SECONDS)
    took = time.monotonic() - begun
    node = psutil.Process(cluster.pid(_NODE))
    return Start(after, took, sum(node.cpu_times()[:2]), node.io_counters().read_chars / 1e6)


def show(starts: Sequence[Start], megabytes: int, *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print_json({"megabytes": megabytes, "starts": [asdict(one) for one in starts]})
        return
    columns = ("ready after s", "CPU s", "read MB")
    print_table(
        ("start after", *columns),
        [
            (one.after, f"{one.ready_seconds:.2f}", f"{one.cpu_seconds:.2f}", f"{one.read_mb:.0f}")
            for one in starts
        ],
        title=f"a log of {megabytes} MB, flush.policy=os",
        right=columns,
    )


if __name__ == "__main__":
    sys.exit(main())
