"""AdminClient.drain_broker, describe_node and read_metrics, and their twins."""

from __future__ import annotations

import pytest

from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    DirectoryDescription,
    InvalidRequestError,
    NetworkError,
    NodeDescription,
)
from penstock.wire.errors import BrokerIdNotRegisteredError
from tests.unit.client.conftest import Background
from tests.unit.client.fake_broker import FakeCluster


def described(node_id: int) -> NodeDescription:
    directory = DirectoryDescription("/data", 9, 8, "bad", -1)
    return NodeDescription(
        node_id, "1.2", 1, 6, True, ("broker",), 20, 10, (directory,), 5, 7, 11, "h:1"
    )


async def test_a_drain_says_what_is_left_and_may_be_repeated(cluster: FakeCluster) -> None:
    cluster.lost_answers = 1
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        assert await admin.drain_broker(2) == 3
        await admin.drain_broker(2, undo=True)
    assert cluster.drained == [(2, False), (2, False), (2, True)]


async def test_the_node_that_is_named_is_asked(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for node_id in sorted(cluster.nodes):
            assert await admin.describe_node(node_id) == described(node_id)
            assert await admin.read_metrics(node_id) == f"penstock_probe {node_id}.0\n"
        assert (await admin.describe_node()).node_id in cluster.nodes
        assert (await admin.read_metrics()).startswith("penstock_probe")


async def test_a_node_that_is_none_or_does_not_answer_is_an_error(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for ask in (admin.describe_node, admin.read_metrics):
            with pytest.raises(BrokerIdNotRegisteredError, match="the brokers are 1, 2"):
                await ask(77)
            with pytest.raises(InvalidRequestError, match="node_id"):
                await ask("two")  # type: ignore[arg-type]  # That is the test.
        await cluster.nodes[2].stop()
        with pytest.raises(NetworkError, match="2"):
            await admin.describe_node(2)


async def test_a_controller_without_a_broker_is_asked_through_one(cluster: FakeCluster) -> None:
    cluster.voters[101] = ("10.0.0.1", 9093)
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        assert (await admin.describe_node(101)).roles == ("controller",)
        with pytest.raises(BrokerIdNotRegisteredError, match=r"brokers are 1, 2.*no controller"):
            await admin.describe_node(102)
        cluster.silent_controllers.add(101)
        with pytest.raises(NetworkError, match="it is silent"):
            await admin.describe_node(101)
        assert cluster.asked_controllers == [101, 102, 101]  # Nobody is asked for a minute.
        # One of older software tells of itself instead.
        cluster.knows_controllers = False
        with pytest.raises(BrokerIdNotRegisteredError, match="the brokers are 1, 2"):
            await admin.describe_node(101)


def test_the_synchronous_twin(background: Background) -> None:
    with AdminClient(background.cluster.bootstrap) as admin:
        assert admin.drain_broker(1, undo=True) == 3
        assert admin.describe_node(1) == described(1)
        assert admin.read_metrics(1) == "penstock_probe 1.0\n"
