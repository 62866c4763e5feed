"""What one partition does to the others that share a stream with it: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from grpc import StatusCode, aio

from penstock.broker.core.partition_events import RefuseFollower
from penstock.broker.replication.follower import LeaderLink
from penstock.broker.replication.leader import MAX_IN_FLIGHT, FollowerStream
from penstock.broker.replication.ports import EOF
from penstock.v1 import cluster_pb2, common_pb2, replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.replication.brokers import (
    CLUSTER_ID,
    KEY,
    TOPIC_ID,
    BrokerProcess,
    Brokers,
    batch,
    running,
)

OTHER = "payments"
OTHER_KEY = TopicIdPartition(TopicId(b"payments-id-16by"), 0)


def create_other(brokers: Brokers) -> None:
    """A second topic of one partition, led by broker 1 as well."""
    record = cluster_pb2.PartitionRecord(
        topic_id=OTHER_KEY.topic_id, replicas=[1, 2], isr=[1, 2], leader=1
    )
    topic = cluster_pb2.TopicRecord(topic_id=OTHER_KEY.topic_id, name=OTHER)
    brokers.publish(topics=[topic], partitions=[record])


async def append_other(broker: BrokerProcess, *values: bytes) -> None:
    await broker.manager.append(
        OTHER, b"", 0, batch(*values), acks=common_pb2.ACKS_NONE, timeout_ms=10_000
    )


# --- A partition that goes while its last push is not durable yet --------------------------------


async def test_a_topic_deleted_before_its_last_push_is_durable_holds_up_no_other() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        create_other(brokers)
        await brokers[1].append(b"a")
        brokers[2].logs.hold = True
        for number in range(1, MAX_IN_FLIGHT + 1):
            await append_other(brokers[1], b"never durable")
            log = brokers[2].logs.open[OTHER_KEY]
            await eventually(lambda log=log, end=number: log.log_end_offset == end)
        brokers.publish(removed_topics=[OTHER_KEY.topic_id])
        brokers[2].logs.release()
        await brokers[1].append(b"b", timeout_ms=5_000)
        assert brokers[2].log().values() == [b"a", b"b"]


async def test_a_replica_moved_away_before_its_last_push_is_durable_holds_up_no_other() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=3)  # Broker 1 leads 0 and 2.
        brokers[2].logs.hold = True
        doomed = brokers[2].log(2)
        for number in range(1, MAX_IN_FLIGHT + 1):
            await brokers[1].append(b"x", acks=common_pb2.ACKS_NONE, partition=2)
            await eventually(lambda end=number: doomed.log_end_offset == end)
        brokers.change(2, replicas=[1], isr=[1])
        brokers[2].logs.release()
        await brokers[1].append(b"b", timeout_ms=5_000)


async def test_what_comes_late_on_an_earlier_stream_is_refused_to_that_one_alone() -> None:
    # As the simulator saw: what had still been said on the stream before, under the broker epoch
    # before, ended the feed of the one after it, which the leader took for up to date for ever.
    async with running(2) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        partition = brokers[1].partition()
        feeds = dict(partition.feeds)
        [node_id] = feeds
        partition._act(RefuseFollower(node_id, -1, ErrorCode.STALE_BROKER_EPOCH))
        assert partition.feeds == feeds
        await brokers[1].append(b"b", timeout_ms=5_000)


async def test_a_leader_forgets_what_was_stated_of_a_partition_that_is_no_longer_followed() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        create_other(brokers)
        await brokers[1].append(b"a")
        [stream] = brokers[1].partition().feeds.values()
        assert isinstance(stream, FollowerStream)
        await eventually(lambda: OTHER_KEY in stream._stated_epochs)
        brokers.publish(removed_topics=[OTHER_KEY.topic_id])
        await eventually(lambda: list(stream._stated_epochs) == [KEY])


# --- A follower that does not answer -------------------------------------------------------------


@asynccontextmanager
async def follower_stream(brokers: Brokers, node_id: int) -> AsyncIterator[Any]:
    """A follower's stream to broker 1, to be played by the test, following partition 0."""
    stated: Any = replication_pb2.FollowerPositions()
    position = stated.start.add(leader_epoch=0, log_end_offset=0, last_epoch=-1)
    position.partition.topic_id = TOPIC_ID
    hello = replication_pb2.FollowerHello(
        cluster_id=CLUSTER_ID, node_id=node_id, broker_epoch=brokers[node_id].broker_epoch
    )
    async with aio.insecure_channel(f"127.0.0.1:{brokers[1].port}") as channel:
        stub: Any = ReplicationStub(channel)
        call = stub.Fetch()
        await call.write(replication_pb2.ReplicationFetchRequest(hello=hello))
        await call.write(replication_pb2.ReplicationFetchRequest(positions=stated))
        try:
            yield call
        finally:
            call.cancel()


