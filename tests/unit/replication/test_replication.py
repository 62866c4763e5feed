"""Replica managers that replicate to each other over gRPC on loopback."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker.core.partition_events import Role
from penstock.broker.replication.leader import FollowerStream
from penstock.v1 import common_pb2
from penstock.wire.errors import (
    FencedLeaderEpochError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    RequestTimedOutError,
    StorageError,
)
from tests.support import eventually
from tests.unit.replication.brokers import KEY, TOPIC, Brokers, running


def all_equal(brokers: Brokers, values: list[bytes], partition: int = 0) -> bool:
    return all(
        broker.log(partition).values() == values
        for broker in brokers.brokers.values()
        if not broker.stopped
    )


async def test_acks_all_answers_once_every_in_sync_replica_holds_it_durably() -> None:
    async with running() as brokers:
        brokers.create_topic()
        brokers[3].logs.hold = True
        pending = asyncio.create_task(brokers[1].append(b"a", b"b"))
        await eventually(lambda: brokers[3].log().log_end_offset == 2)
        await eventually(lambda: brokers[2].log().durable_offset == 2)
        assert brokers[1].partition().replica.high_watermark == 0
        assert not pending.done()
        brokers[3].logs.release()
        info = await pending
        assert (info.base_offset, info.last_offset) == (0, 1)
        assert all_equal(brokers, [b"a", b"b"])
        # The followers learn what is committed without another append.
        for node_id in (1, 2, 3):
            partition = brokers[node_id].partition()
            await eventually(lambda p=partition: p.replica.high_watermark == 2)
            assert brokers[node_id].log().committed_offset == 2


async def test_many_appends_at_once_arrive_in_order_in_few_messages() -> None:
    async with running() as brokers:
        brokers.create_topic(partitions=2)
        values = [b"%d" % number for number in range(300)]
        leaders = (brokers[1], brokers[2])
        await asyncio.gather(
            *(
                leaders[partition].append(value, partition=partition)
                for value in values
                for partition in (0, 1)
            )
        )
        assert all_equal(brokers, values)
        assert all_equal(brokers, values, partition=1)


async def test_a_large_backlog_is_cut_into_messages() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        values = [bytes([number]) * 300_000 for number in range(12)]
        await asyncio.gather(*(brokers[1].append(value) for value in values))
        assert all_equal(brokers, values)


async def test_a_follower_that_was_down_catches_up_and_joins_again() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers.kill(3)
        await brokers[1].append(b"b")
        assert brokers.isr() == {1, 2}
        await brokers.restart(3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert all_equal(brokers, [b"a", b"b"])
        await brokers[1].append(b"c")
        assert all_equal(brokers, [b"a", b"b", b"c"])


async def test_a_leader_that_dies_is_followed_by_one_that_has_everything_acknowledged() -> None:
    async with running() as brokers:
        brokers.create_topic()
        acknowledged = []
        for number in range(5):
            await brokers[1].append(b"%d" % number)
            acknowledged.append(b"%d" % number)
        await brokers.kill(1)
        info = await brokers[2].append(b"next")
        assert info.base_offset == 5
        fetched = await brokers[2].fetch(0)
        assert fetched.high_watermark == 6
        await brokers.restart(1)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert all_equal(brokers, [*acknowledged, b"next"])


async def test_a_deposed_leader_answers_who_waits_and_cuts_what_was_never_committed() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"kept")
        # Cut off: its followers take nothing more, and it does not hear of the election.
        for node_id in (2, 3):
            brokers[node_id].logs.hold = True
        waiting = asyncio.create_task(brokers[1].append(b"lost"))
        await eventually(lambda: brokers[1].log().durable_offset == 2)
        brokers[1].deaf = True
        for node_id in (2, 3):
            brokers[node_id].log().truncate_to(1)
        brokers.change(leader=2, isr=[1, 2, 3])
        for node_id in (2, 3):
            brokers[node_id].logs.release()
        written = asyncio.create_task(brokers[2].append(b"new"))
        await eventually(lambda: brokers[2].log().log_end_offset == 2)
        assert not waiting.done()
        brokers[1].listen()
        with pytest.raises(NotLeaderError) as refused:
            await waiting
        assert refused.value.leader is not None
        assert refused.value.leader.node_id == 2
        assert refused.value.leader.port == brokers[2].port
        await written
        assert all_equal(brokers, [b"kept", b"new"])
        assert [brokers[n].log().epochs.entries for n in (1, 3)] == [
            brokers[2].log().epochs.entries
        ] * 2


async def test_a_follower_ahead_of_its_leaders_metadata_asks_again() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[2].deaf = True  # Elected, but the last to know.
        brokers.change(leader=2)
        await eventually(lambda: brokers[3].partition().replica.leader == 2)
        with pytest.raises(NotLeaderError):
            await brokers[1].append(b"b")
        brokers[2].listen()
        await brokers[2].append(b"b")
        assert all_equal(brokers, [b"a", b"b"])


async def test_a_slow_follower_leaves_the_in_sync_set_and_comes_back() -> None:
    async with running(lag_max_ms=1000) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[3].logs.hold = True
        await brokers[1].append(b"b")  # Acknowledged once 3 is out.
        assert brokers.isr() == {1, 2}
        [entry] = brokers.proposals[-1].partitions
        assert [(m.node_id, m.broker_epoch) for m in entry.new_isr] == [
            (n, brokers[n].broker_epoch) for n in (1, 2)
        ]
        brokers[3].logs.release()
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        await brokers[1].append(b"c")
        assert all_equal(brokers, [b"a", b"b", b"c"])


async def test_too_few_in_sync_replicas_are_named_and_nothing_is_appended() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers.kill(2)
        await brokers.kill(3)
        with pytest.raises(NotEnoughReplicasError) as refused:
            await brokers[1].append(b"a")
        assert refused.value.message == (
            "orders-0: 1 in-sync replica (brokers 1), min.insync.replicas needs 2; out of sync: "
            "brokers 2, 3. Start them or wait until they have caught up"
        )
        assert brokers[1].log().log_end_offset == 0
        # With acks=1 it is taken, but not shown.
        await brokers[1].append(b"b", acks=common_pb2.ACKS_LEADER)
        assert (await brokers[1].fetch(0, wait_ms=0)).records == b""
        await brokers.restart(2)
        assert (await brokers[1].fetch(0)).records


async def test_an_in_sync_set_that_shrinks_below_the_minimum_answers_who_waits() -> None:
    async with running() as brokers:
        brokers.create_topic()
        brokers[2].logs.hold = brokers[3].logs.hold = True
        waiting = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: brokers[3].log().log_end_offset == 1)
        brokers.change(isr=[1])
        with pytest.raises(NotEnoughReplicasAfterAppendError, match="brokers 2, 3"):
            await waiting


async def test_a_time_out_names_who_is_behind() -> None:
    async with running() as brokers:
        brokers.create_topic()
        brokers[3].logs.hold = True
        with pytest.raises(RequestTimedOutError, match=r"in-sync broker\(s\) 3 within 100 ms"):
            await brokers[1].append(b"a", timeout_ms=100)
        brokers[3].logs.release()
        assert (await brokers[1].append(b"b")).base_offset == 1


async def test_acks_one_and_none_do_not_wait_for_followers() -> None:
    async with running() as brokers:
        brokers.create_topic()
        for node_id in (1, 2, 3):
            brokers[node_id].logs.hold = True
        info = await brokers[1].append(b"a", acks=common_pb2.ACKS_NONE)
        assert info.base_offset == 0
        waiting = asyncio.create_task(brokers[1].append(b"b", acks=common_pb2.ACKS_LEADER))
        await eventually(lambda: brokers[2].log().log_end_offset == 2)
        assert not waiting.done()  # Not even here is it durable.
        brokers[1].logs.release()
        assert (await waiting).base_offset == 1


async def test_a_lost_answer_of_the_controllers_is_asked_for_again() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers.kill(3)
        await brokers[1].append(b"a")
        brokers[1].deaf = True  # It learns of the change by the answer alone.
        brokers.controllers_lose_answers = 1
        await brokers.restart(3)
        brokers[1].deaf = False
        brokers[1].listen()
        brokers[1].deaf = True
        await eventually(lambda: brokers[1].partition().replica.isr == {1, 2, 3})
        assert len(brokers.proposals) == 2
        assert brokers.proposals[0] == brokers.proposals[1]


async def test_without_controllers_a_replica_being_added_holds_the_high_watermark() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers.kill(3)
        await brokers[1].append(b"a")
        brokers.controllers_answer = False
        await brokers.restart(3)
        await eventually(lambda: bool(brokers.proposals))
        brokers[3].logs.hold = True
        waiting = asyncio.create_task(brokers[1].append(b"b"))
        await eventually(lambda: brokers[2].log().durable_offset == 2)
        await eventually(lambda: brokers[3].log().log_end_offset == 2)
        assert not waiting.done()
        brokers[3].logs.release()
        await waiting
        assert brokers[1].partition().replica.isr == {1, 2}
        brokers.controllers_answer = True
        await eventually(lambda: brokers.isr() == {1, 2, 3})


async def test_a_follower_begins_anew_where_the_leaders_log_begins() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers.kill(3)
        for value in (b"b", b"c", b"d"):
            await brokers[1].append(value)
        brokers[1].partition().advance_log_start(3)
        await brokers.restart(3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert brokers[3].log().log_start_offset == 3
        assert brokers[3].log().values() == [b"d"]
        assert brokers[3].log().begun_with == b"below 3"  # What the leader's producers wrote.
        await eventually(lambda: brokers[2].log().log_start_offset == 3)


async def test_a_restarted_leader_leads_nothing_by_metadata_older_than_its_registration() -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        stale = brokers.snapshot()  # It says that 1 leads.
        await brokers[1].stop()
        brokers.index += 1
        process = await brokers.start(1, brokers[1].logs)
        await process.stop()
        fresh = type(process)(brokers, 1, process.logs, brokers.index + 5)
        await fresh.start()
        try:
            fresh.hear(stale)
            assert list(fresh.manager.partitions()) == []
            brokers.index += 5
            fresh.hear(brokers.snapshot())
            assert [p.replica.role for p in fresh.manager.partitions()] == [Role.LEADER]
        finally:
            await fresh.stop()


async def test_deleted_topics_end_with_all_who_wait_on_them() -> None:
    async with running() as brokers:
        brokers.create_topic()
        told: list[tuple[str, int, int, bool]] = []
        brokers[1].manager.add_leadership_listener(lambda *args: told.append(args))
        brokers[2].logs.hold = True
        waiting = asyncio.create_task(brokers[1].append(b"a"))
        fetching = asyncio.create_task(brokers[1].fetch(0))
        await eventually(lambda: brokers[2].log().log_end_offset == 1)
        brokers.partitions.clear()
        brokers.publish(removed_topics=[brokers.topic.topic_id])
        with pytest.raises(Exception, match="does not exist"):
            await waiting
        assert (await fetching).error.code == 3
        assert told == [(TOPIC, 0, 0, False)]
        assert all(not broker.logs.open for broker in brokers.brokers.values())


async def test_logs_that_the_metadata_does_not_name_at_a_start_are_set_aside() -> None:
    async with running() as brokers:
        brokers.create_topic(partitions=2)
        await brokers[1].append(b"a")
        await brokers.kill(3)
        del brokers.partitions[1]
        restarted = await brokers.restart(3)
        assert [key.partition for key in restarted.logs.open] == [0]
        assert [key.partition for key in restarted.logs.aside] == [1]
        await brokers.kill(3)
        brokers.partitions.clear()  # The topic was deleted; or the metadata is lost.
        brokers.publish(removed_topics=[brokers.topic.topic_id])
        restarted = await brokers.restart(3)
        assert not restarted.logs.open
        assert restarted.logs.aside[KEY].values() == [b"a"]
        assert not restarted.logs.deleted


async def test_a_snapshot_that_lacks_a_topic_is_no_order_to_delete_it() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers.partitions.clear()
        brokers.index += 1
        for broker in brokers.brokers.values():
            broker.hear(brokers.snapshot())
            assert not broker.logs.open
            assert broker.logs.aside[KEY].values() == [b"a"]
            assert not broker.logs.deleted


@pytest.mark.parametrize("when", ["it was down", "it missed the news"])
async def test_a_topic_that_a_snapshot_remembers_as_deleted_is_deleted(when: str) -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        if when == "it was down":
            await brokers.kill(3)
        brokers[3].deaf = True
        brokers.partitions.clear()
        brokers.deleted_topics = [brokers.topic.topic_id]
        brokers.publish(removed_topics=brokers.deleted_topics)
        if when == "it was down":
            await brokers.restart(3)
        else:
            brokers[3].deaf = False
            brokers[3].hear(brokers.snapshot())
        assert (brokers[3].logs.deleted, brokers[3].logs.aside) == ([KEY], {})


async def test_a_replica_moved_away_is_deleted_when_told_and_set_aside_when_found() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers.kill(2)
        brokers.change(replicas=[1], isr=[1])
        assert (brokers[3].logs.deleted, brokers[3].logs.aside) == ([KEY], {})
        restarted = await brokers.restart(2)
        assert not restarted.logs.deleted
        assert restarted.logs.aside[KEY].values() == [b"a"]


@pytest.mark.parametrize("when", ["it was down", "it missed the news"])
async def test_one_that_a_later_leader_epoch_shows_to_be_moved_away_is_deleted(when: str) -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        if when == "it was down":
            await brokers.kill(2)
            brokers.change(replicas=[1, 3], isr=[1, 3], leader=1)
            moved = await brokers.restart(2)
        else:
            moved = brokers[2]
            moved.deaf = True
            brokers.change(replicas=[1, 3], isr=[1, 3], leader=1)
            moved.deaf = False
            moved.hear(brokers.snapshot())
        assert (moved.logs.deleted, moved.logs.aside) == ([KEY], {})


async def test_a_log_that_can_not_be_used_at_a_start_is_left_where_it_is() -> None:
    """Its disk has failed since it was opened; the metadata name it, in whatever epoch."""
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers.kill(2)
        brokers.change(leader=3)
        brokers[2].logs.away.add(KEY)
        failed = await brokers.restart(2)
        assert failed.manager.hosted(KEY) is None
        assert failed.manager.offline_count == 1
        assert (failed.logs.deleted, failed.logs.aside) == ([], {})
        assert failed.logs.open[KEY].values() == [b"a"]


async def test_leadership_listeners_hear_each_change() -> None:
    async with running() as brokers:
        brokers.create_topic()
        told: list[tuple[str, int, int, bool]] = []
        brokers[2].manager.add_leadership_listener(lambda *args: told.append(args))
        brokers.change(leader=2)
        assert brokers[2].manager.leader_epoch_of(TOPIC, 0) == 1
        brokers.change(leader=2)
        brokers.change(leader=3)
        assert brokers[2].manager.leader_epoch_of(TOPIC, 0) is None
        assert told == [
            (TOPIC, 0, 1, True),
            (TOPIC, 0, 1, False),
            (TOPIC, 0, 2, True),
            (TOPIC, 0, 2, False),
        ]


async def test_a_broken_disk_takes_one_replica_offline_and_no_other() -> None:
    async with running() as brokers:
        brokers.create_topic(partitions=2)
        brokers[3].log(0).broken = True
        waiting = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: brokers[3].partition(0).replica.role is Role.OFFLINE)
        await brokers[2].append(b"b", partition=1)
        brokers.change(isr=[1, 2])
        await waiting
        assert brokers[3].log(1).values() == [b"b"]


@pytest.mark.parametrize("led_before", [False, True])
async def test_a_replica_whose_log_has_a_newer_epoch_than_it_is_to_lead_in_steps_down(
    monkeypatch: pytest.MonkeyPatch, led_before: bool
) -> None:
    def refuse(leader_epoch: int) -> None:
        raise FencedLeaderEpochError(f"the log has a newer epoch than {leader_epoch}")

    async with running(2) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        chosen = brokers[1] if led_before else brokers[2]
        told: list[tuple[str, int, int, bool]] = []
        chosen.manager.add_leadership_listener(lambda *args: told.append(args))
        monkeypatch.setattr(chosen.log(), "assign_epoch", refuse)
        brokers.change(leader=chosen.node_id)
        assert chosen.partition().replica.role is Role.OFFLINE
        assert chosen.manager.leader_epoch_of(TOPIC, 0) is None
        assert told == ([(TOPIC, 0, 0, False)] if led_before else [])
        assert not chosen.manager._links._leader_of
        with pytest.raises(StorageError, match=r"orders-0: cannot lead in epoch 1.*newer epoch"):
            await chosen.append(b"b")
        assert chosen.log().values() == [b"a"]
        other = brokers[2] if led_before else brokers[1]
        brokers.change(leader=other.node_id, isr=[other.node_id])  # Its disk is fine.
        await other.append(b"b")


async def test_idle_streams_say_nothing() -> None:
    async with running() as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        for node_id in (2, 3):
            partition = brokers[node_id].partition()
            await eventually(lambda p=partition: p.replica.high_watermark == 1)
        streams = [brokers[1].manager.feed(session) for session in (1, 2)]
        sent = [stream.sequence for stream in streams if isinstance(stream, FollowerStream)]
        assert len(sent) == 2
        await asyncio.sleep(0.3)  # Time in which nothing must happen.
        assert [stream.sequence for stream in streams if isinstance(stream, FollowerStream)] == sent
