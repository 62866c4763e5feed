from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.client import (
    AsyncConsumer,
    MaxPollExceededError,
    TopicPartition,
)
from penstock.client.core.subscription import Rebalance
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    ConsumerStalledError,
    CoordinatorLoadInProgressError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    InvalidGroupIdError,
    PenstockError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, T1, committed, fill, member, numbers, read, values


async def test_a_member_commits_what_it_handed_out_and_the_next_goes_on(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    async with member(cluster, max_poll_records=4) as consumer:
        assert values(await read(consumer, 4)) == numbers(0, 4)
    assert committed(cluster) == {T0: 4}
    async with member(cluster) as consumer:
        assert values(await read(consumer, 6)) == numbers(4, 10)
    assert committed(cluster) == {T0: 10}


async def test_two_members_share_and_nothing_is_lost_or_doubled(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 4)
    for partition in range(4):
        fill(cluster, "t", partition, numbers(0, 100))
    seen: dict[TopicPartition, list[bytes]] = {}
    stop = False

    async def run(consumer: AsyncConsumer) -> None:
        async with consumer:
            while not stop:
                for record in await consumer.poll(20, 7):
                    seen.setdefault(record.topic_partition, []).append(record.value)

    first = asyncio.ensure_future(run(member(cluster)))
    await eventually(lambda: sum(map(len, seen.values())) > 50)
    second = asyncio.ensure_future(run(member(cluster)))
    await eventually(
        lambda: sorted(len(m.owned) for m in cluster.groups["g"].members.values()) == [2, 2]
    )
    for partition in range(4):
        fill(cluster, "t", partition, numbers(100, 150))
    await cluster.wake()
    await eventually(lambda: sum(map(len, seen.values())) >= 600)
    stop = True
    await asyncio.gather(first, second)
    assert seen == {TopicPartition("t", partition): numbers(0, 150) for partition in range(4)}
    assert committed(cluster) == {TopicPartition("t", partition): 150 for partition in range(4)}
    assert cluster.groups["g"].members == {}


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[TopicPartition, ...]]] = []

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.heard.append(("revoked", tuple(partitions)))

    async def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.heard.append(("assigned", tuple(partitions)))

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.heard.append(("lost", tuple(partitions)))


async def test_the_listener_hears_of_what_comes_and_goes(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    listener = Listener()
    first = AsyncConsumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest")
    first.subscribe("t", listener)
    async with first:
        while not listener.heard:
            await first.poll(20)
        assert listener.heard == [("assigned", (T0, T1))]
        async with member(cluster) as second:
            while not second.assignment():
                await first.poll(5)
                await second.poll(5)
        assert listener.heard[1][0] == "revoked"
        while len(listener.heard) < 3:
            await first.poll(20)
        assert listener.heard[2][0] == "assigned"
        assert first.assignment() == {T0, T1}
    assert listener.heard[3:] == [("revoked", (T0, T1))]


async def test_the_listener_hears_what_unsubscribing_gives_back(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 3))
    listener = Listener()
    async with member(cluster, max_poll_records=2) as consumer:
        consumer.subscribe("t", listener)
        await read(consumer, 3)
        await consumer.unsubscribe()
        assert listener.heard == [("assigned", (T0, T1)), ("revoked", (T0, T1))]
        assert committed(cluster) == {T0: 2, T1: 0}, "what the last poll gave is not processed"
        await consumer.assign([T1])
    assert len(listener.heard) == 2


async def test_revoked_partitions_wait_for_the_next_poll(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 3))
    fill(cluster, "t", 1, numbers(0, 3))
    async with member(cluster) as first, member(cluster) as second:
        await read(first, 6)
        await second.poll(50)
        await eventually(lambda: first._engine.handout.interrupted)
        # What the application works on is neither committed nor given away behind its back.
        assert committed(cluster) == {}
        assert second.assignment() == frozenset()
        await first.poll(0)
        while not second.assignment():
            await second.poll(20)
        [moved] = second.assignment()
        assert committed(cluster)[moved] == 3
        assert await second.poll(50) == []


