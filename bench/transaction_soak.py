"""Transactions while nodes, writers and processors are killed, until there were enough of them.

Three nodes; writers, each with its transactional id, that put transactions of --size values over
three partitions into one topic and abort every tenth on purpose; and a group of processors that
read what is committed and write it into a second topic, with their positions in the transactions.
By turns a node, a writer and a processor is killed (SIGKILL) every few seconds and started again:
coordinators, leaders, clients. In the end

* of every transaction that its writer knows to be committed every value is read exactly once, of
  every aborted one none, of one whose writer was killed in its midst all or none;
* every value that is read in the first topic is read exactly once in the second;
* no transaction is open: every log can be read to its end, and no coordinator has one.

Exit status 1 when one of these does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from children import Answer, Child
from fleet import wait_for
from transaction_verdict import Read, differences, judge, read_notes

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.groups import partition_lags
from penstock.cli.local_cluster import LocalCluster
from penstock.cli.output import print_json, print_table
from penstock.client import AdminClient, Consumer, TopicPartition

SOURCE: Final = "transactions"
TARGET: Final = "processed"
GROUP: Final = "processors"
NODES: Final = 3
PARTITIONS: Final = 6
_DOWN_SECONDS: Final = 5.0
_TIMEOUT_MS: Final = 10_000
_KINDS: Final = ("node", "writer", "processor", "node", "writer and processor")


@dataclass(slots=True)
class Soak:
    """What goes on, and what was seen of it."""

    cluster: LocalCluster
    admin: AdminClient
    options: argparse.Namespace
    work: Path
    children: ExitStack
    writers: dict[str, Child] = field(default_factory=dict)
    processors: dict[str, Child] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS[:3], 0))
    written: dict[int, int] = field(default_factory=dict)  # By process, of those that are gone too.
    again: dict[int, int] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    @property
    def transactions(self) -> int:
        """How many were ended, as far as their processes have told."""
        return sum(self.written.values())

    def start_writer(self, name: str) -> None:
        """Start a writer, perhaps again."""
        self.writers[name] = self._start(
            "transaction_writer.py",
            name,
            topic=SOURCE,
            partitions=PARTITIONS,
            size=self.options.size,
            notes=str(self.work / f"{name}.notes"),
        )

    def start_processor(self, name: str) -> None:
        """Start a processor, perhaps again."""
        self.processors[name] = self._start(
            "transaction_processor.py",
            name,
            topic=SOURCE,
            target=TARGET,
            group=GROUP,
            session_timeout_ms=6_000,
            most=self.options.size * 20,
        )

    def _start(self, script: str, name: str, **given: object) -> Child:
        shared: Answer = {
            "bootstrap": self.cluster.bootstrap,
            "name": name,
            "transaction_timeout_ms": _TIMEOUT_MS,
        }
        child = Child(script, {**shared, **given}, self.work / f"{name}.log")
        self.children.callback(child.stop)
        return child

    def kill_writer(self, name: str) -> None:
        """SIGKILL, and another process with the same transactional id."""
        self.writers[name].kill()
        self.kills["writer"] += 1
        self.start_writer(name)

    def kill_processor(self, name: str) -> None:
        """SIGKILL, and another process with the same transactional id."""
        self.processors[name].kill()
        self.kills["processor"] += 1
        self.start_processor(name)

    def look(self) -> None:
        """Ask all processes how far they are; ends the soak when one has failed."""
        for child in (*self.writers.values(), *self.processors.values()):
            self._note(child, child.ask("progress"))

    def finish(self, children: dict[str, Child]) -> None:
        """Have processes end what they are at."""
        for child in children.values():
            child.tell("finish")
        for child in children.values():
            self._note(child, child.answer())

    def _note(self, child: Child, answer: Answer) -> None:
        self.written[child.pid] = answer["written"]
        self.again[child.pid] = answer.get("again", 0)

    def is_whole(self) -> bool:
        """Whether every replica is in sync."""
        topics = self.admin.describe_topics([SOURCE, TARGET])
        return all(len(entry.isr) == NODES for topic in topics for entry in topic.partitions)


def run(soak: Soak) -> None:
    """Let it go on until there were enough transactions."""
    options = soak.options
    for number in range(1, options.writers + 1):
        soak.start_writer(f"writer-{number}")
    for number in range(1, options.processors + 1):
        soak.start_processor(f"processor-{number}")
    nodes, kinds = cycle(range(1, NODES + 1)), cycle(_KINDS)
    writers, processors = cycle(list(soak.writers)), cycle(list(soak.processors))
    down, start_at = 0, float("inf")
    kill_at, look_at = options.kill_every, 1.0
    while soak.transactions < options.transactions or down:
        now = soak.elapsed
        if now >= start_at:
            soak.cluster.start_node(down)
            down, start_at = 0, float("inf")
        if now >= kill_at and not down:
            kind = next(kinds)
            if kind == "node":
                wait_for(soak.is_whole, bool, "every replica to be in sync before the next kill")
                down = next(nodes)
                soak.cluster.kill_node(down)
                soak.kills["node"] += 1
                start_at = soak.elapsed + _DOWN_SECONDS
            if "writer" in kind:
                soak.kill_writer(next(writers))
            if "processor" in kind:
                soak.kill_processor(next(processors))
            kill_at = soak.elapsed + options.kill_every
        if now >= look_at:
            soak.look()
            look_at = now + 1.0
        time.sleep(0.1)  # What is due is looked for so often.


def finish(soak: Soak) -> dict[str, Any]:
    """Stop the writers, have all be processed, and compare."""
    soak.finish(soak.writers)
    seconds = soak.elapsed
    soak.cluster.wait_ready()
    wait_for(soak.is_whole, bool, "every replica to be in sync in the end")
    wait_for(lambda: open_ends(soak), lambda found: not found, "no transaction to be open")

    def all_read() -> bool:
        (group,) = soak.admin.describe_groups([GROUP])
        lags = partition_lags(soak.admin, group)
        return len(lags) == PARTITIONS and unprocessed(soak) == 0

    wait_for(all_read, bool, "the group to have processed everything")
    soak.finish(soak.processors)
    source, target = (Read(soak.options.size), Read(soak.options.size))
    for topic, read in ((SOURCE, source), (TARGET, target)):
        for values in read_log(soak.cluster.bootstrap, topic):
            read.add(values)
    notes = {path.stem: read_notes(path.read_text()) for path in sorted(soak.work.glob("*.notes"))}
    verdict = judge(notes, source)
    return {
        "seconds": round(seconds, 1),
        "transactions": soak.transactions,
        "kills": soak.kills,
        "began_anew": sum(soak.again.values()),
        "values": source.count,
        **asdict(verdict),
        "unprocessed": 0,
        "processed_twice": 0,
        **differences(source, target),
        "foreign_processed": target.strange,
        "open": open_ends(soak),
        "faults": verdict.faults,
    }


def unprocessed(soak: Soak) -> int:
    """How many values are read in the first topic and not yet in the second, or the other way."""
    source, target = (
        sum(len(values) for values in read_log(soak.cluster.bootstrap, topic))
        for topic in (SOURCE, TARGET)
    )
    return source - target


def open_ends(soak: Soak) -> list[str]:
    """The partitions that can't be read to their end, as a transaction is open there."""
    partitions = [
        TopicPartition(topic, number) for topic in (SOURCE, TARGET) for number in range(PARTITIONS)
    ]
    ends = []
    for level in ("read_committed", "read_uncommitted"):
        with Consumer(soak.cluster.bootstrap, isolation_level=level) as consumer:  # type: ignore[arg-type]
            ends.append(consumer.end_offsets(partitions))
    return [str(place) for place in partitions if ends[0][place] != ends[1][place]]


