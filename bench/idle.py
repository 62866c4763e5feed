"""What three nodes cost while nothing happens: CPU of one core together, memory together.

Three nodes with a topic of six partitions (three replicas each) that holds a few records and has
neither readers nor writers. Then three dedicated controllers, each by itself, with three brokers
that heartbeat. Exit status 1 above 8 % of one core or 250 MB for the nodes together, or above 2.5 %
of one core for any controller.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
from fleet import Fleet

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

GOAL_CPU_PERCENT: Final = 8.0
GOAL_RSS_MB: Final = 250.0
GOAL_CONTROLLER_CPU_PERCENT: Final = 2.5
# Others on the same two-core machine, three nodes each, as the goals were set beside them.
OTHERS: Final = (("Kafka", 13.0, 1136.0), ("RabbitMQ", 1.5, 341.0), ("NATS", 0.2, 54.0))
_SETTLE_SECONDS: Final = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        cpu_percent, rss_mb = measure_nodes(work / "cluster", options.seconds)
        controllers = measure_controllers(work, options.seconds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return show(cpu_percent, rss_mb, controllers, options.seconds, as_json=options.json)


def measure_nodes(directory: Path, seconds: float) -> tuple[float, float]:
    """CPU and memory of three nodes that play both roles, in sum."""
    layout = prepare_layout(directory, nodes=3, base_port=find_base_port(3, first=24_000))
    with LocalCluster(layout) as cluster:
        cluster.start()
        cluster.wait_ready()
        _fill(cluster.bootstrap)
        time.sleep(_SETTLE_SECONDS)
        nodes = [psutil.Process(cluster.pid(plan.node_id)) for plan in layout.plans]
        return measure(nodes, seconds)


def measure_controllers(directory: Path, seconds: float) -> dict[str, tuple[float, float]]:
    """CPU and memory of each of three dedicated controllers."""
    with Fleet(directory, brokers=3) as fleet:
        active = fleet.active_controller()
        processes = {node: psutil.Process(fleet.controller_pid(node)) for node in fleet.ports}
        time.sleep(_SETTLE_SECONDS)
        with ThreadPoolExecutor() as pool:
            figures = pool.map(lambda process: measure([process], seconds), processes.values())
        return {
            f"controller {node}{', active' if node == active else ''}": figure
            for node, figure in zip(processes, figures, strict=True)
        }


def measure(processes: Sequence[psutil.Process], seconds: float) -> tuple[float, float]:
    """CPU in percent of one core over the time, and resident memory in MB at its end, in sum."""
    begun, used_before = time.monotonic(), _cpu_seconds(processes)
    time.sleep(seconds)
    used = _cpu_seconds(processes) - used_before
    elapsed = time.monotonic() - begun
    rss = sum(process.memory_info().rss for process in processes)
    return used / elapsed * 100, rss / 1e6


def show(
    cpu_percent: float,
    rss_mb: float,
    controllers: Mapping[str, tuple[float, float]],
    seconds: float,
    *,
    as_json: bool,
) -> int:
    """Print the figures beside the goals and beside others; the exit status."""
    if as_json:
        print_json(
            {
                "seconds": seconds,
                "cpu_percent_of_one_core": round(cpu_percent, 2),
                "rss_mb": round(rss_mb, 1),
                "goal_cpu_percent": GOAL_CPU_PERCENT,
                "goal_rss_mb": GOAL_RSS_MB,
                "controllers": {
                    name: {"cpu_percent_of_one_core": round(cpu, 2), "rss_mb": round(rss, 1)}
                    for name, (cpu, rss) in controllers.items()
                },
                "goal_controller_cpu_percent": GOAL_CONTROLLER_CPU_PERCENT,
            }
        )
    else:
        rows = [("Penstock", cpu_percent, rss_mb), ("the goal", GOAL_CPU_PERCENT, GOAL_RSS_MB)]
        print_table(
            ("three nodes at rest", "CPU % of a core", "to ours", "RSS MB", "RSS to ours"),
            [
                (
                    name,
                    f"{cpu:.1f}",
                    f"{cpu / cpu_percent:.2f}",
                    f"{rss:.0f}",
                    f"{rss / rss_mb:.2f}",
                )
                for name, cpu, rss in (*rows, *OTHERS)
            ],
            right=("CPU % of a core", "to ours", "RSS MB", "RSS to ours"),
        )
        print_table(
            ("a dedicated controller at rest", "CPU % of a core", "RSS MB"),
            [
                *((name, f"{cpu:.1f}", f"{rss:.0f}") for name, (cpu, rss) in controllers.items()),
                ("the goal", f"{GOAL_CONTROLLER_CPU_PERCENT:.1f}", ""),
            ],
            right=("CPU % of a core", "RSS MB"),
        )
    dearest = max(cpu for cpu, _ in controllers.values())
    held = (
        cpu_percent < GOAL_CPU_PERCENT
        and rss_mb < GOAL_RSS_MB
        and dearest <= GOAL_CONTROLLER_CPU_PERCENT
    )
    return 0 if held else 1


def _fill(bootstrap: str) -> None:
    with AdminClient(bootstrap) as admin:
        admin.create_topic("idle", 6, 3)
    with Producer(bootstrap) as producer:
        for number in range(1000):
            producer.send("idle", value=b"x" * 100, key=str(number).encode())


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
