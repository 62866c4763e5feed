"""The examples do what they say, started as their docstrings say."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sqlite3
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient, Producer, TopicPartition
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[3] / "examples"
PIPE_BYTES = 4_096
"""Less than what a full poll says."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def run(
    name: str, *arguments: str, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_the_producer_writes_a_group_of_consumers_reads_once(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("numbers", 3)
    written = run("producer.py", cluster.bootstrap, "numbers", "10")
    assert (written.returncode, written.stderr) == (0, "")
    places = written.stdout.splitlines()
    assert len(set(places)) == 10
    assert all(re.fullmatch(r"numbers-[012] @ \d+", place) for place in places)

    consumed = [
        run("consumer.py", cluster.bootstrap, "numbers", "readers", "--count", "5")
        for _ in range(2)
    ]
    seen: list[tuple[str, str, str]] = []
    for consumer in consumed:
        assert (consumer.returncode, consumer.stderr) == (0, "")
        assigned, *lines = consumer.stdout.splitlines()
        assert set(assigned.split()) == {"assigned:", "numbers-0", "numbers-1", "numbers-2"}
        line = re.compile(r"(numbers-[012] @ \d+) b'(key-[012])' b'(\{.*\})'")
        records = [found.groups() for found in map(line.fullmatch, lines) if found]
        assert len(records) == 5
        seen += records
    # The first one committed what it had read, and the second one went on from there.
    assert sorted(place for place, _, _ in seen) == sorted(places)
    keys = {int(re.sub(r"\D", "", value)): key for _, key, value in seen}
    assert keys == {number: f"key-{number % 3}" for number in range(10)}


def test_the_examples_say_in_a_line_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    for name in sorted(path.name for path in EXAMPLES.glob("*.py")):
        failed = run(name, cluster.bootstrap, "no-such-topic", directory=tmp_path)
        assert failed.returncode == 1
        assert failed.stderr.startswith("UnknownTopicOrPartitionError: ")
        assert "Traceback" not in failed.stderr


class Example:
    """An example that runs until it is told, or killed, to end."""

    def __init__(self, name: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pipesize=PIPE_BYTES,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def lines(self) -> Iterator[str]:
        """What it says, line by line."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            yield line.rstrip("\n")

    def read_until(self, last: str) -> list[str]:
        """What it says up to this line."""
        found: list[str] = []
        for line in self.lines():
            found.append(line)
            if line == last:
                return found
        raise AssertionError(f"it ended without {last!r}: {found[-3:]}")

    def unread_bytes(self) -> int:
        """How much of what it said lies in the pipe."""
        assert self._process.stdout is not None
        answer = fcntl.ioctl(self._process.stdout, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def kill(self) -> list[str]:
        """SIGKILL; what it had said and nobody had read."""
        self._process.kill()
        assert self._process.wait(20) == -signal.SIGKILL
        return list(self.lines())

    def interrupt(self) -> None:
        """Ctrl-C, by which the examples end well."""
        self._process.send_signal(signal.SIGINT)
        _, errors = self._process.communicate(timeout=20)
        assert (self._process.returncode, errors) == (0, "")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> str:
        """What it said when it failed."""
        _, errors = self._process.communicate(timeout=20)
        assert self._process.returncode == 1
        return errors

    def __enter__(self) -> Example:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._process.kill()
        self._process.communicate()


def write_numbers(cluster: Cluster, topic: str, numbers: range) -> None:
    """One batch, so that polls are full however the sending went."""
    with Producer(
        cluster.bootstrap, linger_ms=60_000, batch_size=1_000_000, value_serializer="json"
    ) as producer:
        for number in numbers:
            producer.send(topic, {"number": number}, b"key-%d" % (number % 3))


def committed(admin: AdminClient, group: str, topic: str) -> int:
    found = admin.list_group_offsets(group).get(TopicPartition(topic, 0))
    return 0 if found is None else found.offset


def test_who_commits_first_handles_nothing_twice_when_it_is_killed(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("alarms")
        write_numbers(cluster, "alarms", range(1_000))
        places = [f"alarms-0 @ {offset}" for offset in range(1_000)]
        with Example("at_most_once.py", cluster.bootstrap, "alarms", "most") as first:
            # Nobody reads: it hangs where the pipe is full, in a batch that it has committed.
            wait_until(
                lambda: (
                    group_exists(admin, "most")
                    and committed(admin, "most", "alarms") * len(places[0]) > PIPE_BYTES
                ),
                "more is committed than was handled",
            )
            handled = first.kill()
    with Example("at_most_once.py", cluster.bootstrap, "alarms", "most") as second:
        handled += second.read_until(places[-1])
        second.interrupt()
    assert len(set(handled)) == len(handled)
    assert handled == [place for place in places if place in set(handled)]
    assert len(handled) < len(places)  # What it had committed and not handled is left out.


def test_who_commits_last_leaves_nothing_out_when_it_is_killed(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("copies")
        write_numbers(cluster, "copies", range(1_000))
        places = [f"copies-0 @ {offset}" for offset in range(1_000)]
        with Example("at_least_once.py", cluster.bootstrap, "copies", "least") as first:
            wait_until(
                lambda: first.unread_bytes() > PIPE_BYTES - 2 * len(places[-1]),
                "it hangs where the pipe is full, in a batch that it has not committed",
            )
            handled = first.kill()
        assert committed(admin, "least", "copies") == 0
        with Example("at_least_once.py", cluster.bootstrap, "copies", "least") as second:
            handled += second.read_until(places[-1])
            wait_until(lambda: committed(admin, "least", "copies") == 1_000, "all is committed")
            second.interrupt()
    assert set(handled) == set(places)
    assert len(handled) > len(places)  # What it had handled and not committed came again.


HANG_AT_TOTALS = """
CREATE VIEW for_ever AS
    WITH RECURSIVE steps(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps)
    SELECT * FROM steps;
CREATE TRIGGER hang BEFORE INSERT ON totals BEGIN SELECT count(*) FROM for_ever; END;
"""


def totals(database: Path) -> tuple[int, int]:
    """The sum of all totals, and how far they go."""
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as reader:
        [(total,)] = reader.execute("SELECT coalesce(sum(total), 0) FROM totals")
        [(position,)] = reader.execute("SELECT coalesce(sum(next_offset), 0) FROM positions")
    return total, position


def test_who_keeps_position_and_results_together_counts_once_when_it_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    database = tmp_path / "totals.db"
    start = ("effectively_once.py", cluster.bootstrap, "amounts", str(database))
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("amounts")
    write_numbers(cluster, "amounts", range(10))
    with Example(*start) as first:
        first.read_until("amounts-0 @ 10")
        first.kill()
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as holder:
        # Its next total takes for ever, and the position was moved before.
        holder.executescript(HANG_AT_TOTALS)
        write_numbers(cluster, "amounts", range(10, 3_000))
        with Example(*start) as second:
            wait_until(lambda: is_writing(database), "the position is moved")
            second.kill()
        holder.execute("DROP TRIGGER hang")
        assert totals(database) == (sum(range(10)), 10)
        # A reader keeps what follows from being committed: all is done but that.
        holder.execute("BEGIN")
        holder.execute("SELECT * FROM totals").fetchall()
        with Example(*start) as third:
            wait_until(lambda: is_writing(database), "the next results wait for their commit")
            third.kill()
        holder.execute("ROLLBACK")
        assert totals(database) == (sum(range(10)), 10)
    for _ in range(3):  # Wherever it is after its next transaction.
        with Example(*start) as another:
            next(another.lines())
            another.kill()
        total, position = totals(database)
        assert total == sum(range(position))
    with Example(*start) as last:
        wait_until(lambda: totals(database)[1] == 3_000, "all is counted")
        last.interrupt()
    assert totals(database) == (sum(range(3_000)), 3_000)


def test_of_two_that_count_in_one_database_one_stops(cluster: Cluster, tmp_path: Path) -> None:
    database = tmp_path / "totals.db"
    start = ("effectively_once.py", cluster.bootstrap, "shared", str(database))
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("shared")
    write_numbers(cluster, "shared", range(10))
    with Example(*start) as one:
        one.read_until("shared-0 @ 10")
        with Example(*start) as other:
            for begin in range(10, 3_000, 10):
                write_numbers(cluster, "shared", range(begin, begin + 10))
                if one.ended or other.ended:
                    break
            end = begin + 10
            stopped, left = (one, other) if one.ended else (other, one)
            assert "another process counts shared-0" in stopped.failure()
            wait_until(lambda: totals(database)[1] == end, "the other counts on")
            left.interrupt()
    assert totals(database) == (sum(range(end)), end)


def is_writing(database: Path) -> bool:
    """Whether somebody is in a transaction that writes."""
    with contextlib.closing(sqlite3.connect(database, timeout=0)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


def group_exists(admin: AdminClient, group: str) -> bool:
    return group in {entry.group_id for entry in admin.list_groups()}


def test_the_asyncio_pair(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("async-numbers", 3)
    written = run("async_producer.py", cluster.bootstrap, "async-numbers", "10")
    assert (written.returncode, written.stderr) == (0, "")
    read = run("async_consumer.py", cluster.bootstrap, "async-numbers", "loops", "--count", "10")
    assert (read.returncode, read.stderr) == (0, "")
    assigned, *lines, revoked = read.stdout.splitlines()
    assert (assigned.partition(" ")[0], revoked.partition(" ")[0]) == ("assigned:", "revoked:")
    places = [line.partition(" b'")[0] for line in lines]
    assert sorted(places) == sorted(written.stdout.splitlines())


def test_records_go_where_the_own_partitioner_says(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("orders", 4)
    done = run("custom_partitioner.py", cluster.bootstrap, "orders")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all(("urgent" in line) == line.startswith("0 ") for line in lines)
    assert all("Order(table=" in line for line in lines)


@pytest.mark.parametrize("name", ["consumer.py", "async_consumer.py"])
def test_a_consumer_that_is_stopped_has_committed_and_left(cluster: Cluster, name: str) -> None:
    topic, group = f"stopped-{name}", f"stopping-{name}"
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(topic)
        write_numbers(cluster, topic, range(3))
        with Example(name, cluster.bootstrap, topic, group) as example:
            assert any(line.startswith(f"{topic}-0 @ 2 ") for line in example.lines())
            example.interrupt()
        [left] = admin.describe_groups([group])
        assert left.members == ()
        # The last one counts once it has asked for the next.
        assert committed(admin, group, topic) in (2, 3)
