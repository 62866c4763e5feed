"""Writers, a group whose members come and go, and nodes that are killed, for as long as one wants.

Three nodes, three idempotent writers, and a group of six members, each a process. Two members
stay; of the others one goes every few seconds, by turns in good order and by SIGKILL, and another
comes in its place. Every --kill-every seconds a node is killed (SIGKILL) and started again five
seconds later. In the end

* every value that was sent is in the log exactly once, and none of them failed;
* every value was processed by a member at least once; what came again is counted;
* the processes use no more memory in the last third of the time than in the one before.

Of each acknowledgement that took longer than a second it says when that was, of which partitions,
who led them, what was done to nodes before, and how busy the machine was. The death of a leader
takes some tenths of a second, more where it was the active controller (`make bench-failover`).

Exit status 1 when one of these does not hold. Memory is judged from five minutes on: before that
it is still growing into its caches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from children import Answer, Child, rss_mb
from fleet import wait_for
from soak_gaps import LONG_SECONDS, NodeEvent, Wait, gap_rows, gaps

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.groups import partition_lags
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Consumer, TopicPartition

TOPIC: Final = "soak"
GROUP: Final = "soak"
NODES: Final = 3
PARTITIONS: Final = 12
WRITERS: Final = 3
MEMBERS: Final = 6
STAYING: Final = 2
_DOWN_SECONDS: Final = 5.0
_JUDGE_MEMORY_SECONDS: Final = 300.0
_MOST_GROWTH: Final = 1.05
_MOST_GROWTH_MB: Final = 4.0


@dataclass(slots=True)
class Values:
    """How often each value of each writer was seen; a byte a value."""

    counts: dict[str, bytearray] = field(default_factory=dict)
    strange: int = 0

    def add(self, value: bytes) -> None:
        """Count one value."""
        writer, _, number = value.decode().rpartition("-")
        try:
            place = int(number)
        except ValueError:
            self.strange += 1
            return
        seen = self.counts.setdefault(writer, bytearray())
        if place >= len(seen):
            seen.extend(bytes(place + 1 - len(seen)))
        seen[place] = min(seen[place] + 1, 255)

    def compare(self, sent: dict[str, int]) -> tuple[int, int, int]:
        """Of what was sent: how many values are missing, how many came again, and what is not
        of it.
        """
        missing = again = 0
        for writer, count in sent.items():
            seen = self.counts.get(writer, bytearray())
            missing += count - len(seen[:count]) + seen[:count].count(0)
            again += sum(times - 1 for times in seen[:count] if times > 1)
        foreign = self.strange + sum(
            len(seen) - min(len(seen), sent.get(writer, 0)) for writer, seen in self.counts.items()
        )
        return missing, again, foreign


@dataclass(slots=True)
class Soak:
    """What goes on, and what was seen of it."""

    cluster: LocalCluster
    admin: AdminClient
    options: argparse.Namespace
    work: Path
    children: ExitStack
    writers: dict[str, Child] = field(default_factory=dict)
    members: dict[str, Child] = field(default_factory=dict)
    events: list[NodeEvent] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)
    departures: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def add_writer(self, name: str) -> None:
        """Start a writer."""
        given: Answer = {
            "bootstrap": self.cluster.bootstrap,
            "topic": TOPIC,
            "name": name,
            "rate": self.options.rate,
        }
        self.writers[name] = self._start("soak_writer.py", given, name)

    def add_member(self, name: str, *, asynchronous: bool) -> None:
        """Start a member."""
        given: Answer = {
            "bootstrap": self.cluster.bootstrap,
            "topic": TOPIC,
            "group": GROUP,
            "name": name,
            "asynchronous": asynchronous,
            "session_timeout_ms": 6_000,
            "notes": str(self.work / f"{name}.notes"),
        }
        self.members[name] = self._start("soak_member.py", given, name)

    def _start(self, script: str, given: Answer, name: str) -> Child:
        child = Child(script, given, self.work / f"{name}.log")
        self.children.callback(child.stop)
        return child

    def replace_member(self, number: int) -> None:
        """The oldest of those that do not stay goes, and another comes."""
        name = next(name for name in self.members if not name.startswith("staying"))
        child = self.members.pop(name)
        if number % 2:
            self.departures["killed"] += 1
            child.kill()
        else:
            self.departures["in good order"] += 1
            child.stop()
        self.add_member(f"member-{number}", asynchronous=number % 3 != 0)

    def measure(self) -> None:
        """Note how busy the machine is, and what each process that lives on uses; nodes that were
        just started do not count.
        """
        self.loads.append((time.monotonic(), os.getloadavg()[0]))
        named = {f"writer {name}": child.pid for name, child in self.writers.items()}
        named |= {
            f"member {name}": child.pid
            for name, child in self.members.items()
            if name.startswith("staying")
        }
        named |= {f"node {node_id}": self.cluster.pid(node_id) for node_id in self.cluster.running}
        for name, pid in named.items():
            self.memory.setdefault(name, []).append((self.elapsed, rss_mb(pid)))

    def check_alive(self) -> None:
        """End the soak when a process has ended that nobody ended."""
        for child in self.members.values():
            child.ask("alive")

    def kill_node(self, node_id: int) -> None:
        """SIGKILL a node, and note what it was."""
        (topic,) = self.admin.describe_topics([TOPIC])
        leaders = {entry.partition: entry.leader for entry in topic.partitions}
        was_controller = self.admin.describe_cluster().controller_id == node_id
        at = time.monotonic()
        self.cluster.kill_node(node_id)
        self.events.append(NodeEvent(at, node_id, "killed", was_controller, leaders))

    def start_node(self, node_id: int) -> None:
        """Start a node that was killed."""
        self.cluster.start_node(node_id)
        self.events.append(NodeEvent(time.monotonic(), node_id, "started"))

    def is_whole(self) -> bool:
        """Whether every replica is in sync."""
        (topic,) = self.admin.describe_topics([TOPIC])
        return all(len(entry.isr) == NODES for entry in topic.partitions)


def run(soak: Soak) -> None:
    """Let it go on for as long as was asked for."""
    options = soak.options
    for number in range(1, WRITERS + 1):
        soak.add_writer(f"w{number}")
    for number in range(1, MEMBERS + 1):
        name = f"staying-{number}" if number <= STAYING else f"member-{number}"
        soak.add_member(name, asynchronous=number % 2 == 0)
    nodes = cycle(range(1, NODES + 1))
    down = 0
    started = MEMBERS
    kill_at, start_at = options.kill_every, float("inf")
    member_at, measure_at = options.member_every, 2.0
    while soak.elapsed < options.seconds or down:
        now = soak.elapsed
        if now >= start_at:
            soak.start_node(down)
            down, start_at = 0, float("inf")
        if kill_at <= now < options.seconds and not down:
            wait_for(soak.is_whole, bool, "every replica to be in sync before the next kill")
            down = next(nodes)
            soak.kill_node(down)
            kill_at = soak.elapsed + options.kill_every
            start_at = soak.elapsed + _DOWN_SECONDS
        if now >= member_at:
            started += 1
            soak.replace_member(started)
            member_at += options.member_every
        if now >= measure_at:
            soak.check_alive()
            soak.measure()
            measure_at = now + 2.0
        time.sleep(0.1)  # What is due is looked for so often.


def finish(soak: Soak) -> dict[str, Any]:
    """Stop the writers, have all be read, and compare."""
    outcomes = {name: child.ask("finish") for name, child in soak.writers.items()}
    sent = {name: outcome["sent"] for name, outcome in outcomes.items()}
    soak.cluster.wait_ready()
    wait_for(soak.is_whole, bool, "every replica to be in sync in the end")

    def all_read() -> bool:
        (group,) = soak.admin.describe_groups([GROUP])
        lags = partition_lags(soak.admin, group)
        return len(lags) == PARTITIONS and all(entry.lag == 0 for entry in lags)

    wait_for(all_read, bool, "the group to have read and committed everything")
    for child in soak.members.values():
        child.stop()
    in_log = Values()
    for value in read_log(soak.cluster.bootstrap):
        in_log.add(value)
    processed = Values()
    for notes in soak.work.glob("*.notes"):
        for line in notes.read_bytes().splitlines():
            processed.add(line)
    lost, doubled, foreign = in_log.compare(sent)
    unprocessed, redelivered, _ = processed.compare(sent)
    return {
        "seconds": round(soak.elapsed, 1),
        "sent": sum(sent.values()),
        "failed": sum(outcome["failed"] for outcome in outcomes.values()),
        "failures": [reason for outcome in outcomes.values() for reason in outcome["failures"]][:5],
        "longest_acknowledgement_seconds": round(
            max(outcome["longest_seconds"] for outcome in outcomes.values()), 3
        ),
        "gaps": [
            asdict(entry)
            for entry in gaps(
                (Wait(*wait) for outcome in outcomes.values() for wait in outcome["waits"]),
                soak.events,
                soak.loads,
                soak.begun,
            )
        ],
        "node_kills": sum(event.what == "killed" for event in soak.events),
        "departures": dict(soak.departures),
        "lost": lost,
        "doubled_in_log": doubled,
        "foreign_in_log": foreign,
        "unprocessed": unprocessed,
        "redelivered": redelivered,
        "memory": [asdict(entry) for entry in growth(soak.memory, soak.options.seconds)],
    }


def read_log(bootstrap: str) -> Iterable[bytes]:
    """Every value of the log, once."""
    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(place) < end for place, end in ends.items()):
            for record in consumer.poll(1_000, 10_000):
                yield record.value


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process used in the middle and in the last third of the time, in the mean."""

    process: str
    middle_mb: float
    last_mb: float
    flat: bool


