"""How long partitions stand still when a member of their consumer group is killed.

Three nodes (flush.policy=os), a topic of 64 partitions with three replicas, a writer that sends to
every partition at a steady pace, and a group of 8 members, each a process. In each round one of
them is killed (SIGKILL), and measured are

* taken over: from the kill until every partition of the dead member was read by another one, and
* others' pause: the longest time for which records of a partition that a living member held all
  the time were overdue, from the kill until all was taken over; beside it the same of the three
  seconds before the kill, when nothing happened.

Then another member starts in its place. Exit status 1 when in the median of the rounds the
partitions are taken over later than the session timeout and half a second, or the others pause
for more than 100 ms. A machine that has not the CPU for twelve processes shows pauses of its
own: compare those before the kill.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from children import Answer, Child
from fleet import wait_for

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Producer

TOPIC: Final = "group-failover"
GROUP: Final = "bench"
NODES: Final = 3
OVER_SESSION_SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 0.1
_CALM_SECONDS: Final = 3.0
_TURNS: Final = 8
_ASK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Round:
    """One kill and what it cost, in seconds."""

    number: int
    partitions: int
    taken_over: float
    others_pause: float
    pause_before: float


class SteadyWriter:
    """Sends one record to every partition each interval. Use as a context manager.

    It sends to neighbours at a time, which different members hold: one that stands still is then
    late with one of its partitions soon.
    """

    def __init__(self, bootstrap: str, partitions: int, interval_ms: int) -> None:
        self._partitions = partitions
        self._interval_seconds = interval_ms / 1000
        self._producer = Producer(bootstrap, acks="all", linger_ms=0, client_id="bench-writer")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SteadyWriter:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()

    def _run(self) -> None:
        due = time.monotonic()
        turn = 0
        while not self._stop.is_set():
            first, last = (self._partitions * edge // _TURNS for edge in (turn, turn + 1))
            for partition in range(first, last):
                self._producer.send(TOPIC, value=b"x" * 100, partition=partition)
            turn = (turn + 1) % _TURNS
            due = max(due + self._interval_seconds / _TURNS, time.monotonic())
            self._stop.wait(due - time.monotonic())


class Group:
    """The members. Use as a context manager; not safe between threads."""

    def __init__(self, bootstrap: str, options: argparse.Namespace, directory: Path) -> None:
        self._settings = {
            "bootstrap": bootstrap,
            "topic": TOPIC,
            "group": GROUP,
            "session_timeout_ms": options.session_timeout_ms,
        }
        self._options = options
        self._directory = directory
        self._started = 0
        self.members: list[Child] = []

    def __enter__(self) -> Group:
        for _ in range(self._options.members):
            self.add()
        return self

    def __exit__(self, *_exc: object) -> None:
        for member in self.members:
            member.stop()

    def add(self) -> None:
        """Start one more member."""
        self._started += 1
        log = self._directory / f"member-{self._started}.log"
        self.members.append(Child("group_member.py", dict(self._settings), log))

    def shares(self) -> list[set[int]]:
        """What each member reads, asked of all of them."""
        return [set(answer["held"]) for answer in self._ask_all("held")]

    def first_reads(self, partitions: set[int], after: float) -> dict[int, float]:
        """When each of these partitions was first read by any member after a time."""
        firsts: dict[int, float] = {}
        for answer in self._ask_all("first_reads", after=after):
            for name, at in answer["firsts"].items():
                if int(name) in partitions:
                    firsts[int(name)] = min(at, firsts.get(int(name), at))
        return firsts

    def longest_pause(self, shares: Sequence[set[int]], begin: float, end: float) -> float:
        """The longest time for which a partition's records were overdue at its member."""
        answers = self._ask_all("gaps", begin=begin, end=end)
        longest = max(
            answer["gaps"].get(str(partition), end - begin)
            for share, answer in zip(shares, answers, strict=True)
            for partition in share
        )
        return float(max(0.0, longest - self._options.interval_ms / 1000))

    def forget(self) -> None:
        """Have the members forget what is past."""
        self._ask_all("forget")

    def wait_settled(self) -> None:
        """Wait until each partition is read by one member, and all members have as many."""
        total, count = self._options.partitions, self._options.members

        def settled(shares: list[set[int]]) -> bool:
            sizes = [len(share) for share in shares]
            return (
                len(set().union(*shares)) == sum(sizes) == total
                and max(sizes) - min(sizes) <= 1
                and len(sizes) == count
            )

        wait_for(self.shares, settled, "the members to share all partitions")

    def _ask_all(self, what: str, **arguments: object) -> list[Answer]:
        for member in self.members:
            member.tell(what, **arguments)
        return [member.answer() for member in self.members]


