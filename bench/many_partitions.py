"""What a thousand partitions cost three nodes: at rest, in memory, and when a node comes back.

Three nodes, one topic, three replicas of each partition and a record in each. CPU and memory are
those of the three nodes together, once before the topic is there and once with it. Then one node is
stopped and started as an operator would, and one is killed and started; measured is how long it
takes from the start until every partition has all its replicas in sync again. Exit status 1 when
the nodes use 20 % of one core at rest, or when a restart takes 30 seconds.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
from fleet import wait_for
from idle import measure

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

GOAL_CPU_PERCENT: Final = 20.0
GOAL_RESTART_SECONDS: Final = 30.0
TOPIC: Final = "many"
_NODES: Final = 3
_STOP_SECONDS: Final = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of rest that are measured")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before each of these")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        layout = prepare_layout(
            work / "cluster", nodes=_NODES, base_port=find_base_port(_NODES, first=25_000)
        )
        with LocalCluster(layout) as cluster:
            cluster.start()
            cluster.wait_ready()
            figures = run(cluster, options.partitions, options.seconds, options.settle)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    show(figures, options.partitions, as_json=options.json)
    restarts = (figures["stopped_seconds"], figures["killed_seconds"])
    held = figures["cpu_percent"] < GOAL_CPU_PERCENT and max(restarts) <= GOAL_RESTART_SECONDS
    return 0 if held else 1


def run(
    cluster: LocalCluster, partitions: int, seconds: float, settle_seconds: float
) -> dict[str, float]:
    """All that is measured, in the order in which it happens."""
    time.sleep(settle_seconds)
    empty_cpu, empty_rss = measure(_nodes(cluster), seconds)
    with AdminClient(cluster.bootstrap) as admin:
        begun = time.monotonic()
        admin.create_topic(TOPIC, partitions, _NODES)
        created = time.monotonic() - begun
        with Producer(cluster.bootstrap) as producer:
            for number in range(partitions):
                producer.send(TOPIC, b"x" * 100, partition=number)
        written = time.monotonic() - begun
        time.sleep(settle_seconds)
        cpu, rss = measure(_nodes(cluster), seconds)
        return {
            "create_seconds": created,
            "written_seconds": written,
            "empty_cpu_percent": empty_cpu,
            "cpu_percent": cpu,
            "empty_rss_mb": empty_rss,
            "rss_mb": rss,
            "kb_a_replica": (rss - empty_rss) * 1000 / (partitions * _NODES),
            "stopped_seconds": restart(cluster, admin, 2, signal.SIGTERM),
            "killed_seconds": restart(cluster, admin, 3, signal.SIGKILL),
            "restarted_rss_mb": measure(_nodes(cluster), 1)[1],
        }


def _nodes(cluster: LocalCluster) -> list[psutil.Process]:
    return [psutil.Process(cluster.pid(plan.node_id)) for plan in cluster.layout.plans]


def restart(cluster: LocalCluster, admin: AdminClient, node_id: int, how: int) -> float:
    """End a node and start it; seconds from its start until no partition lacks a replica."""
    process = psutil.Process(cluster.pid(node_id))
    cluster.kill_node(node_id, how)
    process.wait(_STOP_SECONDS)
    wait_for(lambda: _in_sync(admin), lambda least: least < _NODES, "replicas out of sync")
    begun = time.monotonic()
    cluster.start_node(node_id)
    wait_for(lambda: _in_sync(admin), lambda least: least == _NODES, "all replicas in sync")
    return time.monotonic() - begun


def _in_sync(admin: AdminClient) -> int:
    """The fewest replicas in sync that a partition has."""
    (topic,) = admin.describe_topics([TOPIC])
    return min(len(partition.isr) for partition in topic.partitions)


def show(figures: dict[str, float], partitions: int, *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print_json({"partitions": partitions, **figures})
        return
    columns = ("CPU % of a core", "RSS MB", "KB a replica")
    print_table(
        ("three nodes at rest", *columns),
        [
            (
                "without",
                f"{figures['empty_cpu_percent']:.1f}",
                f"{figures['empty_rss_mb']:.0f}",
                "",
            ),
            (
                f"{partitions} partitions",
                f"{figures['cpu_percent']:.1f}",
                f"{figures['rss_mb']:.0f}",
                f"{figures['kb_a_replica']:.1f}",
            ),
            ("goal", f"{GOAL_CPU_PERCENT:.0f}", "", ""),
        ],
        right=columns,
    )
    print_table(
        ("what", "seconds"),
        [
            ("create the topic", f"{figures['create_seconds']:.2f}"),
            ("... and a record in each partition", f"{figures['written_seconds']:.2f}"),
            ("all in sync after a node's stop and start", f"{figures['stopped_seconds']:.2f}"),
            ("all in sync after SIGKILL and start", f"{figures['killed_seconds']:.2f}"),
            ("goal of both", f"{GOAL_RESTART_SECONDS:.0f}"),
        ],
        right=("seconds",),
    )


if __name__ == "__main__":
    sys.exit(main())