async def test_an_assignment_that_another_overtook_is_not_read(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with member(cluster) as consumer:
        while not consumer.assignment():
            await consumer.poll(20)
        overtaken = Rebalance(0, assigned=(T1,))
        assert await consumer._engine.take_over(overtaken) == ()
        assert consumer.assignment() == {T0}


async def test_a_fenced_member_loses_all_and_joins_anew(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    listener = Listener()
    consumer = AsyncConsumer(cluster.bootstrap, group_id="g", auto_offset_reset="earliest")
    consumer.subscribe("t", listener)
    async with consumer:
        await read(consumer, 3)
        cluster.groups["g"].members.clear()
        # Nothing was committed, so everything comes again: at least once.
        assert values(await read(consumer, 3)) == numbers(0, 3)
    assert [what for what, _ in listener.heard] == ["assigned", "lost", "assigned", "revoked"]


async def test_a_moved_coordinator_is_found_and_nothing_is_lost(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))
    async with member(cluster) as consumer:
        await read(consumer, 5)
        [before] = cluster.groups["g"].members.values()
        cluster.coordinator = 2
        await consumer.commit()
        assert committed(cluster) == {T0: 5}
        await cluster.nodes[2].stop()
        cluster.coordinator = 3
        fill(cluster, "t", 0, numbers(5, 8))
        await cluster.wake()
        assert values(await read(consumer, 3)) == numbers(5, 8)
        await consumer.commit()
        assert committed(cluster) == {T0: 8}
        heard = asyncio.Event()

        def note(request: groups_pb2.GroupHeartbeatRequest) -> None:
            heard.set()

        cluster.on_heartbeat = note
        await asyncio.wait_for(heard.wait(), 10)
        [after] = cluster.groups["g"].members.values()
        assert after.member_id == before.member_id


async def test_a_loading_coordinator_is_waited_for(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 2))
    left = 3

    def load(request: Any) -> PenstockError | None:
        nonlocal left
        left -= 1
        return CoordinatorLoadInProgressError("still reading") if left >= 0 else None

    cluster.on_heartbeat = load
    async with member(cluster) as consumer:
        assert values(await read(consumer, 2)) == numbers(0, 2)
        left = 2
        cluster.on_commit = load
        await consumer.commit()
    assert committed(cluster) == {T0: 2}


