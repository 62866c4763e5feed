"""What a scrape of a node with a thousand partitions takes, and what it holds up meanwhile.

One node with a hundred topics of ten partitions, or as --topics and --partitions say (each topic
has labels of its own to show). It is asked a small question fifty times a second, first alone and
then while it is scraped four times a second: what a question waits for longer then, the scrape
held up. Beside it stands what counting costs: microseconds of a call of what is counted for each
request. Exit status 1 when the median scrape takes longer than 100 ms, the worst question in a
hundred waits for 25 ms longer than without scrapes, or a count costs more than a microsecond.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
import timeit
import urllib.request
from collections.abc import Sequence
from typing import Final

import psutil
from clusters import local_cluster, node_pids
from prometheus_client import CollectorRegistry

from penstock.broker.topic_labels import TopicLabels
from penstock.broker.traffic_metrics import TrafficMetrics
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

GOAL_SCRAPE_MS: Final = 100.0
GOAL_HELD_UP_MS: Final = 25.0
GOAL_COUNT_US: Final = 1.0
_QUESTION_S: Final = 0.02
_SCRAPE_S: Final = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--topics", type=int, default=100, help="to share the partitions")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    figures = {
        "count_us": count_us(),
        **scrape(options.partitions, options.topics, options.seconds),
    }
    show(figures, as_json=options.json)
    held = (
        figures["scrape_p50_ms"] <= GOAL_SCRAPE_MS
        and figures["held_up_ms"] <= GOAL_HELD_UP_MS
        and figures["count_us"] <= GOAL_COUNT_US
    )
    return 0 if held else 1


def count_us() -> float:
    """Microseconds of what is counted of one request, whichever is dearest."""
    traffic = TrafficMetrics(CollectorRegistry(), TopicLabels(1000))
    observe = traffic.unary("Log.ListOffsets")
    number = 100_000
    calls = (lambda: observe(0.003), lambda: traffic.produced("orders", 1000, 10))
    return max(min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6 for call in calls)


def scrape(partitions: int, topics: int, seconds: float) -> dict[str, float]:
    """All that is measured at one node."""
    port = _free_port()
    settings = {"metrics.listen": f"127.0.0.1:{port}"}
    each = partitions // topics
    with local_cluster(1, settings) as (cluster, _), AdminClient(cluster.bootstrap) as admin:
        names = [f"topic-{number}" for number in range(topics)]
        for name in names:
            admin.create_topic(name, each, 1)
        with Producer(cluster.bootstrap) as producer:
            for name in names:
                for number in range(each):
                    producer.send(name, b"x" * 100, partition=number)
        node = psutil.Process(node_pids(cluster)[0])
        begun_cpu_s = _cpu_s(node)
        alone_ms = _asked_ms(admin, seconds)
        alone_cpu_s = _cpu_s(node) - begun_cpu_s
        took_ms: list[float] = []
        sizes_bytes: list[int] = []
        stop = threading.Event()

        def scrape_again() -> None:
            while not stop.wait(_SCRAPE_S):
                begun_s = time.perf_counter()
                sizes_bytes.append(_scraped_bytes(port))
                took_ms.append((time.perf_counter() - begun_s) * 1000)

        thread = threading.Thread(target=scrape_again)
        thread.start()
        beside_ms = _asked_ms(admin, seconds)
        stop.set()
        thread.join()
        scraped_cpu_s = _cpu_s(node) - begun_cpu_s - 2 * alone_cpu_s
        return {
            "partitions": each * topics,
            "topics": topics,
            "scrapes": len(took_ms),
            "scrape_p50_ms": statistics.median(took_ms),
            "scrape_max_ms": max(took_ms),
            "scrape_cpu_ms": max(0.0, scraped_cpu_s) / len(took_ms) * 1000,
            "size_kb": max(sizes_bytes) / 1000,
            "alone_p99_ms": alone_ms,
            "meanwhile_p99_ms": beside_ms,
            "held_up_ms": max(0.0, beside_ms - alone_ms),
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    used: float = times.user + times.system
    return used


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _scraped_bytes(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return len(answer.read())


def _asked_ms(admin: AdminClient, seconds: float) -> float:
    """How long the worst of a hundred small questions takes."""
    took = []
    end_s = time.perf_counter() + seconds
    while (begun_s := time.perf_counter()) < end_s:
        admin.describe_cluster()
        took.append((time.perf_counter() - begun_s) * 1000)
        time.sleep(_QUESTION_S)
    return statistics.quantiles(took, n=100)[-1]


def show(figures: dict[str, float], *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print_json(figures)
        return
    print_table(
        ("what", "measured", "goal"),
        [
            ("partitions / topics", f"{figures['partitions']:.0f} / {figures['topics']:.0f}", ""),
            ("a scrape, median ms", f"{figures['scrape_p50_ms']:.1f}", f"{GOAL_SCRAPE_MS:.0f}"),
            ("a scrape, worst ms", f"{figures['scrape_max_ms']:.1f}", ""),
            ("its CPU time in the node, ms", f"{figures['scrape_cpu_ms']:.1f}", ""),
            ("its size, KB", f"{figures['size_kb']:.0f}", ""),
            ("a question, p99 ms, without scrapes", f"{figures['alone_p99_ms']:.1f}", ""),
            ("the same meanwhile", f"{figures['meanwhile_p99_ms']:.1f}", ""),
            (
                "held up by scrapes, ms",
                f"{figures['held_up_ms']:.1f}",
                f"{GOAL_HELD_UP_MS:.0f}",
            ),
            ("counting a request, µs", f"{figures['count_us']:.2f}", f"{GOAL_COUNT_US:.0f}"),
        ],
        right=("measured", "goal"),
    )


if __name__ == "__main__":
    sys.exit(main())
