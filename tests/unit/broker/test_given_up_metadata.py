"""A broker that is told that the metadata which it acted on were given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.v1 import controller_pb2
from penstock.wire.errors import MetadataDivergedError
from tests.support import eventually
from tests.unit.broker.scripted_controllers import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    await one.start()
    yield one
    await one.stop()


async def test_a_broker_whose_metadata_were_given_up_ends(bench: Bench) -> None:
    first = bench.controllers[1]
    first.index = 5
    await eventually(lambda: bool(first.heartbeats))
    first.say(first, 2)
    await eventually(lambda: bench.image.controller_epoch == 2)
    first.index = 2  # The survivor of a lost majority goes on, and had less.
    first.say(first, 3)
    with pytest.raises(MetadataDivergedError, match="start it again"):
        async with asyncio.timeout(10):
            await bench.link.wait_failed()
    assert bench.image.controller_epoch == 2


async def test_a_broker_that_a_controller_tells_that_its_metadata_were_given_up_ends(
    bench: Bench,
) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bool(first.heartbeats))
    refusal = MetadataDivergedError("given up")
    first.watchers[-1].put_nowait(controller_pb2.WatchMetadataResponse(error=refusal.to_proto()))
    with pytest.raises(MetadataDivergedError, match="given up"):
        async with asyncio.timeout(10):
            await bench.link.wait_failed()
