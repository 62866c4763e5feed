"""Transactions as they go over the wire, without the client SDK."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from penstock.v1 import (
    common_pb2,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.records import Record, decode_batch, encode_batch, iter_batches
from penstock.wire.transactional_ids import parse_attempt
from tests.integration.cluster import Cluster
from tests.integration.raw import channel, leader_address

RETRIABLE = {
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.BROKER_FENCED,
    ErrorCode.NOT_LEADER,
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.UNKNOWN_SERVER_ERROR,
}
DEADLINE_S = 40.0


class Given(NamedTuple):
    """What a producer writes under."""

    producer_id: int
    epoch: int


def code(answer: Any) -> ErrorCode | None:
    return ErrorCode(answer.error.code) if answer.HasField("error") else None


def given(answer: Any) -> Given:
    assert code(answer) is None, answer.error.message
    return Given(answer.producer_id, answer.producer_epoch)


def coordinator_of(cluster: Cluster, key: str) -> int:
    """The node id of the broker that coordinates a transactional id or a group of attempts."""
    request = metadata_pb2.FindCoordinatorRequest(
        type=metadata_pb2.COORDINATOR_TYPE_TRANSACTION, key=key
    )

    def ask() -> Any:
        node = next(node for node in cluster.nodes.values() if node.answers)
        with channel(node.address, cluster.credentials) as opened:
            return metadata_pb2_grpc.MetadataStub(opened).FindCoordinator(request, timeout=10)

    def found(answer: Any) -> bool:
        return code(answer) is None and cluster.nodes[answer.coordinator.node_id].alive

    return int(_until(ask, found).coordinator.node_id)


def ask(cluster: Cluster, key: str, method: str, request: Any) -> Any:
    """Ask the coordinator of ``key`` until it answers anything but a retriable refusal."""

    def once() -> Any:
        address = cluster.nodes[coordinator_of(cluster, key)].address
        with channel(address, cluster.credentials) as opened:
            stub = transactions_pb2_grpc.TransactionsStub(opened)
            return getattr(stub, method)(request, timeout=10)

    return _until(once, lambda answer: code(answer) not in RETRIABLE)


def describe(cluster: Cluster, name: str) -> Any:
    """All about one transactional id."""
    request = transactions_pb2.DescribeTransactionsRequest(transactional_ids=[name])

    def once() -> Any:
        address = cluster.nodes[coordinator_of(cluster, name)].address
        with channel(address, cluster.credentials) as opened:
            stub = transactions_pb2_grpc.TransactionsStub(opened)
            return stub.DescribeTransactions(request, timeout=10).transactions[0]

    return _until(once, lambda answer: code(answer) not in RETRIABLE)


def _until(ask_once: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    problem = "nothing was answered"
    while time.monotonic() < deadline:
        try:
            answer = ask_once()
        except (grpc.RpcError, StopIteration) as error:
            problem = repr(error)
            continue
        if good(answer):
            return answer
        problem = str(answer)
    raise AssertionError(problem)


class Producer:
    """A producer with a transactional id, which does what a test tells it and no more."""

    def __init__(self, cluster: Cluster, name: str, timeout_ms: int = 60_000) -> None:
        self._cluster = cluster
        self.name = name
        self.timeout_ms = timeout_ms
        self.instance = os.urandom(16)
        self.identity = Given(-1, -1)
        self._sequences: dict[tuple[Given, str, int], int] = {}

    def init(self) -> Any:
        request = transactions_pb2.InitProducerIdRequest(
            transactional_id=self.name,
            transaction_timeout_ms=self.timeout_ms,
            instance_id=self.instance,
        )
        answer = ask(self._cluster, self.name, "InitProducerId", request)
        if code(answer) is None:
            self.identity = given(answer)
        return answer

    def begin_attempt(self, group: str, number: int, task: int, attempt: int = 0) -> Any:
        """Be an attempt's producer."""
        request = transactions_pb2.BeginAttemptRequest(
            group=group,
            epoch_number=number,
            task=task,
            attempt=attempt,
            transaction_timeout_ms=self.timeout_ms,
            instance_id=self.instance,
        )
        answer = ask(self._cluster, group, "BeginAttempt", request)
        if code(answer) is None:
            self.name, self.identity = answer.attempt_id, given(answer)
        return answer

    @property
    def winner(self) -> transactions_pb2.Winner:
        """The attempt, for a commit of its group."""
        attempt = parse_attempt(self.name)
        assert attempt is not None
        return transactions_pb2.Winner(
            task=attempt.task, attempt=attempt.attempt, producer_id=self.identity.producer_id
        )

    def send(
        self,
        topic: str,
        values: Sequence[bytes],
        partition: int = 0,
        *,
        identity: Given | None = None,
    ) -> ErrorCode | None:
        """Write in the transaction; None when it is acknowledged by all."""
        identity = identity or self.identity
        place = (identity, topic, partition)
        sequence = self._sequences.get(place, 0)
        now_ms = int(time.time() * 1000)
        batch = encode_batch(
            [Record(i, now_ms, None, value, ()) for i, value in enumerate(values)],
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        request = log_pb2.ProduceRequest(
            acks=common_pb2.ACKS_ALL,
            timeout_ms=10_000,
            transactional_id=self.name,
            partitions=[
                log_pb2.ProducePartition(
                    partition=common_pb2.TopicPartition(topic=topic, partition=partition),
                    current_leader_epoch=-1,
                    records=batch,
                )
            ],
        )

        cluster = self._cluster

        def once() -> Any:
            with channel(leader_address(cluster, topic, partition), cluster.credentials) as opened:
                stub = log_pb2_grpc.LogStub(opened)
                wrapped = log_pb2.ProduceOnceRequest(request=request)
                return stub.ProduceOnce(wrapped, timeout=15).response.partitions[0]

        answer = _until(once, lambda result: code(result) not in RETRIABLE)
        if code(answer) is None:
            self._sequences[place] = sequence + len(values)
        return code(answer)

    def end(self, *, commit: bool, identity: Given | None = None, adopt: bool = True) -> Any:
        identity = identity or self.identity
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.name,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            commit=commit,
        )
        answer = ask(self._cluster, self.name, "EndTransaction", request)
        if code(answer) is None and adopt:
            self.identity = given(answer)
        return answer


