"""Queries that write exactly once while their drivers, workers and brokers are killed at random.

::

    make pipeline-crashes ROUNDS=20 SEED=7

Each round has topics, a query from one to the other, and a seed of its own. Something fails in it
at a moment where that hurts (``failing``; ten rounds in a row have each of them), a few more things
are killed at random moments of some batch, what has died is started again, and in the end the round
reads what committed readers see. Nothing may be missing, and nothing be there twice. Every fourth
round is the control: it writes at least once, its driver dies behind the sink's commit, and it has
to show duplicates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from penstock.client import Producer
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.transacting import coordinator_of
from tests.pipeline import failing
from tests.pipeline.logs import make_topic, repeated, values
from tests.support import wait_until

BATCHES: Final = 12
ROWS: Final = 500
PARTITIONS: Final = 3
KILLS: Final = 3
DEADLINE_S: Final = 1_800.0
MOMENTS: Final = (
    failing.DRIVER_BEFORE_COMMIT,
    failing.DRIVER_AFTER_COMMIT,
    failing.AFTER_COMMIT,
    failing.TASK_AFTER_WRITE,
    failing.TWIN,
)
VICTIMS: Final = ("driver", "driver", "worker", "leader", "coordinator")


@dataclass
class Round:
    """One query over all its drivers."""

    cluster: Cluster
    directory: Path
    seed: int
    delivery: str
    batches: int = BATCHES
    kills: int = KILLS
    killed: list[str] = field(default_factory=list)
    """Who was, really, behind how many batches; drivers that ended otherwise in parentheses."""
    duplicates: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.source = make_topic(self.cluster, f"crashes-{self.seed}-in", PARTITIONS)
        self.topic = make_topic(self.cluster, f"crashes-{self.seed}-out", PARTITIONS)
        for name in ("tmp", "marks"):
            (self.directory / name).mkdir(parents=True)
        self.wanted = [f"{number:05}" for number in range(self.batches * ROWS)]
        with Producer(self.cluster.bootstrap) as producer:
            for number, value in enumerate(self.wanted):
                producer.send(self.source, value.encode(), partition=number % PARTITIONS)
        self.foreach = self.chance.random() < 0.5
        exact = self.delivery == "exactly-once"
        self.moment = MOMENTS[self.seed % len(MOMENTS)] if exact else failing.DRIVER_AFTER_COMMIT
        self.deadline = time.monotonic() + DEADLINE_S
        self.driver = self._drive()

    def __str__(self) -> str:
        """What it was, and which of its processes were killed after how many batches."""
        return (
            f"seed {self.seed}: {self.delivery}{' foreachBatch' if self.foreach else ''}: "
            f"{self.moment}, killed {', '.join(self.killed) or 'nobody'}; {self.duplicates} twice"
        )

    def run(self) -> list[str]:
        """What is wrong at the end; nothing, when all went as it should."""
        try:
            for _ in range(self.kills):
                if not self._await_moment():
                    break
                if not self._kill(self.chance.choice(VICTIMS)):
                    break
            self._await_end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.driver.pid, signal.SIGKILL)
        return self._faults()

    @property
    def batches_done(self) -> int:
        """As Spark's own log has it."""
        commits = self.directory / "checkpoint" / "commits"
        return sum(1 for entry in commits.glob("*") if entry.name.isdigit())

    def _drive(self) -> subprocess.Popen[bytes]:
        told: dict[str, Any] = {
            "temporary": str(self.directory / "tmp"),
            "reading": {
                "penstock.bootstrap.servers": self.cluster.bootstrap,
                "subscribe": self.source,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": str(ROWS),
            },
            "checkpoint": str(self.directory / "checkpoint"),
            "form": "penstock-failing",
            "foreach": self.foreach,
            "options": {
                "penstock.bootstrap.servers": self.cluster.bootstrap,
                "topic": self.topic,
                "delivery": self.delivery,
                "fail": self.moment,
                "marks": str(self.directory / "marks"),
            },
        }
        with (self.directory / "driver.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.pipeline.sink_driver", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _await_moment(self) -> bool:
        """Some moment of a batch from here on; False where the query is through before."""
        wanted = self.batches_done + self.chance.randint(1, 2)
        wait_until(
            lambda: self._ended() or self.batches_done >= wanted,
            f"{wanted} batches are done",
            DEADLINE_S,
        )
        time.sleep(self.chance.random() * 0.8)  # Any moment will do.
        return not self._ended()

    def _await_end(self) -> None:
        wait_until(self._ended, "the query is through", DEADLINE_S)

    def _ended(self) -> bool:
        """Whether the query is through. A driver that has failed is started again, as an operator
        would.
        """
        if time.monotonic() > self.deadline:
            log = (self.directory / "driver.log").read_text(errors="replace")
            raise AssertionError(f"seed {self.seed}: not through in time\n{log[-4000:]}")
        status = self.driver.poll()
        if status is not None and status != 0:
            self.killed.append(f"(ended {status})")
            self.driver = self._drive()
        return status == 0

    def _kill(self, victim: str) -> bool:
        """Kill one, once there is one, and note it; False where the query is through before."""
        strike = {"driver": self._kill_driver, "worker": self._kill_worker}.get(
            victim, partial(self._kill_node, victim)
        )
        struck = False

        def done() -> bool:
            nonlocal struck
            if self._ended():
                return True
            batches = self.batches_done
            if struck := strike():
                self.killed.append(f"{victim}@{batches}")
            return struck

        wait_until(done, f"there is a {victim} to kill", DEADLINE_S)
        return struck

    def _kill_driver(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)
        if self.driver.wait() != -signal.SIGKILL:
            return False  # It had ended by itself.
        self.driver = self._drive()
        return True

    def _kill_worker(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = workers_below(psutil.Process(self.driver.pid))
            if workers:
                self.chance.choice(workers).kill()
                return True
        return False

    def _kill_node(self, victim: str) -> bool:
        if victim == "leader":
            topic = self.cluster.topic(self.chance.choice((self.source, self.topic)))
            node = topic.partitions[self.chance.randrange(PARTITIONS)].leader
        else:
            metadata = (self.directory / "checkpoint" / "metadata").read_text()
            query = json.loads(metadata)["id"]
            node = coordinator_of(self.cluster, f"spark-{query}-{self.topic}")
        if node not in self.cluster.nodes:  # -1 where there is none just now.
            return False
        self.cluster.nodes[node].kill()
        self.cluster.start()
        return True

    def _faults(self) -> list[str]:
        found = values(self.cluster, self.topic)
        self.duplicates = len(repeated(found))
        exact = self.delivery == "exactly-once"
        return faults_of(self.wanted, found, self.killed, exact=exact)


def workers_below(driver: psutil.Process) -> list[psutil.Process]:
    """Spark's Python processes that run; those that nobody has waited for yet have ended."""
    found = []
    for one in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess is one.
            if "pyspark.daemon" in " ".join(one.cmdline()):
                found.append(one)
    return found


def faults_of(
    wanted: Sequence[str], found: Sequence[str], killed: Sequence[str], *, exact: bool
) -> list[str]:
    """What is wrong with a round that read these values, and killed these processes."""
    faults = []
    if missing := sorted(set(wanted) - set(found)):
        faults.append(f"{len(missing)} are lost: {missing[:3]}")
    if strange := sorted(set(found) - set(wanted)):
        faults.append(f"{len(strange)} were never written: {strange[:3]}")
    if exact and repeated(found):
        faults.append("which nothing may be")
    if not exact and not repeated(found):
        faults.append("which some have to be")
    # What ended by itself, or by the moment that was chosen for it, stands in parentheses.
    if all(one.startswith("(") for one in killed):
        faults.append("nobody was killed")
    return faults


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args(arguments)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="penstock-crashes-") as work,
        running_cluster(Path(work) / "cluster") as cluster,
    ):
        for seed in range(told.seed, told.seed + told.rounds):
            delivery = "at-least-once" if seed % 4 == 0 else "exactly-once"
            begun = time.monotonic()
            one = Round(cluster, Path(work) / f"round-{seed}", seed, delivery)
            faults = one.run()
            failed += bool(faults)
            wrong = "".join(f", {fault}" for fault in faults)
            say(f"{one}{wrong}; {time.monotonic() - begun:.0f} s")
    say(f"{told.rounds - failed} of {told.rounds} rounds are as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
