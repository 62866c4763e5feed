"""How long a record takes from ``send`` to its acknowledgement by every in-sync replica.

Three nodes, a topic of six partitions (three replicas each, min.insync.replicas=2), one asyncio
producer without linger that sends records of 100 bytes with acks=all at a steady rate, however
long the answers take; once with flush.policy=os and once with commit. A record's time begins
when it was due, so that a pause of the sender counts too; the sender runs on uvloop, since
asyncio's own loop wakes it up 0.6 ms late (median). The first seconds warm up and do not count.
The load average is printed beside the figures: they hold for cores that nothing else wants.
Exit status 1 when a goal is missed: p50 and p99 of 0.9 and 2 ms with os, 1.8 and 5 ms with commit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import uvloop
from children import percentile

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AsyncAdminClient, AsyncProducer, RecordMetadata

GOALS_MS: Final = {"os": (0.9, 2.0), "commit": (1.8, 5.0)}
"""p50 and p99 by flush.policy."""

TOPIC: Final = "latency"
_RECORD: Final = b"x" * 100


@dataclass(frozen=True, slots=True)
class Round:
    """One flush policy's figures."""

    policy: str
    transport: str
    records: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    nodes_cpu_us_a_record: float
    producer_cpu_us_a_record: float
    load_average: float

    @property
    def held(self) -> bool:
        """Whether the goals are met."""
        p50, p99 = GOALS_MS[self.policy]
        return self.p50_ms <= p50 and self.p99_ms <= p99


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=500, help="records a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="counted, of each round")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before, not counted")
    parser.add_argument("--policies", nargs="+", choices=list(GOALS_MS), default=list(GOALS_MS))
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=("frames", "grpc"),
        default=["frames"],
        help="replication.transport, one round of each policy with each",
    )
    parser.add_argument("--repeat", type=int, default=1, help="so often, in turns")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rounds = []
    # One loop for all: what gRPC has for a loop that was closed it hands to the next, which fails.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for policy, transport in _turns(options):
            work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
            settings = {"flush.policy": policy, "replication.transport": transport}
            try:
                rounds.append(measure(work / "cluster", settings, options, runner))
            finally:
                shutil.rmtree(work, ignore_errors=True)
    show(rounds, options.rate, as_json=options.json)
    return 0 if all(one.held for one in rounds) else 1


def _turns(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for policy in options.policies:
        for _ in range(options.repeat):
            for transport in options.transports:
                yield policy, transport


def measure(
    directory: Path,
    settings: Mapping[str, str],
    options: argparse.Namespace,
    runner: asyncio.Runner,
) -> Round:
    """Run a cluster with these settings and write to it."""
    layout = prepare_layout(
        directory,
        nodes=3,
        base_port=find_base_port(3, first=24_300),
        settings=settings,
    )
    with LocalCluster(layout) as cluster:
        cluster.start()
        cluster.wait_ready()
        nodes = [psutil.Process(cluster.pid(plan.node_id)) for plan in layout.plans]
        return runner.run(_write(cluster.bootstrap, nodes, settings, options))


async def _write(
    bootstrap: str,
    nodes: Sequence[psutil.Process],
    settings: Mapping[str, str],
    options: argparse.Namespace,
) -> Round:
    async with AsyncAdminClient(bootstrap) as admin:
        await admin.create_topic(TOPIC, 6, 3, {"min.insync.replicas": "2"})
    async with AsyncProducer(bootstrap, acks="all", linger_ms=0) as producer:
        rate = options.rate
        await send(producer, rate, round(rate * options.warm_up))
        used, own = _cpu_seconds(nodes), time.process_time()
        times = await send(producer, rate, round(rate * options.seconds))
        used, own = _cpu_seconds(nodes) - used, time.process_time() - own
    return Round(
        settings["flush.policy"],
        settings["replication.transport"],
        len(times),
        percentile(times, 50),
        percentile(times, 99),
        max(times),
        used * 1e6 / len(times),
        own * 1e6 / len(times),
        os.getloadavg()[0],
    )


async def send(producer: AsyncProducer, rate: int, records: int) -> list[float]:
    """Send so many records, each when it is due; the milliseconds that each one took."""
    times: list[float] = []
    failures: list[BaseException] = []
    # None is kept once it is done: what a collection of thousands takes is not Penstock's time.
    waiting: set[asyncio.Future[RecordMetadata]] = set()

    def ended(due: float, future: asyncio.Future[RecordMetadata]) -> None:
        times.append((time.perf_counter() - due) * 1000)
        waiting.discard(future)
        if (error := future.exception()) is not None:
            failures.append(error)

    begun = time.perf_counter()
    for number in range(records):
        due = begun + number / rate
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        future = await producer.send(TOPIC, _RECORD, partition=number % 6)
        waiting.add(future)
        future.add_done_callback(partial(ended, due))
    await asyncio.gather(*waiting)
    if failures:
        raise failures[0]
    return times


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def show(rounds: Sequence[Round], rate: int, *, as_json: bool) -> None:
    """Print the figures beside the goals."""
    if as_json:
        print_json({"rate": rate, "goals_ms": GOALS_MS, "rounds": [asdict(one) for one in rounds]})
        return
    columns = ("p50 ms", "goal p50", "p99 ms", "goal p99", "max ms", "nodes us", "producer us")
    print_table(
        ("flush.policy", "transport", *columns, "load"),
        [
            (
                one.policy,
                one.transport,
                f"{one.p50_ms:.2f}",
                f"{GOALS_MS[one.policy][0]:.1f}",
                f"{one.p99_ms:.2f}",
                f"{GOALS_MS[one.policy][1]:.1f}",
                f"{one.max_ms:.1f}",
                f"{one.nodes_cpu_us_a_record:.0f}",
                f"{one.producer_cpu_us_a_record:.0f}",
                f"{one.load_average:.1f}",
            )
            for one in rounds
        ],
        title=f"acks=all, {rate} records a second; CPU a record",
        right=(*columns, "load"),
    )


if __name__ == "__main__":
    sys.exit(main())
