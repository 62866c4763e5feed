"""Two drivers of one engine, over nodes that die: each batch is committed once, and whole."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    DeliveryFailedError,
    GroupCommitConflictError,
    GroupCommits,
    PenstockError,
    ProducerFencedError,
    StaleGroupCommitError,
    TopicPartition,
    TransactionAbortableError,
    UnknownAttemptError,
)
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BATCHES = 6
TASKS = 2
PARTS = 3
DEADLINE_S = 120.0
RUN_AGAIN = (
    DeliveryFailedError,
    ProducerFencedError,
    TransactionAbortableError,
    UnknownAttemptError,
)


class Driver:
    """An engine's driver and its tasks. What it is told of each batch is in ``told``.

    All number their attempts alike, as an engine does that was started twice: each one that begins
    fences the other's, also when that has handed its handle over.
    """

    def __init__(self, name: str, bootstrap: str, pause_s: float) -> None:
        self.name = name
        self.bootstrap = bootstrap
        self.pause_s = pause_s
        self.chance = random.Random(name)
        self.tries = 0
        self.told: dict[int, tuple[str, ...]] = {}
        self.run_again = 0

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with GroupCommits(self.bootstrap, "rivals", request_timeout_ms=5_000) as commits:
            while (number := commits.last_committed().epoch_number + 1) < BATCHES:
                assert time.monotonic() < deadline, f"{self.name} is at {number}"
                try:
                    self._batch(commits, number)
                except RUN_AGAIN:
                    self.run_again += 1
                    pause_s = self.chance.uniform(0, self.pause_s)
                    time.sleep(pause_s)  # Else they stop each other for ever.
                except (StaleGroupCommitError, GroupCommitConflictError):
                    pass  # The other one was first.

    def _batch(self, commits: GroupCommits, number: int) -> None:
        winners = tuple(self._task(commits, number, task) for task in range(TASKS))
        commits.commit(number, winners)
        self.told[number] = winners

    def _task(self, commits: GroupCommits, number: int, task: int) -> str:
        self.tries += 1
        settings = {"linger_ms": 0, "request_timeout_ms": 5_000}
        with commits.begin_attempt(number, task, 0, **settings) as writer:  # type: ignore[arg-type]
            for part in range(PARTS):
                value = f"{number} {task} {self.name}-{self.tries} {part} {writer.handle}"
                writer.send("t", value.encode(), partition=part)
                writer.flush()  # So that there is a half of it.
            return writer.prepare()


def kill_now_and_then(cluster: Cluster, drivers: list[Driver]) -> None:
    """Kill a node when the drivers have come as far as the next batch or two."""
    chance = random.Random(3)
    for reached in (1, 3):
        wait_until(
            lambda reached=reached: max(max(one.told, default=-1) for one in drivers) >= reached,
            f"batch {reached} is committed",
            DEADLINE_S,
        )
        victim = cluster.nodes[chance.choice(list(cluster.nodes))]
        victim.kill()
        victim.start()
        cluster.wait_ready()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as running:
        yield running


def read_all(bootstrap: str) -> list[bytes]:
    """What a reader of committed records is given up to the ends of all partitions."""
    every = [TopicPartition("t", part) for part in range(PARTS)]
    found: list[bytes] = []
    with Consumer(bootstrap, isolation_level="read_committed") as consumer:
        consumer.assign(every)
        consumer.seek_to_beginning()

        def at_the_ends() -> bool:
            found.extend(record.value for record in consumer.poll(100))
            return len(found) >= BATCHES * TASKS * PARTS and all(
                consumer.position(name) >= end for name, end in consumer.end_offsets(every).items()
            )

        wait_until(at_the_ends, "all is read", 60)
    return found


def test_each_batch_is_there_once_and_whole(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", PARTS, configs={"min.insync.replicas": 2})
    drivers = [Driver("old", cluster.bootstrap, 1.0), Driver("new", cluster.bootstrap, 0.1)]
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(driver.run) for driver in drivers]
        killing = threads.submit(kill_now_and_then, cluster, drivers)
        for one in (*running, killing):
            one.result()
    assert sum(driver.run_again for driver in drivers) > 0, "they never met"
    written: dict[tuple[int, int], list[list[str]]] = defaultdict(list)
    for value in read_all(cluster.bootstrap):
        number, task, *what = value.decode().split(" ")
        written[int(number), int(task)].append(what)
    assert set(written) == {(number, task) for number in range(BATCHES) for task in range(TASKS)}
    for (number, task), records in sorted(written.items()):
        [writer] = {(who, handle) for who, _, handle in records}
        assert sorted(part for _, part, _ in records) == ["0", "1", "2"], (number, task, records)
        for driver in drivers:
            if number in driver.told:
                assert driver.told[number][task] == writer[1]
    with GroupCommits(cluster.bootstrap, "rivals") as commits:
        last = commits.last_committed()
        assert last.epoch_number == BATCHES - 1
        assert commits.commit(last.epoch_number, last.winners) is True
        with pytest.raises(PenstockError, match="other winners"):
            commits.commit(last.epoch_number, last.winners[:-1])
