"""Controllers that do as a test says, on loopback, and a ControllerLink that talks to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

from grpc import aio

from penstock.broker.acting import MetadataActor
from penstock.broker.controller_link import ControllerLink
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.identity import BrokerIdentity
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import cluster_pb2, controller_pb2, controller_pb2_grpc
from penstock.wire.errors import (
    InvalidUpdateVersionError,
    LeaderHint,
    NotControllerError,
    PenstockError,
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
        self.registered: cluster_pb2.BrokerRecord | None = None  # What its feed tells of.
        self.metadata_version = 1
        self.newest_epoch: int | None = None  # Registrations that follow another are refused.
        self.registers_again: asyncio.Event | PenstockError | None = None  # Waits for, or raises.
        self.heartbeats: list[controller_pb2.BrokerHeartbeatRequest] = []
        self.streams = 0  # Of heartbeats.
        self.refusal: PenstockError | None = None
        self.mute = False
        self.tells_slowly = False  # A feed names the active controller, and no more until it may.
        self.may_tell = asyncio.Event()
        self.refuses_feed: PenstockError | None = None
        self.fences = False
        self.told_index = 0
        self.watchers: list[asyncio.Queue[controller_pb2.WatchMetadataResponse]] = []
        self.heard = asyncio.Event()
        self.known: list[tuple[int, int]] = []  # What each feed's broker had.
        self.supports = 2
        self.leads_quorum = True
        self.confirms: bool | None = True  # None: software that does not know the question.
        self.founding: controller_pb2.QuorumFounding | None = None
        self.awaited: list[int] = []
        self.asked = 0  # How often it was asked how the quorum stands.
        self.voters: list[FakeController] = []
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
        message.delta.metadata_version = self.metadata_version
        if self.registered is not None:
            message.delta.brokers.append(self.registered)
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
        if self.refuses_feed is not None:
            yield controller_pb2.WatchMetadataResponse(error=self.refuses_feed.to_proto())
            return
        if self.tells_slowly:
            endpoint = controller_pb2.WatchMetadataResponse()
            endpoint.active_controller.CopyFrom(self._news(snapshot=True).active_controller)
            yield endpoint
            await self.may_tell.wait()
        yield self._news(snapshot=True)
        while True:
            yield await queue.get()

    async def RegisterBroker(self, request: Any, context: Any) -> Any:
        refusal = self._not_active()
        if refusal is not None:
            return controller_pb2.RegisterBrokerResponse(error=refusal.to_proto())
        self.registrations.append(request.registration)
        if self.newest_epoch not in (None, request.registration.follows_broker_epoch):
            other = InvalidUpdateVersionError("another registered")
            return controller_pb2.RegisterBrokerResponse(error=other.to_proto())
        if len(self.registrations) > 1:
            if isinstance(self.registers_again, asyncio.Event):
                await self.registers_again.wait()
            elif self.registers_again is not None:
                error = self.registers_again
                return controller_pb2.RegisterBrokerResponse(error=error.to_proto())
        processes = list(dict.fromkeys(each.incarnation_id for each in self.registrations))
        epoch = 101 + processes.index(request.registration.incarnation_id)
        return controller_pb2.RegisterBrokerResponse(broker_epoch=epoch)

    async def Heartbeat(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.streams += 1
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

    async def DescribeQuorum(self, request: Any, context: Any) -> Any:
        self.asked += 1
        leader = self.active.node_id if self.active is not None and self.leads_quorum else -1
        answer = controller_pb2.DescribeQuorumResponse(
            leader_id=leader,
            answered_by=self.node_id,
            supported_metadata_version=self.supports,
            term=self.epoch,
            confirmed=None if self.confirms is None else self.confirms and leader == self.node_id,
        )
        if self.founding is not None:
            answer.founding.CopyFrom(self.founding)
            answer.awaited_node_ids.extend(self.awaited)
        for voter in self.voters:
            answer.voters.add(node_id=voter.node_id, host="127.0.0.1", port=voter.port)
        return answer

    async def AllocateProducerIds(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            return controller_pb2.AllocateProducerIdsResponse(error=self.refusal.to_proto())
        assert request.allocation.broker_epoch > 0
        return controller_pb2.AllocateProducerIdsResponse(
            result=cluster_pb2.AllocateProducerIdsResult(first_producer_id=3000, count=1000)
        )


class Bench:
    """A link with what acts on its changes, and the controllers that it talks to."""

    def __init__(self) -> None:
        self.controllers: dict[int, FakeController] = {}
        self.image = MetadataImage()
        self.changes: list[ImageChange] = []
        self.epochs: list[int] = []
        self.now_ms = 0
        self.may_go_on = asyncio.Event()  # Not set: acting on a change takes its time.
        self.may_go_on.set()
        self.fault: Exception | None = None  # What acting on a change raises.
        self.session_timeout_ms = 1000
        self.previous_broker_epoch = -1
        self.external: tuple[str, int] | None = None
        self.link: ControllerLink
        self.actor = MetadataActor(
            self,
            first=self.changes.append,
            followers=(lambda change: self.acted.append(change.index),),
            on_caught_up=lambda: None,
            on_failed=lambda _: None,
            clock_s=map(float, count()).__next__,  # Each step takes longer than a slice.
        )
        self.acted: list[int] = []
        self.catching_up = False

    def on_metadata(self, change: ImageChange) -> Iterator[None]:
        for _ in range(3_000_000):
            if self.may_go_on.is_set():
                break
            yield
        else:
            raise AssertionError("nothing else had its turn while the change was acted on")
        if self.fault is not None:
            raise self.fault

    def catch_up(self) -> Iterator[None]:
        while self.catching_up:
            yield

    async def start(
        self,
        count: int = 2,
        active: int | None = 1,
        prepare: Callable[[FakeController], None] = lambda _: None,
    ) -> None:
        for node_id in range(1, count + 1):
            controller = FakeController(node_id)
            prepare(controller)
            await controller.start()
            self.controllers[node_id] = controller
        for controller in self.controllers.values():
            if active is not None:
                controller.active, controller.epoch = self.controllers[active], 1
        self.link = ControllerLink(
            BrokerIdentity(
                "c", 1, "127.0.0.1", 1234, "", self.previous_broker_epoch, self.external
            ),
            {node: ("127.0.0.1", one.port) for node, one in self.controllers.items()},
            self.image,
            connector=NodeConnector(None),
            heartbeat_interval_ms=20,
            session_timeout_ms=self.session_timeout_ms,
            on_change=self.actor.on_change,
            until_idle=self.actor.until_idle,
            on_registered=self.epochs.append,
            clock_ms=lambda: self.now_ms,
        )
        await self.link.start()

    async def stop(self) -> None:
        await self.link.stop()
        for controller in self.controllers.values():
            await controller.stop()


async def heartbeats_more(controller: FakeController, number: int) -> None:
    """So many that were sent from now on, and the answers to all but the last."""
    seen = len(controller.heartbeats)
    await eventually(lambda: len(controller.heartbeats) >= seen + number)
