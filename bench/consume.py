"""How many records a second a consumer hands out, and what CPU a million of them cost it.

A topic of a local cluster of three nodes is filled with records of 100 bytes, in batches of the
size that producers make by themselves, and read from its beginning again and again, each time by a
new group in one process: by iteration, by ``poll_batch`` and by ``fetch_arrow``.

CPU is that of the client, and of all nodes together. Exit status 1 when a goal is missed, by the
best of the rounds: 900,000 records a second by iteration, 1,800,000 by ``poll_batch``, 5,000,000
by ``fetch_arrow``. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from children import Child, cpu_seconds, stopping
from clusters import local_cluster, node_pids

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient

TOPIC: Final = "consumed"
GOALS: Final[Mapping[str, int]] = {
    "iterate": 900_000,
    "poll_batch": 1_800_000,
    "fetch_arrow": 5_000_000,
}
_CONFIGS: Final = {"segment.bytes": str(256 * 1024 * 1024), "min.insync.replicas": "2"}
_NODES: Final = 3


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of reading reached."""

    how: str
    records: int
    records_per_s: float
    client_cpu_s_per_million: float
    nodes_cpu_s_per_million: float
    goal_records_per_s: int | None
    load_average: float

    @property
    def held(self) -> bool:
        """Whether the goal is met."""
        return self.goal_records_per_s is None or self.records_per_s >= self.goal_records_per_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--record-bytes", type=int, default=100)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--how", nargs="+", choices=[*GOALS, "poll"], default=[*GOALS], help="ways of reading"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rows = run_all(options)
    best = [
        max((row for row in rows if row.how == how), key=lambda row: row.records_per_s)
        for how in options.how
    ]
    if options.json:
        print_json({"goals": GOALS, "rounds": [asdict(row) for row in rows]})
    else:
        show(best)
    return 0 if all(row.held for row in best) else 1


def run_all(options: argparse.Namespace) -> list[Row]:
    """Every way of reading, in turns."""
    with filling_client(options.partitions) as (cluster, client):
        records = client.ask(
            "fill",
            records=options.records,
            record_bytes=options.record_bytes,
            batch_bytes=options.batch_bytes,
        )["records"]
        return [
            measured(cluster, client, how, records)
            for _ in range(options.rounds)
            for how in options.how
        ]


def measured(cluster: LocalCluster, client: Child, how: str, records: int) -> Row:
    """Read it all once."""
    nodes = node_pids(cluster)
    used = cpu_seconds(nodes)
    answer: dict[str, Any] = client.ask("read", how=how, records=records)
    used = cpu_seconds(nodes) - used
    return Row(
        how,
        records,
        records / answer["seconds"],
        answer["cpu_seconds"] / records * 1e6,
        used / records * 1e6,
        GOALS.get(how),
        os.getloadavg()[0],
    )


@contextmanager
def filling_client(partitions: int) -> Iterator[tuple[LocalCluster, Child]]:
    """Three nodes with the topic, and a client process."""
    with local_cluster(_NODES, {"flush.policy": "os"}) as (cluster, work):
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions, _NODES, _CONFIGS)
            (topic,) = admin.describe_topics([TOPIC])
        leads: dict[str, list[int]] = {}
        addresses = {plan.node_id: plan.address for plan in cluster.layout.plans}
        for partition in topic.partitions:
            leads.setdefault(addresses[partition.leader], []).append(partition.partition)
        given = {"topic": TOPIC, "leads": leads, "bootstrap": cluster.bootstrap}
        client = Child("consuming_client.py", given, work / "client.log")
        with stopping([client]):
            yield cluster, client


def show(rows: Sequence[Row]) -> None:
    """Print the figures beside the goals."""
    columns = ("records", "records/s", "goal", "client CPU-s/million", "nodes'", "load")
    print_table(
        ("how", *columns),
        [
            (
                row.how,
                f"{row.records:,}",
                f"{row.records_per_s:,.0f}",
                "" if row.goal_records_per_s is None else f"{row.goal_records_per_s:,}",
                f"{row.client_cpu_s_per_million:.3f}",
                f"{row.nodes_cpu_s_per_million:.3f}",
                f"{row.load_average:.1f}",
            )
            for row in rows
        ],
        right=columns,
    )


if __name__ == "__main__":
    sys.exit(main())
