"""The client of these tests, in a pod of its own: writes with acks=all, then reads all of it again.

    python load.py BOOTSTRAP TOPIC PARTITIONS

It writes until there is a file /tmp/stop, to all partitions in turn, and says each second what was
acknowledged and the longest time that a partition had to wait since it said so last. In the end it
reads the whole topic: what was acknowledged has to be there, at its offset, once. Each line that it
prints is JSON, and the last one has `lost` and `doubled`. The image has all that it imports.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from penstock.client import AdminClient, Consumer, Producer, RecordMetadata
from penstock.wire.ids import TopicPartition

STOP = Path("/tmp/stop")
PACE_S = 0.002
TELL_S = 1.0
READ_S = 240.0


class Acknowledged:
    """What was, and how long each partition waited. For any thread."""

    def __init__(self, partitions: int) -> None:
        self.records: dict[tuple[int, int], bytes] = {}
        self.failures: list[str] = []
        self._last_s = [time.monotonic()] * partitions
        self._pause_s = 0.0
        self._lock = threading.Lock()

    def done(self, value: bytes, future: Future[RecordMetadata]) -> None:
        """A record's fate."""
        error = future.exception()
        now_s = time.monotonic()
        with self._lock:
            if error is not None:
                self.failures.append(repr(error))
                return
            at = future.result().partition, future.result().offset
            if self.records.setdefault(at, value) != value:
                self.failures.append(f"two records were acknowledged at {at}")
            self._pause_s = max(self._pause_s, now_s - self._last_s[at[0]])
            self._last_s[at[0]] = now_s

    def take_pause_ms(self) -> int:
        """The longest since the last call, be it over or not."""
        now_s = time.monotonic()
        with self._lock:
            pause_s = max(self._pause_s, *(now_s - last for last in self._last_s))
            self._pause_s = 0.0
        return round(pause_s * 1000)


def say(**what: object) -> None:
    """A line."""
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def write(bootstrap: str, topic: str, partitions: int) -> Acknowledged:
    """Until it is told to stop."""
    seen = Acknowledged(partitions)
    number, told_s = 0, time.monotonic()
    with Producer(bootstrap, acks="all", linger_ms=0) as producer:
        while not STOP.exists():
            value = str(number).encode()
            future = producer.send(topic, value, partition=number % partitions)
            future.add_done_callback(partial(seen.done, value))
            number += 1
            time.sleep(PACE_S)  # The pace is the point.
            if time.monotonic() >= told_s + TELL_S:
                told_s = time.monotonic()
                say(
                    at=round(time.time(), 1),
                    acknowledged=len(seen.records),
                    pause_ms=seen.take_pause_ms(),
                    failed=len(seen.failures),
                )
        producer.flush()
    return seen


def read(bootstrap: str, topic: str, partitions: int) -> dict[tuple[int, int], bytes]:
    """The whole topic, by partition and offset; what there is, when the time is over."""
    with AdminClient(bootstrap) as admin:
        ends = admin.list_offsets(
            {TopicPartition(topic, number): "latest" for number in range(partitions)}
        )
    count = sum(found.offset for found in ends.values())
    log: dict[tuple[int, int], bytes] = {}
    end_s = time.monotonic() + READ_S
    with Consumer(bootstrap, topics=[topic], auto_offset_reset="earliest") as consumer:
        while len(log) < count and time.monotonic() < end_s:
            for record in consumer.poll(500):
                log[record.partition, record.offset] = record.value or b""
    return log


def main() -> None:
    """Write, read, say what became of it."""
    bootstrap, topic, partitions = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with AdminClient(bootstrap) as admin:
        admin.create_topic(topic, partitions, 3, {"min.insync.replicas": "2"})
    seen = write(bootstrap, topic, partitions)
    log = read(bootstrap, topic, partitions)
    lost = [at for at, value in seen.records.items() if log.get(at) != value]
    say(
        acknowledged=len(seen.records),
        read=len(log),
        lost=len(lost),
        doubled=len(log) - len(set(log.values())),
        failed=seen.failures[:5],
    )


if __name__ == "__main__":
    main()