def fetch(cluster: Cluster, topic: str, partition: int = 0) -> log_pb2.FetchPartitionResult:
    """What is committed of a partition, as its leader answers it from the start."""
    request = log_pb2.FetchRequest(
        max_wait_ms=100,
        min_bytes=1,
        max_bytes=50 * 1024 * 1024,
        isolation_level=common_pb2.ISOLATION_LEVEL_READ_COMMITTED,
        partitions=[
            log_pb2.FetchPartition(
                partition=common_pb2.TopicPartition(topic=topic, partition=partition),
                fetch_offset=0,
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=16 * 1024 * 1024,
            )
        ],
    )

    def once() -> Any:
        with channel(leader_address(cluster, topic, partition), cluster.credentials) as opened:
            return log_pb2_grpc.LogStub(opened).Fetch(request, timeout=10).partitions[0]

    result: log_pb2.FetchPartitionResult = _until(once, lambda one: code(one) not in RETRIABLE)
    assert code(result) is None, result.error.message
    return result


def committed(cluster: Cluster, topic: str, partition: int = 0) -> list[bytes]:
    """What a reader of committed records sees, once no transaction is open any more."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        result = fetch(cluster, topic, partition)
        if result.last_stable_offset == result.high_watermark:
            return _visible(result)
        assert time.monotonic() < deadline, (
            f"a transaction is open from {result.last_stable_offset}\n{cluster.log_tails()}"
        )


def _visible(result: log_pb2.FetchPartitionResult) -> list[bytes]:
    aborted = sorted((one.first_offset, one.producer_id) for one in result.aborted_transactions)
    dropped: set[int] = set()
    values = []
    for header, batch in iter_batches(result.records):
        while aborted and aborted[0][0] <= header.base_offset:
            dropped.add(aborted.pop(0)[1])
        if header.is_control:
            dropped.discard(header.producer_id)
        elif header.producer_id not in dropped or not header.is_transactional:
            values += [record.value or b"" for record in decode_batch(batch)]
    return values
