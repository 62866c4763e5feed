"""Transactions that hang, since what their coordinator knew is gone; and others that people end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    HangingSearch,
    InvalidTxnStateError,
    TransactionAbortableError,
)
from penstock.client import Producer as SdkProducer
from penstock.wire.ids import TopicPartition
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.transacting import Producer, committed, given
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TIMEOUT_S = 60.0
STATE_PARTITIONS = 2
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
SETTINGS = {
    "broker.session.timeout.ms": 2000,
    "transaction.state.topic.num.partitions": STATE_PARTITIONS,
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, settings=SETTINGS) as running:
        yield running


def penstock(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "transactions", *arguments]
    return subprocess.run(
        [*command, "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def opened(cluster: Cluster, name: str) -> Producer:
    """A producer with a transaction open in both partitions."""
    producer = Producer(cluster, name)
    given(producer.init())
    for partition in (0, 1):
        assert producer.send("t", [name.encode()], partition=partition) is None
    return producer


def commit(cluster: Cluster, name: str) -> Producer:
    producer = opened(cluster, name)
    given(producer.end(commit=True))
    return producer


def forget_all_transactions(cluster: Cluster) -> None:
    """As if every disk had lost what coordinators wrote."""
    for node in cluster.nodes.values():
        node.stop()
    for node in cluster.nodes.values():
        for partition in range(STATE_PARTITIONS):
            shutil.rmtree(node.partition_directory("__transaction_state", partition))
    cluster.start()


def stable_offset(admin: AdminClient, where: TopicPartition) -> int:
    return admin.describe_producers([where])[where].last_stable_offset


def test_what_nobody_knows_any_more_is_found_and_ended(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", 2)
        lost = opened(cluster, "lost")
        assert admin.find_hanging([T0, T1], older_than_ms=0) == HangingSearch()
        forget_all_transactions(cluster)
        commit(cluster, "next")
        assert stable_offset(admin, T0) == 0, "readers stand still"
        done = penstock(cluster, "hanging", "t", "--longer-than", "0", "--output", "json")
        assert done.returncode == 1, done.stderr
        shown = json.loads(done.stdout)
        assert not shown["in_doubt"]
        assert [(one["partition"], one["producer_id"]) for one in shown["hanging"]] == [
            (0, lost.identity.producer_id),
            (1, lost.identity.producer_id),
        ]
        place = ("--topic", "t", "--partition", "0")
        producer = ("--producer-id", str(lost.identity.producer_id))
        done = penstock(cluster, "abort", *place, *producer)
        assert done.returncode == 0, done.stderr
        end = admin.list_offsets({T0: "latest"})[T0].offset
        wait_until(lambda: stable_offset(admin, T0) == end, "nothing is open", TIMEOUT_S)
        assert committed(cluster, "t") == [b"next"]
        found = admin.find_hanging([T0, T1], older_than_ms=0)
        assert [one.partition for one in found.hanging] == [T1]
        admin.abort_hanging(T1, lost.identity.producer_id)
        assert committed(cluster, "t", 1) == [b"next"]


def torn(cluster: Cluster) -> list[str]:
    """What nodes say of transactions that are in halves."""
    lines = [line for node in cluster.nodes.values() for line in node.log.read_text().splitlines()]
    return [line for line in lines if "transaction torn" in line]


def test_what_is_forced_on_a_living_transaction_tears_it_loudly(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", 2)
        living = opened(cluster, "living")
        producer_id = living.identity.producer_id
        with pytest.raises(InvalidTxnStateError, match="transactional id 'living' has this"):
            admin.abort_hanging(T0, producer_id)
        place = ("--topic", "t", "--partition", "0", "--producer-id", str(producer_id))
        done = penstock(cluster, "abort", *place)
        assert done.returncode != 0
        assert "'living'" in done.stderr
        assert stable_offset(admin, T0) == 0, "nothing was done"
        done = penstock(cluster, "abort", *place, "--force")
        assert done.returncode == 0, done.stderr
        assert "no coordinator is asked" in done.stderr
        given(living.end(commit=True))
        wait_until(lambda: torn(cluster), "it is told", TIMEOUT_S)
        assert "error" in torn(cluster)[0]
        assert "transactional_id=living" in torn(cluster)[0]
        wait_until(lambda: committed(cluster, "t", 1) == [b"living"], "half of it", TIMEOUT_S)
        assert committed(cluster, "t") == []
        # What is lost was told. The id goes on: the producer that has it, and the one after that.
        assert living.send("t", [b"more"], partition=0) is None
        given(living.end(commit=True))
        wait_until(lambda: committed(cluster, "t") == [b"more"], "it goes on", TIMEOUT_S)
        commit(cluster, "living")
        wait_until(lambda: committed(cluster, "t") == [b"more", b"living"], "so does the next")
        commit(cluster, "next")
        wait_until(lambda: committed(cluster, "t")[2:] == [b"next"], "others go on", TIMEOUT_S)
        assert len(torn(cluster)) == 1, "once"


def test_who_writes_on_where_its_part_was_ended_by_force_begins_anew(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("t", 2)
        with SdkProducer(cluster.bootstrap, transactional_id="living") as living:
            living.begin_transaction()
            for partition in (0, 1):
                living.send("t", b"lost", partition=partition).result(TIMEOUT_S)
            [found] = admin.describe_producers([T0])[T0].producers
            admin.abort_hanging(T0, found.producer_id, force=True)
            living.send("t", b"lost", partition=0)
            with pytest.raises(TransactionAbortableError):
                living.commit_transaction()
            living.abort_transaction()
            with living.transaction():
                for partition in (0, 1):
                    living.send("t", b"anew", partition=partition)
        for partition in (0, 1):
            assert committed(cluster, "t", partition) == [b"anew"]
    assert not torn(cluster), "both ended it the same way"
