"""How long the cluster's metadata stand still when the active controller or a broker is killed.

Three dedicated controllers and four brokers, each a process; the brokers have no logs, but what
they are to the controllers is the real thing over real gRPC. Two parts:

1. Topics are created all the time. SIGKILL the active controller, take the time until a creation
   that was asked for after the kill is committed, start the process again; so many times. In the
   end every controller must know each topic that was acknowledged, and no name twice.
2. 3,000 partitions. SIGKILL a broker that leads a quarter of them or more, take the time until
   every other broker knows new leaders of all partitions.

Exit status 1 when a goal is missed, or a topic is lost or doubled.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fleet import Fleet, wait_for

from penstock.cli.output import print_json, print_table

GOAL_P50_SECONDS: Final = 0.5
GOAL_MAX_SECONDS: Final = 1.2
GOAL_BROKER_SECONDS: Final = 0.5
BROKERS: Final = 3
PARTITIONS: Final = 3000
REPLICAS: Final = 3
_CLIENTS: Final = 8
_TOPICS: Final = 10


@dataclass(frozen=True, slots=True)
class ControllerKills:
    """Part 1: the seconds of each kill, and what became of the topics."""

    seconds: list[float]
    acknowledged: int
    known: int
    lost: list[str]
    doubled: list[str]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class BrokerKill:
    """Part 2: one kill."""

    led: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of the active controller")
    parser.add_argument("--broker-kills", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        with _fleet(work, "controllers") as fleet:
            controller = kill_controllers(fleet, options.kills)
        brokers = []
        for number in range(options.broker_kills):
            with _fleet(work, f"brokers-{number}") as fleet:
                brokers.append(kill_broker(fleet))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return show(controller, brokers, as_json=options.json)


def _fleet(work: Path, name: str) -> Fleet:
    directory = work / name
    directory.mkdir()
    return Fleet(directory, brokers=BROKERS)


def kill_controllers(fleet: Fleet, kills: int) -> ControllerKills:
    """Part 1."""
    first = fleet.brokers[fleet.broker_ids[0]]
    first.ask("begin_load", name="load", clients=_CLIENTS, replicas=REPLICAS)
    first.ask("answered_after", at=0.0)
    seconds = []
    for _ in range(kills):
        active = fleet.active_controller()
        killed_s = fleet.kill_controller(active)
        seconds.append(first.ask("answered_after", at=killed_s)["at"] - killed_s)
        fleet.start_controller(active)
        index = fleet.quorum(fleet.active_controller()).commit_index
        fleet.wait_applied(active, index)
    acknowledged = first.ask("end_load")["topics"]
    active = fleet.active_controller()
    wait_for(
        lambda: {fleet.quorum(node).applied_index for node in fleet.ports},
        lambda indexes: len(indexes) == 1,
        "all controllers to have applied the same",
    )
    lost: set[str] = set()
    doubled: set[str] = set()
    known = 0
    for node in fleet.ports:
        topics = first.ask("snapshot", address=fleet.address(node))["topics"]
        known = len(topics)
        lost.update(set(acknowledged).difference(topics))
        doubled.update(topic for topic in topics if topics.count(topic) > 1)
    return ControllerKills(seconds, len(acknowledged), known, sorted(lost), sorted(doubled))


def kill_broker(fleet: Fleet) -> BrokerKill:
    """Part 2, once."""
    first = fleet.brokers[fleet.broker_ids[0]]
    made = PARTITIONS // _TOPICS
    first.ask("create", topics=_TOPICS, partitions=made, replicas=REPLICAS, name="topic")
    fleet.ask_all(fleet.broker_ids, "knows", partitions=_TOPICS * made)
    *others, victim = fleet.broker_ids
    led = fleet.brokers[victim].ask("led_by", node=victim)["count"]
    killed_s = fleet.kill_broker(victim)
    answers = fleet.ask_all(others, "led_without", node=victim)
    return BrokerKill(led, max(answer["at"] for answer in answers) - killed_s)


def show(controller: ControllerKills, brokers: Sequence[BrokerKill], *, as_json: bool) -> int:
    """Print both parts; the exit status."""
    missed = []
    if controller.p50 > GOAL_P50_SECONDS or max(controller.seconds) > GOAL_MAX_SECONDS:
        missed.append(f"controller killed: p50 {GOAL_P50_SECONDS:g} s, max {GOAL_MAX_SECONDS:g} s")
    if controller.lost or controller.doubled:
        missed.append("no topic is lost or doubled")
    if statistics.median(kill.seconds for kill in brokers) > GOAL_BROKER_SECONDS:
        missed.append(f"broker killed: {GOAL_BROKER_SECONDS:g} s")
    if as_json:
        print_json(
            {
                "controller": {**asdict(controller), "p50_seconds": controller.p50},
                "broker": [asdict(kill) for kill in brokers],
                "missed": missed,
            }
        )
        return 1 if missed else 0
    broker_seconds = [kill.seconds for kill in brokers]
    rows = [
        ("active controller", controller.seconds, "the next topic is committed"),
        (f"broker that led {brokers[0].led:,}", broker_seconds, "all brokers know new leaders"),
    ]
    print_table(
        ("Killed", "Kills", "p50 s", "max s", "until"),
        [
            (killed, len(seconds), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", what)
            for killed, seconds, what in rows
        ],
        right=("Kills", "p50 s", "max s"),
    )
    print(
        f"{controller.acknowledged:,} topics acknowledged, {controller.known:,} there; "
        f"{len(controller.lost)} lost, {len(controller.doubled)} doubled"
    )
    for goal in missed:
        print(f"missed: {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