async def with_deaf_follower(brokers: Brokers) -> None:
    """A topic on brokers 1 and 2, where 2 does not follow by itself."""
    brokers[2].deaf = True
    brokers.create_topic(configs={"min.insync.replicas": "1"})


def ack(sequence: int) -> replication_pb2.ReplicationFetchRequest:
    return replication_pb2.ReplicationFetchRequest(
        ack=replication_pb2.FollowerAck(sequence=sequence)
    )


async def test_a_leader_ends_the_stream_of_a_follower_that_leaves_a_push_unanswered() -> None:
    async with running(2, lag_max_ms=300) as brokers:
        await with_deaf_follower(brokers)
        async with follower_stream(brokers, 2) as call:
            first = await call.read()
            await brokers[1].append(b"a", acks=common_pb2.ACKS_NONE)
            # Whatever comes after it is answered.
            while (push := await asyncio.wait_for(call.read(), 5)) is not EOF:
                assert push.sequence > first.sequence
                await call.write(ack(push.sequence))
        await eventually(lambda: not brokers[1].partition().feeds)


async def test_a_stream_whose_pushes_are_answered_lasts_however_long_it_is_idle() -> None:
    async with running(2, lag_max_ms=500) as brokers:
        await with_deaf_follower(brokers)
        async with follower_stream(brokers, 2) as call:
            push = await call.read()
            for value in (b"a", b"b"):
                await call.write(ack(push.sequence))
                await asyncio.sleep(0.6)  # Time in which the stream must not end.
                await brokers[1].append(value, acks=common_pb2.ACKS_NONE)
                push = await asyncio.wait_for(call.read(), 5)
                assert push is not EOF


# --- Who is served -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("follower", "leader", "status", "reason"),
    [
        ("other", CLUSTER_ID, StatusCode.FAILED_PRECONDITION, "is of cluster 'other'"),
        ("", CLUSTER_ID, StatusCode.UNAVAILABLE, "broker 2 does not know its cluster yet"),
        (CLUSTER_ID, "", StatusCode.UNAVAILABLE, "broker 1 does not know its cluster yet"),
    ],
)
async def test_a_cluster_that_is_not_known_yet_is_no_other_cluster(
    follower: str, leader: str, status: StatusCode, reason: str
) -> None:
    async with running(2) as brokers:
        brokers[1].image.cluster_id = leader
        hello = replication_pb2.FollowerHello(cluster_id=follower, node_id=2, broker_epoch=9)
        async with aio.insecure_channel(f"127.0.0.1:{brokers[1].port}") as channel:
            stub: Any = ReplicationStub(channel)
            call = stub.Fetch()
            await call.write(replication_pb2.ReplicationFetchRequest(hello=hello))
            assert await asyncio.wait_for(call.code(), 5) is status
            assert reason in await call.details()


# --- What breaks the follower's own end ----------------------------------------------------------


async def test_what_breaks_the_writer_of_a_follower_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(link: LeaderLink) -> Any:
        raise RuntimeError("a fault of ours")

    async with running(2) as brokers:
        with structlog.testing.capture_logs() as logs:
            monkeypatch.setattr(LeaderLink, "_take_positions", fails)
            brokers.create_topic()
            await eventually(lambda: any("exc_info" in line for line in logs))
        told = [line for line in logs if "exc_info" in line]
        assert {str(line["exc_info"]) for line in told} == {"a fault of ours"}
        assert {(line["event"], line["leader"]) for line in told} == {
            ("replication stream failed", 1)
        }
        monkeypatch.undo()
        await brokers[1].append(b"a")  # It goes on.
