"""Transactions over real nodes that die: no half of one, nothing doubled, none that hangs."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.v1 import (
    common_pb2,
    groups_pb2,
    groups_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import ErrorCode
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import channel, create_topic, leader_address
from tests.integration.transacting import (
    RETRIABLE,
    Given,
    Producer,
    _until,
    code,
    committed,
    coordinator_of,
    given,
)
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(cluster: Cluster) -> Iterator[None]:
    yield
    for node in cluster.nodes.values():
        if node.alive:
            node.signal(signal.SIGCONT)
        else:
            node.start()
    cluster.wait_ready()


def make_topic(cluster: Cluster, name: str, partitions: int = 1) -> None:
    create_topic(cluster, name, partitions, configs={"min.insync.replicas": "2"})


def leader_of(cluster: Cluster, topic: str, partition: int = 0) -> int:
    address = leader_address(cluster, topic, partition)
    return next(node.node_id for node in cluster.nodes.values() if node.address == address)


def started(cluster: Cluster, name: str) -> Producer:
    producer = Producer(cluster, name)
    given(producer.init())
    return producer


def started_away_from(cluster: Cluster, node_id: int, prefix: str) -> Producer:
    """A producer whose transactions another broker coordinates."""
    for number in itertools.count():
        name = f"{prefix}-{number}"
        if coordinator_of(cluster, name) != node_id:
            return started(cluster, name)
    raise AssertionError


def describe_producers(
    cluster: Cluster, topic: str, partition: int = 0
) -> transactions_pb2.PartitionProducers:
    request = transactions_pb2.DescribeProducersRequest(
        partitions=[common_pb2.TopicPartition(topic=topic, partition=partition)]
    )

    def once() -> Any:
        with channel(leader_address(cluster, topic, partition)) as opened:
            stub = transactions_pb2_grpc.TransactionsStub(opened)
            return stub.DescribeProducers(request, timeout=10).partitions[0]

    found: transactions_pb2.PartitionProducers = _until(once, lambda answer: code(answer) is None)
    return found


def open_in(cluster: Cluster, topic: str, partition: int = 0) -> list[int]:
    """The producer ids of open transactions."""
    return [
        one.producer_id
        for one in describe_producers(cluster, topic, partition).producers
        if one.transaction_start_offset >= 0
    ]


def wait_nothing_hangs(cluster: Cluster, topic: str, partitions: int = 1) -> None:
    for partition in range(partitions):
        wait_until(
            lambda partition=partition: not open_in(cluster, topic, partition),
            f"no transaction is open in {topic}-{partition}",
            40,
        )


# ---------------------------------------------------------------------- one failure at a time


def test_a_leader_dies_between_the_question_and_the_append(cluster: Cluster) -> None:
    make_topic(cluster, "asked")
    leader = leader_of(cluster, "asked")
    producer = started_away_from(cluster, leader, "asker")
    coordinator = cluster.nodes[coordinator_of(cluster, producer.name)]
    coordinator.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(producer.send, "asked", [b"once"])
        # The leader has asked and waits: it has nothing in its log, and answers others.
        for _ in range(20):
            assert open_in(cluster, "asked") == []
        cluster.nodes[leader].kill()
        coordinator.signal(signal.SIGCONT)
        assert sending.result() is None
    given(producer.end(commit=True))
    assert committed(cluster, "asked") == [b"once"]
    wait_nothing_hangs(cluster, "asked")


def test_a_coordinator_dies_with_a_transaction_open_and_with_one_decided(cluster: Cluster) -> None:
    make_topic(cluster, "survived", PARTITIONS)
    producer = started(cluster, "survivor")
    for partition in range(PARTITIONS):
        assert producer.send("survived", [b"one"], partition) is None
    cluster.nodes[coordinator_of(cluster, producer.name)].kill()
    given(producer.end(commit=True))
    for partition in range(PARTITIONS):
        assert committed(cluster, "survived", partition) == [b"one"]
    for node in cluster.nodes.values():
        if not node.alive:
            node.start()
    cluster.wait_ready()
    for partition in range(PARTITIONS):
        assert producer.send("survived", [b"two"], partition) is None
    decided = producer.identity
    given(producer.end(commit=False))
    cluster.nodes[coordinator_of(cluster, producer.name)].kill()
    for partition in range(PARTITIONS):
        assert committed(cluster, "survived", partition) == [b"one"]
    assert code(producer.end(commit=True, identity=decided)) is ErrorCode.INVALID_TXN_STATE
    wait_nothing_hangs(cluster, "survived", PARTITIONS)


def test_a_mark_is_sent_until_its_leader_is_there(cluster: Cluster) -> None:
    make_topic(cluster, "marked")
    leader = leader_of(cluster, "marked")
    producer = started_away_from(cluster, leader, "marker")
    assert producer.send("marked", [b"kept"]) is None
    cluster.nodes[leader].signal(signal.SIGSTOP)
    given(producer.end(commit=True))  # Decided, though no mark can be written.
    cluster.nodes[leader].signal(signal.SIGCONT)
    assert committed(cluster, "marked") == [b"kept"]
    wait_nothing_hangs(cluster, "marked")


def test_a_mark_waits_until_enough_replicas_are_in_sync(cluster: Cluster) -> None:
    create_topic(cluster, "thin", replication_factor=2, configs={"min.insync.replicas": "2"})
    leader = leader_of(cluster, "thin")
    (follower,) = [node for node in cluster.topic("thin").partitions[0].replicas if node != leader]
    producer = started_away_from(cluster, follower, "thin-writer")
    assert producer.send("thin", [b"kept"]) is None
    cluster.nodes[follower].kill()
    wait_until(lambda: list(cluster.topic("thin").partitions[0].isr) == [leader], "it is alone")
    identity = producer.identity
    given(producer.end(commit=True))  # Decided all the same.
    assert open_in(cluster, "thin") == [identity.producer_id]
    cluster.nodes[follower].start()
    cluster.wait_ready()
    assert committed(cluster, "thin") == [b"kept"]
    wait_nothing_hangs(cluster, "thin")


def test_a_zombie_writes_nothing_through_a_new_leader(cluster: Cluster) -> None:
    make_topic(cluster, "haunted")
    zombie = started(cluster, "ghost")
    assert zombie.send("haunted", [b"half"]) is None
    heir = started(cluster, "ghost")
    cluster.nodes[leader_of(cluster, "haunted")].kill()
    for _ in range(3):
        assert zombie.send("haunted", [b"late"]) in {
            ErrorCode.INVALID_PRODUCER_EPOCH,
            ErrorCode.PRODUCER_FENCED,
        }
    assert heir.send("haunted", [b"new"]) is None
    given(heir.end(commit=True))
    assert committed(cluster, "haunted") == [b"new"]
    wait_nothing_hangs(cluster, "haunted")


# ---------------------------------------------------------------------- people


def test_only_what_is_open_there_is_ended_by_hand(cluster: Cluster) -> None:
    make_topic(cluster, "by-hand")
    producer = started(cluster, "handled")
    assert producer.send("by-hand", [b"stuck"]) is None
    (found,) = [
        one
        for one in describe_producers(cluster, "by-hand").producers
        if one.transaction_start_offset >= 0
    ]
    assert Given(found.producer_id, found.producer_epoch) == producer.identity
    request = transactions_pb2.AbortHangingRequest(
        partition=common_pb2.TopicPartition(topic="by-hand"),
        producer_id=found.producer_id,
        start_offset=found.transaction_start_offset + 1,
    )
    with channel(leader_address(cluster, "by-hand")) as opened:
        stub = transactions_pb2_grpc.TransactionsStub(opened)
        assert code(stub.AbortHanging(request, timeout=10)) is ErrorCode.INVALID_TXN_STATE
        assert open_in(cluster, "by-hand") == [found.producer_id]
        request.start_offset = found.transaction_start_offset
        # Its coordinator knows of it, so it does not hang.
        assert code(stub.AbortHanging(request, timeout=10)) is ErrorCode.INVALID_TXN_STATE
        assert open_in(cluster, "by-hand") == [found.producer_id]
        request.force = True
        assert code(stub.AbortHanging(request, timeout=10)) is None
    assert committed(cluster, "by-hand") == []
    assert producer.send("by-hand", [b"more"]) is not None, "its epoch has ended here"


# ---------------------------------------------------------------------- offsets


class Group:
    """A group's offsets as they go over the wire."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self.group_id = group_id

    def coordinator(self) -> int:
        request = metadata_pb2.FindCoordinatorRequest(
            type=metadata_pb2.COORDINATOR_TYPE_GROUP, key=self.group_id
        )

        def once() -> Any:
            node = next(node for node in self._cluster.nodes.values() if node.alive)
            with channel(node.address) as opened:
                return metadata_pb2_grpc.MetadataStub(opened).FindCoordinator(request, timeout=10)

        def found(answer: Any) -> bool:
            return code(answer) is None and self._cluster.nodes[answer.coordinator.node_id].alive

        return int(_until(once, found).coordinator.node_id)

    def _ask(self, method: str, request: Any) -> Any:
        def once() -> Any:
            address = self._cluster.nodes[self.coordinator()].address
            with channel(address) as opened:
                stub = groups_pb2_grpc.GroupsStub(opened)
                answer = getattr(stub, method)(request, timeout=10)
                return answer.commit if method == "CommitTransactionOffsets" else answer

        return _until(once, lambda answer: code(answer) not in RETRIABLE)

    def commit(self, producer: Producer, topic: str, offset: int, **more: Any) -> Any:
        identity = more.pop("identity", producer.identity)
        where = common_pb2.TopicPartition(topic=topic)
        return self._ask(
            "CommitTransactionOffsets",
            groups_pb2.CommitTransactionOffsetsRequest(
                transactional_id=producer.name,
                producer_id=identity.producer_id,
                producer_epoch=identity.epoch,
                commit=groups_pb2.CommitOffsetsRequest(
                    group_id=self.group_id,
                    offsets=[groups_pb2.OffsetCommit(partition=where, offset=offset)],
                    **more,
                ),
            ),
        )

    def position(self, topic: str, *, stable: bool = True) -> int | ErrorCode:
        request = groups_pb2.FetchOffsetsRequest(
            group_id=self.group_id,
            partitions=[common_pb2.TopicPartition(topic=topic)],
            require_stable=stable,
        )
        answer = self._ask("FetchOffsets", request)
        refused = code(answer)
        return int(answer.offsets[0].offset) if refused is None else refused

    def stable_position(self, topic: str) -> int | ErrorCode:
        wait_until(
            lambda: self.position(topic) is not ErrorCode.UNSTABLE_OFFSET_COMMIT,
            "the transaction's mark reaches the group",
            40,
        )
        return self.position(topic)


