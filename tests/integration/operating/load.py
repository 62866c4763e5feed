"""What applications do meanwhile: write with acks=all, and read as a group."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial

from penstock.client import AdminClient, Consumer, Producer, RecordMetadata
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition
from tests.support import wait_until

TOPIC = "orders"
PARTITIONS = 6
REPLICAS = 3
END_S = 90.0
_PACE_S = 0.002


def make_topic(bootstrap: str) -> None:
    with AdminClient(bootstrap) as admin:
        admin.create_topic(TOPIC, PARTITIONS, REPLICAS, {"min.insync.replicas": "2"})


def in_sync(bootstrap: str) -> bool:
    """Whether every replica of the topic is: what a node is asked before it may leave."""
    try:
        with AdminClient(bootstrap) as admin:
            (topic,) = admin.describe_topics([TOPIC])
    except PenstockError:
        return False
    return all(len(partition.isr) == REPLICAS for partition in topic.partitions)


def wait_in_sync(bootstrap: str) -> None:
    wait_until(lambda: in_sync(bootstrap), "all replicas are in sync", END_S)


class Writer:
    """Writes numbers to all partitions in turn, in a thread of its own, until told to stop."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        """By partition and offset. Only grows; read it when the thread has ended."""
        self.failures: list[BaseException] = []
        self.longest_pause_s = 0.0
        """Between two acknowledgements of one partition."""
        self._last_s: dict[int, float] = {}
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap,))
        self._thread.start()

    def _run(self, bootstrap: str) -> None:
        try:
            with Producer(bootstrap, acks="all", linger_ms=0) as producer:
                number = 0
                while not self._stop.wait(_PACE_S):
                    value = f"{self._name}/{number}".encode()
                    future = producer.send(TOPIC, value, partition=number % PARTITIONS)
                    future.add_done_callback(partial(self._done, value))
                    number += 1
                producer.flush()
        except BaseException as error:
            self.failures.append(error)

    def _done(self, value: bytes, future: Future[RecordMetadata]) -> None:
        error = future.exception()
        if error is not None:
            self.failures.append(error)
            return
        metadata = future.result()
        now_s = time.monotonic()
        pause_s = now_s - self._last_s.get(metadata.partition, now_s)
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
        self._last_s[metadata.partition] = now_s
        at = metadata.partition, metadata.offset
        if self.acknowledged.setdefault(at, value) != value:
            self.failures.append(AssertionError(f"two records were acknowledged at {at}"))

    def take_pause_ms(self) -> int:
        """The longest pause since the last call."""
        pause_s, self.longest_pause_s = self.longest_pause_s, 0.0
        return round(pause_s * 1000)

    def end(self) -> None:
        """Have it write nothing more."""
        self._stop.set()

    def stop(self) -> None:
        self.end()
        self._thread.join(END_S)
        assert not self._thread.is_alive()


class Reader:
    """A member of a group, in a thread of its own."""

    def __init__(self, bootstrap: str, group: str) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap, group))
        self._thread.start()

    def _run(self, bootstrap: str, group: str) -> None:
        try:
            with Consumer(
                bootstrap, group_id=group, topics=[TOPIC], auto_offset_reset="earliest"
            ) as consumer:
                while not self._stop.is_set():
                    for record in consumer.poll(200):
                        self.seen[record.partition, record.offset] += 1
        except BaseException as error:
            self.failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(END_S)
        assert not self._thread.is_alive()


class Load:
    """Two writers and two members of a group, until ``finish``."""

    def __init__(self, bootstrap: str) -> None:
        self.writers = [Writer(bootstrap, name) for name in ("a", "b")]
        self.readers = [Reader(bootstrap, "billing") for _ in range(2)]

    def pause_ms(self) -> int:
        """The longest write pause since the last call."""
        return max(writer.take_pause_ms() for writer in self.writers)

    def wait_progress(self, records: int = 200) -> None:
        """Until each writer wrote so many more."""
        wanted = [len(writer.acknowledged) + records for writer in self.writers]
        wait_until(
            lambda: all(
                writer.failures or len(writer.acknowledged) >= count
                for writer, count in zip(self.writers, wanted, strict=True)
            ),
            "writes go on",
            END_S,
        )

    def finish(self, bootstrap: str) -> int:
        """Stop it, and see that nothing is lost or doubled; how many records there are."""
        try:
            for writer in self.writers:
                writer.end()
            for writer in self.writers:
                writer.stop()
            acknowledged: dict[tuple[int, int], bytes] = {}
            for writer in self.writers:
                assert not writer.failures, writer.failures[:3]
                assert not acknowledged.keys() & writer.acknowledged.keys()
                acknowledged |= writer.acknowledged
            wait_until(
                lambda: (
                    sum(len(reader.seen) for reader in self.readers) >= len(acknowledged)
                    or any(reader.failures for reader in self.readers)
                ),
                "the group has read all",
                END_S,
            )
        finally:
            for reader in self.readers:
                reader.stop()
        assert not [reader.failures for reader in self.readers if reader.failures]
        read = self.readers[0].seen.keys() | self.readers[1].seen.keys()
        assert acknowledged.keys() <= read, "the group missed records"
        log = read_all(bootstrap)
        assert log == acknowledged
        assert len(set(log.values())) == len(log), "a record twice"
        return len(log)


def read_all(bootstrap: str) -> dict[tuple[int, int], bytes]:
    """The whole topic, by partition and offset."""
    with AdminClient(bootstrap) as admin:
        ends = admin.list_offsets(
            {TopicPartition(TOPIC, number): "latest" for number in range(PARTITIONS)}
        )
    count = sum(found.offset for found in ends.values())
    log: dict[tuple[int, int], bytes] = {}
    end_s = time.monotonic() + END_S
    with Consumer(bootstrap, topics=[TOPIC], auto_offset_reset="earliest") as consumer:
        while len(log) < count:
            assert time.monotonic() < end_s, f"{len(log)} of {count} records could be read"
            for record in consumer.poll(500):
                assert record.value is not None
                log[record.partition, record.offset] = record.value
    return log