def read_log(bootstrap: str, topic: str) -> Iterator[list[bytes]]:
    """Every value of a topic that is committed, once."""
    with Consumer(
        bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    ) as consumer:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(place) < end for place, end in ends.items()):
            yield [record.value for record in consumer.poll(1_000, 10_000)]


def faults_of(figures: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    names = ("unprocessed", "processed_twice", "foreign_processed")
    found = [f"{name.replace('_', ' ')}: {figures[name]:,}" for name in names if figures[name]]
    found += [f"a transaction is open in {place}" for place in figures["open"]]
    return [*figures["faults"], *found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transactions", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=9, help="values of a transaction")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=6, help="seconds between kills")
    parser.add_argument("--keep", action="store_true", help="keep all data and logs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="penstock-transactions-"))
    layout = prepare_layout(
        work / "cluster", nodes=NODES, base_port=find_base_port(NODES, first=24_000)
    )
    with LocalCluster(layout) as cluster, ExitStack() as children:
        cluster.start()
        cluster.wait_ready()
        with AdminClient(cluster.bootstrap) as admin:
            for topic in (SOURCE, TARGET):
                admin.create_topic(topic, PARTITIONS, NODES, {"min.insync.replicas": "2"})
            soak = Soak(cluster, admin, options, work, children)
            run(soak)
            figures = finish(soak)
    faults = faults_of(figures)
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
    rows += [(f"{kind} killed", count) for kind, count in figures["kills"].items()]
    print_table(("What", "Figure"), rows, right=("Figure",))
    for fault in [*faults, *figures["examples"]]:
        print(fault)
    if faults:
        print(f"everything that there is to look at is in {work}")


if __name__ == "__main__":
    sys.exit(main())
