"""Transactions over real nodes: identities, fences, ends, timeouts, and what people see of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from penstock.v1 import admin_pb2, admin_pb2_grpc, transactions_pb2, transactions_pb2_grpc
from penstock.wire.errors import ErrorCode, error_from_proto
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import channel, create_topic
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def started(cluster: Cluster, name: str, timeout_ms: int = 60_000) -> Producer:
    producer = Producer(cluster, name, timeout_ms)
    given(producer.init())
    return producer


def test_a_transaction_is_seen_whole_or_not_at_all(cluster: Cluster) -> None:
    create_topic(cluster, "whole", partitions=3)
    producer = started(cluster, "whole-writer")
    for number, commit in ((1, True), (2, False), (3, True)):
        for partition in range(3):
            assert producer.send("whole", [b"%d" % number] * 2, partition) is None
        given(producer.end(commit=commit))
    for partition in range(3):
        assert committed(cluster, "whole", partition) == [b"1", b"1", b"3", b"3"]
    assert describe(cluster, "whole-writer").state == EMPTY


def test_an_end_is_answered_alike_however_often_it_comes(cluster: Cluster) -> None:
    create_topic(cluster, "repeated")
    producer = started(cluster, "repeater")
    assert producer.send("repeated", [b"one"]) is None
    first = producer.identity
    after = given(producer.end(commit=True))
    assert after == Given(first.producer_id, first.epoch + 1)
    assert given(producer.end(commit=True, identity=first)) == after
    assert code(producer.end(commit=False, identity=first)) is ErrorCode.INVALID_TXN_STATE
    assert producer.send("repeated", [b"two"]) is None
    # A late copy of the first end, and what it would end, have nothing to do with each other.
    assert given(producer.end(commit=True, identity=first, adopt=False)) == after
    assert code(producer.end(commit=False, identity=first)) is ErrorCode.INVALID_TXN_STATE
    given(producer.end(commit=False))
    assert committed(cluster, "repeated") == [b"one"]


def test_the_next_producer_fences_the_one_before_and_aborts_what_it_left(cluster: Cluster) -> None:
    create_topic(cluster, "fenced")
    zombie = started(cluster, "taken-over")
    assert zombie.send("fenced", [b"half"]) is None
    heir = started(cluster, "taken-over")
    assert heir.identity.epoch == zombie.identity.epoch + 2
    assert zombie.send("fenced", [b"late"]) is not None
    assert code(zombie.end(commit=True)) is ErrorCode.PRODUCER_FENCED
    assert code(zombie.init()) is ErrorCode.PRODUCER_FENCED, "it does not take the id back"
    assert code(heir.end(commit=True)) is None
    assert committed(cluster, "fenced") == []


def test_a_transaction_that_lasts_too_long_is_aborted(cluster: Cluster) -> None:
    create_topic(cluster, "slow")
    producer = started(cluster, "slow-writer", timeout_ms=1_000)
    assert producer.send("slow", [b"lost"]) is None
    assert committed(cluster, "slow") == [], "it ends by itself"
    assert code(producer.end(commit=True)) is ErrorCode.TRANSACTION_ABORTABLE
    given(producer.end(commit=False))
    assert producer.send("slow", [b"kept"]) is None
    given(producer.end(commit=True))
    assert committed(cluster, "slow") == [b"kept"]


def test_people_list_describe_and_abort(cluster: Cluster) -> None:
    create_topic(cluster, "looked-at")
    producer = started(cluster, "looked-after")
    assert producer.send("looked-at", [b"stuck"]) is None
    described = describe(cluster, "looked-after")
    assert (described.state, described.producer_id) == (ONGOING, producer.identity.producer_id)
    assert described.start_ms == pytest.approx(time.time() * 1000, abs=60_000)
    assert [(one.topic, one.partition) for one in described.partitions] == [("looked-at", 0)]
    node = cluster.nodes[coordinator_of(cluster, "looked-after")]
    with channel(node.address) as opened:
        stub = transactions_pb2_grpc.TransactionsStub(opened)
        request = transactions_pb2.ListTransactionsRequest(states=[ONGOING])
        listed = {one.transactional_id for one in stub.ListTransactions(request).transactions}
    assert "looked-after" in listed
    request = transactions_pb2.AbortTransactionRequest(transactional_id="looked-after")
    assert code(ask(cluster, "looked-after", "AbortTransaction", request)) is None
    assert committed(cluster, "looked-at") == []
    assert code(producer.end(commit=True)) is ErrorCode.TRANSACTION_ABORTABLE


def test_a_group_of_attempts_is_committed_once_and_whole(cluster: Cluster) -> None:
    create_topic(cluster, "engine", partitions=2)
    attempts = {}
    for task in range(2):
        for number in range(2):
            attempt = Producer(cluster, "")
            given(attempt.begin_attempt("query", 7, task, number))
            value = b"task %d attempt %d" % (task, number)
            assert attempt.send("engine", [value], task) is None
            attempts[task, number] = attempt
    winners = [attempts[0, 0].winner, attempts[1, 1].winner]
    request = transactions_pb2.CommitGroupRequest(group="query", epoch_number=7, winners=winners)
    answer = ask(cluster, "query", "CommitGroup", request)
    assert code(answer) is None
    assert not answer.is_replay
    assert committed(cluster, "engine", 0) == [b"task 0 attempt 0"]
    assert committed(cluster, "engine", 1) == [b"task 1 attempt 1"]
    assert ask(cluster, "query", "CommitGroup", request).is_replay
    last = ask(
        cluster, "query", "LastCommitted", transactions_pb2.LastCommittedRequest(group="query")
    )
    assert (last.epoch_number, list(last.winners)) == (7, winners)
    late = Producer(cluster, "")
    assert code(late.begin_attempt("query", 7, 3)) is ErrorCode.STALE_GROUP_COMMIT
    assert attempts[0, 1].send("engine", [b"zombie"], 0) is not None


def test_a_transaction_on_a_topic_that_was_deleted_ends(cluster: Cluster) -> None:
    create_topic(cluster, "short-lived")
    create_topic(cluster, "long-lived")
    producer = started(cluster, "of-both")
    assert producer.send("short-lived", [b"x"]) is None
    assert producer.send("long-lived", [b"x"]) is None
    delete_topic(cluster, "short-lived")
    given(producer.end(commit=True))
    assert committed(cluster, "long-lived") == [b"x"]
    wait_until(
        lambda: describe(cluster, "of-both").state == EMPTY,
        "the transaction ends without the topic that is gone",
    )


def delete_topic(cluster: Cluster, name: str) -> None:
    """Asked again where the controllers changed meanwhile: then it may have been deleted before."""
    address = next(node.address for node in cluster.nodes.values() if node.alive)
    asked = 0

    def is_deleted() -> bool:
        nonlocal asked
        asked += 1
        with channel(address) as opened:
            request = admin_pb2.DeleteTopicsRequest(names=[name], timeout_ms=10_000)
            result = admin_pb2_grpc.AdminStub(opened).DeleteTopics(request, timeout=15).results[0]
        if not result.HasField("error"):
            return True
        error = error_from_proto(result.error)
        assert error.retriable, error.message
        return asked > 1 and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    wait_until(is_deleted, f"{name} is deleted")