@pytest.mark.parametrize("refusal", [UnknownMemberIdError, FencedMemberEpochError])
async def test_a_member_fenced_while_it_asks_for_offsets_joins_again(
    cluster: FakeCluster, refusal: type[PenstockError]
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    asked = 0

    def fence(request: groups_pb2.FetchOffsetsRequest) -> PenstockError | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            cluster.groups["g"].members.clear()
        return refusal("gone") if asked <= 2 else None

    cluster.on_fetch_offsets = fence
    async with member(cluster) as consumer:
        assert values(await read(consumer, 3)) == numbers(0, 3)


async def test_a_refused_member_hears_why_at_poll(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    cluster.on_heartbeat = lambda request: FencedInstanceIdError("another one is called so")
    async with member(cluster, group_instance_id="one") as consumer:
        with pytest.raises(FencedInstanceIdError, match="called so"):
            await read(consumer, 1)


async def test_a_refused_member_hears_it_at_each_poll_with_a_traceback_of_its_own(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    cluster.on_heartbeat = lambda request: FencedInstanceIdError("another one is called so")
    async with member(cluster, group_instance_id="one") as consumer:
        depths = []
        for _ in range(5):
            with pytest.raises(FencedInstanceIdError) as refused:
                await read(consumer, 1)
            depths.append(len(list(traceback.walk_tb(refused.value.__traceback__))))
    assert depths[-1] <= depths[0]


async def test_a_refused_member_that_subscribes_again_joins_again(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    async with member(cluster, group_instance_id="one") as consumer:
        for _ in range(2):
            cluster.on_heartbeat = lambda request: FencedInstanceIdError("another one")
            consumer.subscribe("t")
            for _ in range(2):  # Until it subscribes again, it hears the same again.
                with pytest.raises(FencedInstanceIdError):
                    await read(consumer, 1)
        cluster.on_heartbeat = None
        consumer.subscribe("t")
        assert values(await read(consumer, 3)) == numbers(0, 3)


async def test_a_refused_member_commits_nothing_and_hears_what_it_lost(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    listener = Listener()
    consumer = AsyncConsumer(
        cluster.bootstrap,
        group_id="g",
        group_instance_id="one",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=10,
        max_poll_records=2,
    )
    consumer.subscribe("t", listener)
    async with consumer:
        await read(consumer, 2)
        cluster.on_heartbeat = lambda request: FencedInstanceIdError("another one is called so")
        await eventually(lambda: consumer._engine.handout.interrupted)
        cluster.groups["g"].members.clear()  # The other one came, read everything and left.
        cluster.groups["g"].offsets[T0] = groups_pb2.OffsetCommit(offset=10)
        consumer._engine.handout.settle()
        commits = len(cluster.groups["g"].commits)
        with pytest.raises(FencedInstanceIdError):
            await consumer.commit()
        with pytest.raises(FencedInstanceIdError):
            await read(consumer, 1)
        assert consumer.assignment() == frozenset()
        assert listener.heard == [("assigned", (T0,)), ("lost", (T0,))]
        await asyncio.sleep(0.05)  # Some turns of the automatic commit.
    assert len(cluster.groups["g"].commits) == commits
    assert committed(cluster) == {T0: 10}
    assert listener.heard == [("assigned", (T0,)), ("lost", (T0,))]


async def test_a_member_given_up_commits_nothing_of_what_it_lost(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a member again at once, with an epoch that would let it commit."""
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 4))
    listener = Listener()
    consumer = AsyncConsumer(
        cluster.bootstrap, group_id="g", auto_offset_reset="earliest", max_poll_records=2
    )
    consumer.subscribe("t", listener)
    await read(consumer, 2)
    group = cluster.groups["g"]
    [before] = group.members.values()
    group.members.clear()
    await eventually(lambda: group.members and next(iter(group.members.values())) is not before)
    await eventually(lambda: consumer._engine._group.member.state.value == "reconciling")
    group.offsets[T0] = groups_pb2.OffsetCommit(offset=4)
    with pytest.raises(FencedMemberEpochError, match="t-0"):
        await consumer.commit()
    await consumer.close()
    assert committed(cluster) == {T0: 4}
    assert "automatic commit failed" not in caplog.text, "it does not even try"
    assert listener.heard == [("assigned", (T0,)), ("lost", (T0,))]


async def test_a_refused_member_may_go_on_by_hand(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    cluster.on_heartbeat = lambda request: FencedInstanceIdError("another one")
    async with member(cluster, group_instance_id="one") as consumer:
        with pytest.raises(FencedInstanceIdError):
            await read(consumer, 1)
        await consumer.unsubscribe()
        await consumer.assign([T0])
        async with asyncio.timeout(10):
            assert (await anext(consumer)).offset == 0


async def test_a_static_member_waits_for_its_predecessor_to_end(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 1))
    left = 2

    def held(request: Any) -> PenstockError | None:
        nonlocal left
        left -= 1
        return UnreleasedInstanceIdError("still held") if left >= 0 else None

    cluster.on_heartbeat = held
    async with member(cluster, group_instance_id="one") as consumer:
        await read(consumer, 1)


async def test_how_members_leave(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    epochs: list[int] = []

    def note(request: groups_pb2.GroupHeartbeatRequest) -> None:
        if request.member_epoch < 0:
            epochs.append(request.member_epoch)

    cluster.on_heartbeat = note
    for settings in ({}, {"group_instance_id": "one"}):
        async with member(cluster, **settings) as consumer:
            while not consumer.assignment():
                await consumer.poll(20)
        await eventually(lambda: not cluster.groups["g"].members)
    assert epochs == [-1, -2]


async def test_who_does_not_poll_leaves_and_who_polls_again_joins_again(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 2))
    async with member(cluster, max_poll_interval_ms=200) as consumer:
        await read(consumer, 2)
        await eventually(lambda: not cluster.groups["g"].members)
        assert values(await read(consumer, 2)) == numbers(0, 2)


async def test_who_left_for_not_polling_cannot_commit(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 2))
    async with member(cluster, max_poll_interval_ms=100, enable_auto_commit=False) as consumer:
        await read(consumer, 2)
        await eventually(lambda: not cluster.groups["g"].members)
        with pytest.raises(MaxPollExceededError, match="max_poll_interval_ms=100"):
            await consumer.commit()
    assert committed(cluster) == {}


async def test_what_failed_in_processing_comes_again(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 5))

    async def process() -> None:
        async with member(cluster) as consumer:
            async for record in consumer:
                if record.offset == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await process()
    assert committed(cluster) == {T0: 3}
    async with member(cluster) as again:
        assert values(await read(again, 2)) == numbers(3, 5)


async def test_waiting_in_poll_counts_as_polling(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    async with member(cluster, max_poll_interval_ms=150) as consumer:
        while not consumer.assignment():
            await consumer.poll(20)
        [joined] = cluster.groups["g"].members.values()
        assert await consumer.poll(600) == []
        assert list(cluster.groups["g"].members.values()) == [joined]


async def test_a_subscription_can_change(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    cluster.add_topic("u")
    fill(cluster, "u", 0, [b"u"])
    async with member(cluster) as consumer:
        while consumer.assignment() != {T0}:
            await consumer.poll(20)
        consumer.subscribe(["u"])
        assert (await read(consumer, 1))[0].topic == "u"
        assert consumer.assignment() == {TopicPartition("u", 0)}
        assert consumer.subscription() == ("u",)
        await consumer.unsubscribe()
        assert consumer.assignment() == frozenset()
        await eventually(lambda: not cluster.groups["g"].members)


async def test_committed_positions_serve_partitions_assigned_by_hand(
    cluster: FakeCluster,
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 4))
    async with AsyncConsumer(
        cluster.bootstrap, group_id="g", auto_offset_reset="earliest"
    ) as consumer:
        await consumer.assign([T0])
        await read(consumer, 4)
        await consumer.commit({T0: 3})
    async with AsyncConsumer(
        cluster.bootstrap, group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        await consumer.assign([T0])
        assert committed(cluster)[T0] == 4  # Closing committed what was handed out.
        assert await consumer.position(T0) == 4


async def test_a_heartbeat_that_a_blocked_loop_held_up_is_logged(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    with caplog.at_level(logging.WARNING, "penstock.client"):
        async with member(cluster, session_timeout_ms=1_000) as consumer:
            while not consumer.assignment():
                await consumer.poll(20)
            time.sleep(0.7)  # noqa: ASYNC251 - that it blocks the loop is the point.
            await consumer.poll(50)
    [text] = [one.getMessage() for one in caplog.records if "heartbeat was" in one.message]
    assert "session_timeout_ms=1000" in text


async def test_taking_records_one_by_one_counts_as_polling(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 20))
    async with member(cluster, max_poll_interval_ms=400) as consumer:
        seen = []
        async for record in consumer:
            seen.append(record.offset)
            await asyncio.sleep(0.06)  # Slow work: all of it together takes longer than allowed.
            if len(seen) == 12:
                break
        assert seen == list(range(12))
        started = asyncio.get_running_loop().time()
        await eventually(lambda: not cluster.groups["g"].members)  # Now it is silent.
        assert asyncio.get_running_loop().time() - started < 1


async def test_a_member_leaves_though_its_coordinator_is_just_gone(cluster: FakeCluster) -> None:
    cluster.add_topic("t", leader=2)
    consumer = member(cluster, enable_auto_commit=False)
    while not consumer.assignment():
        await consumer.poll(20)
    assert cluster.groups["g"].members
    await cluster.nodes[1].stop()
    await eventually(lambda: consumer._engine._group._stream is None)
    cluster.coordinator = 3
    await consumer.close()
    assert not cluster.groups["g"].members


async def test_a_member_leaves_though_its_coordinator_is_another_now(
    cluster: FakeCluster,
) -> None:
    cluster.heartbeat_interval_ms = 60_000
    cluster.add_topic("t")
    consumer = member(cluster, enable_auto_commit=False)
    while not consumer.assignment():
        await consumer.poll(20)
    cluster.coordinator = 3
    await consumer.close()
    assert not cluster.groups["g"].members


async def test_a_member_that_can_tell_nobody_says_so(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    consumer = member(cluster, enable_auto_commit=False)
    while not consumer.assignment():
        await consumer.poll(20)
    for node in cluster.nodes.values():
        await node.stop()
    await consumer.close(300)
    assert "could not be told that this member left" in caplog.text


async def test_what_may_mend_is_waited_for_and_logged(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t", leader=-1)
    monkeypatch.setattr("penstock.client.stalls._STALL_MS", 50.0)
    async with AsyncConsumer(cluster.bootstrap, topics="t") as consumer:
        assert await consumer.poll(400) == []
    assert "t-0 has no leader" in caplog.text


async def test_what_will_not_mend_is_raised_after_a_while(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_topic("t")
    cluster.on_find_coordinator = lambda request: InvalidGroupIdError("no such name for a group")
    async with member(cluster) as consumer:
        with monkeypatch.context() as patch:
            patch.setattr("penstock.client.stalls._STALL_MS", 100.0)
            with pytest.raises(ConsumerStalledError, match="no such name"):
                await read(consumer, 1)
        cluster.on_find_coordinator = None
        fill(cluster, "t", 0, numbers(0, 1))
        await read(consumer, 1)
