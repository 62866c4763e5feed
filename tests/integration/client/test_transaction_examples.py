"""The examples of transactions do what they say, killed at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.client import AdminClient, Consumer, Producer, TopicPartition
from tests.integration.client.test_examples import Example, run
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def everything(cluster: Cluster, topic: str) -> Counter[bytes]:
    """What each key has, by all records that were ever written, committed or not."""
    found: Counter[bytes] = Counter()
    with Consumer(cluster.bootstrap, value_deserializer="json") as consumer:
        partitions = [TopicPartition(topic, number) for number in range(3)]
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(name) < end for name, end in ends.items()):
            for record in consumer.poll(1_000):
                found[record.key] += record.value
    return found


def test_no_transfer_loses_or_makes_money(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("ledger", 3)
    refused = 0
    for _ in range(3):
        with Example("money_transfer.py", cluster.bootstrap, "ledger", "100000") as clerk:
            said = [line for line, _ in zip(clerk.lines(), range(60), strict=False)]
            said += clerk.kill()
        refused += sum("has too little" in line for line in said)
        # The successor ends what was left open, and the balances are those of whole transfers.
        done = run("money_transfer.py", cluster.bootstrap, "ledger", "10")
        assert (done.returncode, done.stderr) == (0, "")
        *_, balances, total = done.stdout.splitlines()
        assert total == "total: 0"
        assert all(int(entry.partition(": ")[2]) >= -50 for entry in balances.split(", "))
    assert refused
    # Debits without a credit were written; only readers of committed records do not see them.
    assert everything(cluster, "ledger").total() < 0


def test_each_line_counts_once_whoever_is_killed(cluster: Cluster) -> None:
    lines = [f"line {number % 7} of the song" for number in range(800)]
    wanted = Counter(word for line in lines for word in line.split())
    names = (cluster.bootstrap, "lines", "words")
    every = [TopicPartition("lines", number) for number in range(3)]
    with AdminClient(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        for topic in names[1:]:
            admin.create_topic(topic, 3)

        def write(begin: int, end: int) -> None:
            for number in range(begin, end):
                producer.send("lines", lines[number].encode(), partition=number % 3)
                if number % 10 == 9:
                    producer.flush()

        for begin in range(0, 600, 200):
            with Example("word_count_transactions.py", *names, "--id", "1") as counter:
                write(begin, begin + 100)
                next(line for line in counter.lines() if line.endswith(" lines"))
                write(begin + 100, begin + 200)  # It is killed somewhere in these.
                if begin:
                    counter.kill()
                else:
                    counter.interrupt()
        with (
            Example("word_count_transactions.py", *names, "--id", "1"),
            Example("word_count_transactions.py", *names, "--id", "2"),
        ):
            write(600, 800)

            def all_counted() -> bool:
                positions = admin.list_group_offsets("word-count")
                return sum(positions[name].offset for name in every if name in positions) == 800

            wait_until(all_counted, "all is counted")

    def shown() -> dict[str, int]:
        done = run("word_count_transactions.py", *names, "--show")
        assert (done.returncode, done.stderr) == (0, "")
        return {line.split()[1]: int(line.split()[0]) for line in done.stdout.splitlines()}

    # The last transaction's marks may come to the positions first.
    wait_until(lambda: shown().items() >= wanted.items(), "every word is counted")
    assert shown() == wanted