def growth(memory: dict[str, list[tuple[float, float]]], seconds: float) -> list[Growth]:
    """How the memory of each process developed. A node's is that of all its processes."""
    found = []
    for name, samples in sorted(memory.items()):
        middle = [mb for at, mb in samples if seconds / 3 <= at < seconds * 2 / 3]
        last = [mb for at, mb in samples if at >= seconds * 2 / 3]
        if middle and last:
            before, after = statistics.mean(middle), statistics.mean(last)
            flat = after <= before * _MOST_GROWTH + _MOST_GROWTH_MB
            found.append(Growth(name, round(before, 1), round(after, 1), flat))
    return found


def judge(figures: dict[str, Any], seconds: float) -> list[str]:
    """What does not hold, in words."""
    faults = [
        f"{name.replace('_', ' ')}: {figures[name]:,}"
        for name in ("failed", "lost", "doubled_in_log", "foreign_in_log", "unprocessed")
        if figures[name]
    ]
    if seconds >= _JUDGE_MEMORY_SECONDS:
        faults += [
            f"{entry['process']} grew from {entry['middle_mb']} to {entry['last_mb']} MB"
            for entry in figures["memory"]
            if not entry["flat"]
        ]
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=int, default=300, help="values a second of each writer")
    parser.add_argument("--kill-every", type=float, default=30, help="seconds between node kills")
    parser.add_argument("--member-every", type=float, default=8, help="seconds between departures")
    parser.add_argument("--keep", action="store_true", help="keep all data and logs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    layout = prepare_layout(
        work / "cluster", nodes=NODES, base_port=find_base_port(NODES, first=23_000)
    )
    with LocalCluster(layout) as cluster, ExitStack() as children:
        cluster.start()
        cluster.wait_ready()
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, NODES, {"min.insync.replicas": "2"})
            soak = Soak(cluster, admin, options, work, children)
            run(soak)
            figures = finish(soak)
    faults = judge(figures, options.seconds)
    if not (faults or options.keep):
        shutil.rmtree(work, ignore_errors=True)
    show(figures, faults, work, as_json=options.json)
    return 1 if faults else 0


def show(figures: dict[str, Any], faults: Sequence[str], work: Path, *, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print_json({**figures, "faults": list(faults)})
        return
    rows = [
        (name.replace("_", " "), value)
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    rows += [(f"members gone {how}", count) for how, count in figures["departures"].items()]
    print_table(("What", "Figure"), rows, right=("Figure",))
    print_table(
        ("Process", "Middle third MB", "Last third MB"),
        [(entry["process"], entry["middle_mb"], entry["last_mb"]) for entry in figures["memory"]],
        right=("Middle third MB", "Last third MB"),
    )
    if figures["gaps"]:
        print_table(
            ("At s", "Seconds", "Load", "Partitions", "Leaders before", "After"),
            gap_rows(figures["gaps"]),
            title=f"acknowledgements that took more than {LONG_SECONDS:.0f} s",
            right=("At s", "Seconds", "Load"),
        )
    for fault in [*faults, *figures["failures"]]:
        print(fault)
    if faults:
        print(f"everything that there is to look at is in {work}")


if __name__ == "__main__":
    sys.exit(main())
