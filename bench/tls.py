"""What TLS costs: CPU for producing through three replicas, and for a commit of the metadata.

Clusters of three nodes, one with TLS and one without, are written to in turns: records of 1 KB,
acks=all, flush.policy=os (the disk would hide the difference), by one producer that shows a
certificate as the nodes do. Counted is the CPU of the nodes and that of the producer for each
megabyte; each record goes over the network three times. Then bench/quorum_commit.py's 64 clients
commit commands in a quorum of three, with TLS and without. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import quorum_commit

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

_RECORD: Final = bytes(range(256)) * 4
_TOPIC: Final = "load"
_CLIENTS: Final = 64
_WARM_UP_RECORDS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Produced:
    """One round of producing."""

    tls: bool
    mb_a_second: float
    nodes_ms_a_mb: float
    producer_ms_a_mb: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=150_000, help="of 1 KB, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round of commits")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        produced = produce(work, options.records, options.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    commits = [
        one
        for _ in range(options.rounds)
        for tls in (False, True)
        for one in quorum_commit.run([_CLIENTS], 1, options.seconds, tls=tls)
    ]
    show(produced, commits, as_json=options.json)
    return 0


def produce(directory: Path, records: int, rounds: int) -> list[Produced]:
    """Write to both clusters in turns, so that what else the machine does hits both alike."""
    found = []
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(_target(directory / f"tls-{tls}", tls=tls)) for tls in (False, True)
        ]
        for target in targets:
            target.write(_WARM_UP_RECORDS)
        for _ in range(rounds):
            found += [target.write(records) for target in targets]
    return found


class Target:
    """A running cluster, and the producer that writes to it."""

    def __init__(self, cluster: LocalCluster, producer: Producer, *, tls: bool) -> None:
        self._tls = tls
        self._producer = producer
        self._nodes = [psutil.Process(cluster.pid(plan.node_id)) for plan in cluster.layout.plans]

    def write(self, records: int) -> Produced:
        """Write, wait until all is acknowledged, and say what it took."""
        begun, nodes, own = time.monotonic(), _cpu_seconds(self._nodes), time.process_time()
        for _ in range(records):
            self._producer.send(_TOPIC, _RECORD)
        self._producer.flush()
        megabytes = records * len(_RECORD) / 1e6
        return Produced(
            self._tls,
            megabytes / (time.monotonic() - begun),
            (_cpu_seconds(self._nodes) - nodes) * 1000 / megabytes,
            (time.process_time() - own) * 1000 / megabytes,
        )


@contextlib.contextmanager
def _target(directory: Path, *, tls: bool) -> Any:
    layout = prepare_layout(
        directory,
        nodes=3,
        base_port=find_base_port(3, first=24_000 + 200 * tls),
        tls=tls,
        settings={"flush.policy": "os"},
    )
    files = layout.client_tls
    options: Any = {}
    if files is not None:
        options = {"tls_ca": files.ca, "tls_certificate": files.certificate, "tls_key": files.key}
    with LocalCluster(layout) as cluster:
        cluster.start()
        cluster.wait_ready()
        with AdminClient(cluster.bootstrap, **options) as admin:
            admin.create_topic(_TOPIC, partitions=6, replication_factor=3)
        with Producer(cluster.bootstrap, batch_size=131_072, linger_ms=5, **options) as producer:
            yield Target(cluster, producer, tls=tls)


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def show(
    produced: Sequence[Produced], commits: Sequence[quorum_commit.Round], *, as_json: bool
) -> None:
    """Print the medians beside one another."""
    if as_json:
        print_json(
            {"produce": [asdict(one) for one in produced], "commit": [asdict(c) for c in commits]}
        )
        return
    print_table(
        ("median of the rounds", "plain", "TLS", "ratio"),
        [
            _row("produce: nodes, CPU ms a MB", produced, "nodes_ms_a_mb"),
            _row("produce: producer, CPU ms a MB", produced, "producer_ms_a_mb"),
            _row("produce: MB/s", produced, "mb_a_second"),
            _row(f"commit, {_CLIENTS} clients: voters, CPU us", commits, "cpu_us_a_commit"),
            _row(f"commit, {_CLIENTS} clients: commits/s", commits, "commits_a_second"),
            _row(f"commit, {_CLIENTS} clients: p50 ms", commits, "p50_ms"),
        ],
        right=("plain", "TLS", "ratio"),
    )


def _row(name: str, rounds: Sequence[Any], figure: str) -> tuple[str, ...]:
    plain, secure = (
        statistics.median(getattr(one, figure) for one in rounds if one.tls is tls)
        for tls in (False, True)
    )
    return (name, f"{plain:.2f}", f"{secure:.2f}", f"{secure / plain:.2f}")


if __name__ == "__main__":
    sys.exit(main())
