"""How the controllers carry many partitions: time and memory from 1,000 to 100,000 of them.

Three dedicated controllers and five brokers, each a process; the brokers have no logs, but what
they are to the controllers is the real thing over real gRPC. Three replicas a partition, 1,000
partitions a topic (fewer where there are fewer). Measured at each size:

create      from the first request until every broker knows every partition
snapshot    a broker comes anew: until it has received everything
restart     a follower controller is killed and started: until it has applied everything
fail-over   the active controller is killed: until the next topic is committed
lost        a broker is killed: until every other knows new leaders of all it led
stall       the longest that the active controller left a caller without an answer, in all of it
memory      of the active controller, above that with no partition, after creation

Exit status 1 when a goal is missed at the largest size.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
from children import rss_mb
from fleet import Fleet

from penstock.cli.output import print_json, print_table

BROKERS: Final = 5
REPLICAS: Final = 3
PARTITIONS_A_TOPIC: Final = 1000
SIZES: Final = (1_000, 3_000, 10_000, 30_000, 100_000)
GOAL_FAIL_OVER_SECONDS: Final = 3.0
GOAL_BYTES_A_PARTITION: Final = 1024
_PROBE_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class Point:
    """One size. Seconds, and the active controller's memory."""

    partitions: int
    create_s: float
    snapshot_s: float
    snapshot_mb: float
    restart_s: float
    fail_over_s: float
    lost_s: float
    lost_leaderships: int
    create_stall_s: float
    lost_stall_s: float
    rss_mb: float
    bytes_a_partition: float


class Prober:
    """Asks a controller all the time how the quorum is; keeps the longest wait for an answer."""

    def __init__(self, fleet: Fleet, node_id: int) -> None:
        self._fleet = fleet
        self._node_id = node_id
        self._longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End; the longest wait in seconds."""
        self._stop.set()
        self._thread.join()
        return self._longest_s

    def _run(self) -> None:
        while not self._stop.wait(_PROBE_SECONDS):
            began_s = time.monotonic()
            with contextlib.suppress(grpc.RpcError):
                self._fleet.quorum(self._node_id)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    points = []
    for partitions in options.partitions:
        work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        try:
            with Fleet(work, brokers=BROKERS) as fleet:
                points.append(measure(fleet, partitions))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if not options.json:
            print(f"{partitions} partitions measured", file=sys.stderr)
    return show(points, as_json=options.json)


def measure(fleet: Fleet, partitions: int) -> Point:
    """Everything at one size, on a fresh cluster."""
    every, first = fleet.broker_ids, fleet.brokers[fleet.broker_ids[0]]
    active = fleet.active_controller()
    rss_before = rss_mb(fleet.controller_pid(active))

    a_topic = min(PARTITIONS_A_TOPIC, partitions)
    topics = -(-partitions // a_topic)
    prober = Prober(fleet, active)
    made = first.ask("create", topics=topics, partitions=a_topic, replicas=REPLICAS, name="topic")
    known = fleet.ask_all(every, "knows", partitions=topics * a_topic)
    create_s = max(answer["at"] for answer in known) - made["began"]
    create_stall_s = prober.stop()
    rss = rss_mb(fleet.controller_pid(active))

    snapshot = first.ask("snapshot", address=fleet.address(active))
    if snapshot["partitions"] != topics * a_topic:
        raise SystemExit(f"{snapshot['partitions']} partitions, not {topics * a_topic}")
    return Point(
        partitions=topics * a_topic,
        create_s=create_s,
        create_stall_s=create_stall_s,
        snapshot_s=snapshot["received"],
        snapshot_mb=snapshot["bytes"] / 1e6,
        restart_s=_restart(fleet, active),
        fail_over_s=_fail_over(fleet),
        **_lose_a_broker(fleet),
        rss_mb=rss,
        bytes_a_partition=(rss - rss_before) * 1e6 / (topics * a_topic),
    )


def _restart(fleet: Fleet, active: int) -> float:
    follower = next(node for node in fleet.ports if node != active)
    index = fleet.quorum(active).commit_index
    fleet.wait_applied(follower, index)
    fleet.kill_controller(follower)
    began_s = time.monotonic()
    fleet.start_controller(follower)
    return fleet.wait_applied(follower, index) - began_s


def _fail_over(fleet: Fleet) -> float:
    active, first = fleet.active_controller(), fleet.brokers[fleet.broker_ids[0]]
    fleet.ask_all(fleet.broker_ids, "unfenced", nodes=fleet.broker_ids)
    first.ask("begin_load", name="load", clients=1, replicas=REPLICAS)
    first.ask("answered_after", at=0.0)
    killed_s = fleet.kill_controller(active)
    seconds = first.ask("answered_after", at=killed_s)["at"] - killed_s
    first.ask("end_load")
    fleet.start_controller(active)
    fleet.active_controller()
    fleet.ask_all(fleet.broker_ids, "unfenced", nodes=fleet.broker_ids)
    return float(seconds)


def _lose_a_broker(fleet: Fleet) -> dict[str, float]:
    *others, victim = fleet.broker_ids
    led = fleet.brokers[victim].ask("led_by", node=victim)["count"]
    prober = Prober(fleet, fleet.active_controller())
    killed_s = fleet.kill_broker(victim)
    answers = fleet.ask_all(others, "led_without", node=victim)
    lost_s = max(answer["at"] for answer in answers) - killed_s
    return {"lost_s": lost_s, "lost_leaderships": led, "lost_stall_s": prober.stop()}


def show(points: Sequence[Point], *, as_json: bool) -> int:
    """Print the curve; the exit status."""
    largest = points[-1]
    missed = []
    if largest.fail_over_s > GOAL_FAIL_OVER_SECONDS:
        missed.append(f"fail-over within {GOAL_FAIL_OVER_SECONDS:g} s")
    if largest.bytes_a_partition > GOAL_BYTES_A_PARTITION:
        missed.append(f"{GOAL_BYTES_A_PARTITION} bytes a partition")
    if as_json:
        print_json({"points": [asdict(point) for point in points], "missed": missed})
    else:
        columns = (
            "Partitions", "Create s", "Snapshot s", "MB", "Restart s", "Fail-over s",
            "Broker lost s", "It led", "Stall s", "RSS MB", "Bytes a partition",
        )  # fmt: skip
        print_table(
            columns,
            [
                (
                    f"{point.partitions:,}",
                    f"{point.create_s:.2f}",
                    f"{point.snapshot_s:.2f}",
                    f"{point.snapshot_mb:.2f}",
                    f"{point.restart_s:.2f}",
                    f"{point.fail_over_s:.2f}",
                    f"{point.lost_s:.2f}",
                    f"{point.lost_leaderships:,}",
                    f"{max(point.create_stall_s, point.lost_stall_s):.2f}",
                    f"{point.rss_mb:.0f}",
                    f"{point.bytes_a_partition:.0f}",
                )
                for point in points
            ],
            title="three controllers, five brokers, three replicas a partition",
            right=columns,
        )
        for goal in missed:
            print(f"missed at {largest.partitions:,}: {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
