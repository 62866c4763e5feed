"""Commits of groups whose coordinator is killed at that moment: one set of winners, whole, once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from penstock.v1 import transactions_pb2, transactions_pb2_grpc
from penstock.wire.errors import ErrorCode
from tests.integration.cluster import Cluster, NodeProcess, running_cluster
from tests.integration.raw import channel, create_topic
from tests.integration.transacting import (
    Producer,
    ask,
    code,
    committed,
    coordinator_of,
    given,
)
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TASKS = 2
DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"replica.lag.time.max.ms": 2_000, "broker.session.timeout.ms": 3_000}
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def every_node_runs(cluster: Cluster) -> None:
    cluster.start()


class Work:
    """Two attempts at each task of an epoch number; those at a task write to a partition of it."""

    def __init__(self, cluster: Cluster, group: str, topic: str, number: int) -> None:
        self.cluster, self.group, self.number = cluster, group, number
        self.attempts: list[list[Producer]] = []
        for task in range(TASKS):
            self.attempts.append([Producer(cluster, "", 120_000) for _ in range(2)])
            for index, producer in enumerate(self.attempts[task]):
                given(producer.begin_attempt(group, number, task, index))
                assert producer.send(topic, [value_of(number, task, index)], task) is None

    def commit_of(self, indexes: Sequence[int]) -> transactions_pb2.CommitGroupRequest:
        """A commit whose winner of each task has this index."""
        winners = [self.attempts[task][index].winner for task, index in enumerate(indexes)]
        return transactions_pb2.CommitGroupRequest(
            group=self.group, epoch_number=self.number, winners=winners
        )

    def commit(self, request: transactions_pb2.CommitGroupRequest) -> Any:
        return ask(self.cluster, self.group, "CommitGroup", request)

    def last(self) -> transactions_pb2.LastCommittedResponse:
        request = transactions_pb2.LastCommittedRequest(group=self.group)
        answer: transactions_pb2.LastCommittedResponse = ask(
            self.cluster, self.group, "LastCommitted", request
        )
        return answer


def value_of(number: int, task: int, index: int) -> bytes:
    return b"%d/%d/%d" % (number, task, index)


def state_bytes(node: NodeProcess) -> int:
    """The size of what the coordinators of a node have in their logs."""
    logs = (node.directory / "logs").glob("__transaction_state-*/*.log")
    return sum(log.stat().st_size for log in logs)


def commit_and_do_not_listen(
    cluster: Cluster, node_id: int, request: transactions_pb2.CommitGroupRequest
) -> None:
    with channel(cluster.nodes[node_id].address) as opened:
        stub = transactions_pb2_grpc.TransactionsStub(opened)
        try:
            stub.CommitGroup(request, timeout=30)
        except grpc.RpcError:
            return


def test_killed_with_the_decision_in_its_own_log_only(cluster: Cluster) -> None:
    create_topic(cluster, "undecided", partitions=TASKS)
    work = Work(cluster, "undecided-query", "undecided", 3)
    first, second = work.commit_of([0, 0]), work.commit_of([1, 1])
    coordinator = coordinator_of(cluster, work.group)
    followers = [node for node_id, node in cluster.nodes.items() if node_id != coordinator]
    for node in followers:
        node.signal(signal.SIGSTOP)
    before = state_bytes(cluster.nodes[coordinator])
    with ThreadPoolExecutor(1) as threads:
        threads.submit(commit_and_do_not_listen, cluster, coordinator, first)
        wait_until(
            lambda: state_bytes(cluster.nodes[coordinator]) > before,
            "the decision is in the log of its coordinator",
            DEADLINE_S,
        )
        cluster.nodes[coordinator].kill()
    for node in followers:
        node.signal(signal.SIGCONT)
    # Whether it lives on is open: it may be on its way in a follower's socket. A driver that took
    # over chooses others.
    refused = code(work.commit(second))
    assert refused in {None, ErrorCode.GROUP_COMMIT_CONFLICT}
    winner, loser = (second, first) if refused is None else (first, second)
    for _ in range(2):
        assert work.commit(winner).is_replay
        assert code(work.commit(loser)) is ErrorCode.GROUP_COMMIT_CONFLICT
        assert work.last().epoch_number == 3
        assert list(work.last().winners) == list(winner.winners)
        for task in range(TASKS):
            expected = value_of(3, task, 1 if winner is second else 0)
            assert committed(cluster, "undecided", task) == [expected]
        cluster.start()
        cluster.wait_ready()
        cluster.nodes[coordinator_of(cluster, work.group)].kill()


def test_a_decision_whose_answer_dies_with_its_coordinator_stays(cluster: Cluster) -> None:
    # No mark can be written before the coordinator is gone: the next one sends them all.
    create_topic(cluster, "unanswered", partitions=TASKS, configs={"min.insync.replicas": "3"})
    work = Work(cluster, "unanswered-query", "unanswered", 0)
    first, second = work.commit_of([0, 1]), work.commit_of([1, 1])
    coordinator = coordinator_of(cluster, work.group)
    next(node for node_id, node in cluster.nodes.items() if node_id != coordinator).kill()
    wait_until(
        lambda: all(len(one.isr) == 2 for one in cluster.topic("unanswered").partitions),
        "two replicas in sync",
        DEADLINE_S,
    )
    work.commit(first)  # Whose answer nobody looks at.
    cluster.nodes[coordinator_of(cluster, work.group)].kill()
    cluster.start()
    assert code(work.commit(second)) is ErrorCode.GROUP_COMMIT_CONFLICT
    assert work.commit(first).is_replay
    assert list(work.last().winners) == list(first.winners)
    for task, index in enumerate([0, 1]):
        assert committed(cluster, "unanswered", task) == [value_of(0, task, index)]
        late = work.attempts[task][1 - index]
        assert late.send("unanswered", [b"late"], task) is not None
    for task, index in enumerate([0, 1]):
        assert committed(cluster, "unanswered", task) == [value_of(0, task, index)]


def test_rival_drivers_while_their_coordinator_is_killed_again_and_again(
    cluster: Cluster,
) -> None:
    create_topic(cluster, "rivals", partitions=TASKS, configs={"min.insync.replicas": "2"})
    chance = random.Random(6)
    expected: list[list[bytes]] = [[] for _ in range(TASKS)]
    for number in range(6):
        work = Work(cluster, "rivals-query", "rivals", number)
        choices = [[chance.randrange(2) for _ in range(TASKS)] for _ in range(2)]
        requests = [work.commit_of(choice) for choice in choices]
        coordinator = coordinator_of(cluster, work.group)
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(work.commit, request) for request in requests]
            time.sleep(chance.uniform(0, 0.02))  # Any moment will do.
            cluster.nodes[coordinator].kill()
            codes = [code(answer.result()) for answer in answers]
        assert set(codes) <= {None, ErrorCode.GROUP_COMMIT_CONFLICT}, codes
        last = work.last()
        assert last.epoch_number == number
        won = [list(last.winners) == list(request.winners) for request in requests]
        assert any(won)
        assert [one is None for one in codes] == won, "one was told what is not so"
        for request, is_last in zip(requests, won, strict=True):
            answer = work.commit(request)
            assert answer.is_replay if is_last else code(answer) is not None
        for task, index in enumerate(choices[won.index(True)]):
            expected[task].append(value_of(number, task, index))
        cluster.start()
    for task in range(TASKS):
        assert committed(cluster, "rivals", task) == expected[task]