def test_positions_are_committed_with_what_they_were_read_for(cluster: Cluster) -> None:
    make_topic(cluster, "source")
    make_topic(cluster, "sink")
    group, producer = Group(cluster, "readers"), started(cluster, "reader")
    for offset, commit, expected in ((5, True, 5), (9, False, 5), (11, True, 11)):
        assert producer.send("sink", [b"%d" % offset]) is None
        assert code(group.commit(producer, "source", offset)) is None
        assert group.position("source") is ErrorCode.UNSTABLE_OFFSET_COMMIT
        given(producer.end(commit=commit))
        assert group.stable_position("source") == expected
    assert committed(cluster, "sink") == [b"5", b"11"]
    stale = Given(producer.identity.producer_id, producer.identity.epoch - 1)
    assert code(group.commit(producer, "source", 99, identity=stale)) in {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
    zombie = group.commit(producer, "source", 99, member_id="gone", member_epoch=1)
    assert code(zombie) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.position("source") == 11


def test_positions_outlive_their_groups_coordinator(cluster: Cluster) -> None:
    make_topic(cluster, "kept-source")
    group, producer = Group(cluster, "kept-readers"), started(cluster, "kept-reader")
    assert code(group.commit(producer, "kept-source", 3)) is None
    cluster.nodes[group.coordinator()].kill()
    assert group.position("kept-source") is ErrorCode.UNSTABLE_OFFSET_COMMIT
    given(producer.end(commit=True))
    assert group.stable_position("kept-source") == 3
    for node in cluster.nodes.values():
        if not node.alive:
            node.start()
    cluster.wait_ready()
    assert code(group.commit(producer, "kept-source", 7)) is None
    given(producer.end(commit=True))
    cluster.nodes[group.coordinator()].kill()  # Perhaps with the mark on its way.
    assert group.stable_position("kept-source") == 7


# ---------------------------------------------------------------------- many failures


def test_what_commits_is_there_once_while_nodes_die(cluster: Cluster) -> None:
    make_topic(cluster, "stormy", PARTITIONS)
    chance = random.Random(12)
    expected: list[bytes] = []
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(_kill_and_restart, cluster, chance, 4)
        producer = started(cluster, "storm-writer")
        for number in itertools.count():
            value = b"%d" % number
            outcomes = [
                producer.send("stormy", [value] * 2, partition) for partition in range(PARTITIONS)
            ]
            whole = outcomes == [None] * PARTITIONS
            given(producer.end(commit=whole))
            if whole:
                expected += [value] * 2
            if killing.done() and len(expected) > 20:
                break
        killing.result()
    for partition in range(PARTITIONS):
        assert committed(cluster, "stormy", partition) == expected
    wait_nothing_hangs(cluster, "stormy", PARTITIONS)


def _kill_and_restart(cluster: Cluster, chance: random.Random, times: int) -> None:
    for _ in range(times):
        node = chance.choice(list(cluster.nodes.values()))
        node.kill()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            survivors = [one for one in cluster.nodes.values() if one is not node]
            if any(cluster.serves(one.node_id) for one in survivors):
                break
        node.start()
        cluster.wait_ready(60)


def test_each_position_is_worked_on_once_while_nodes_die(cluster: Cluster) -> None:
    make_topic(cluster, "work")
    make_topic(cluster, "done")
    chance = random.Random(7)
    group, producer = Group(cluster, "workers"), started(cluster, "worker")
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(_kill_and_restart, cluster, chance, 4)
        for number in itertools.count():
            position = max(group.stable_position("work"), 0)
            whole = producer.send("done", [b"%d" % position]) is None and (
                _is_stored(group.commit(producer, "work", position + 1))
            )
            given(producer.end(commit=whole and number % 5 != 4))
            if killing.done() and position > 20:
                break
        killing.result()
    last = group.stable_position("work")
    assert last > 20
    assert committed(cluster, "done") == [b"%d" % position for position in range(last)]
    wait_nothing_hangs(cluster, "done")


def _is_stored(answer: groups_pb2.CommitOffsetsResponse) -> bool:
    return code(answer) is None and not any(one.HasField("error") for one in answer.results)
