"""The active controller says what it refused, each refusal once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.raft_meta.active import ControllerShell
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.quorum import Leadership, LeadershipListener, QuorumStatus, Role
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, incarnation, topic_id


class LoneQuorum:
    """One voter that commits at once."""

    def __init__(self) -> None:
        self.shell: ControllerShell
        self.listeners: list[LeadershipListener] = []
        self.index = 0

    def address_of(self, node_id: int) -> tuple[str, int]:
        return "127.0.0.1", node_id

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        self.listeners.append(listener)

    def status(self) -> QuorumStatus:
        return QuorumStatus(1, Role.LEADER, 1, 1, self.index, self.index, self.index)

    def commit(self, payload: bytes) -> bytes:
        self.index += 1
        return self.shell.apply(self.index, 1, payload)

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.commit(payload))
        return future

    async def propose(self, payload: bytes, *, timeout_ms: int | None = None) -> bytes:
        return self.commit(payload)

    def lead(self) -> None:
        for listener in self.listeners:
            listener(Leadership(1, 1, leading=True))


class World:
    def __init__(self, tmp_path: Path) -> None:
        config = ControllerConfig(
            node_id=1,
            cluster_id=CLUSTER,
            data_dir=tmp_path,
            listen=("127.0.0.1", 0),
            voters={1: ("127.0.0.1", 1)},
        )
        self.counted: list[tuple[str, int]] = []
        self.quorum = LoneQuorum()
        self.shell = ControllerShell(
            config, count_refusal=lambda command, code: self.counted.append((command, code))
        )
        self.quorum.shell = self.shell
        self.shell.bind(self.quorum)  # type: ignore[arg-type]  # All of it that is used.

    async def run(self, **body: object) -> cluster_pb2.CommandResult:
        command = cluster_pb2.Command(**body)  # type: ignore[arg-type]  # One of its bodies.
        return await self.shell.execute(command)

    async def register(self, node: int) -> int:
        body = cluster_pb2.RegisterBrokerCommand(
            node_id=node, incarnation_id=incarnation(node), cluster_id=CLUSTER, host="h", port=1
        )
        return (await self.run(register_broker=body)).register_broker.broker_epoch


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.quorum.lead()
    return made


async def test_stale_brokers_in_sync_changes_and_commands_are_counted(world: World) -> None:
    epoch = await world.register(1)
    stale = cluster_pb2.FenceBrokerCommand(node_id=1, broker_epoch=epoch - 1)
    await world.run(fence_broker=stale)
    unfence = cluster_pb2.UnfenceBrokerCommand(node_id=1, broker_epoch=epoch)
    await world.run(unfence_broker=unfence)
    assert world.counted == [("fence_broker", ErrorCode.STALE_BROKER_EPOCH)]
    world.counted.clear()
    create = cluster_pb2.CreateTopicCommand(
        name="orders",
        topic_id=topic_id(1),
        replica_assignments=[cluster_pb2.ReplicaAssignment(replicas=[1])] * 2,
    )
    await world.run(create_topic=create)
    change = cluster_pb2.AlterPartitionCommand(node_id=1, broker_epoch=epoch)
    for number in range(2):
        entry = change.partitions.add(
            topic_id=topic_id(1), partition=number, leader_epoch=0, partition_epoch=number
        )
        entry.new_isr.add(node_id=1, broker_epoch=epoch)
    await world.run(alter_partition=change)
    assert world.counted == [("alter_partition", ErrorCode.INVALID_UPDATE_VERSION)]


async def test_a_stale_controllers_command_is_counted(world: World) -> None:
    old = cluster_pb2.Command(
        controller_epoch=9, sequence=1, delete_topic=cluster_pb2.DeleteTopicCommand(name="x")
    )
    world.quorum.commit(old.SerializeToString())
    world.quorum.commit(b"\xff")
    assert world.counted == [
        ("delete_topic", ErrorCode.STALE_CONTROLLER_EPOCH),
        ("", ErrorCode.INVALID_REQUEST),
    ]


async def test_heartbeats_of_a_stale_process_are_counted(world: World) -> None:
    epoch = await world.register(1)
    stream = world.shell.open_stream()
    beat = controller_pb2.BrokerHeartbeatRequest(node_id=1, broker_epoch=epoch - 1)
    world.shell.heartbeat(stream, beat)
    assert world.counted == [("heartbeat", ErrorCode.STALE_BROKER_EPOCH)]


async def test_who_is_not_active_counts_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.quorum.commit(b"\xff")
    assert world.counted == []
