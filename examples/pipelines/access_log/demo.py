"""Plays a real access log through the queries while a broker is killed, and checks every row.

``make demo`` runs it after the demo of the log itself. Exit status 0 means: what the queries wrote
is what plain Python makes of the same lines (``batch.py``), row for row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import batch
import outputs
import queries
from summary import show

from penstock.cli.demo.access_log import SAMPLE, read_lines
from penstock.cli.demo.report import say, start_clock
from penstock.cli.demo.stage import quiet_spark, run_in_temporary, three_nodes, wait_until
from penstock.cli.installation import require_broker
from penstock.cli.local_cluster import LocalCluster
from penstock.client import AdminClient, Producer, RecordMetadata
from penstock.pipeline.session import prepare_environment

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LATENESS: Final = timedelta(days=1)
MOST_HOURS_AHEAD: Final = 20
"""So much of the log, in its own time, is sent before the queries must have caught up.

It is less than the day for which windows wait, so that no line can be too late, however long a
broker is away and however slow this machine is.
"""
HOUR_S: Final = 0.05
"""An hour of the log in so many seconds: 119 lines on average."""
_STEP_S: Final = 120.0


class Feed:
    """Sends lines, and keeps where each of them went."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._sent: list[tuple[bytes, Future[RecordMetadata]]] = []

    def __len__(self) -> int:
        """How many lines were sent."""
        return len(self._sent)

    def send(self, lines: Sequence[str]) -> None:
        """Send lines, each keyed by its first word, the client's address."""
        for line in lines:
            client, value = line.partition(" ")[0].encode(), line.encode()
            self._sent.append((value, self._producer.send(self._topic, value=value, key=client)))

    def sent(self) -> list[batch.Sent]:
        """Every line in order, with the place that was acknowledged. Raises what sending raised."""
        self._producer.flush()
        places = [(line, future.result()) for line, future in self._sent]
        return [batch.Sent(line, place.partition, place.offset) for line, place in places]


@dataclass
class Play:
    """One run of the log through the queries."""

    cluster: LocalCluster
    feed: Feed
    running: list[StreamingQuery]
    killed: int = 0
    busy_at_kill: list[str] = field(default_factory=list)

    def play(self, hours: Sequence[Sequence[str]]) -> None:
        """Send all hours; a leader dies after two fifths, and is back after seven tenths."""
        ahead = max(1, min(MOST_HOURS_AHEAD, len(hours) // 4))
        for number, lines in enumerate(hours):
            if number and number % ahead == 0:
                queries.drain(self.running)
                say(f"{len(self.feed):,} lines: the queries have caught up")
            self.feed.send(lines)
            if number == len(hours) * 2 // 5:
                self._kill_leader()
            if number == len(hours) * 7 // 10:
                self.cluster.start_node(self.killed)
                say(f"started node {self.killed} again")
            time.sleep(HOUR_S)
        queries.drain(self.running)
        self.feed.send([closing_line(hours[-1][-1])])
        queries.drain(self.running)
        say(f"{len(self.feed):,} lines, the last one two days later: every window is closed")

    def _kill_leader(self) -> None:
        """Kill the leader of partition 0 while a query is in the middle of a batch."""
        with AdminClient(self.cluster.bootstrap, client_id="demo-admin") as admin:
            (topic,) = admin.describe_topics([queries.LINES])
        self.killed = topic.partitions[0].leader
        led = [entry.partition for entry in topic.partitions if entry.leader == self.killed]
        wait_until(self._idle, "a query to be in a batch", _STEP_S)
        self.cluster.kill_node(self.killed)
        say(
            f"killed node {self.killed} (SIGKILL) after {len(self.feed):,} lines; "
            f"it led partitions {', '.join(map(str, led))}; "
            f"in the middle of a batch: {', '.join(self.busy_at_kill)}"
        )

    def _idle(self) -> str:
        """Empty where a query is in a batch; which ones are is noted."""
        self.busy_at_kill = [
            query.name or ""
            for query in self.running
            if query.status["isTriggerActive"] and query.status["isDataAvailable"]
        ]
        return "" if self.busy_at_kill else "they are all idle"


def closing_line(last: str) -> str:
    """A line of two days after this one: what is open waits for later lines to be closed."""
    text = last.partition("[")[2].partition("]")[0]
    later = datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z") + 2 * LATENESS
    when = later.strftime("%d/%b/%Y:%H:%M:%S %z")
    return f'127.0.0.1 - - [{when}] "GET /later HTTP/1.1" 200 0 "-" "demo"'


def hours_of(lines: Sequence[str]) -> list[list[str]]:
    """The lines in parts of an hour each, as they are in the log."""
    return [list(part) for _, part in groupby(lines, lambda line: line.partition("[")[2][:14])]


def run(data: Path, work: Path, most_hours: int | None) -> bool:
    """Everything from the first node to the table; whether every row is as it should be."""
    prepare_environment()
    hours = hours_of(read_lines(data))[:most_hours]
    with three_nodes(work) as cluster:
        queries.make_topics(cluster.bootstrap)
        with (
            quiet_spark("access-log", work, queries.SETTINGS) as spark,
            Producer(cluster.bootstrap, client_id="demo-writer", acks="all") as producer,
        ):
            running = queries.AccessLog(spark, cluster.bootstrap, str(work)).start()
            say("queries run: " + ", ".join(query.name or "" for query in running))
            feed = Feed(producer, queries.LINES)
            Play(cluster, feed, running).play(hours)
            sent = feed.sent()
        expected = batch.work_out(sent, LATENESS)
        found = outputs.compare(cluster.bootstrap, work / queries.MINUTES, expected)
    show(found, expected)
    return all(one.agrees for one in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=SAMPLE, help="a gzip access log")
    parser.add_argument("--hours", type=int, help="play so many hours of it alone")
    options = parser.parse_args(arguments)
    require_broker()
    start_clock()
    return run_in_temporary(lambda work: run(options.data, work, options.hours))


if __name__ == "__main__":
    sys.exit(main())
