"""Topics deleted and made anew under clients of real nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    Producer,
    RecordMetadata,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


class Writer:
    """Sends to a topic every 2 ms, whatever happens, and notes what was acknowledged."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.sent = 0
        self.acknowledged: dict[int, RecordMetadata] = {}
        self.refused = 0  # Sends that raised at once.
        self._producer = Producer(cluster.bootstrap)
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            number = self.sent = self.sent + 1
            try:
                future = self._producer.send(self._topic, b"%d" % number)
            except UnknownTopicOrPartitionError:
                self.refused += 1
                continue
            future.add_done_callback(lambda done, number=number: self._note(number, done))

    def _note(self, number: int, done: object) -> None:
        assert hasattr(done, "exception")
        if done.exception() is None:
            assert hasattr(done, "result")
            self.acknowledged[number] = done.result()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._producer.close()


def test_a_group_and_a_producer_go_on_whenever_their_topic_is_made_anew(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("g", 4, 3)
    writer = Writer(cluster, "g")
    try:
        with Consumer(
            cluster.bootstrap, topics="g", group_id="g", auto_offset_reset="earliest"
        ) as consumer:

            def reads() -> bool:
                return bool(consumer.poll(200))

            wait_until(reads, "the first records")
            for _ in range(3):
                admin.delete_topic("g")
                refused = writer.refused

                def is_gone(refused: int = refused) -> bool:
                    consumer.poll(50)
                    return not consumer.assignment() and writer.refused > refused

                wait_until(is_gone, "the topic is gone for everybody")
                admin.create_topic("g", 4, 3)
                last = writer.sent
                seen: Counter[int] = Counter()

                def goes_on(last: int = last, seen: Counter[int] = seen) -> bool:
                    seen.update(int(record.value) for record in consumer.poll(200))
                    return sum(number > last for number in seen) > 100

                wait_until(goes_on, "records of the new topic")
                assert max(seen.values()) == 1
                assert min(seen) > 1
                assert len(consumer.assignment()) == 4
            consumer.commit()
            found = admin.list_group_offsets("g")
            assert {entry.offset for entry in found.values()} != {0}
    finally:
        writer.stop()


READER = """
import sys
from penstock.client import Consumer, TopicPartition
with Consumer(sys.argv[1], auto_offset_reset="earliest") as consumer:
    consumer.assign([TopicPartition("s", 0)])
    while True:
        for record in consumer.poll(500):
            print(record.value.decode(), flush=True)
"""


def test_a_consumer_that_slept_through_it_reads_all_of_the_new_topic(
    cluster: Cluster, admin: AdminClient, tmp_path: Path
) -> None:
    admin.create_topic("s", 1, 3)
    output, errors = tmp_path / "values", tmp_path / "errors"
    with Producer(cluster.bootstrap) as producer:
        for number in range(500):
            producer.send("s", b"old-%d" % number)
    with output.open("wb") as values, errors.open("wb") as log:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, cluster.bootstrap], stdout=values, stderr=log
        )
    try:
        old = [f"old-{number}" for number in range(500)]
        wait_until(lambda: output.read_text().split() == old, "the old topic is read")
        reader.send_signal(signal.SIGSTOP)
        admin.delete_topic("s")
        admin.create_topic("s", 1, 3)
        with Producer(cluster.bootstrap) as producer:
            for number in range(2_000):
                producer.send("s", b"new-%d" % number)
        reader.send_signal(signal.SIGCONT)
        new = [f"new-{number}" for number in range(2_000)]
        wait_until(lambda: output.read_text().split()[500:] == new, "all of the new topic", 30)
    finally:
        reader.kill()
        reader.wait()
    assert "topic s was deleted and made anew" in errors.read_text()


def test_a_consumer_without_a_group_recovers_when_its_topic_exists_again(
    cluster: Cluster, admin: AdminClient
) -> None:
    admin.create_topic("n", 2, 3)
    with Consumer(cluster.bootstrap, topics="n", auto_offset_reset="earliest") as consumer:
        with Producer(cluster.bootstrap) as producer:
            producer.send("n", b"old", partition=1)
        wait_until(lambda: bool(consumer.poll(200)), "the record of the old topic")
        admin.delete_topic("n")

        def is_gone() -> bool:
            try:
                consumer.poll(100)
            except UnknownTopicOrPartitionError:
                return True
            return False

        wait_until(is_gone, "the consumer says that there is none")
        started = time.monotonic()
        for _ in range(10):
            assert is_gone()
        assert time.monotonic() - started >= 1.0, "polls wait, they do not spin"
        admin.create_topic("n", 2, 3)
        with Producer(cluster.bootstrap) as producer:
            for number in range(100):
                producer.send("n", b"%d" % number, partition=number % 2)
        seen: Counter[bytes] = Counter()

        def reads_on() -> bool:
            try:
                seen.update(record.value for record in consumer.poll(200))
            except UnknownTopicOrPartitionError:
                return False
            return len(seen) == 100

        wait_until(reads_on, "the new topic is read")
    assert seen == Counter(b"%d" % number for number in range(100))


def test_a_producer_goes_on_after_a_long_absence_of_its_topic(
    cluster: Cluster, admin: AdminClient
) -> None:
    """Several at once: what each finds out when the topic goes is a matter of milliseconds."""
    topics = [f"p{number}" for number in range(6)]
    for topic in topics:
        admin.create_topic(topic, 2, 3)
    writers = {topic: Writer(cluster, topic) for topic in topics}
    try:
        for topic, writer in writers.items():
            wait_until(lambda writer=writer: len(writer.acknowledged) > 100, "acknowledgements")
            admin.delete_topic(topic)
        for writer in writers.values():
            refused = writer.refused
            wait_until(lambda writer=writer, refused=refused: writer.refused > refused, "refusals")
        before = {topic: set(writer.acknowledged) for topic, writer in writers.items()}
        for topic in topics:
            admin.create_topic(topic, 2, 3)
        for topic, writer in writers.items():
            wait_until(
                lambda topic=topic, writer=writer: (
                    len(writer.acknowledged) - len(before[topic]) > 200
                ),
                f"acknowledgements of the new topic {topic}",
            )
    finally:
        for writer in writers.values():
            writer.stop()
    for topic, writer in writers.items():
        wanted = {
            number: place
            for number, place in writer.acknowledged.items()
            if number not in before[topic]
        }
        found: dict[int, tuple[int, int]] = {}
        order: dict[int, list[int]] = {0: [], 1: []}
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, 0), TopicPartition(topic, 1)])

            def is_read(
                consumer: Consumer = consumer,
                found: dict[int, tuple[int, int]] = found,
                order: dict[int, list[int]] = order,
                wanted: dict[int, RecordMetadata] = wanted,
            ) -> bool:
                for record in consumer.poll(200):
                    assert int(record.value) not in found, "twice"
                    found[int(record.value)] = (record.partition, record.offset)
                    order[record.partition].append(int(record.value))
                return len(found) >= len(wanted)

            wait_until(is_read, "all that was acknowledged")
        assert found == {number: (at.partition, at.offset) for number, at in wanted.items()}
        assert all(numbers == sorted(numbers) for numbers in order.values())
