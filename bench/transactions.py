"""What transactions cost: those who write them, those who read them, and the cluster.

Three nodes, three replicas, acks=all, flush.policy as --policy says:

- transactions of 100 records over three partitions, one after the other, of one producer and of ten
  at once (one asyncio loop): how many a second, how long one takes from its begin until its commit
  has returned, and the CPU seconds of this process and all nodes for 1,000 of them;
- records a second of one producer in transactions of 10,000, beside the same without;
- records a second of a consumer that reads what the transactions wrote, with read_committed and
  with read_uncommitted.

docs/internals/performance.md has the goals. The load average is printed beside the figures: they
hold for cores that nothing else wants. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import uvloop
from children import cpu_seconds, percentile
from clusters import local_cluster, node_pids

from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AsyncAdminClient, AsyncConsumer, AsyncProducer, TopicPartition
from penstock.client.config import IsolationLevel

_PARTITIONS: Final = 3
_SMALL: Final = 100
_LARGE: Final = 10_000
_RECORD: Final = b"x" * 100
_WARM_UP: Final = 20


@dataclass(frozen=True, slots=True)
class Small:
    """Transactions of 100 records."""

    producers: int
    transactions: int
    transactions_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_thousand: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Records that were written, or read."""

    what: str
    records: int
    records_per_s: float
    cpu_s_per_million: float
    load_average: float


