"""Why replicas are out of sync: who is asked, and what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from penstock.client import AsyncAdminClient, OutOfSyncReplica, out_of_sync
from penstock.v1 import metadata_pb2
from tests.unit.client.fake_broker import FakeCluster, FakeNode

SLOW = metadata_pb2.OUT_OF_SYNC_REASON_SLOW
STUCK = metadata_pb2.OUT_OF_SYNC_REASON_STUCK
BOOTSTRAPPING = metadata_pb2.OUT_OF_SYNC_REASON_BOOTSTRAPPING
OFFLINE = metadata_pb2.OUT_OF_SYNC_REASON_OFFLINE
DAMAGED = metadata_pb2.OUT_OF_SYNC_REASON_DAMAGED

Reasons = Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]


class Pictures:
    """What each broker says of the one partition of topic t, and who was asked."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.asked: list[int] = []
        self.leader = 2
        self.isr: Sequence[int] = (2,)
        self.offline: Sequence[int] = ()
        self.fenced: set[int] = set()
        self.reasons: dict[int, Reasons] = {}
        self.epochs: dict[int, int] = {}
        self.newer_isr: dict[int, Sequence[int]] = {}
        self.silent: set[int] = set()
        cluster.on_describe = self.describe

    async def describe(self, node: FakeNode) -> metadata_pb2.DescribeTopicsResponse:
        self.asked.append(node.number)
        if node.number in self.silent:
            await asyncio.Event().wait()
        answer = metadata_pb2.DescribeTopicsResponse(metadata_index=5, cluster_id="fake")
        for one in self.cluster.nodes.values():
            answer.brokers.add(
                node_id=one.number,
                host="127.0.0.1",
                port=one.port,
                fenced=one.number in self.fenced,
            )
        entry = metadata_pb2.PartitionDescription(
            partition=0,
            leader=self.leader,
            replicas=(1, 2, 3),
            isr=self.newer_isr.get(node.number, self.isr),
            offline_replicas=self.offline,
            partition_epoch=self.epochs.get(node.number, 0),
        )
        for node_id, reason in self.reasons.get(node.number, {}).items():
            entry.out_of_sync.add(node_id=node_id, reason=reason)
        answer.topics.add(name="t", topic_id=b"t" * 16, partitions=[entry])
        return answer

    async def shown(self) -> dict[int, str]:
        """What the client makes of it; broker 1 is asked first."""
        bootstrap = f"127.0.0.1:{self.cluster.nodes[1].port}"
        async with AsyncAdminClient(bootstrap) as admin:
            await admin.describe_topics(["t"])  # It knows all brokers from now on.
            self.asked.clear()
            [topic] = await admin.describe_topics(["t"], out_of_sync=True)
        [partition] = topic.partitions
        assert partition.out_of_sync is not None
        assert all(isinstance(one, OutOfSyncReplica) for one in partition.out_of_sync)
        return {one.node_id: one.reason for one in partition.out_of_sync}


@pytest.fixture
def pictures(cluster: FakeCluster) -> Pictures:
    return Pictures(cluster)


async def test_the_leader_says_why(pictures: Pictures) -> None:
    pictures.reasons = {2: {1: SLOW, 3: STUCK}}
    assert await pictures.shown() == {1: "slow", 3: "stuck"}


async def test_nobody_is_asked_more_where_all_are_in_sync(pictures: Pictures) -> None:
    pictures.isr = (1, 2, 3)
    assert await pictures.shown() == {}
    assert len(pictures.asked) == 1


async def test_a_leader_that_does_not_answer_leaves_it_unknown(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_sync, "ASKED_MS", 50.0)
    pictures.leader, pictures.isr = 3, (3,)
    pictures.reasons = {3: {1: SLOW, 2: SLOW}}
    pictures.silent = {3}
    assert await pictures.shown() == {1: "unknown", 2: "unknown"}


async def test_a_leader_that_is_gone_leaves_it_unknown_at_once(pictures: Pictures) -> None:
    pictures.leader, pictures.isr = 3, (3,)
    await pictures.cluster.nodes[3].stop()
    assert await pictures.shown() == {1: "unknown", 2: "unknown"}


async def test_a_leader_that_knows_of_no_reasons_leaves_them_unknown(pictures: Pictures) -> None:
    pictures.reasons = {}  # An older broker passes over what it is asked.
    assert await pictures.shown() == {1: "unknown", 3: "unknown"}


async def test_without_a_leader_the_metadata_tell_who_is_down(pictures: Pictures) -> None:
    pictures.leader, pictures.isr, pictures.fenced = -1, (3,), {2, 3}
    assert await pictures.shown() == {1: "unknown", 2: "offline"}
    assert len(pictures.asked) == 1


async def test_who_is_damaged_knows_it_better_than_its_leader(pictures: Pictures) -> None:
    pictures.offline = (1, 3)
    pictures.reasons = {2: {1: OFFLINE, 3: OFFLINE}, 3: {3: DAMAGED}}
    assert await pictures.shown() == {1: "offline", 3: "damaged"}


async def test_what_others_say_of_other_replicas_does_not_count(pictures: Pictures) -> None:
    pictures.offline = (3,)
    pictures.reasons = {2: {1: STUCK, 3: OFFLINE}, 3: {1: SLOW, 3: OFFLINE}}
    assert await pictures.shown() == {1: "stuck", 3: "offline"}


async def test_the_newer_picture_of_the_leader_is_shown(pictures: Pictures) -> None:
    pictures.isr = (2,)
    pictures.newer_isr, pictures.epochs = {2: (1, 2)}, {2: 7}
    pictures.reasons = {2: {3: BOOTSTRAPPING}}
    assert await pictures.shown() == {3: "bootstrapping"}


async def test_it_is_not_there_where_it_was_not_asked(pictures: Pictures) -> None:
    async with AsyncAdminClient(pictures.cluster.bootstrap) as admin:
        [topic] = await admin.describe_topics(["t"])
    assert topic.partitions[0].out_of_sync is None
    assert len(pictures.asked) == 1
