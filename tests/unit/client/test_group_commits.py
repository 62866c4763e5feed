"""What members commit, and when."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.client import AsyncConsumer, ClientClosedError, OffsetAndMetadata, commits
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    FencedMemberEpochError,
    PenstockError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from tests.support import eventually
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reading import T0, T1, committed, fill, member, numbers, read


async def test_iteration_commits_only_what_was_gone_past(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 10))
    async with member(cluster, auto_commit_interval_ms=10) as consumer:
        seen = 0
        async for _ in consumer:
            seen += 1
            if seen == 5:
                await eventually(lambda: committed(cluster).get(T0) == 4)
                break
        # The fifth is in the application's hands: not processed yet, as far as we know.
        assert committed(cluster) == {T0: 4}
    assert committed(cluster) == {T0: 5}  # Closing says that it is.


async def test_auto_commit_holds_back_what_the_last_poll_gave(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 6))
    async with member(cluster, auto_commit_interval_ms=10, max_poll_records=3) as consumer:
        await read(consumer, 3)
        await eventually(lambda: committed(cluster) == {T0: 0})
        await read(consumer, 3)
        await eventually(lambda: committed(cluster) == {T0: 3})


async def test_commits_by_hand(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 5))
    async with member(cluster, enable_auto_commit=False) as consumer:
        await read(consumer, 5)
        assert await consumer.committed(T0, T1) == {T0: None, T1: None}
        await consumer.commit()
        assert (await consumer.committed(T0))[T0] == OffsetAndMetadata(5, 0, "")
        await consumer.commit({T0: OffsetAndMetadata(2, 0, "note"), T1: 0})
        assert (await consumer.committed(T0))[T0] == OffsetAndMetadata(2, 0, "note")
    assert committed(cluster) == {T0: 2, T1: 0}


async def test_an_automatic_commit_leaves_out_what_was_given_back_while_it_waited(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 3))
    fill(cluster, "t", 1, numbers(0, 3))
    async with member(cluster) as first, member(cluster) as second:
        await read(first, 6)
        await first.poll(0)  # All of it is processed.
        await second.poll(50)
        await eventually(lambda: first._engine.handout.interrupted)
        asked: list[int] = []

        def not_yet(request: groups_pb2.CommitOffsetsRequest) -> PenstockError | None:
            asked.append(len(request.offsets))
            return CoordinatorLoadInProgressError("wait")

        cluster.on_commit = not_yet
        giving_back = asyncio.create_task(first.poll(0))
        await eventually(lambda: asked != [])
        engine = first._engine
        waiting = asyncio.create_task(engine._commits.commit_processed(engine._mine))
        cluster.on_commit = None
        await asyncio.gather(giving_back, waiting)
        assert committed(cluster) == {T0: 3, T1: 3}
        assert "automatic commit failed" not in caplog.text


async def test_a_commit_that_crossed_a_new_epoch_is_repeated(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 2))
    left = 1

    def stale(request: groups_pb2.CommitOffsetsRequest) -> PenstockError | None:
        nonlocal left
        left -= 1
        return StaleMemberEpochError("take the newer one first") if left >= 0 else None

    async with member(cluster, enable_auto_commit=False) as consumer:
        await read(consumer, 2)
        cluster.on_commit = stale
        await consumer.commit()
        assert committed(cluster) == {T0: 2}
        cluster.on_commit = lambda request: UnknownMemberIdError("gone")
        with pytest.raises(UnknownMemberIdError):
            await consumer.commit()


async def test_closing_waits_for_an_earlier_commit_no_longer_than_it_may(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    asked = asyncio.Event()

    def not_yet(request: groups_pb2.CommitOffsetsRequest) -> PenstockError | None:
        asked.set()
        return CoordinatorLoadInProgressError("wait")

    consumer = member(cluster)
    await read(consumer, 3)
    cluster.on_commit = not_yet
    commit = asyncio.create_task(consumer.commit())
    await asked.wait()
    started = time.monotonic()
    await consumer.close(timeout_ms=300)
    assert time.monotonic() - started < 10, "and not for default_api_timeout_ms, a minute"
    assert "was not answered within" in caplog.text
    with pytest.raises(ClientClosedError):
        await commit


async def test_partitions_given_up_by_assign_are_committed_first(cluster: FakeCluster) -> None:
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 3))
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "max_poll_records": 2}
    async with AsyncConsumer(cluster.bootstrap, **settings) as consumer:
        await consumer.assign([T0])
        await read(consumer, 2)
        assert len(await consumer.poll(5_000)) == 1
        await consumer.assign([T1])
        assert committed(cluster) == {T0: 2}, "the third is in the application's hands"


@pytest.mark.parametrize("by_hand", [True, False])
async def test_positions_that_stay_are_renewed_where_no_membership_keeps_them(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """A group without members forgets a quiet partition's position while it is being read."""
    monkeypatch.setattr(commits, "_RENEW_MS", 30.0)
    cluster.add_topic("t", 2)
    fill(cluster, "t", 0, numbers(0, 3))
    async with member(cluster, auto_commit_interval_ms=10) as consumer:
        if by_hand:
            await consumer.unsubscribe()
            await consumer.assign([T0])
        await read(consumer, 3)
        await consumer.poll(0)
        made = cluster.groups["g"].commits
        await eventually(lambda: bool(made) and made[-1].get(T0) == 3)
        if by_hand:
            await eventually(lambda: made[-3:] == [{T0: 3}] * 3)
        else:
            count = len(made)
            await asyncio.sleep(0.2)  # To show that nothing happens.
            assert len(made) == count


async def test_a_commit_is_refused_when_its_partition_was_anothers_while_it_waited(
    cluster: FakeCluster,
) -> None:
    """Even if this member has it again: the other may have gone beyond."""
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    asked = asyncio.Event()

    def not_yet(request: groups_pb2.CommitOffsetsRequest) -> PenstockError | None:
        asked.set()
        return CoordinatorLoadInProgressError("wait")

    async with member(cluster, enable_auto_commit=False) as consumer:
        await read(consumer, 3)
        cluster.on_commit = not_yet
        other = asyncio.create_task(consumer.commit({T1: 7}))
        await asked.wait()
        commit = asyncio.create_task(consumer.commit({T0: 1}))
        await consumer.poll(0)
        cluster.groups["g"].members.clear()
        assert len(await read(consumer, 3)) == 3, "all again, as nothing was committed"
        cluster.on_commit = None
        with pytest.raises(FencedMemberEpochError, match="took t-0 from this member"):
            await commit
        assert T0 not in committed(cluster)
        await asyncio.gather(other, return_exceptions=True)
