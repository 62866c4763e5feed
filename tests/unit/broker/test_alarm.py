"""A call that is wanted at several times comes at the earliest, on the nodes' loop too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from penstock.broker.alarm import Alarm

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.param
    return found


def test_what_is_due_already_can_be_asked_for_again(run: Run) -> None:
    async def play() -> None:
        rung = asyncio.Event()
        alarm = Alarm(rung.set)
        for seconds in (0, 0, -5, 60, 0):
            alarm.within(seconds)
        await asyncio.wait_for(rung.wait(), 10)

    run(play())


def test_the_earliest_counts_and_it_rings_once(run: Run) -> None:
    async def play() -> None:
        rings: list[float] = []
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()

        def ring() -> None:
            rings.append(loop.time())
            rung.set()

        alarm = Alarm(ring)
        begun = loop.time()
        for seconds in (600, 0.05, 300):
            alarm.within(seconds)
        await asyncio.wait_for(rung.wait(), 30)
        assert rings[0] - begun >= 0.04
        rung.clear()
        alarm.within(0.01)  # It can be set again.
        await asyncio.wait_for(rung.wait(), 30)
        assert len(rings) == 2

    run(play())


def test_what_is_cancelled_does_not_ring(run: Run) -> None:
    async def play() -> None:
        rung, later = asyncio.Event(), asyncio.Event()
        alarm = Alarm(rung.set)
        alarm.within(0)
        alarm.cancel()
        alarm.cancel()
        asyncio.get_running_loop().call_later(0.05, later.set)
        await later.wait()
        assert not rung.is_set()

    run(play())
