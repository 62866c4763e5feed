from __future__ import annotations

import asyncio

import pytest

from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncProducer,
    ClientClosedError,
    ClusterNotFoundedError,
    InvalidRequestError,
    NetworkError,
    TopicAlreadyExistsError,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from penstock.v1 import metadata_pb2
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster, FakeNode

T0 = TopicPartition("t", 0)


async def test_topics_come_and_go(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        made = await admin.create_topic("t", 3, 2, {"retention.ms": "5"})
        assert (made.name, made.created) == ("t", True)
        [listed] = await admin.list_topics()
        assert (listed.name, listed.partition_count, listed.replication_factor) == ("t", 3, 3)
        assert listed.configs == {"retention.ms": "5"}
        assert listed.topic_id == made.topic_id
        [described] = await admin.describe_topics(["t"])
        assert described == listed
        with pytest.raises(TopicAlreadyExistsError):
            await admin.create_topic("t")
        again = await admin.create_topic("t", if_not_exists=True)
        assert (again.created, again.topic_id) == (False, made.topic_id)
        await admin.delete_topic("t")
        assert await admin.list_topics() == []
        with pytest.raises(UnknownTopicOrPartitionError):
            await admin.describe_topics(["t"])


async def test_only_the_topic_of_the_id_given_is_deleted(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        first = await admin.create_topic("t")
        await admin.delete_topic("t", topic_id=first.topic_id)
        second = await admin.create_topic("t")
        with pytest.raises(UnknownTopicOrPartitionError):
            await admin.delete_topic("t", topic_id=first.topic_id)
        with pytest.raises(InvalidRequestError, match="topic_id='t': the UUID of a topic"):
            await admin.delete_topic("t", topic_id="t")
        [left] = await admin.list_topics()
        assert left.topic_id == second.topic_id


async def test_refusals_that_came_are_not_called_lost(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        with pytest.raises(UnknownTopicOrPartitionError) as caught:
            await admin.delete_topic("nope")
    # It was asked three times, and refused three times.
    assert getattr(caught.value, "__notes__", []) == []


async def test_offsets_follow_the_leaders(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 3)
    async with AsyncProducer(cluster.bootstrap) as producer:
        for number in range(9):
            await producer.send_and_wait("t", b"v", partition=number % 3, timestamp_ms=number)
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        every = {TopicPartition("t", number): "latest" for number in range(3)}
        assert {
            name: entry.offset
            for name, entry in (await admin.list_offsets(every)).items()  # type: ignore[arg-type]
        } == dict.fromkeys(every, 3)
        cluster.move("t", 0, 3)
        assert (await admin.list_offsets({T0: "earliest"}))[T0].offset == 0
        assert (await admin.list_offsets({T0: 4}))[T0].offset == 2
        assert (await admin.list_offsets({T0: 99}))[T0].offset == -1
        assert await admin.delete_records({T0: 2}) == {T0: 2}
        assert (await admin.list_offsets({T0: "earliest"}))[T0].offset == 2
        with pytest.raises(UnknownTopicOrPartitionError, match="no partition 7; it has 0 to 2"):
            await admin.list_offsets({TopicPartition("t", 7): "latest"})
        with pytest.raises(UnknownTopicOrPartitionError):
            await admin.list_offsets({TopicPartition("nope", 0): "latest"})


async def test_any_living_broker_will_do(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        assert len((await admin.describe_cluster()).brokers) == 3
        for number in (1, 2):
            await cluster.nodes[number].stop()
            described = await asyncio.wait_for(admin.describe_cluster(), 10)
            assert described.answered_by not in range(1, number + 1)


async def test_a_broker_that_lags_is_not_believed(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 1)
    index = cluster.index
    for behind in (1, 2):
        cluster.nodes[behind].lag_entries = 1
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for _ in range(5):
            assert (await admin.describe_cluster(since_index=index)).answered_by == 3
            await asyncio.wait_for(admin.list_topics(since_index=index), 10)
    cluster.nodes[3].lag_entries = index + 1
    async with AsyncAdminClient([f"127.0.0.1:{cluster.nodes[3].port}"]) as admin:
        described = await asyncio.wait_for(admin.describe_cluster(), 10)
        assert described.metadata_index == -1, "whoever wants nothing of it is told what it knows"
    cluster.nodes[3].lag_entries = 1
    async with AsyncAdminClient(cluster.bootstrap, default_api_timeout_ms=300) as admin:
        assert len((await admin.describe_cluster(since_index=index - 1)).brokers) == 3
        late = rf"up to index {index - 1}, and they have changed up to {index}; next: ask again"
        with pytest.raises(NetworkError, match=late):
            await admin.describe_cluster(since_index=index)
        with pytest.raises(NetworkError, match=late):
            await admin.list_topics(since_index=index)


async def test_group_offsets(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        cluster.coordinator = 2
        await admin.alter_group_offsets("g", {T0: 7})
        cluster.coordinator = 3
        found = await admin.list_group_offsets("g")
        assert {name: entry.offset for name, entry in found.items()} == {T0: 7}
        assert await admin.list_group_offsets("g", [TopicPartition("t", 1)]) == {}
        [listed] = await admin.list_groups()
        assert (listed.group_id, listed.coordinator) == ("g", 3)


def test_the_synchronous_twin(background: Background) -> None:
    with AdminClient(background.cluster.bootstrap) as admin:
        assert admin.create_topic("t", 2).created
        assert [topic.name for topic in admin.list_topics()] == ["t"]
        assert admin.list_offsets({T0: "latest"})[T0].offset == 0
        assert admin.describe_cluster().controller_id == 1
    with pytest.raises(ClientClosedError):
        admin.list_topics()


async def test_a_list_of_topics_that_a_broker_does_not_know_is_no_empty_list(
    cluster: FakeCluster,
) -> None:
    async def refuse(_node: FakeNode) -> metadata_pb2.DescribeTopicsResponse:
        error = ClusterNotFoundedError("controller 1 waits for 2").to_proto()
        return metadata_pb2.DescribeTopicsResponse(error=error)

    cluster.on_describe = refuse
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        with pytest.raises(ClusterNotFoundedError, match="waits for 2"):
            await admin.list_topics()
