"""Watchers of the metadata: a snapshot first, changes in order, bounded memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from penstock.raft_meta import change_log
from penstock.raft_meta.change_log import ChangeLog
from penstock.raft_meta.guarding import Encoded
from penstock.raft_meta.metadata_stream import MetadataFeed
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import MetadataDivergedError


class World:
    def __init__(self) -> None:
        self.index = 0
        self.epoch = 1
        self.active = -1
        self.frozen: list[int] = []
        self.news = asyncio.Event()
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.feed = MetadataFeed(self.freeze, self.endpoint)

    def freeze(self) -> Callable[[], cluster_pb2.MetadataDelta]:
        self.frozen.append(self.index)
        self.news.set()
        return partial(self.encode, self.index)

    async def froze(self, times: int) -> None:
        async with asyncio.timeout(30):
            while len(self.frozen) < times:
                self.news.clear()
                await self.news.wait()

    def encode(self, index: int) -> cluster_pb2.MetadataDelta:
        assert self.may_encode.wait(10)
        return cluster_pb2.MetadataDelta(index=index, snapshot=True)

    def endpoint(self) -> controller_pb2.ControllerEndpoint:
        return controller_pb2.ControllerEndpoint(node_id=self.active)

    def change(self) -> None:
        self.index += 1
        self.feed.changed(cluster_pb2.MetadataDelta(index=self.index, controller_epoch=self.epoch))


@pytest.fixture
def world():
    return World()


async def take(responses, count):
    return [decoded(await asyncio.wait_for(anext(responses), 5)) for _ in range(count)]


def decoded(response: Encoded) -> controller_pb2.WatchMetadataResponse:
    return controller_pb2.WatchMetadataResponse.FromString(response.data)


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


async def test_a_slow_watcher_is_given_a_fresh_snapshot(world, monkeypatch):
    monkeypatch.setattr(change_log, "KEPT_CHANGES", 20)
    slow, fast = (world.feed.subscribe().responses() for _ in range(2))
    await take(slow, 1)
    await take(fast, 1)
    for _ in range(25):
        world.change()
        await take(fast, 1)
    (fresh,) = await take(slow, 1)
    assert (fresh.delta.index, fresh.delta.snapshot) == (25, True)
    world.change()
    for responses in (slow, fast):
        assert (await take(responses, 1))[0].delta.index == 26
    assert world.frozen == [0, 0, 25], "the fast one was told each change"


async def test_what_is_kept_for_a_reader_that_never_reads_is_bounded(world, monkeypatch):
    monkeypatch.setattr(change_log, "KEPT_CHANGES", 100)
    streams = [world.feed.subscribe().responses() for _ in range(50)]
    for responses in streams:
        await take(responses, 1)
    for _ in range(1000):
        world.change()
    log = world.feed._log  # What all of them share; they have nothing else.
    assert sum(log.at(position) is not None for position in range(log.end)) == 100
    for responses in streams:
        (fresh,) = await take(responses, 1)
        assert (fresh.delta.index, fresh.delta.snapshot) == (1000, True)


async def test_a_broker_that_comes_again_is_told_what_changed_since(world):
    for _ in range(5):
        world.change()
    responses = world.feed.subscribe(3, 1).responses()
    first, *changes = await take(responses, 3)
    assert first.HasField("active_controller")
    assert not first.HasField("delta")
    assert [each.delta.index for each in changes] == [4, 5]
    world.change()
    assert (await take(responses, 1))[0].delta.index == 6
    assert world.frozen == []


@pytest.mark.parametrize(
    ("index", "epoch"),
    [(2, 1), (0, 0), (5, 9), (7, 0), (99, 9)],
    ids=["forgotten", "nothing", "never", "of older software", "ahead in another past"],
)
async def test_a_broker_that_cannot_go_on_begins_with_a_snapshot(world, monkeypatch, index, epoch):
    monkeypatch.setattr(change_log, "KEPT_CHANGES", 4)
    for number in range(8):
        world.epoch = 1 if number < 6 else 2  # Indexes 7 and 8 are of the second controller.
        world.change()
    (first,) = await take(world.feed.subscribe(index, epoch).responses(), 1)
    assert (first.delta.index, first.delta.snapshot) == (8, True)


@pytest.mark.parametrize(("index", "epoch"), [(7, 1), (8, 1), (99, 1)])
async def test_a_broker_whose_past_was_given_up_is_told_so(world, index, epoch):
    for number in range(8):
        world.epoch = 1 if number < 6 else 2
        world.change()
    with pytest.raises(MetadataDivergedError, match=f"epoch 1 up to index {index} .* start the"):
        world.feed.subscribe(index, epoch)
    world.feed.replaced(50, 3)
    with pytest.raises(MetadataDivergedError):
        world.feed.subscribe(60, 2)


async def test_a_broker_that_is_ahead_of_this_controller_waits_for_it(world):
    world.change()
    responses = world.feed.subscribe(3, 1).responses()
    (first,) = await take(responses, 1)
    assert not first.HasField("delta")
    for _ in range(3):
        world.change()
    assert [each.delta.index for each in await take(responses, 3)] == [2, 3, 4]


async def test_nobody_goes_on_across_a_replaced_state(world):
    world.change()
    world.index = 50
    world.feed.replaced(50, 2)
    (first,) = await take(world.feed.subscribe(1, 1).responses(), 1)
    assert first.delta.snapshot
    world.epoch = 2
    world.change()
    first, second = await take(world.feed.subscribe(50, 2).responses(), 2)
    assert (first.HasField("delta"), second.delta.index) == (False, 51)


def test_changes_are_bounded_by_size_as_well(monkeypatch):
    monkeypatch.setattr(change_log, "KEPT_BYTES", 10_000)
    log = ChangeLog()
    for index in range(1, 4):
        log.append(Encoded(b"%d" % index + bytes(6000)), (index, 1))
    assert log.position_after(1, 1) is None
    assert log.position_after(2, 1) == 2
    assert log.at(2).data[:1] == b"3"
    log.append(Encoded(b"4" + bytes(20_000)), (4, 1))
    assert log.at(3).data[:1] == b"4", "the newest is kept, however large"
    assert log.at(2) is None
    assert log.at(4) is None


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
    world.feed.replaced(50, 2)
    (fresh,) = await take(responses, 1)
    assert (fresh.delta.index, fresh.delta.snapshot) == (50, True)


async def test_streams_end_with_the_feed(world):
    responses = world.feed.subscribe().responses()
    await take(responses, 1)
    world.feed.close()
    assert [each async for each in responses] == []
    assert [each async for each in world.feed.subscribe().responses()] == []


async def test_changes_while_a_snapshot_is_encoded_follow_it(world):
    world.may_encode.clear()
    responses = world.feed.subscribe().responses()
    first = asyncio.ensure_future(anext(responses))
    await world.froze(1)
    world.change()
    world.change()
    world.may_encode.set()
    assert decoded(await asyncio.wait_for(first, 5)).delta.index == 0
    assert [each.delta.index for each in await take(responses, 2)] == [1, 2]


async def test_watchers_that_come_together_share_a_snapshot_of_what_is_true(world):
    world.may_encode.clear()
    streams = [world.feed.subscribe().responses() for _ in range(4)]
    early = [asyncio.ensure_future(anext(stream)) for stream in streams[:2]]
    await world.froze(1)
    world.change()
    late = [asyncio.ensure_future(anext(stream)) for stream in streams[2:]]
    await world.froze(2)
    world.may_encode.set()
    firsts = await asyncio.wait_for(asyncio.gather(*early, *late), 5)
    assert [decoded(first).delta.index for first in firsts] == [0, 0, 1, 1]
    assert world.frozen == [0, 1]


async def test_a_watcher_that_goes_takes_no_snapshot_from_the_others(world):
    world.may_encode.clear()
    goes, stays = (
        asyncio.ensure_future(anext(world.feed.subscribe().responses())) for _ in range(2)
    )
    await world.froze(1)
    goes.cancel()
    await asyncio.gather(goes, return_exceptions=True)
    world.may_encode.set()
    assert decoded(await asyncio.wait_for(stays, 5)).delta.index == 0


async def test_all_watchers_are_sent_the_same_bytes(world):
    streams = [world.feed.subscribe().responses() for _ in range(2)]
    for stream in streams:
        await take(stream, 1)
    world.change()
    one, other = [await asyncio.wait_for(anext(stream), 5) for stream in streams]
    assert one.data is other.data


def test_the_last_change_that_is_told_is_known_whatever_else_is_said(world: World) -> None:
    assert world.feed.told_index == 0
    world.change()
    world.change()
    world.active = 2
    world.feed.changed(None)  # Where the active controller is, which is no change of the metadata.
    assert world.feed.told_index == 2
    world.feed.replaced(90, 4)
    assert world.feed.told_index == 90
