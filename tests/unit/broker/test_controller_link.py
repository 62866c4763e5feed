"""The broker's side of the Controller service, against scripted controllers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from penstock.broker.controller_link import BrokerIdentity, ControllerLink
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import cluster_pb2, controller_pb2, controller_pb2_grpc
from penstock.wire.errors import (
    BrokerFencedError,
    BrokerIdNotRegisteredError,
    LeaderHint,
    NotControllerError,
    PenstockError,
    RequestTimedOutError,
    StaleBrokerEpochError,
)
from tests.support import eventually


class FakeController(controller_pb2_grpc.ControllerServicer):
    """A controller that does as the test says."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.port = 0
        self.active: FakeController | None = None  # Whom this one takes to be active.
        self.epoch = 0
        self.index = 0
        self.registrations: list[cluster_pb2.RegisterBrokerCommand] = []
        self.heartbeats: list[controller_pb2.BrokerHeartbeatRequest] = []
        self.refusal: PenstockError | None = None
        self.mute = False
        self.fences = False
        self.told_index = 0
        self.watchers: list[asyncio.Queue[controller_pb2.WatchMetadataResponse]] = []
        self.heard = asyncio.Event()
        self.known: list[tuple[int, int]] = []  # What each feed's broker had.
        self._server = aio.server()

    async def start(self) -> None:
        controller_pb2_grpc.add_ControllerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def say(self, active: FakeController, epoch: int) -> None:
        """Let this controller know, and tell its watchers, who is active."""
        self.active, self.epoch = active, epoch
        self.index += 1
        for watcher in self.watchers:
            watcher.put_nowait(self._news(snapshot=False))

    def _news(self, *, snapshot: bool) -> controller_pb2.WatchMetadataResponse:
        message = controller_pb2.WatchMetadataResponse()
        message.delta.index = self.index
        message.delta.snapshot = snapshot
        message.delta.controller_epoch = self.epoch
        if self.active is not None:
            message.active_controller.node_id = self.active.node_id
            message.active_controller.controller_epoch = self.epoch
            message.active_controller.host = "127.0.0.1"
            message.active_controller.port = self.active.port
        return message

    def _not_active(self) -> PenstockError | None:
        if self.active is self or self.active is None:
            return None
        hint = LeaderHint(self.active.node_id, self.epoch, "127.0.0.1", self.active.port)
        return NotControllerError(leader=hint)

    async def WatchMetadata(self, request: Any, context: Any) -> AsyncIterator[Any]:
        queue: asyncio.Queue[controller_pb2.WatchMetadataResponse] = asyncio.Queue()
        self.watchers.append(queue)
        self.known.append((request.known_index, request.known_controller_epoch))
        yield self._news(snapshot=True)
        while True:
            yield await queue.get()

    async def RegisterBroker(self, request: Any, context: Any) -> Any:
        refusal = self._not_active()
        if refusal is not None:
            return controller_pb2.RegisterBrokerResponse(error=refusal.to_proto())
        self.registrations.append(request.registration)
        return controller_pb2.RegisterBrokerResponse(broker_epoch=100 + len(self.registrations))

    async def Heartbeat(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            self.heartbeats.append(request)
            self.heard.set()
            if self.mute:
                continue
            error = self._not_active() or self.refusal
            if error is not None:
                yield controller_pb2.BrokerHeartbeatResponse(error=error.to_proto())
                return
            yield controller_pb2.BrokerHeartbeatResponse(
                sequence=request.sequence,
                may_shut_down=request.want_shutdown,
                fenced=self.fences,
                metadata_index=self.told_index,
            )

    async def ExecuteAdmin(self, request: Any, context: Any) -> Any:
        refusal = self._not_active()
        result = cluster_pb2.CommandResult(index=7)
        if refusal is not None:
            result.error.CopyFrom(refusal.to_proto())
        return controller_pb2.ExecuteAdminResponse(result=result)

    async def AllocateProducerIds(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            return controller_pb2.AllocateProducerIdsResponse(error=self.refusal.to_proto())
        assert request.allocation.broker_epoch > 0
        return controller_pb2.AllocateProducerIdsResponse(
            result=cluster_pb2.AllocateProducerIdsResult(first_producer_id=3000, count=1000)
        )


class Bench:
    """A link and the controllers that it talks to."""

    def __init__(self) -> None:
        self.controllers: dict[int, FakeController] = {}
        self.image = MetadataImage()
        self.changes: list[ImageChange] = []
        self.epochs: list[int] = []
        self.now_ms = 0
        self.link: ControllerLink

    async def start(self, count: int = 2, active: int | None = 1) -> None:
        for node_id in range(1, count + 1):
            controller = FakeController(node_id)
            await controller.start()
            self.controllers[node_id] = controller
        for controller in self.controllers.values():
            if active is not None:
                controller.active, controller.epoch = self.controllers[active], 1
        self.link = ControllerLink(
            BrokerIdentity("c", 1, "127.0.0.1", 1234, "", -1),
            {node: ("127.0.0.1", one.port) for node, one in self.controllers.items()},
            self.image,
            connector=NodeConnector(None),
            heartbeat_interval_ms=20,
            session_timeout_ms=1000,
            on_change=self.changes.append,
            on_registered=self.epochs.append,
            clock_ms=lambda: self.now_ms,
        )
        await self.link.start()

    async def stop(self) -> None:
        await self.link.stop()
        for controller in self.controllers.values():
            await controller.stop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    await one.start()
    yield one
    await one.stop()


async def test_it_registers_once_and_is_heard(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: len(first.heartbeats) >= 3)
    assert len(first.registrations) == 1
    assert first.registrations[0].cluster_id == "c"
    assert bench.epochs == [101]
    assert {beat.broker_epoch for beat in first.heartbeats} == {101}
    await eventually(bench.link.may_serve)


async def test_the_lease_runs_out_when_nobody_answers(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    bench.controllers[1].mute = True
    bench.now_ms = 1000
    assert not bench.link.may_serve()


async def test_it_follows_the_office_without_registering_anew(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    first.say(second, 2)
    second.say(second, 2)
    await eventually(lambda: bool(second.heartbeats))
    assert bench.epochs == [101]
    assert second.heartbeats[0].broker_epoch == 101
    assert not second.registrations


async def test_a_hint_in_a_refusal_is_enough_to_find_the_active_one(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    # Nobody tells the feed: only the refusal of the next heartbeat names the second.
    second.active, second.epoch = second, 2
    first.active, first.epoch = second, 2
    await eventually(lambda: bool(second.heartbeats))


async def test_a_dead_controller_is_left_for_another_that_knows_more(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    await first.stop()
    second.say(second, 2)
    await eventually(lambda: bool(second.heartbeats))


async def test_another_controller_is_told_what_the_broker_has_already(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: first.known == [(0, 0)])
    first.say(first, 2)
    await eventually(lambda: bench.image.index == 1)
    await first.stop()
    await eventually(lambda: second.known[:1] == [(1, 2)])


async def test_a_broker_that_nobody_knows_registers_anew(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bool(first.heartbeats))
    first.refusal = BrokerIdNotRegisteredError()
    await eventually(lambda: len(first.registrations) >= 2)
    first.refusal = None
    assert first.registrations[0].incarnation_id != first.registrations[-1].incarnation_id


async def test_a_taken_node_id_ends_the_broker(bench: Bench) -> None:
    await eventually(lambda: bool(bench.controllers[1].heartbeats))
    bench.controllers[1].refusal = StaleBrokerEpochError("node 1 registered anew")
    with pytest.raises(StaleBrokerEpochError):
        async with asyncio.timeout(10):
            await bench.link.wait_failed()


async def test_controlled_shutdown_is_asked_for_at_once(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    assert await bench.link.shut_down_controlled(5000)
    assert bench.controllers[1].heartbeats[-1].want_shutdown


async def test_controlled_shutdown_gives_up_in_time(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    bench.controllers[1].mute = True
    assert not await bench.link.shut_down_controlled(50)


async def test_a_registered_broker_takes_producer_ids(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    assert (await bench.link.allocate_producer_ids()).first_producer_id == 3000


async def test_a_broker_that_is_not_registered_sends_producers_elsewhere() -> None:
    bench = Bench()
    await bench.start(active=None)
    try:
        await eventually(lambda: bool(bench.controllers[1].watchers))
        with pytest.raises(BrokerFencedError, match="broker 1 is not registered") as caught:
            await bench.link.allocate_producer_ids()
        assert caught.value.retriable
    finally:
        await bench.stop()


@pytest.mark.parametrize("refusal", [StaleBrokerEpochError(), BrokerIdNotRegisteredError()])
async def test_a_registration_that_is_stale_is_no_fault_of_the_producer(
    bench: Bench, refusal: PenstockError
) -> None:
    await eventually(bench.link.may_serve)
    controller = bench.controllers[1]
    controller.mute = True  # The next heartbeat would mend, or end, what the refusal is about.
    controller.refusal = refusal
    with pytest.raises(BrokerFencedError, match="ask another broker"):
        await bench.link.allocate_producer_ids()


async def test_a_command_follows_the_office(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    first, second = bench.controllers[1], bench.controllers[2]
    first.active, first.epoch = second, 2
    second.active, second.epoch = second, 2
    result = await bench.link.execute_admin(cluster_pb2.Command(), 5000)
    assert result.index == 7
    assert not result.HasField("error")


async def test_a_command_without_a_controller_says_that_its_outcome_is_unknown(
    bench: Bench,
) -> None:
    await eventually(bench.link.may_serve)
    for controller in bench.controllers.values():
        await controller.stop()
    command = cluster_pb2.Command(create_topic=cluster_pb2.CreateTopicCommand())
    with pytest.raises(RequestTimedOutError, match=r"create_topic.*outcome is unknown"):
        await bench.link.execute_admin(command, 200)


async def test_waiting_for_an_index_sees_the_change(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bench.image.index == 0)
    waiting = asyncio.create_task(bench.link.wait_for_index(1, 5000))
    first.say(first, 1)
    await waiting
    assert bench.image.index == 1
    assert bench.changes[-1].index == 1


async def test_a_fenced_broker_does_not_serve_though_it_is_heard(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    first.fences = True
    await eventually(lambda: not bench.link.may_serve())
    first.fences = False
    await eventually(bench.link.may_serve)


async def test_a_feed_that_lags_behind_what_is_told_is_left_for_another(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(bench.link.may_serve)
    second.index = 5  # The first one is cut off from the quorum and hears of nothing any more.
    first.told_index = 5
    await eventually(lambda: len(first.heartbeats) >= 3)
    assert bench.image.index == 0
    bench.now_ms = 999
    await eventually(bench.link.may_serve)
    bench.now_ms = 1_000
    await eventually(lambda: bench.image.index == 5)


async def test_a_broker_that_stays_behind_stops_serving(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    first.told_index = 5  # And nobody has it.
    seen = len(first.heartbeats)
    await eventually(lambda: len(first.heartbeats) >= seen + 3)
    bench.now_ms = 1_000
    await eventually(lambda: not bench.link.may_serve())
    seen = len(first.heartbeats)
    await eventually(lambda: len(first.heartbeats) >= seen + 3)
    assert not bench.link.may_serve()


async def test_a_feed_that_knows_no_active_controller_is_left_for_another() -> None:
    bench = Bench()
    await bench.start(active=None)
    try:
        await eventually(lambda: bench.image.index == 0)
        second = bench.controllers[2]
        second.active, second.epoch = second, 1
        await eventually(lambda: bool(second.heartbeats))
    finally:
        await bench.stop()