def run_round(group: Group, number: int) -> Round:
    """Kill a member, wait until its partitions are read again, and start another in its place."""
    group.wait_settled()
    group.forget()
    calm_at = time.monotonic()
    time.sleep(_CALM_SECONDS)  # The time that the one after the kill is compared with.
    shares = group.shares()
    victim = group.members.pop(0)
    orphans = shares.pop(0)
    killed_at = time.monotonic()
    victim.kill()

    def read_again() -> dict[int, float]:
        time.sleep(_ASK_SECONDS)  # Asking costs the members time that they should read in.
        return group.first_reads(orphans, killed_at)

    firsts = wait_for(
        read_again, lambda found: found.keys() == orphans, "the partitions to be read again"
    )
    over_at = max(firsts.values())
    before = group.longest_pause(shares, calm_at, killed_at)
    after = group.longest_pause(shares, killed_at, over_at)
    group.add()
    return Round(number, len(orphans), over_at - killed_at, after, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=64)
    parser.add_argument("--session-timeout-ms", type=int, default=3_000)
    parser.add_argument(
        "--interval-ms", type=int, default=400, help="between a partition's records"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        layout = prepare_layout(
            work / "cluster",
            nodes=NODES,
            base_port=find_base_port(NODES, first=23_000),
            # Small records to 64 logs all the time measure little but the disk, if all are flushed.
            settings={"flush.policy": "os"},
        )
        with LocalCluster(layout) as cluster:
            cluster.start()
            cluster.wait_ready()
            rounds = _run(cluster, options, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return show(rounds, options)


def _run(cluster: LocalCluster, options: argparse.Namespace, work: Path) -> list[Round]:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, options.partitions, NODES, {"min.insync.replicas": "2"})
    with (
        SteadyWriter(cluster.bootstrap, options.partitions, options.interval_ms),
        Group(cluster.bootstrap, options, work) as group,
    ):
        return [run_round(group, number) for number in range(1, options.rounds + 1)]


def show(rounds: Sequence[Round], options: argparse.Namespace) -> int:
    """Print each round and the summary; the exit status."""
    goals = {
        "taken_over": options.session_timeout_ms / 1000 + OVER_SESSION_SECONDS,
        "others_pause": PAUSE_SECONDS,
    }
    summary = {}
    for name in ("taken_over", "others_pause", "pause_before"):
        values = [float(getattr(one, name)) for one in rounds]
        summary[name] = {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)}
    met = all(summary[name]["p50"] <= goal for name, goal in goals.items())
    if options.json:
        print_json(
            {
                "rounds": [asdict(one) for one in rounds],
                "summary": summary,
                "goals": goals,
                "met": met,
            }
        )
        return 0 if met else 1
    print_table(
        ("Round", "Partitions", "TakenOver ms", "Others' pause ms", "Pause before ms"),
        [
            (
                one.number,
                one.partitions,
                *(
                    f"{seconds * 1000:.0f}"
                    for seconds in (one.taken_over, one.others_pause, one.pause_before)
                ),
            )
            for one in rounds
        ],
        title=f"a member is killed; session timeout {options.session_timeout_ms} ms",
        right=("Round", "Partitions", "TakenOver ms", "Others' pause ms", "Pause before ms"),
    )
    print_table(
        ("Figure", "p50 ms", "max ms", "Goal ms"),
        [
            (
                name.replace("_", " "),
                f"{values['p50'] * 1000:.0f}",
                f"{values['max'] * 1000:.0f}",
                f"{goals[name] * 1000:.0f}" if name in goals else None,
            )
            for name, values in summary.items()
        ],
        right=("p50 ms", "max ms", "Goal ms"),
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
