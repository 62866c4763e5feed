"""The examples do what they say, started as their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient
from tests.integration.cluster import Cluster, running_cluster

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
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


def test_the_examples_say_in_a_line_what_is_wrong(cluster: Cluster) -> None:
    for name in ("producer.py", "consumer.py"):
        failed = run(name, cluster.bootstrap, "no-such-topic")
        assert failed.returncode == 1
        assert failed.stderr.startswith("UnknownTopicOrPartitionError: ")
        assert "Traceback" not in failed.stderr
