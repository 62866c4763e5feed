"""Watchers of the metadata: a snapshot first, changes in order, bounded memory."""

from __future__ import annotations

import asyncio

import pytest

from penstock.raft_meta.metadata_stream import BUFFERED_CHANGES, MetadataFeed
from penstock.v1 import cluster_pb2, controller_pb2


class World:
    def __init__(self) -> None:
        self.index = 0
        self.active = -1
        self.feed = MetadataFeed(self.snapshot, self.endpoint)

    def snapshot(self) -> cluster_pb2.MetadataDelta:
        return cluster_pb2.MetadataDelta(index=self.index, snapshot=True)

    def endpoint(self) -> controller_pb2.ControllerEndpoint:
        return controller_pb2.ControllerEndpoint(node_id=self.active)

    def change(self) -> None:
        self.index += 1
        self.feed.changed(cluster_pb2.MetadataDelta(index=self.index))


@pytest.fixture
def world():
    return World()


async def take(responses, count):
    return [await asyncio.wait_for(anext(responses), 5) for _ in range(count)]


async def test_a_watcher_gets_a_snapshot_and_then_each_change(world):
    world.change()
    responses = world.feed.subscribe().responses()
    (first,) = await take(responses, 1)
    assert (first.delta.index, first.delta.snapshot) == (1, True)
    assert first.HasField("active_controller")
    for _ in range(3):
        world.change()
    assert [each.delta.index for each in await take(responses, 3)] == [2, 3, 4]


async def test_what_changes_before_the_snapshot_is_taken_is_in_it_and_not_sent_again(world):
    watcher = world.feed.subscribe()
    world.change()
    world.change()
    responses = watcher.responses()
    (first,) = await take(responses, 1)
    assert first.delta.index == 2
    world.change()
    (second,) = await take(responses, 1)
    assert (second.delta.index, second.delta.snapshot) == (3, False)


async def test_a_slow_watcher_is_given_a_fresh_snapshot(world):
    watcher = world.feed.subscribe()
    responses = watcher.responses()
    await take(responses, 1)
    for _ in range(BUFFERED_CHANGES + 5):
        world.change()
    assert len(watcher._buffer) <= BUFFERED_CHANGES
    (fresh,) = await take(responses, 1)
    assert (fresh.delta.index, fresh.delta.snapshot) == (BUFFERED_CHANGES + 5, True)
    world.change()
    assert (await take(responses, 1))[0].delta.index == BUFFERED_CHANGES + 6


async def test_a_move_of_the_active_controller_is_told_at_once_and_only_once(world):
    responses = world.feed.subscribe().responses()
    await take(responses, 1)
    world.active = 2
    world.feed.changed(None)
    world.feed.changed(None)
    world.change()
    move, change = await take(responses, 2)
    assert move.active_controller.node_id == 2
    assert not move.HasField("delta")
    assert change.delta.index == 1
    assert not change.HasField("active_controller")


async def test_a_replaced_state_is_sent_whole(world):
    responses = world.feed.subscribe().responses()
    await take(responses, 1)
    world.index = 50
    world.feed.replaced()
    (fresh,) = await take(responses, 1)
    assert (fresh.delta.index, fresh.delta.snapshot) == (50, True)


async def test_streams_end_with_the_feed(world):
    responses = world.feed.subscribe().responses()
    await take(responses, 1)
    world.feed.close()
    assert [each async for each in responses] == []
    assert [each async for each in world.feed.subscribe().responses()] == []
