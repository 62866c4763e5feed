"""Why nothing comes or is acknowledged, as consumers and producers of real nodes say it.

Unauthorised, and what is refused for good, no node says to a client yet: see the unit tests.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    CorruptRecordError,
    LeaderNotAvailableError,
    NetworkError,
    PenstockError,
    StallReason,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from tests.integration.client.forms import Form, verdict
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster
from tests.integration.proxy import Relay

pytestmark = pytest.mark.integration

PATIENCE_S = 20.0
SETTINGS: Any = {"auto_offset_reset": "earliest", "request_timeout_ms": 2_000}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Clients reach node 3 by way of ``relay`` alone, once they know it by its metadata."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module", autouse=True)
def relay(cluster: Cluster) -> Relay:
    node = cluster.nodes[3]
    relay = Relay(int(node.address.rpartition(":")[2]))
    with node.config.open("a", encoding="utf-8") as config:
        config.write(f'broker.advertised = "127.0.0.1:{relay.port}"\n')
    cluster.start()
    return relay


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def form(cluster: Cluster, request: pytest.FixtureRequest) -> Form:
    return Form(cluster.bootstrap, request.param)


async def make_topic(form: Form, admin: AdminClient, what: str, node_id: int) -> str:
    """A topic whose only replica is on one node, with one record."""
    name = f"{what}-{'asyncio' if form.is_async else 'sync'}"
    admin.create_topic(name, replica_assignments=[[node_id]])
    async with form.producer() as producer:
        await verdict(producer.send(name, b"first"))
    return name


async def trouble_of(client: Any, reason: StallReason) -> PenstockError:
    """A consumer's or producer's trouble, once it is this one; it may have another at first."""
    deadline = time.monotonic() + PATIENCE_S
    trouble: PenstockError | None = None
    while time.monotonic() < deadline:
        if hasattr(client, "poll"):
            await settle(client.poll(20))
        else:
            await asyncio.sleep(0.02)  # Between two looks.
        trouble = await settle(client.trouble())
        if trouble is not None and trouble.reason is reason:
            return trouble
    raise AssertionError(f"it is not {reason}: {trouble!r}")


@asynccontextmanager
async def away(cluster: Cluster, node_id: int) -> AsyncIterator[None]:
    """The node is killed, and there again after the block."""
    cluster.nodes[node_id].kill()
    try:
        yield
    finally:
        cluster.start()


async def test_the_only_replica_of_a_partition_is_killed(
    form: Form, admin: AdminClient, cluster: Cluster
) -> None:
    topic = await make_topic(form, admin, "killed", 2)
    async with (
        form.producer() as producer,
        form.consumer(topics=topic, **SETTINGS) as consumer,
        form.consumer(topics=topic, **SETTINGS) as late,
    ):
        assert [r.value for r in await settle(consumer.poll(PATIENCE_S * 1_000))] == [b"first"]
        async with away(cluster, 2):
            sent = await settle(producer.send(topic, b"second"))
            for client in (consumer, producer, late):
                trouble = await trouble_of(client, StallReason.NO_LEADER)
                assert isinstance(trouble, LeaderNotAvailableError)
                assert trouble.retriable
                assert f"{topic}-0" in trouble.message
        await verdict(sent)
        assert [r.value for r in await settle(consumer.poll(PATIENCE_S * 1_000))] == [b"second"]
        for client in (consumer, producer):
            assert await settle(client.trouble()) is None


async def test_a_topic_is_deleted_while_it_is_read(form: Form, admin: AdminClient) -> None:
    topic = await make_topic(form, admin, "deleted", 2)
    async with form.consumer(topics=topic, **SETTINGS) as consumer:
        assert len(await settle(consumer.poll(PATIENCE_S * 1_000))) == 1
        admin.delete_topic(topic)
        trouble = await trouble_of(consumer, StallReason.TOPIC_ABSENT)
        assert isinstance(trouble, UnknownTopicOrPartitionError)


async def test_the_only_replica_of_a_record_is_damaged(
    form: Form, admin: AdminClient, cluster: Cluster
) -> None:
    topic = await make_topic(form, admin, "damaged", 2)
    [segment] = cluster.nodes[2].partition_directory(topic, 0).glob("*.log")
    position = segment.read_bytes().index(b"first")
    with segment.open("r+b") as file:
        file.seek(position)
        file.write(b"F")
        file.flush()
        async with form.consumer(topics=topic, **SETTINGS) as consumer:
            trouble = await trouble_of(consumer, StallReason.DAMAGED)
            assert isinstance(trouble, CorruptRecordError)
            assert f"{topic}-0" in trouble.message
            file.seek(position)
            file.write(b"f")
            file.flush()
            [record] = await settle(consumer.poll(PATIENCE_S * 1_000))
            assert record.value == b"first"
            assert await settle(consumer.trouble()) is None


async def test_the_coordinator_stands_still_while_a_member_joins(
    form: Form, admin: AdminClient, cluster: Cluster
) -> None:
    topic = await make_topic(form, admin, "joined", 2)
    settings = {"topics": topic, "group_id": topic, **SETTINGS}
    async with form.consumer(**settings) as consumer:
        assert len(await settle(consumer.poll(PATIENCE_S * 1_000))) == 1
    [group] = admin.describe_groups([topic])
    coordinator = cluster.nodes[group.coordinator]
    others = [node.address for node in cluster.nodes.values() if node is not coordinator]
    coordinator.signal(signal.SIGSTOP)
    try:
        async with Form(",".join(others), form.is_async).consumer(**settings) as consumer:
            trouble = await trouble_of(consumer, StallReason.WAITING_FOR_REBALANCE)
            assert f"penstock groups describe {topic}" in trouble.message
            # Then it is taken for dead, and another broker coordinates the group.
            async with form.producer() as producer:
                await trouble_of(consumer, StallReason.UNREACHABLE)
                coordinator.signal(signal.SIGCONT)
                await verdict(producer.send(topic, b"second"))
            [record] = await settle(consumer.poll(PATIENCE_S * 1_000))
            assert record.value == b"second"
            assert await settle(consumer.trouble()) is None
    finally:
        coordinator.signal(signal.SIGCONT)
        cluster.wait_ready()


@pytest.fixture(scope="class")
def far(admin: AdminClient, relay: Relay) -> str:
    admin.create_topic("far", replica_assignments=[[3]])
    relay.cut()
    return "far"


class TestWhileABrokerCannotBeReached:
    """A broker that lives, and whose address leads nowhere: the controllers see nothing amiss."""

    async def test_who_reads_on_says_which(self, form: Form, far: str) -> None:
        async with form.consumer(**SETTINGS) as consumer:
            partition = TopicPartition(far, 0)
            await settle(consumer.assign([partition]))
            await settle(consumer.seek(partition, 0))
            trouble = await trouble_of(consumer, StallReason.UNREACHABLE)
            assert isinstance(trouble, NetworkError)
            assert "broker 3 at 127.0.0.1:" in trouble.message

    async def test_who_does_not_know_yet_where_to_begin_says_so(self, form: Form, far: str) -> None:
        async with form.consumer(topics=far, **SETTINGS) as consumer:
            trouble = await trouble_of(consumer, StallReason.WAITING_FOR_POSITION)
            assert f"{far}-0" in trouble.message

    async def test_who_writes_says_which(self, form: Form, far: str) -> None:
        async with form.producer(delivery_timeout_ms=3_000) as producer:
            sent = await settle(producer.send(far, b"v"))
            trouble = await trouble_of(producer, StallReason.UNREACHABLE)
            assert "1 record for partition far-0" in trouble.message
            assert "broker 3 at 127.0.0.1:" in trouble.message
            with pytest.raises(PenstockError, match="not written") as caught:
                await verdict(sent)
            assert caught.value.reason is StallReason.UNREACHABLE
