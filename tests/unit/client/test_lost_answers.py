"""Changes that took effect and whose answers were lost: a client's retry is no second wish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import pytest

from penstock.client import AsyncAdminClient
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    InvalidPartitionsError,
    PenstockError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    UnknownVoterError,
)
from tests.unit.client.fake_broker import FakeCluster

LOST = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]


@pytest.fixture(params=LOST, ids=lambda status: status.name)
def losing(cluster: FakeCluster, request: pytest.FixtureRequest) -> FakeCluster:
    """The next change takes effect, and its answer gets lost."""
    cluster.add_topic("t", 2)
    cluster.lost_answers, cluster.lost_as = 1, request.param
    return cluster


async def test_a_topic_is_made_once(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        made = await admin.create_topic("new", 3)
    assert made.created
    assert made.topic_id.replace("-", "") == losing.topics["new"].topic_id.hex()
    first, again = losing.asked_ids
    assert first == again
    assert len(first) == 16


async def test_each_topic_has_an_id_of_its_own(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        for name in ("a", "b"):
            await admin.create_topic(name)
    assert len(set(cluster.asked_ids)) == 2


async def test_a_topic_of_somebody_else_is_still_in_the_way(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        with pytest.raises(TopicAlreadyExistsError):
            await admin.create_topic("t")


async def test_a_topic_that_was_deleted_is_deleted(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        await admin.delete_topic("t")
    assert "t" not in losing.topics


async def test_a_topic_made_anew_meanwhile_is_not_deleted_by_the_retry(
    losing: FakeCluster,
) -> None:
    found = losing.topics["t"].topic_id
    async with AsyncAdminClient(losing.bootstrap) as admin:
        [described] = await admin.describe_topics(["t"])
        assert described.topic_id.replace("-", "") == found.hex()

        async def describe(_names: object) -> object:
            losing.delete_topic("t")
            losing.add_topic("t", 5)  # By somebody else, after we looked.
            return [described]

        admin.describe_topics = describe  # type: ignore[method-assign,assignment]  # As said above.
        await admin.delete_topic("t")
    assert len(losing.topics["t"].partitions) == 5


async def test_partitions_that_are_there_were_added(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        await admin.create_partitions("t", 4)
    assert len(losing.topics["t"].partitions) == 4


async def test_partitions_on_other_replicas_were_not_added_by_us(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        with pytest.raises(InvalidPartitionsError) as caught:
            await admin.create_partitions("t", 3, replica_assignments=[[77]])
    assert "it may have taken effect then" in caught.value.__notes__[0]


async def test_more_partitions_than_asked_for_are_of_somebody_else(losing: FakeCluster) -> None:
    losing.add_partitions("t", 9)
    async with AsyncAdminClient(losing.bootstrap) as admin:
        with pytest.raises(InvalidPartitionsError):
            await admin.create_partitions("t", 4)


async def test_a_voter_that_was_removed_is_removed(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        after = await admin.remove_voter(3)
    assert [voter.node_id for voter in after.voters] == [1, 2]


async def test_a_broker_that_was_unregistered_is_unregistered(losing: FakeCluster) -> None:
    async with AsyncAdminClient(losing.bootstrap) as admin:
        await admin.unregister_broker(2)
    assert losing.unregistered == [2, 2], "and no more is asked once that is known"


async def test_a_broker_that_is_not_there_is_asked_about_once(cluster: FakeCluster) -> None:
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        with pytest.raises(BrokerIdNotRegisteredError):
            await admin.unregister_broker(9)
    assert cluster.unregistered == [9]


Change = Callable[[AsyncAdminClient], Awaitable[object]]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda admin: admin.delete_topic("nope"), UnknownTopicOrPartitionError),
        (lambda admin: admin.remove_voter(9), UnknownVoterError),
        (lambda admin: admin.unregister_broker(9), BrokerIdNotRegisteredError),
    ],
    ids=["topic", "voter", "broker"],
)
async def test_what_never_was_is_refused_though_an_answer_got_lost(
    losing: FakeCluster, change: Change, refusal: type[PenstockError]
) -> None:
    async with AsyncAdminClient(losing.bootstrap, default_api_timeout_ms=3_000) as admin:
        with pytest.raises(refusal):
            await change(admin)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda admin: admin.create_partitions("t", 2), InvalidPartitionsError),
        (lambda admin: admin.create_topic("t"), TopicAlreadyExistsError),
    ],
    ids=["partitions", "topic"],
)
async def test_a_refusal_that_was_heard_stands(
    cluster: FakeCluster, change: Change, refusal: type[PenstockError]
) -> None:
    cluster.add_topic("t", 2)
    async with AsyncAdminClient(cluster.bootstrap) as admin:
        with pytest.raises(refusal) as caught:
            await change(admin)
    assert getattr(caught.value, "__notes__", []) == []
