"""How long writes stand still when a partition's leader is killed.

Three nodes, three partitions with three replicas each, and a Producer that sends to each partition
200 times a second with acks=all. Ten times: SIGKILL the leader of one partition, take the longest
time without an acknowledgement of that partition from then until a write that was sent after the
kill is acknowledged, start the node again, and wait until every replica is in sync. Exit status 1
when the median is more than 0.3 s, or more than 0.7 s of those that were the active controller as
well, or when a write fails.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer, RecordMetadata, TopicDescription

TOPIC: Final = "failover"
NODES: Final = 3
GOALS_SECONDS: Final = {"leader alone": 0.3, "leader and active controller": 0.7}
_SEND_EVERY_SECONDS: Final = 0.005
_PATIENCE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and what it cost."""

    number: int
    partition: int
    node_id: int
    was_controller: bool
    seconds: float


class Writer:
    """Writes to every partition all the time, and knows when each was acknowledged last."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(bootstrap, linger_ms=0, client_id="bench-failover")
        self._changed = threading.Condition()
        self._failures: list[str] = []
        # By partition: when each acknowledged record was sent, and when it was answered.
        self._acknowledged: dict[int, list[tuple[float, float]]] = {
            partition_id: [] for partition_id in range(NODES)
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def standstill(self, partition_id: int, killed_at: float) -> float:
        """The longest time in seconds without an acknowledgement that touches what follows a
        kill, up to that of the first write that was sent after it.
        """
        answers = self._acknowledged[partition_id]
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(sent > killed_at for sent, _ in answers), _PATIENCE_SECONDS
            ):
                raise SystemExit(f"no write to partition {partition_id} was acknowledged")
            end = min(answered for sent, answered in answers if sent > killed_at)
            times = sorted(answered for _, answered in answers if answered <= end)
            answers.clear()
        return max(
            (later - earlier for earlier, later in pairwise(times) if later > killed_at),
            default=end - killed_at,
        )

    def close(self) -> list[str]:
        """Stop; the reasons of writes that failed."""
        self._stop.set()
        self._thread.join()
        self._producer.close()
        return self._failures

    def _run(self) -> None:
        while not self._stop.wait(_SEND_EVERY_SECONDS):
            for partition_id in range(NODES):
                future = self._producer.send(TOPIC, value=b"x" * 100, partition=partition_id)
                future.add_done_callback(partial(self._settle, partition_id, time.monotonic()))

    def _settle(self, partition_id: int, sent: float, future: Future[RecordMetadata]) -> None:
        now = time.monotonic()
        error = future.exception()
        with self._changed:
            if error is not None:
                self._failures.append(str(error))
            else:
                self._acknowledged[partition_id].append((sent, now))
            self._changed.notify_all()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        layout = prepare_layout(
            work / "cluster", nodes=NODES, base_port=find_base_port(NODES, first=23_000)
        )
        with LocalCluster(layout) as cluster:
            cluster.start()
            cluster.wait_ready()
            kills = run_kills(cluster, options.kills)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return show(kills, as_json=options.json)


def run_kills(cluster: LocalCluster, count: int) -> list[Kill]:
    """Kill leaders, one after the other, each time with the whole cluster in sync."""
    kills: list[Kill] = []
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, NODES, NODES, {"min.insync.replicas": "2"})
        writer = Writer(cluster.bootstrap)
        try:
            for number in range(1, count + 1):
                _wait(lambda: _whole(admin), "every replica to be in sync and every node to lead")
                kills.append(_kill_once(cluster, admin, writer, number))
        finally:
            failures = writer.close()
        if failures:
            raise SystemExit(f"{len(failures)} writes failed; the first: {failures[0]}")
    return kills


def _kill_once(cluster: LocalCluster, admin: AdminClient, writer: Writer, number: int) -> Kill:
    partition_id = (number - 1) % NODES
    leader = _describe(admin).partitions[partition_id].leader
    was_controller = admin.describe_cluster().controller_id == leader
    killed_at = time.monotonic()
    cluster.kill_node(leader)
    seconds = writer.standstill(partition_id, killed_at)
    cluster.start_node(leader)
    cluster.wait_ready()
    return Kill(number, partition_id, leader, was_controller, seconds)


def show(kills: Sequence[Kill], *, as_json: bool) -> int:
    """Print each kill and the summary; the exit status."""
    groups = {
        "all": [kill.seconds for kill in kills],
        "leader alone": [kill.seconds for kill in kills if not kill.was_controller],
        "leader and active controller": [kill.seconds for kill in kills if kill.was_controller],
    }
    summary = {
        name: {
            "kills": len(values),
            "p50_ms": round(statistics.median(values) * 1000, 1),
            "max_ms": round(max(values) * 1000, 1),
            "goal_ms": GOALS_SECONDS[name] * 1000 if name in GOALS_SECONDS else None,
        }
        for name, values in groups.items()
        if values
    }
    missed = [
        name
        for name, goal in GOALS_SECONDS.items()
        if groups[name] and statistics.median(groups[name]) > goal
    ]
    if as_json:
        rows = [{field: getattr(kill, field) for field in kill.__slots__} for kill in kills]
        print_json({"kills": rows, "summary": summary, "missed": missed})
    else:
        print_table(
            ("Kill", "Partition", "Node", "ActiveController", "Milliseconds"),
            [
                (
                    k.number,
                    k.partition,
                    k.node_id,
                    "yes" if k.was_controller else "no",
                    f"{k.seconds * 1000:.0f}",
                )
                for k in kills
            ],
            title="longest time without an acknowledgement after SIGKILL",
            right=("Kill", "Partition", "Node", "Milliseconds"),
        )
        print_table(
            ("Killed", "Kills", "p50 ms", "max ms", "Goal ms"),
            [(name, *values.values()) for name, values in summary.items()],
            right=("Kills", "p50 ms", "max ms", "Goal ms"),
        )
    return 1 if missed else 0


def _describe(admin: AdminClient) -> TopicDescription:
    (topic,) = admin.describe_topics([TOPIC])
    return topic


def _whole(admin: AdminClient) -> bool:
    partitions = _describe(admin).partitions
    return (
        all(len(entry.isr) == NODES for entry in partitions)
        and len({entry.leader for entry in partitions}) == NODES
    )


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_PATIENCE_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
