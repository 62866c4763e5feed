"""Brokers, as the controllers see them.

A broker registers, follows the metadata, heartbeats, changes the in-sync sets of what it leads, and
takes producer ids; now and then it asks for what it has no right to, as an old process or a faulty
one would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode
from tests.simulation.quorum.checkers import require, view_crc
from tests.simulation.quorum.network import Broken, End, connect
from tests.simulation.quorum.node import CLUSTER_ID
from tests.simulation.quorum.virtual_time import Clock, ProcessLoop

if TYPE_CHECKING:
    from tests.simulation.quorum.world import World

_CALL_TIMEOUT_S = 1.5
_NOBODY = -1


class Client:
    """A process that asks controllers, and looks for the active one."""

    def __init__(self, world: World, node_id: int) -> None:
        self.world = world
        self.node_id = node_id
        self.loop = ProcessLoop(
            world.scheduler, Clock(world.scheduler, world.rng.uniform(1, 1000), 1.0)
        )
        self.believed = _NOBODY  # The active controller.
        self.rng = world.rng
        self.ends: list[End] = []

    @property
    def is_alive(self) -> bool:
        return self.loop.is_alive

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop.enter(lambda: self.loop.create_task(self.world.watched(work)))

    def guess(self) -> int:
        """Whom to ask: the active controller as far as is known, or anybody."""
        if self.believed == _NOBODY:
            return self.rng.choice(self.world.known_controllers())
        return self.believed

    async def open(self, target: int, method: str, timeout_s: float | None = None) -> End:
        """Make a call to a controller. Raises Broken."""
        end = await connect(
            self.world.network,
            self.loop,
            self.node_id,
            target,
            lambda theirs: self.world.accept(target, theirs, method, timeout_s),
        )
        self.ends.append(end)
        return end

    async def call(self, method: str, request: Any, target: int | None = None) -> Any:
        """One request and its answer, or None when nobody knows what became of it."""
        target = self.guess() if target is None else target
        end: End | None = None
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                end = await self.open(target, method, _CALL_TIMEOUT_S)
                end.send(request)
                response = await anext(end)
        except (Broken, TimeoutError, StopAsyncIteration):
            self.believed = _NOBODY
            return None
        finally:
            if end is not None:
                end.hang_up()
                self.ends.remove(end)
        return response

    def heed(self, error: Any) -> None:
        """Learn from a refusal who the active controller is."""
        if error.code == ErrorCode.NOT_CONTROLLER:
            hint = error.current_leader.node_id if error.HasField("current_leader") else _NOBODY
            self.believed = hint if hint in self.world.known_controllers() else _NOBODY

    async def pause(self, low_s: float, high_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(low_s, high_s))  # of virtual time

    def kill(self) -> None:
        """The process is gone."""
        self.loop.kill()
        for end in self.ends:
            end.hang_up()


class Broker(Client):
    """One broker process. Its disk remembers nothing but how it stopped."""

    def __init__(self, world: World, node_id: int, previous_epoch: int) -> None:
        super().__init__(world, node_id)
        self.epoch = _NOBODY
        self.fenced = True
        self.wants_shutdown = False
        self.may_stop = False
        self.index = self.controller_epoch = self.told_index = 0
        self.brokers: dict[int, cluster_pb2.BrokerRecord] = {}
        self.topics: dict[bytes, cluster_pb2.TopicRecord] = {}
        self.partitions: dict[tuple[bytes, int], cluster_pb2.PartitionRecord] = {}
        self._previous_epoch = previous_epoch
        self._begin_life()
        self._sequence = 0
        for work in (self._register_and_heartbeat, self._follow, self._work):
            self.spawn(work)

    # The metadata.

    async def _follow(self) -> None:
        """One controller after the other, as production does: some know nothing and never will."""
        turns: list[int] = []
        while True:
            if not turns:
                turns = self.world.known_controllers()
                self.rng.shuffle(turns)
            target = turns.pop()
            request = controller_pb2.WatchMetadataRequest(
                cluster_id=CLUSTER_ID,
                node_id=self.node_id,
                known_index=self.index,
                known_controller_epoch=self.controller_epoch,
            )
            with contextlib.suppress(Broken, TimeoutError):
                end = await self.open(target, "WatchMetadata")
                end.send(request)
                await self._take_all(end)
            await self.pause(0.05, 0.3)

    async def _take_all(self, end: End) -> None:
        try:
            while True:
                response = await self._next_news(end)
                if response.HasField("active_controller"):
                    self.believed = response.active_controller.node_id
                if response.HasField("delta"):
                    self._take(response.delta)
        except StopAsyncIteration:
            pass
        finally:
            end.hang_up()

    async def _next_news(self, end: End) -> Any:
        """What a controller tells next. Raises TimeoutError when it is to be left for another.

        One that tells nothing may be cut off, or be no voter any more; as in production it is left
        as soon as the active controller is known to have told more.
        """
        silent_until_s = self.loop.time() + self.rng.uniform(2, 4)
        while True:
            try:
                async with asyncio.timeout(self.rng.uniform(0.5, 1)):
                    return await anext(end)
            except TimeoutError:
                if self.index < self.told_index or self.loop.time() >= silent_until_s:
                    raise

    def _take(self, delta: cluster_pb2.MetadataDelta) -> None:
        if delta.index <= self.index:
            return
        self.world.checkers.counts["snapshots told" if delta.snapshot else "changes told"] += 1
        if delta.snapshot:
            self.brokers.clear()
            self.topics.clear()
            self.partitions.clear()
        self.index, self.controller_epoch = delta.index, delta.controller_epoch
        self.brokers.update({record.node_id: record for record in delta.brokers})
        for node_id in delta.removed_brokers:
            self.brokers.pop(node_id, None)
        for topic_id in delta.removed_topics:
            self.topics.pop(topic_id, None)
            for key in [key for key in self.partitions if key[0] == topic_id]:
                del self.partitions[key]
        self.topics.update({record.topic_id: record for record in delta.topics})
        for partition in delta.partitions:
            self.partitions[partition.topic_id, partition.partition] = partition
        view = cluster_pb2.MetadataDelta(
            brokers=self.brokers.values(),
            topics=self.topics.values(),
            partitions=self.partitions.values(),
        )
        self.world.checkers.broker_view(self.node_id, self.epoch, self.index, view_crc(view))

    # Being alive.

    def _begin_life(self) -> None:
        self._incarnation = self.rng.randbytes(16)
        self.world.checkers.lives.append(self._incarnation)

    async def _register_and_heartbeat(self) -> None:
        while True:
            if self.epoch == _NOBODY and not await self._register():
                await self.pause(0.05, 0.2)
                continue
            with contextlib.suppress(Broken, TimeoutError, StopAsyncIteration):
                await self._heartbeat(await self.open(self.guess(), "Heartbeat"))
            self.believed = _NOBODY
            await self.pause(0.02, 0.1)

    async def _register(self) -> bool:
        known = self.brokers.get(self.node_id)
        registration = cluster_pb2.RegisterBrokerCommand(
            node_id=self.node_id,
            incarnation_id=self._incarnation,
            cluster_id=CLUSTER_ID,
            host="broker",
            port=self.node_id,
            rack=f"rack-{self.node_id % 2}",
            previous_broker_epoch=self._previous_epoch,
            follows_broker_epoch=0 if known is None else known.broker_epoch,
        )
        self.world.old_registrations.append(registration)
        response = await self._ask_to_register(registration)
        if response is None:
            return False
        if response.HasField("error"):
            self.heed(response.error)
            return False
        self.epoch = response.broker_epoch
        checkers = self.world.checkers
        checkers.acknowledged(self.epoch)
        command = cluster_pb2.Command.FromString(checkers.decided[self.epoch][1][1:])
        require(
            command.register_broker.incarnation_id == self._incarnation,
            f"broker {self.node_id} is given the epoch {self.epoch} of another process",
        )
        checkers.metadata_index_of[self.node_id, self.epoch] = self.index
        return True

    async def _ask_to_register(self, registration: cluster_pb2.RegisterBrokerCommand) -> Any:
        request = controller_pb2.RegisterBrokerRequest(registration=registration)
        return await self.call("RegisterBroker", request)

    async def _heartbeat(self, end: End) -> None:
        self.spawn(lambda: self._beat(end))
        try:
            async for response in end:
                if response.HasField("error"):
                    self.heed(response.error)
                    if response.error.code in (
                        ErrorCode.STALE_BROKER_EPOCH,
                        ErrorCode.BROKER_ID_NOT_REGISTERED,
                    ):
                        # Another process has the number; this one is given a new life.
                        self.epoch = _NOBODY
                        self._begin_life()
                    return
                self.fenced = response.fenced
                self.told_index = max(self.told_index, response.metadata_index)
                self.may_stop = self.may_stop or response.may_shut_down
        finally:
            end.hang_up()

    async def _beat(self, end: End) -> None:
        while not end.is_broken:
            self._sequence += 1
            end.send(
                controller_pb2.BrokerHeartbeatRequest(
                    node_id=self.node_id,
                    broker_epoch=self.epoch,
                    metadata_index=self.index,
                    want_shutdown=self.wants_shutdown,
                    sequence=self._sequence,
                )
            )
            await asyncio.sleep(0.2 if self.fenced else 0.5)  # of virtual time

    # What a leader of partitions asks for.

    async def _work(self) -> None:
        while True:
            await self.pause(0.1, self.world.settings.client_pause_s)
            if self.rng.random() < 0.05 and self.world.old_registrations:
                # Of this process, another, or one long dead: it was on its way until now.
                await self._ask_to_register(self.rng.choice(self.world.old_registrations))
            if self.epoch == _NOBODY:
                continue
            if self.rng.random() < 0.15:
                await self._take_producer_ids()
                continue
            change = self._wish()
            if change is not None:
                self.world.old_changes.append(change)
                request = controller_pb2.AlterPartitionRequest(change=change)
                response = await self.call("AlterPartition", request)
                if response is not None and response.HasField("error"):
                    self.heed(response.error)

    def _wish(self) -> cluster_pb2.AlterPartitionCommand | None:
        rng = self.rng
        if self.world.old_changes and rng.random() < 0.15:
            return rng.choice(self.world.old_changes)  # Of this process, another, or one long dead.
        if not self.partitions:
            return None
        mine = [part for _, part in sorted(self.partitions.items()) if part.leader == self.node_id]
        if rng.random() < 0.1:
            mine = [part for _, part in sorted(self.partitions.items())]
        if not mine:
            return None
        partition = rng.choice(mine)
        others = [node for node in partition.replicas if node != self.node_id]
        members = [self.node_id, *(node for node in others if rng.random() < 0.7)]
        if others and rng.random() < 0.05:
            members = others
        elif rng.random() < 0.05:
            members = rng.sample(sorted(self.brokers), rng.randint(1, len(self.brokers)))
        epochs = {node: record.broker_epoch for node, record in self.brokers.items()}
        return cluster_pb2.AlterPartitionCommand(
            node_id=self.node_id,
            broker_epoch=self.epoch,
            partitions=[
                cluster_pb2.AlterPartitionEntry(
                    topic_id=partition.topic_id,
                    partition=partition.partition,
                    leader_epoch=partition.leader_epoch - (rng.random() < 0.05),
                    partition_epoch=partition.partition_epoch - (rng.random() < 0.05),
                    new_isr=[
                        cluster_pb2.IsrMember(
                            node_id=node,
                            broker_epoch=epochs.get(node, 0) - (rng.random() < 0.05),
                        )
                        for node in members
                    ],
                )
            ],
        )

    async def _take_producer_ids(self) -> None:
        allocation = cluster_pb2.AllocateProducerIdsCommand(
            node_id=self.node_id, broker_epoch=self.epoch
        )
        response = await self.call(
            "AllocateProducerIds",
            controller_pb2.AllocateProducerIdsRequest(allocation=allocation),
        )
        if response is None:
            return
        if response.HasField("error"):
            self.heed(response.error)
            return
        first = response.result.first_producer_id
        require(first in self.world.checkers.producer_blocks, f"producer ids {first} are nobody's")
        require(first not in self.world.blocks_told, f"producer ids {first} went to two brokers")
        self.world.blocks_told.add(first)
