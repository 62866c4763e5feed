"""Requests as they go over the wire, without the client SDK: what a test sends is what it says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import grpc

from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    common_pb2,
    log_pb2,
    log_pb2_grpc,
    replication_pb2,
    replication_pb2_grpc,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.records import Record, decode_batch, encode_batch, iter_batches
from tests.integration.cluster import Cluster, open_channel

_RETRIABLE = {
    ErrorCode.NOT_LEADER,
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.BROKER_FENCED,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.NOT_ENOUGH_REPLICAS,
}


@contextmanager
def channel(
    address: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[grpc.Channel]:
    with open_channel(address, credentials) as opened:
        yield opened


def batch_of(values: Sequence[bytes]) -> bytes:
    """One record batch without producer id."""
    now_ms = int(time.time() * 1000)
    return encode_batch([Record(i, now_ms, None, value, ()) for i, value in enumerate(values)])


def create_topic(
    cluster: Cluster,
    name: str,
    partitions: int = 1,
    replication_factor: int = 3,
    configs: Mapping[str, str] | None = None,
) -> None:
    wish = cluster_pb2.CreateTopicCommand(
        name=name,
        partition_count=partitions,
        replication_factor=replication_factor,
        configs=dict(configs or {}),
    )
    address = next(node.address for node in cluster.nodes.values() if node.alive)
    with channel(address, cluster.credentials) as opened:
        stub = admin_pb2_grpc.AdminStub(opened)
        request = admin_pb2.CreateTopicsRequest(topics=[wish], timeout_ms=10_000)
        result = stub.CreateTopics(request, timeout=15).results[0]
    assert not result.HasField("error"), result.error.message


def produce_at(
    address: str,
    topic: str,
    records: bytes,
    *,
    partition: int = 0,
    acks: common_pb2.Acks.ValueType = common_pb2.ACKS_ALL,
    timeout_ms: int = 5000,
    credentials: grpc.ChannelCredentials | None = None,
) -> log_pb2.ProducePartitionResult:
    """Produce to whoever listens at ``address``; the answer for the one partition."""
    request = log_pb2.ProduceRequest(
        acks=acks,
        timeout_ms=timeout_ms,
        partitions=[
            log_pb2.ProducePartition(
                partition=common_pb2.TopicPartition(topic=topic, partition=partition),
                current_leader_epoch=-1,
                records=records,
            )
        ],
    )
    with channel(address, credentials) as opened:
        stub = log_pb2_grpc.LogStub(opened)
        wrapped = log_pb2.ProduceOnceRequest(request=request)
        return stub.ProduceOnce(wrapped, timeout=timeout_ms / 1000 + 5).response.partitions[0]


def produce(
    cluster: Cluster, topic: str, values: Sequence[bytes], partition: int = 0
) -> log_pb2.ProducePartitionResult:
    """Produce with acks=all to the leader, wherever it is by the deadline."""
    deadline = time.monotonic() + 20
    while True:
        result = produce_at(
            leader_address(cluster, topic, partition),
            topic,
            batch_of(values),
            partition=partition,
            credentials=cluster.credentials,
        )
        if result.error.code not in _RETRIABLE or time.monotonic() > deadline:
            assert not result.HasField("error"), result.error.message
            return result


def frames_address(cluster: Cluster, node_id: int) -> str:
    """Where a node serves followers that come with frames."""
    address = cluster.nodes[node_id].address
    with channel(address, cluster.credentials) as opened:
        stub = replication_pb2_grpc.ReplicationStub(opened)
        found = stub.Locate(replication_pb2.LocateRequest(), timeout=10)
    assert found.frames_port
    return f"{address.rpartition(':')[0]}:{found.frames_port}"


def leader_address(cluster: Cluster, topic: str, partition: int = 0) -> str:
    """The address of the leader; waits until there is one that lives."""
    deadline = time.monotonic() + 20
    while True:
        description = cluster.topic(topic)
        if description.partitions:
            leader = cluster.nodes.get(description.partitions[partition].leader)
            if leader is not None and leader.alive:
                return leader.address
        assert time.monotonic() < deadline, f"{topic}-{partition} has no leader"


def read_all(
    cluster: Cluster, topic: str, partition: int = 0, at_least: int = 0, start: int = 0
) -> list[Record]:
    """Every record from ``start`` to the high watermark, once there are ``at_least`` of them."""
    deadline = time.monotonic() + 20
    records: list[Record] = []
    while True:
        position = records[-1].offset + 1 if records else start
        leader = leader_address(cluster, topic, partition)
        result = fetch_at(leader, topic, position, partition, credentials=cluster.credentials)
        if not result.HasField("error"):
            for _, batch in iter_batches(result.records):
                records += [one for one in decode_batch(batch) if one.offset >= position]
            done = not records or records[-1].offset + 1 >= result.high_watermark
            if done and len(records) >= at_least:
                return records
        assert time.monotonic() < deadline, f"{len(records)} records: {result.error.message}"


def fetch_at(
    address: str,
    topic: str,
    offset: int,
    partition: int = 0,
    max_wait_ms: int = 200,
    *,
    credentials: grpc.ChannelCredentials | None = None,
) -> log_pb2.FetchPartitionResult:
    request = log_pb2.FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=50 * 1024 * 1024,
        partitions=[
            log_pb2.FetchPartition(
                partition=common_pb2.TopicPartition(topic=topic, partition=partition),
                fetch_offset=offset,
                current_leader_epoch=-1,
                last_fetched_epoch=-1,
                partition_max_bytes=1024 * 1024,
            )
        ],
    )
    with channel(address, credentials) as opened:
        return log_pb2_grpc.LogStub(opened).Fetch(request, timeout=20).partitions[0]
