"""`penstock replay` from one cluster to another, over real nodes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app
from penstock.client import AdminClient, Consumer, ConsumerRecord, Producer, TopicPartition
from tests.integration.cli.dev_cluster import COMMAND
from tests.integration.cluster import Cluster, environment_without_penstock
from tests.support import wait_until

pytestmark = pytest.mark.integration

T0_MS = 1_600_000_000_000


class Pair(NamedTuple):
    """Two clusters that know nothing of each other, each of one node."""

    here: Cluster
    there: Cluster

    def make(self, topic: str, here: int, there: int, **configs: str) -> None:
        for cluster, partitions in ((self.here, here), (self.there, there)):
            with AdminClient(cluster.bootstrap) as admin:
                named = {key.replace("_", "."): value for key, value in configs.items()}
                admin.create_topic(topic, partitions, 1, named if cluster is self.there else {})

    def fill(self, topic: str, count: int, partitions: int) -> None:
        with Producer(self.here.bootstrap) as producer:
            for number in range(count):
                producer.send(
                    topic,
                    b"%d" % number if number % 7 else None,
                    b"%d" % (number % 10) if number % 3 else None,
                    [("n", b"%d" % number), ("empty", None)] if number % 2 else None,
                    partition=number % partitions,
                    timestamp_ms=T0_MS + number,
                )

    def arguments(self, topic: str, *options: str) -> list[str]:
        return ["replay", topic, topic, "--to-bootstrap", self.there.bootstrap, *options]

    def run(self, topic: str, *options: str) -> Result:
        environment = {"PENSTOCK_BOOTSTRAP": self.here.bootstrap}
        return CliRunner().invoke(app, self.arguments(topic, *options), env=environment)

    def replay(self, topic: str, *options: str) -> Any:
        done = self.run(topic, *options, "--output", "json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def start(self, topic: str, *options: str) -> subprocess.Popen[bytes]:
        """The same in a process of its own, once it has copied something."""
        running = subprocess.Popen(
            [*COMMAND, *self.arguments(topic, *options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": self.here.bootstrap},
        )
        partition = TopicPartition(topic, 0)
        with AdminClient(self.there.bootstrap) as admin:
            wait_until(
                lambda: admin.list_offsets({partition: "latest"})[partition].offset >= 20,
                "some records are there",
                30.0,
            )
        return running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    clusters = [Cluster(tmp_path_factory.mktemp(name), 1) for name in ("here", "there")]
    try:
        for cluster in clusters:
            cluster.start()
        yield Pair(*clusters)
    finally:
        for cluster in clusters:
            cluster.close()


def contents(cluster: Cluster, topic: str, count: int) -> list[ConsumerRecord]:
    """All records of a topic, which has at least so many, by partition and offset."""
    found: list[ConsumerRecord] = []
    with Consumer(cluster.bootstrap, topics=topic, auto_offset_reset="earliest") as consumer:

        def all_there() -> bool:
            found.extend(consumer.poll(200))
            return len(found) >= count

        wait_until(all_there, f"{count} records of {topic}", 20.0)
        while records := consumer.poll(100):
            found.extend(records)
    return sorted(found, key=lambda record: (record.partition, record.offset))


def parts(records: list[ConsumerRecord], *, partition: bool = True) -> list[tuple[object, ...]]:
    """Everything of records but their offsets."""
    return [
        (r.partition if partition else None, r.timestamp_ms, r.key, r.value, r.headers)
        for r in records
    ]


def interrupted(running: subprocess.Popen[bytes]) -> str:
    """What a run says on standard error that is stopped with Ctrl-C."""
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=40)
    assert running.returncode == 130, errors
    return errors.decode()


def go_on(errors: str) -> Any:
    """What the command reports that goes on, run as it was told, but as fast as it can."""
    words = shlex.split(errors.partition(": penstock ")[2].strip())
    words[words.index("--rate") + 1] = "0"
    done = CliRunner().invoke(app, [*words, "--output", "json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_topic_is_the_same_in_the_other_cluster(pair: Pair) -> None:
    pair.make("same", 3, 3)
    pair.fill("same", 900, 3)
    report = pair.replay("same")
    assert (report["records"], report["complete"]) == (900, True)
    there = contents(pair.there, "same", 900)
    assert parts(there) == parts(contents(pair.here, "same", 900)), "in each partition in order"


def test_a_producer_chooses_where_there_are_more_or_fewer_partitions(pair: Pair) -> None:
    pair.make("mapped", 4, 2)
    pair.fill("mapped", 400, 4)
    refused = pair.run("mapped")
    assert refused.exit_code == 1
    assert "mapped has 2 partitions, and mapped has 4" in refused.stderr
    assert "next: choose --partition-by key" in refused.stderr
    assert pair.replay("mapped", "--partition-by", "key")["records"] == 400
    here, there = (contents(cluster, "mapped", 400) for cluster in pair)

    def by_key(records: list[ConsumerRecord], source: int) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for record in records:
            number = record.timestamp_ms - T0_MS
            if record.key is not None and number % 4 == source:
                found.setdefault(record.key, []).append(number)
        return found

    for source in range(4):
        assert by_key(there, source) == by_key(here, source), "the order of each key"
    keyed = {(record.key, record.partition) for record in there if record.key is not None}
    assert len(keyed) == 10, "each key in one partition"
    with Producer(pair.there.bootstrap) as producer:
        chosen = {producer.send("mapped", b"", key).result(20).partition for key, _ in [*keyed]}
    assert chosen == {partition for _, partition in keyed}
    assert Counter(parts(there, partition=False)) == Counter(parts(here, partition=False))


def test_a_range_is_copied_at_a_rate(pair: Pair) -> None:
    pair.make("ranged", 2, 2)
    pair.fill("ranged", 200, 2)
    with AdminClient(pair.here.bootstrap) as admin:
        admin.delete_records({TopicPartition("ranged", 0): 20})
    # Of partition 0 by offset, of partition 1 by time.
    options = ("--from", str(T0_MS + 40), "--to", str(T0_MS + 140), "--from-offset", "0=60")
    report = pair.replay("ranged", *options, "--to-offset", "0=65", "--rate", "100")
    assert report["records"] == 5 + 50
    assert report["seconds"] >= 0.5
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for record in contents(pair.there, "ranged", 55):
        numbers[record.partition].append(record.timestamp_ms - T0_MS)
    assert numbers == {0: list(range(120, 130, 2)), 1: list(range(41, 140, 2))}
    # From where the log begins now.
    report = pair.replay("ranged", "--to-offset", "0=30", "--to-offset", "1=0")
    assert [entry["start_offset"] for entry in report["partitions"]] == [20, 0]
    assert report["records"] == 10


def test_a_topic_may_have_times_of_its_own(pair: Pair) -> None:
    pair.make("stamped", 1, 1, message_timestamp_type="LogAppendTime")
    pair.fill("stamped", 10, 1)
    pair.replay("stamped")
    there = contents(pair.there, "stamped", 10)
    assert min(record.timestamp_ms for record in there) > T0_MS + 1_000_000
    here = contents(pair.here, "stamped", 10)
    assert [(r.key, r.value, r.headers) for r in there] == [
        (r.key, r.value, r.headers) for r in here
    ]


def test_ctrl_c_says_how_to_go_on_and_nothing_is_lost_or_doubled(pair: Pair) -> None:
    pair.make("resumed", 2, 2)
    pair.fill("resumed", 1_000, 2)
    errors = interrupted(pair.start("resumed", "--rate", "100"))
    assert f"--to-bootstrap {pair.there.bootstrap}" in errors
    assert "may be there already" not in errors
    # What is written meanwhile is not of this replay.
    pair.fill("resumed", 10, 2)
    report = go_on(errors)
    assert report["complete"] is True
    assert 0 < report["records"] < 1_000
    here = [r for r in contents(pair.here, "resumed", 1_010) if r.offset < 500]
    assert parts(contents(pair.there, "resumed", 1_000)) == parts(here)


def test_what_was_on_its_way_to_a_broker_that_died_comes_again(pair: Pair) -> None:
    pair.make("broken", 1, 1)
    pair.fill("broken", 2_000, 1)
    running = pair.start("broken", "--rate", "200")
    pair.there.nodes[1].kill()
    assert running.stderr is not None
    # The first line of its progress. What was sent since is on its way.
    assert b" records" in running.stderr.readline()
    errors = interrupted(running)
    pair.there.start()
    told = re.search(r"to go on; ([\d,]+) records? of these may be there already: ", errors)
    assert go_on(errors)["complete"] is True
    found = Counter(r.timestamp_ms - T0_MS for r in contents(pair.there, "broken", 2_000))
    assert set(found) == set(range(2_000)), "nothing is lost"
    again = found.total() - 2_000
    assert again <= (int(told[1].replace(",", "")) if told else 0)
