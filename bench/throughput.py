"""How many bytes a second brokers take and give, and what CPU a gigabyte costs.

A client process that does gRPC alone sends requests that were encoded before (bench/raw_client.py):

- to one broker with acks=1;
- to three brokers, three replicas each, with acks=all, under flush.policy=os and under commit;
- and reads it all again from one broker, out of the page cache.

CPU is that of the client and of all brokers together. Exit status 1 when a goal is missed: 500 MB/s
and 1.7 CPU-s/GB with one broker; 200 MB/s and 8 CPU-s/GB with three under os, 60 % of that
speed under commit; 700 MB/s when reading. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from children import Answer, Child, cpu_seconds, stopping
from clusters import local_cluster, node_pids

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient

TOPIC: Final = "throughput"
COMMIT_TO_OS: Final = 0.6
_PARTITIONS: Final = 6
_CONFIGS: Final = {"segment.bytes": str(256 * 1024 * 1024)}


@dataclass(frozen=True, slots=True)
class Goal:
    """The least megabytes a second and the most CPU seconds a gigabyte."""

    mb_per_second: float
    cpu_s_per_gb: float | None = None


ONE_BROKER: Final = Goal(500, 1.7)
THREE_BROKERS: Final = Goal(200, 8)
READING: Final = Goal(700)


@dataclass(frozen=True, slots=True)
class Row:
    """What one round moved."""

    what: str
    megabytes: float
    mb_per_second: float
    client_cpu_s_per_gb: float
    brokers_cpu_s_per_gb: float
    goal_mb_per_second: float
    goal_cpu_s_per_gb: float | None
    load_average: float

    @property
    def cpu_s_per_gb(self) -> float:
        """Of the client and of the brokers."""
        return self.client_cpu_s_per_gb + self.brokers_cpu_s_per_gb

    @property
    def held(self) -> bool:
        """Whether the goals are met."""
        most = self.goal_cpu_s_per_gb
        return self.mb_per_second >= self.goal_mb_per_second and (
            most is None or self.cpu_s_per_gb <= most
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=3000, help="that each round moves")
    parser.add_argument("--request-bytes", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=3, help="requests to each broker")
    parser.add_argument("--readers", type=int, default=3, help="partitions read at a time")
    parser.add_argument("--answer-bytes", type=int, default=2_000_000, help="of a fetch")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rows = run_all(options)
    show(rows, as_json=options.json)
    return 0 if all(row.held for row in rows) else 1


def run_all(options: argparse.Namespace) -> list[Row]:
    """Every round, each on a cluster of its own; reading follows writing on one broker."""
    load = {
        "megabytes": options.megabytes,
        "request_bytes": options.request_bytes,
        "in_flight": options.in_flight,
    }
    rows = []
    with cluster_of(1, "os") as bench:
        rows.append(bench.produce("one broker, acks=1", ONE_BROKER, acks="1", **load))
        reading = {"answer_bytes": options.answer_bytes, "readers": options.readers}
        rows.append(bench.consume("one broker, consumed", READING, **reading))
    with cluster_of(3, "os") as bench:
        rows.append(bench.produce("three brokers, acks=all, os", THREE_BROKERS, acks="all", **load))
    to_os = Goal(COMMIT_TO_OS * rows[-1].mb_per_second)
    with cluster_of(3, "commit") as bench:
        rows.append(bench.produce("three brokers, acks=all, commit", to_os, acks="all", **load))
    return rows


class Bench:
    """A cluster with the topic, and a client process."""

    def __init__(self, cluster: LocalCluster, client: Child) -> None:
        self.cluster = cluster
        self._client = client

    def produce(self, what: str, goal: Goal, *, megabytes: int, **load: object) -> Row:
        """Write."""
        warm_up = min(100, megabytes)
        self._client.ask("produce", **load, megabytes=warm_up)  # Warms everything up.
        return self._measured(what, goal, "produce", {**load, "megabytes": megabytes})

    def consume(self, what: str, goal: Goal, **load: object) -> Row:
        """Read all that was written."""
        return self._measured(what, goal, "consume", load)

    def _measured(self, what: str, goal: Goal, request: str, load: dict[str, object]) -> Row:
        brokers = node_pids(self.cluster)
        used = cpu_seconds(brokers)
        answer: Answer = self._client.ask(request, **load)
        used = cpu_seconds(brokers) - used
        moved = answer["bytes"]
        return Row(
            what,
            moved / 1e6,
            moved / 1e6 / answer["seconds"],
            answer["cpu_seconds"] / moved * 1e9,
            used / moved * 1e9,
            goal.mb_per_second,
            goal.cpu_s_per_gb,
            os.getloadavg()[0],
        )


@contextmanager
def cluster_of(
    brokers: int,
    policy: str,
    partitions: int = _PARTITIONS,
    configs: Mapping[str, str] = _CONFIGS,
) -> Iterator[Bench]:
    """Run so many nodes; all hold replicas of all partitions."""
    with local_cluster(brokers, {"flush.policy": policy}) as (cluster, work):
        with AdminClient(cluster.bootstrap) as admin:
            acknowledged_by = {"min.insync.replicas": str(min(brokers, 2))}
            admin.create_topic(TOPIC, partitions, brokers, {**configs, **acknowledged_by})
            (topic,) = admin.describe_topics([TOPIC])
        leads: dict[str, list[int]] = {}
        addresses = {plan.node_id: plan.address for plan in cluster.layout.plans}
        for partition in topic.partitions:
            leads.setdefault(addresses[partition.leader], []).append(partition.partition)
        client = Child("raw_client.py", {"topic": TOPIC, "leads": leads}, work / "client.log")
        with stopping([client]):
            yield Bench(cluster, client)


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the figures beside the goals."""
    if as_json:
        print_json({"rows": [{**asdict(row), "cpu_s_per_gb": row.cpu_s_per_gb} for row in rows]})
        return
    columns = ("MB", "MB/s", "goal", "CPU-s/GB", "goal ", "of client", "of brokers", "load")
    print_table(
        ("what", *columns),
        [
            (
                row.what,
                f"{row.megabytes:.0f}",
                f"{row.mb_per_second:.0f}",
                f"{row.goal_mb_per_second:.0f}",
                f"{row.cpu_s_per_gb:.2f}",
                "" if row.goal_cpu_s_per_gb is None else f"{row.goal_cpu_s_per_gb:.1f}",
                f"{row.client_cpu_s_per_gb:.2f}",
                f"{row.brokers_cpu_s_per_gb:.2f}",
                f"{row.load_average:.1f}",
            )
            for row in rows
        ],
        right=columns,
    )


if __name__ == "__main__":
    sys.exit(main())
