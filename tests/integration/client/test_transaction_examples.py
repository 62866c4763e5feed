"""The examples of transactions do what they say, killed at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.client import AdminClient, Consumer, TopicPartition
from tests.integration.client.test_examples import Example, run
from tests.integration.cluster import Cluster, running_cluster

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
