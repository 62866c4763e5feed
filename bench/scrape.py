"""What a scrape of a node with a thousand partitions takes, and what it holds up meanwhile.

One node with a topic of a partition each (which is what has most to show), scraped again and again. Measured are
the seconds of a scrape, its size, and what of the node's own histogram of late timers falls beyond each bound
meanwhile; beside it how long the metadata of the cluster take to ask for, with and without scrapes. And what counting
costs: microseconds of one call of what is counted for every request. Exit status 1 when a scrape takes
longer than 100 ms (the median), the loop was late by more than 25 ms, or a count costs more than a microsecond.
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

from clusters import local_cluster
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.topic_labels import TopicLabels
from penstock.broker.traffic_metrics import TrafficMetrics
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

GOAL_SCRAPE_MS: Final = 100.0
GOAL_DELAY_S: Final = 0.025
GOAL_COUNT_US: Final = 1.0
_AT_ONCE: Final = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--one-topic", action="store_true", help="all partitions in one topic")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    figures = {
        "count_us": count_us(),
        **scrape(options.partitions, options.seconds, one_topic=options.one_topic),
    }
    show(figures, as_json=options.json)
    held = (
        figures["scrape_p50_ms"] <= GOAL_SCRAPE_MS
        and figures["delay_s"] <= GOAL_DELAY_S
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


def scrape(partitions: int, seconds: float, *, one_topic: bool) -> dict[str, float]:
    """All that is measured at one node."""
    port = _free_port()
    settings = {"metrics.listen": f"127.0.0.1:{port}"}
    with local_cluster(1, settings) as (cluster, _), AdminClient(cluster.bootstrap) as admin:
        sizes = [partitions] if one_topic else [1] * partitions
        topics = {f"topic-{number}": size for number, size in enumerate(sizes)}
        for name, size in topics.items():
            admin.create_topic(name, size, 1)
        with Producer(cluster.bootstrap) as producer:
            for name, size in topics.items():
                for number in range(size):
                    producer.send(name, b"x" * 100, partition=number)
                if not one_topic:
                    producer.flush()
        alone_ms = _asked_ms(admin, seconds)
        before = _delays(port)
        took_ms: list[float] = []
        size_bytes = 0
        stop = threading.Event()

        def scrape_again() -> None:
            nonlocal size_bytes
            while not stop.is_set():
                begun_s = time.perf_counter()
                size_bytes = len(_scraped(port))
                took_ms.append((time.perf_counter() - begun_s) * 1000)

        thread = threading.Thread(target=scrape_again)
        thread.start()
        beside_ms = _asked_ms(admin, seconds)
        stop.set()
        thread.join()
        return {
            "partitions": partitions,
            "topics": len(topics),
            "scrapes": len(took_ms),
            "scrape_p50_ms": statistics.median(took_ms),
            "scrape_max_ms": max(took_ms),
            "size_kb": size_bytes / 1000,
            "delay_s": _worst(before, _delays(port)),
            "asked_alone_p99_ms": alone_ms,
            "asked_meanwhile_p99_ms": beside_ms,
        }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def _asked_ms(admin: AdminClient, seconds: float) -> float:
    """The 99th percentile of a small question, put one after the other for so long."""
    took = []
    end_s = time.perf_counter() + seconds
    while (begun_s := time.perf_counter()) < end_s:
        admin.describe_topics(["topic-0"])
        took.append((time.perf_counter() - begun_s) * 1000)
    return statistics.quantiles(took, n=_AT_ONCE)[-1]


def _delays(port: int) -> dict[float, float]:
    """How many of the loop's timers were at most so late, by bound."""
    name = "penstock_event_loop_delay_seconds_bucket"
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(_scraped(port))
        for sample in family.samples
        if sample.name == name
    }


def _worst(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound that no timer in between was later than."""
    total = after[float("inf")] - before[float("inf")]
    return min(bound for bound in after if after[bound] - before[bound] >= total)


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
            ("its size, KB", f"{figures['size_kb']:.0f}", ""),
            (
                "loop's worst delay meanwhile, at most ms",
                f"{figures['delay_s'] * 1000:.1f}",
                f"{GOAL_DELAY_S * 1000:.0f}",
            ),
            ("a question, p99 ms, no scrape", f"{figures['asked_alone_p99_ms']:.1f}", ""),
            ("a question, p99 ms, meanwhile", f"{figures['asked_meanwhile_p99_ms']:.1f}", ""),
            ("counting a request, µs", f"{figures['count_us']:.2f}", f"{GOAL_COUNT_US:.0f}"),
        ],
        right=("measured", "goal"),
    )


if __name__ == "__main__":
    sys.exit(main())
