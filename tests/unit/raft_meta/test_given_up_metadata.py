"""A broker that lives through `penstock quorum recover`: a part of what it was told is given up."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker.core.metadata_image import MetadataImage
from penstock.raft_meta.core.cluster_state import Applied
from penstock.raft_meta.metadata_stream import MetadataFeed, Watcher
from penstock.v1 import controller_pb2
from penstock.wire.errors import MetadataDivergedError
from tests.unit.raft_meta_core.metadata_driver import Driver

RECOVERED_EPOCH = 1_000_001


class Telling(Driver):
    """An active controller that tells what it applies."""

    def __init__(self) -> None:
        self.feed: MetadataFeed | None = None
        super().__init__(brokers=1)
        self.feed = MetadataFeed(
            lambda: self.state.frozen().metadata, controller_pb2.ControllerEndpoint
        )
        self.feed.replaced(self.index, self.epoch)

    def apply_bytes(self, payload: bytes) -> Applied:
        applied = super().apply_bytes(payload)
        if self.feed is not None:
            self.feed.changed(applied.delta)
        return applied

    def create_topics(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.create(f"topic-{number}", [[1]], number=number)


class Recovered:
    """A majority that decided on alone, and is lost, a survivor, and a broker that was told."""

    def __init__(self, lost: int, skipped: int) -> None:
        majority, self.left = Telling(), Telling()
        for driver in (majority, self.left):
            driver.create_topics(1, 1)
        majority.create_topics(100, lost)
        self.image: MetadataImage = majority.image
        self.left.index += skipped  # Entries that are no commands: a voter set, a no-op.

    def go_on(self, changes: int) -> None:
        """The survivor leads, and decides."""
        self.left.claim(RECOVERED_EPOCH, node=3)
        self.left.create_topics(200, changes)

    def watch(self) -> Watcher:
        assert self.left.feed is not None
        return self.left.feed.subscribe(self.image.index, self.image.controller_epoch)

    async def follow(self, watcher: Watcher) -> None:
        """Take all that the feed has now."""
        responses = watcher.responses()
        while self.image.index < self.left.state.applied_index:
            data = (await asyncio.wait_for(anext(responses), 5)).data
            response = controller_pb2.WatchMetadataResponse.FromString(data)
            if response.HasField("delta"):
                self.image.apply(response.delta)
        await responses.aclose()

    def agrees(self) -> bool:
        told = {topic.name for topic in self.image.topics()}
        return told == {topic.name for topic in self.left.state.topics.values()}


@pytest.mark.parametrize("changes_before", [0, 1, 12])
@pytest.mark.parametrize("skipped", [1, 2])
@pytest.mark.parametrize("lost", [1, 2, 3, 10])
async def test_a_broker_that_comes_later_never_builds_on_what_was_given_up(
    lost: int, skipped: int, changes_before: int
) -> None:
    world = Recovered(lost, skipped)
    world.go_on(changes_before)

    async def come() -> None:
        watcher = world.watch()
        world.left.create_topics(300, 12)
        await world.follow(watcher)

    with pytest.raises(MetadataDivergedError):
        await come()
    assert world.image.controller_epoch == 1


@pytest.mark.parametrize("skipped", [1, 2])
@pytest.mark.parametrize("lost", [1, 2, 3, 10])
async def test_a_broker_that_was_there_first_never_builds_on_what_was_given_up(
    lost: int, skipped: int
) -> None:
    world = Recovered(lost, skipped)
    watcher = world.watch()  # The survivor knows of no leader yet.
    world.go_on(12)
    with pytest.raises(MetadataDivergedError):
        await world.follow(watcher)
    assert world.image.controller_epoch == 1


@pytest.mark.parametrize("comes_first", [True, False])
async def test_a_broker_that_was_told_of_nothing_that_is_lost_goes_on(comes_first: bool) -> None:
    world = Recovered(lost=0, skipped=2)
    if comes_first:
        watcher = world.watch()
        world.go_on(12)
    else:
        world.go_on(12)
        watcher = world.watch()
    await world.follow(watcher)
    assert world.agrees()
