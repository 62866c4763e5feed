"""Channels to other brokers: one each, for as long as it is the same process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode, aio

from penstock.broker.peers import Peers
from penstock.v1 import coordination_pb2
from penstock.wire.errors import NetworkError


class _Channel:
    """A channel on which every call ends with ``status``."""

    def __init__(self) -> None:
        self.is_closed = False
        self.status = StatusCode.UNAVAILABLE

    def unary_unary(self, _path: str, **_codecs: Any) -> Any:
        async def call(_request: Any, **settings: float) -> Any:
            assert settings["timeout"] > 0
            raise aio.AioRpcError(self.status, aio.Metadata(), aio.Metadata(), "no", None)

        return call

    async def close(self, _grace: float | None) -> None:
        self.is_closed = True


class _World:
    """Brokers by node id, and the channels that were opened to them."""

    def __init__(self) -> None:
        self.brokers = {2: SimpleNamespace(host="b", port=9092, broker_epoch=1)}
        self.opened: list[_Channel] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        image: Any = SimpleNamespace(brokers=self.brokers)
        opening: Any = self._open
        self.peers = Peers(image, opening)

    async def _open(self, _node_id: int, _host: str, _port: int) -> _Channel:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.append(_Channel())
        return self.opened[-1]


async def test_all_who_ask_share_one_channel() -> None:
    world = _World()
    world.gate.clear()
    asked = [asyncio.ensure_future(world.peers.channel(2)) for _ in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    world.gate.set()
    found = await asyncio.gather(*asked[1:])
    assert found[0] is found[1] is world.opened[0]  # type: ignore[comparison-overlap]
    assert len(world.opened) == 1
    await world.peers.close()
    assert world.opened[0].is_closed


async def test_a_broker_that_registered_anew_gets_a_new_channel() -> None:
    world = _World()
    before = await world.peers.channel(2)
    world.brokers[2].broker_epoch = 7
    after = await world.peers.channel(2)
    assert after is not before
    assert world.opened[0].is_closed
    assert not world.opened[1].is_closed


async def test_who_waits_for_a_broker_that_moved_is_told_so() -> None:
    world = _World()
    world.gate.clear()
    first = asyncio.ensure_future(world.peers.channel(2))
    await asyncio.sleep(0)
    await world.peers.close()
    with pytest.raises(NetworkError, match="moved"):
        await first


async def test_a_channel_that_failed_is_given_back_and_no_newer_one() -> None:
    world = _World()
    failed = await world.peers.channel(2)
    await world.peers.forget(2, failed)
    assert world.opened[0].is_closed
    newer = await world.peers.channel(2)
    await world.peers.forget(2, failed)  # Somebody else's call on it has failed as well.
    assert await world.peers.channel(2) is newer
    world.brokers[2].broker_epoch = 7
    world.gate.clear()
    opening = asyncio.ensure_future(world.peers.channel(2))
    await asyncio.sleep(0)
    await world.peers.forget(2, newer)
    world.gate.set()
    assert await opening is world.opened[2]  # type: ignore[comparison-overlap]
    assert not world.opened[2].is_closed


async def test_a_broker_out_of_reach_is_tried_anew() -> None:
    world = _World()
    world.failure = aio.AioRpcError(  # type: ignore[call-arg]  # The stubs want more.
        StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details="nobody there"
    )
    with pytest.raises(NetworkError, match=r"broker 2 at b:9092 .*nobody there"):
        await world.peers.channel(2)
    world.failure = None
    assert await world.peers.channel(2) is world.opened[0]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("status", "stays"),
    [
        (StatusCode.UNAVAILABLE, False),
        (StatusCode.INTERNAL, False),
        (StatusCode.DEADLINE_EXCEEDED, True),
        (StatusCode.UNIMPLEMENTED, True),  # An older broker, which does all the rest.
        (StatusCode.UNKNOWN, True),  # It failed at this one.
        (StatusCode.RESOURCE_EXHAUSTED, True),  # An answer that is too large.
    ],
)
async def test_only_a_channel_that_leads_nowhere_is_taken_from_other_calls(
    status: StatusCode, stays: bool
) -> None:
    world = _World()
    await world.peers.channel(2)
    world.opened[0].status = status
    request = coordination_pb2.FindTransactionsRequest()
    with pytest.raises(NetworkError, match="broker 2: no"):
        await world.peers.ask(2, "FindTransactions", request, 1.0)
    assert world.opened[0].is_closed is not stays
    await world.peers.channel(2)
    assert len(world.opened) == (1 if stays else 2)


async def test_a_broker_that_is_not_registered() -> None:
    with pytest.raises(NetworkError, match="not registered"):
        await _World().peers.channel(3)
