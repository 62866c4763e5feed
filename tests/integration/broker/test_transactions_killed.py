"""Coordinators of transactions that are killed at each state: the next one goes on from there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.v1 import transactions_pb2
from penstock.wire.errors import ErrorCode
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import create_topic
from tests.integration.transacting import (
    Given,
    Producer,
    ask,
    code,
    committed,
    coordinator_of,
    describe,
    given,
)
from tests.support import wait_until

pytestmark = pytest.mark.integration

EMPTY = transactions_pb2.TRANSACTION_STATE_EMPTY
ONGOING = transactions_pb2.TRANSACTION_STATE_ONGOING
PREPARE_COMMIT = transactions_pb2.TRANSACTION_STATE_PREPARE_COMMIT
PREPARE_ABORT = transactions_pb2.TRANSACTION_STATE_PREPARE_ABORT
DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"replica.lag.time.max.ms": 2_000, "broker.session.timeout.ms": 3_000}
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def every_node_runs(cluster: Cluster) -> None:
    cluster.start()


def started(cluster: Cluster, name: str, timeout_ms: int = 60_000) -> Producer:
    producer = Producer(cluster, name, timeout_ms)
    given(producer.init())
    return producer


def kill_coordinator(cluster: Cluster, key: str) -> None:
    cluster.nodes[coordinator_of(cluster, key)].kill()


def topic_that_needs_all(cluster: Cluster, name: str) -> None:
    """A topic that is written to only while all three nodes have its records."""
    create_topic(cluster, name, configs={"min.insync.replicas": "3"})


def kill_another(cluster: Cluster, key: str) -> None:
    """Kill a node that does not coordinate ``key``: marks that need all three wait for it."""
    coordinator = coordinator_of(cluster, key)
    next(node for node in cluster.nodes.values() if node.node_id != coordinator).kill()
    wait_until(lambda: coordinator_of(cluster, key) == coordinator, "the coordinator stays", 20)


def wait_in_sync(cluster: Cluster, topic: str, count: int) -> None:
    wait_until(
        lambda: len(cluster.topic(topic).partitions[0].isr) == count,
        f"{count} replicas of {topic} in sync",
        DEADLINE_S,
    )


def test_killed_with_no_transaction_open(cluster: Cluster) -> None:
    create_topic(cluster, "k-empty")
    producer = started(cluster, "killed-empty")
    identity = producer.identity
    kill_coordinator(cluster, "killed-empty")
    assert given(producer.init()) == identity, "the identity is the same"
    assert producer.send("k-empty", [b"x"]) is None
    given(producer.end(commit=True))
    assert committed(cluster, "k-empty") == [b"x"]


@pytest.mark.parametrize("commit", [True, False])
def test_killed_with_a_transaction_open(cluster: Cluster, commit: bool) -> None:
    topic, name = f"k-open-{commit}", f"killed-open-{commit}"
    create_topic(cluster, topic)
    producer = started(cluster, name)
    assert producer.send(topic, [b"before"]) is None
    kill_coordinator(cluster, name)
    assert producer.send(topic, [b"after"]) is None
    ended = producer.identity
    after = given(producer.end(commit=commit))
    assert after == Given(ended.producer_id, ended.epoch + 1)
    assert committed(cluster, topic) == ([b"before", b"after"] if commit else [])


def test_killed_with_a_transaction_open_that_nobody_ends(cluster: Cluster) -> None:
    create_topic(cluster, "k-left")
    producer = started(cluster, "killed-left", timeout_ms=3_000)
    assert producer.send("k-left", [b"left"]) is None
    kill_coordinator(cluster, "killed-left")
    assert committed(cluster, "k-left") == [], "the next one aborts it in its time"
    assert code(producer.end(commit=True)) is ErrorCode.TRANSACTION_ABORTABLE


@pytest.mark.parametrize("commit", [True, False])
def test_killed_while_its_marks_cannot_be_written(cluster: Cluster, commit: bool) -> None:
    topic, name = f"k-decided-{commit}", f"killed-decided-{commit}"
    topic_that_needs_all(cluster, topic)
    producer = started(cluster, name)
    assert producer.send(topic, [b"x"]) is None
    kill_another(cluster, name)
    wait_in_sync(cluster, topic, 2)
    ended = producer.identity
    after = given(producer.end(commit=commit))
    assert describe(cluster, name).state == (PREPARE_COMMIT if commit else PREPARE_ABORT)
    kill_coordinator(cluster, name)
    cluster.start()
    assert committed(cluster, topic) == ([b"x"] if commit else [])
    assert given(producer.end(commit=commit, identity=ended)) == after, "it is told as before"
    assert code(producer.end(commit=not commit, identity=ended)) is ErrorCode.INVALID_TXN_STATE
    assert producer.send(topic, [b"next"]) is None
    given(producer.end(commit=True))
    assert committed(cluster, topic)[-1:] == [b"next"]


def test_killed_while_a_producer_that_takes_over_waits_for_marks(cluster: Cluster) -> None:
    topic_that_needs_all(cluster, "k-taken")
    zombie = started(cluster, "killed-taken")
    assert zombie.send("k-taken", [b"half"]) is None
    kill_another(cluster, "killed-taken")
    wait_in_sync(cluster, "k-taken", 2)
    request = transactions_pb2.AbortTransactionRequest(transactional_id="killed-taken")
    assert code(ask(cluster, "killed-taken", "AbortTransaction", request)) is None
    kill_coordinator(cluster, "killed-taken")
    cluster.start()
    heir = started(cluster, "killed-taken")
    assert heir.identity.epoch > zombie.identity.epoch + 1
    assert zombie.send("k-taken", [b"late"]) is not None
    assert code(zombie.end(commit=True)) is ErrorCode.PRODUCER_FENCED
    assert committed(cluster, "k-taken") == []


def test_killed_after_a_group_was_committed(cluster: Cluster) -> None:
    topic_that_needs_all(cluster, "k-engine")
    winner, loser = Producer(cluster, ""), Producer(cluster, "")
    given(winner.begin_attempt("k-query", 1, 0, 0))
    given(loser.begin_attempt("k-query", 1, 0, 1))
    assert winner.send("k-engine", [b"won"]) is None
    assert loser.send("k-engine", [b"lost"]) is None
    kill_another(cluster, "k-query")
    wait_in_sync(cluster, "k-engine", 2)
    request = transactions_pb2.CommitGroupRequest(
        group="k-query", epoch_number=1, winners=[winner.winner]
    )
    assert code(ask(cluster, "k-query", "CommitGroup", request)) is None
    kill_coordinator(cluster, "k-query")
    cluster.start()
    assert committed(cluster, "k-engine") == [b"won"]
    assert ask(cluster, "k-query", "CommitGroup", request).is_replay
    wait_until(
        lambda: code(describe(cluster, winner.name)) is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
        "the attempt is forgotten",
        DEADLINE_S,
    )