class Watch:
    """Time that passes, and the CPU time of this process and of all nodes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._nodes = node_pids(cluster)
        self._cpu_s = self._used()
        self._begun = time.perf_counter()

    def _used(self) -> float:
        return cpu_seconds(self._nodes) + time.process_time()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._begun

    @property
    def cpu_s(self) -> float:
        """Used since it was made."""
        return self._used() - self._cpu_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=2_000, help="of 100 records, each row")
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--records", type=int, default=1_000_000, help="in each row of a flow")
    parser.add_argument("--policy", choices=("os", "commit"), default="os", help="flush.policy")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    # One loop for all: what gRPC has for a loop that was closed it hands to the next, which fails.
    with (
        local_cluster(3, {"flush.policy": options.policy}) as (cluster, _),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        small = [
            runner.run(many_small(cluster, producers, options.transactions))
            for producers in options.producers
        ]
        flows = runner.run(compare(cluster, options.records))
    show(small, flows, as_json=options.json)
    return 0


async def make_topic(cluster: LocalCluster, name: str) -> None:
    """A topic that all nodes have."""
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        configs = {"segment.bytes": 256 * 1024 * 1024, "min.insync.replicas": 2}
        await admin.create_topic(name, _PARTITIONS, 3, configs)


async def many_small(cluster: LocalCluster, producers: int, transactions: int) -> Small:
    """So many transactions of 100 records, shared by so many producers."""
    topic = f"small-{producers}"
    await make_topic(cluster, topic)
    each = max(1, transactions // producers)
    writers = [
        AsyncProducer(cluster.bootstrap, transactional_id=f"small-{producers}-{number}")
        for number in range(producers)
    ]
    try:
        await asyncio.gather(*(write_small(writer, topic, _WARM_UP) for writer in writers))
        watch = Watch(cluster)
        times = await asyncio.gather(*(write_small(writer, topic, each) for writer in writers))
        seconds, cpu_s = watch.seconds, watch.cpu_s
    finally:
        for writer in writers:
            await writer.close()
    every = [taken for some in times for taken in some]
    return Small(
        producers=producers,
        transactions=len(every),
        transactions_per_s=len(every) / seconds,
        p50_ms=percentile(every, 50),
        p99_ms=percentile(every, 99),
        cpu_s_per_thousand=cpu_s / len(every) * 1_000,
        load_average=os.getloadavg()[0],
    )


async def write_small(producer: AsyncProducer, topic: str, transactions: int) -> list[float]:
    """Write so many, one after the other; the milliseconds that each took."""
    times = []
    for _ in range(transactions):
        begun = time.perf_counter()
        async with producer.transaction():
            for partition in range(_PARTITIONS):
                count = len(range(partition, _SMALL, _PARTITIONS))
                await producer.send_many(topic, [_RECORD] * count, partition=partition)
        times.append((time.perf_counter() - begun) * 1_000)
    return times


async def compare(cluster: LocalCluster, records: int) -> list[Flow]:
    """Write with and without transactions, and read what the transactions wrote in both ways."""
    transactions = max(1, records // _LARGE)

    async def plainly(producer: AsyncProducer, topic: str) -> None:
        await producer.send_many(topic, [_RECORD] * _LARGE)

    async def in_one(producer: AsyncProducer, topic: str) -> None:
        async with producer.transaction():
            await producer.send_many(topic, [_RECORD] * _LARGE)

    ways: list[tuple[str, str | None, Callable[[AsyncProducer, str], Awaitable[None]]]] = [
        ("written without transactions", None, plainly),
        (f"written in transactions of {_LARGE:,}", "flow", in_one),
    ]
    flows = []
    for what, transactional_id, write in ways:
        topic = f"flow-{transactional_id or 'plain'}"
        await make_topic(cluster, topic)
        async with AsyncProducer(cluster.bootstrap, transactional_id=transactional_id) as producer:
            await write(producer, topic)  # Warms everything up.
            await producer.flush()
            watch = Watch(cluster)
            for _ in range(transactions):
                await write(producer, topic)
            await producer.flush()
            flows.append(flow(what, transactions * _LARGE, watch))
    levels: list[IsolationLevel] = ["read_uncommitted", "read_committed"]
    for level in levels:
        watch = Watch(cluster)
        count = await read(cluster, "flow-flow", level, (transactions + 1) * _LARGE)
        flows.append(flow(f"read with {level}", count, watch))
    return flows


async def read(cluster: LocalCluster, topic: str, level: IsolationLevel, records: int) -> int:
    """Read so many records from the beginning."""
    count = 0
    async with AsyncConsumer(cluster.bootstrap, isolation_level=level) as consumer:
        await consumer.assign([TopicPartition(topic, number) for number in range(_PARTITIONS)])
        await consumer.seek_to_beginning()
        while count < records:
            batches = await consumer.poll_batch(30_000, max_records=10_000)
            if not batches:
                raise SystemExit(f"{level}: only {count} of {records} records came")
            count += sum(map(len, batches.values()))
    return count


def flow(what: str, records: int, watch: Watch) -> Flow:
    """The figures of what was watched."""
    return Flow(
        what, records, records / watch.seconds, watch.cpu_s / records * 1e6, os.getloadavg()[0]
    )


def show(small: Sequence[Small], flows: Sequence[Flow], *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        rows = {"small": [asdict(one) for one in small], "flows": [asdict(one) for one in flows]}
        print_json(rows)
        return
    columns = ("producers", "transactions", "tx/s", "p50 ms", "p99 ms", "all CPU-s/1,000", "load")
    print_table(
        columns,
        [
            (
                one.producers,
                one.transactions,
                f"{one.transactions_per_s:,.0f}",
                f"{one.p50_ms:.2f}",
                f"{one.p99_ms:.2f}",
                f"{one.cpu_s_per_thousand:.2f}",
                f"{one.load_average:.1f}",
            )
            for one in small
        ],
        title=f"transactions of {_SMALL} records over {_PARTITIONS} partitions, acks=all",
        right=columns,
    )
    numbers = ("records", "records/s", "all CPU-s/M", "load")
    print_table(
        ("what", *numbers),
        [
            (
                one.what,
                f"{one.records:,}",
                f"{one.records_per_s:,.0f}",
                f"{one.cpu_s_per_million:.2f}",
                f"{one.load_average:.1f}",
            )
            for one in flows
        ],
        title="records of 100 bytes",
        right=numbers,
    )


if __name__ == "__main__":
    sys.exit(main())
