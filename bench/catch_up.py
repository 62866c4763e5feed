"""What copying partitions to other brokers costs those who write meanwhile.

Three nodes; a producer writes to one topic (three replicas) at a steady rate with acks=all, as
bench/produce_latency.py does. Measured is how long its acknowledgements take at first, and then
while another topic is moved: every partition of that gets another second replica, which copies all
of it, so that --megabytes go over the network each time; once for each rate of
replication.catchup.max.bytes.per.second, 0 for none.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from children import percentile
from produce_latency import TOPIC, send

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AsyncAdminClient, AsyncProducer, TopicPartition

_BULK: Final = "bulk"
_PARTITIONS: Final = 3
_NODES: Final = (1, 2, 3)
_RATE_KEY: Final = "replication.catchup.max.bytes.per.second"
_RECORD: Final = bytes(1_000_000)


@dataclass(frozen=True, slots=True)
class Round:
    """How long acknowledgements took while something was copied, or nothing (rate -1)."""

    catch_up_mb_per_second: float
    copied_mb: float
    seconds: float
    records: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=100, help="records a second")
    parser.add_argument("--megabytes", type=int, default=500, help="to copy in each round")
    parser.add_argument("--limits", type=int, nargs="+", default=[16, 64, 0], help="MB a second")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        layout = prepare_layout(
            work / "cluster", nodes=3, base_port=find_base_port(3, first=24_600)
        )
        with LocalCluster(layout) as cluster:
            cluster.start()
            cluster.wait_ready()
            rounds = asyncio.run(
                measure(cluster.bootstrap, options.rate, options.megabytes, options.limits)
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    show(rounds, options.rate, as_json=options.json)
    return 0


async def measure(bootstrap: str, rate: int, megabytes: int, limits: Sequence[int]) -> list[Round]:
    """One round without a copy, then one for each limit."""
    async with AsyncAdminClient(bootstrap) as admin, AsyncProducer(bootstrap, linger_ms=0) as small:
        await admin.create_topic(TOPIC, 6, 3, {"min.insync.replicas": "2"})
        await admin.create_topic(_BULK, _PARTITIONS, 2, {"min.insync.replicas": "1"})
        async with AsyncProducer(bootstrap, max_request_size=2_000_000) as large:
            for number in range(megabytes):
                await large.send(_BULK, _RECORD, partition=number % _PARTITIONS)
            await large.flush()
        await send(small, rate, 3 * rate)
        begun = time.monotonic()
        times = await send(small, rate, 10 * rate)
        rounds = [_round(-1, 0, time.monotonic() - begun, times)]
        for limit in limits:
            await admin.alter_cluster_configs({_RATE_KEY: limit * 1_000_000})
            await _move(admin)
            rounds.append(await _while_moving(admin, small, rate, megabytes, limit))
    return rounds


async def _move(admin: AsyncAdminClient) -> None:
    """Give each partition the node that has no replica of it in the place of the follower."""
    (topic,) = await admin.describe_topics([_BULK])
    await admin.alter_partition_reassignments(
        {
            TopicPartition(_BULK, number): [
                partition.leader,
                next(node for node in _NODES if node not in partition.replicas),
            ]
            for number, partition in enumerate(topic.partitions)
        }
    )


async def _while_moving(
    admin: AsyncAdminClient, producer: AsyncProducer, rate: int, megabytes: int, limit: int
) -> Round:
    begun = time.monotonic()
    times: list[float] = []
    while await admin.list_partition_reassignments():
        times += await send(producer, rate, max(rate // 2, 1))
    return _round(limit, megabytes, time.monotonic() - begun, times)


def _round(limit: float, copied_mb: float, seconds: float, times: Sequence[float]) -> Round:
    p50, p99 = percentile(times, 50), percentile(times, 99)
    return Round(limit, copied_mb, seconds, len(times), p50, p99, max(times))


def show(rounds: Sequence[Round], rate: int, *, as_json: bool) -> None:
    """Print the rounds beside the one without a copy."""
    if as_json:
        print_json({"rate": rate, "rounds": [asdict(one) for one in rounds]})
        return
    columns = ("MB", "seconds", "p50 ms", "p99 ms", "p99 to idle", "max ms")
    names = {-1: "nothing is copied", 0: "copied without a limit"}
    print_table(
        ("limit of a broker", *columns),
        [
            (
                names.get(
                    round(one.catch_up_mb_per_second),
                    f"{one.catch_up_mb_per_second:.0f} MB a second",
                ),
                f"{one.copied_mb:.0f}",
                f"{one.seconds:.1f}",
                f"{one.p50_ms:.2f}",
                f"{one.p99_ms:.2f}",
                f"{one.p99_ms / rounds[0].p99_ms:.2f}",
                f"{one.max_ms:.1f}",
            )
            for one in rounds
        ],
        title=f"acks=all, {rate} records a second",
        right=columns,
    )


if __name__ == "__main__":
    sys.exit(main())
