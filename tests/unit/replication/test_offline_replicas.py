"""Replicas that can't be served: the controllers are told, until they know."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from penstock.broker.core.partition_events import PartitionChanged, ProposeIsr, Role
from penstock.v1 import cluster_pb2
from penstock.wire.errors import NotLeaderError, StorageError
from penstock.wire.ids import TopicIdPartition
from tests.support import eventually
from tests.unit.replication.brokers import CLUSTER_ID, KEY, TOPIC, TOPIC_ID, Brokers, running
from tests.unit.replication.test_replica import ack, leader, log_of, position, state

BROKEN = StorageError("data directory d failed")


def reported(brokers: Brokers) -> list[tuple[int, int, int]]:
    """Node, partition and state of each report, in order."""
    return [
        (command.node_id, entry.partition, entry.state)
        for command in brokers.reports
        for entry in command.replicas
    ]


async def test_the_partitions_of_a_failed_disk_are_led_by_others_and_no_others_move() -> None:
    async with running(3) as brokers:
        brokers.create_topic(partitions=3)  # Broker 1 leads 0.
        await brokers[1].append(b"a")
        brokers[1].manager.on_logs_failed([KEY, TopicIdPartition(TOPIC_ID, 1)], BROKEN)
        await eventually(lambda: brokers[2].partition().is_leader)
        await brokers[2].append(b"b")
        assert brokers[3].log().values() == [b"a", b"b"]
        assert brokers[1].log().values() == [b"a"]
        assert brokers.isr(0) == {2, 3}
        assert brokers.isr(1) == {2, 3}
        assert brokers.isr(2) == {1, 2, 3}
        assert brokers[1].manager.offline_count == 2
        assert brokers[1].manager.is_settled


async def test_a_request_to_a_replica_on_a_failed_disk_is_sent_to_the_new_leader() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        brokers.controllers_answer = False
        brokers[1].manager.on_logs_failed([KEY], BROKEN)
        with pytest.raises(StorageError, match="broker 1: data directory d failed"):
            await brokers[1].append(b"a")
        brokers.controllers_answer = True
        await eventually(lambda: brokers[2].partition().is_leader)
        with pytest.raises(NotLeaderError) as refusal:
            await brokers[1].append(b"a")
        assert refusal.value.leader is not None
        assert refusal.value.leader.node_id == 2


async def test_a_report_is_made_again_until_a_controller_takes_it() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=2)
        brokers.controllers_answer = False
        brokers[1].manager.on_logs_failed([KEY], BROKEN)
        await eventually(lambda: len(brokers.reports) >= 3)
        assert not brokers[1].manager.is_settled
        brokers.controllers_answer = True
        await eventually(lambda: brokers[2].partition().is_leader)
        said = len(brokers.reports)
        brokers.change(1)
        await asyncio.sleep(0.1)  # Time in which nothing must happen.
        assert len(brokers.reports) == said


async def test_an_append_that_finds_the_disk_broken_reports_its_partition() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=3)
        brokers[1].log().broken = True
        with pytest.raises(StorageError):
            await brokers[1].append(b"a")
        await eventually(lambda: brokers[2].partition().is_leader)
        assert reported(brokers) == [(1, 0, cluster_pb2.REPLICA_STATE_OFFLINE)]


async def test_a_leader_that_lost_records_is_reported_and_another_one_leads() -> None:
    async with running(3) as brokers:
        brokers.create_topic()
        for value in (b"a", b"b"):
            await brokers[1].append(value)
        await brokers.kill(3)
        brokers[1].log().truncate_to(1)  # As a disk that forgets what it had confirmed.
        with capture_logs() as lines:
            await brokers.restart(3)
            await eventually(lambda: brokers.isr(0) == {2, 3})
        assert brokers[2].partition().is_leader
        await brokers[2].append(b"c")
        assert brokers[3].log().values() == [b"a", b"b", b"c"]
        assert brokers[1].log().values() == [b"a"], "it is left as it is"
        assert reported(brokers) == [(1, 0, cluster_pb2.REPLICA_STATE_OFFLINE)]
        assert brokers[1].manager.offline_count == 1
        [line] = [line for line in lines if line["event"].startswith("leader lost records")]
        assert (line["own_end_offset"], line["follower_end_offset"]) == (1, 2)


async def test_who_asks_a_leader_that_lost_records_is_told_where_there_is_no_other() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        for value in (b"a", b"b"):
            await brokers[1].append(value)
        await brokers.kill(2)  # Broker 1 is the only one in sync from now on.
        brokers[1].log().truncate_to(1)
        brokers.controllers_answer = False
        await brokers.restart(2)
        await eventually(lambda: not brokers[1].partition().is_leader)
        with pytest.raises(StorageError, match=r"broker 1: .*lacks records.*broker 2"):
            await brokers[1].append(b"c")
        brokers.controllers_answer = True
        await eventually(lambda: brokers.partitions[0].leader == -1)
        assert brokers[2].log().values() == [b"a", b"b"]


async def test_a_replica_that_is_not_found_is_reported_before_the_broker_is_let_in() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=2)
        await brokers.kill(1)
        brokers[1].logs.open.pop(KEY)
        brokers[1].logs.away = {KEY}
        brokers.controllers_answer = False
        broker = await brokers.restart(1)
        assert broker.manager.hosted(KEY) is None
        assert not broker.manager.is_settled
        brokers.controllers_answer = True
        await eventually(lambda: broker.manager.is_settled)
        assert reported(brokers)[-1] == (1, 0, cluster_pb2.REPLICA_STATE_OFFLINE)
        assert list(brokers.partitions[0].offline_replicas) == [1]
        with pytest.raises(NotLeaderError):
            await broker.append(b"a")


async def test_an_offline_replica_is_not_looked_for_at_every_change() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=2)
        await brokers.kill(1)
        brokers[1].logs.open.pop(KEY)
        brokers[1].logs.away = {KEY}
        with capture_logs() as lines:
            await brokers.restart(1)
            for _ in range(3):
                brokers.change(0)
        assert [line["event"] for line in lines].count("replica cannot be opened") == 1
        assert KEY not in brokers[1].logs.open, "nor made anew"
        assert brokers[1].manager.hosted(KEY) is None


async def test_offline_replicas_are_not_made_ahead_either() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=9)
        await brokers.kill(1)
        brokers[1].logs.away = set(brokers[1].logs.open)
        brokers[1].logs.open.clear()
        restarted = await brokers.restart(1)
        assert restarted.manager.offline_count == 9
        brokers.index += 1
        news = cluster_pb2.MetadataDelta(
            index=brokers.index, cluster_id=CLUSTER_ID, partitions=brokers.partitions.values()
        )
        change = restarted.image.apply(news)
        assert change is not None
        assert not any(restarted.manager.on_metadata(change)), "nothing is asked of the disk"


async def test_replicas_given_to_a_broker_that_runs_are_new_and_others_are_not() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=1)
        assert brokers[1].logs.made_new == {KEY: True}
        await brokers.kill(1)
        brokers[1].logs.open.clear()
        brokers[1].logs.made_new.clear()
        broker = await brokers.restart(1)
        assert broker.logs.made_new == {KEY: False}


async def test_a_replica_that_found_no_room_stays_as_new_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.broker.replication.hosting.MIN_RETRY_S", 0.01)
    async with running(1) as brokers:
        brokers[1].logs.full = True
        brokers.create_topic()
        await eventually(lambda: brokers[1].logs.refusals >= 2)
        brokers[1].logs.full = False
        await eventually(lambda: brokers[1].manager.leader_epoch_of(TOPIC, 0) == 0)
        assert brokers[1].logs.made_new == {KEY: True}


async def test_a_process_that_registers_anew_says_again_what_it_can_not_serve() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        broker = brokers[2]
        broker.manager.on_logs_failed([KEY], BROKEN)
        await eventually(lambda: list(brokers.partitions[0].offline_replicas) == [2])
        # The controllers forgot it and register the same process anew: all counts as mended.
        brokers.index += 1
        broker.broker_epoch = brokers.index
        record = cluster_pb2.BrokerRecord()
        record.CopyFrom(brokers.records[2])
        record.broker_epoch = broker.broker_epoch
        brokers.records[2] = record
        broker.manager.on_registered()
        brokers.publish(brokers=[record])
        brokers.change(0, offline_replicas=[])
        await eventually(lambda: list(brokers.partitions[0].offline_replicas) == [2])
        assert brokers.reports[-1].broker_epoch == broker.broker_epoch


async def test_metadata_that_wrongly_call_a_replica_offline_are_put_right() -> None:
    """As after a report that was taken late, when a newer one had been taken already."""
    async with running(2) as brokers:
        brokers.create_topic()
        brokers.change(0, offline_replicas=[2], isr=[1])
        await eventually(lambda: not brokers.partitions[0].offline_replicas)
        assert reported(brokers) == [(2, 0, cluster_pb2.REPLICA_STATE_ONLINE)]
        await brokers[1].append(b"a")
        await eventually(lambda: brokers.isr() == {1, 2})


async def test_before_metadata_version_3_nothing_is_reported_until_it_rises() -> None:
    async with running(2) as brokers:
        brokers.metadata_version = 2
        brokers.publish(metadata_version=2)
        brokers.create_topic()
        brokers[1].manager.on_logs_failed([KEY], BROKEN)
        await asyncio.sleep(0.1)  # Time in which nothing must happen.
        assert not brokers.reports
        assert brokers[1].manager.is_settled
        brokers.publish(metadata_version=3)
        await eventually(lambda: brokers[2].partition().is_leader)


async def test_a_replica_that_is_moved_away_is_offline_no_more() -> None:
    async with running(3) as brokers:
        brokers.create_topic()
        brokers[1].manager.on_logs_failed([KEY], BROKEN)
        await eventually(lambda: brokers[2].partition().is_leader)
        brokers.change(0, replicas=[2, 3], isr=[2, 3], offline_replicas=[])
        assert brokers[1].manager.offline_count == 0
        assert brokers[1].manager.hosted(KEY) is None


async def test_of_a_replica_that_never_was_here_nothing_is_removed_when_it_is_moved_away() -> None:
    async with running(3) as brokers:
        brokers[3].logs.away.add(KEY)
        brokers[3].deaf = True
        brokers.create_topic()
        brokers[3].deaf = False
        brokers[3].hear(brokers.snapshot())
        assert brokers[3].manager.offline_count == 1
        brokers.change(0, replicas=[1, 2], isr=[1, 2], offline_replicas=[])
        assert brokers[3].manager.offline_count == 0
        assert (brokers[3].logs.deleted, brokers[3].logs.aside) == ([], {})


async def test_a_failed_replica_follows_nobody_and_leads_nothing() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        brokers[2].manager.on_logs_failed([KEY], BROKEN)
        assert brokers[2].partition().replica.role is Role.OFFLINE
        brokers.change(0, leader=2)
        assert brokers[2].partition().replica.role is Role.OFFLINE
        assert brokers[2].manager.leader_epoch_of(TOPIC, 0) is None


def test_an_offline_follower_is_not_asked_for_until_it_is_online() -> None:
    replica = leader(log_of((4, 2)), high_watermark=2)
    replica.handle(position(2, 2, 4))
    replica.handle(position(3, 2, 4))
    offline = replace(state(version=11, isr=(1, 2)), offline=frozenset({3}))
    replica.handle(PartitionChanged(offline, 2, 0))
    assert replica.isr == {1, 2}
    replica.handle(ack(3, 2))
    assert replica.pending is None
    *_, effect = replica.handle(PartitionChanged(state(version=12, isr=(1, 2)), 2, 0))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.isr == {1, 2, 3}
