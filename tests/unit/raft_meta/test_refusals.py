"""The active controller says what it refused, each refusal once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.raft_meta.active import ControllerShell, monotonic_ms
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.controller_events import Tick
from penstock.raft_meta.quorum import Leadership, LeadershipListener, QuorumStatus, Role
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode, InvalidConfigError
from tests.support import eventually
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, incarnation, topic_id


class LoneQuorum:
    """One voter that commits at once."""

    def __init__(self) -> None:
        self.shell: ControllerShell
        self.listeners: list[LeadershipListener] = []
        self.index = 0
        self.renounced = 0
        self.unconnected: frozenset[int] = frozenset()

    def address_of(self, node_id: int) -> tuple[str, int]:
        return "127.0.0.1", node_id

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        self.listeners.append(listener)

    def status(self) -> QuorumStatus:
        at = self.index
        return QuorumStatus(1, Role.LEADER, 1, 1, at, at, at, unconnected=self.unconnected)

    def commit(self, payload: bytes) -> bytes:
        self.index += 1
        return self.shell.apply(self.index, 1, payload)

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.commit(payload))
        return future

    async def propose(
        self, payload: bytes, *, timeout_ms: int | None = None, level: int = 0
    ) -> bytes:
        return self.commit(payload)

    def renounce(self) -> None:
        self.renounced += 1

    def lead(self, term: int = 1) -> None:
        for listener in self.listeners:
            listener(Leadership(term, 1, leading=True))

    def lose(self) -> None:
        for listener in self.listeners:
            listener(Leadership(1, 2, leading=False))


class World:
    def __init__(self, tmp_path: Path, clock_ms: Callable[[], int] = monotonic_ms) -> None:
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
            config,
            clock_ms=clock_ms,
            count_refusal=lambda command, code: self.counted.append((command, code)),
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


async def test_what_is_refused_before_it_is_proposed_is_counted_and_not_in_the_log(
    world: World,
) -> None:
    before = world.quorum.index
    configs = {"max.message.bytes": "8000", "segment.bytes": "5000"}
    create = cluster_pb2.CreateTopicCommand(name="orders", topic_id=topic_id(1), configs=configs)
    with pytest.raises(InvalidConfigError, match=r"segment\.bytes=5000"):
        await world.run(create_topic=create)
    assert world.counted == [("create_topic", ErrorCode.INVALID_CONFIG)]
    assert world.quorum.index == before


async def test_who_is_not_active_counts_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.quorum.commit(b"\xff")
    assert world.counted == []


async def test_an_active_controller_that_fails_gives_up_its_office_and_can_have_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that died of an exception would have left silent brokers unfenced for ever."""
    epoch = await world.register(1)
    shell, core = world.shell, world.shell._core
    stream = shell.open_stream()
    handle = core.handle

    def fail(event: object, now_ms: int) -> object:
        if isinstance(event, Tick):
            raise ZeroDivisionError
        return handle(event, now_ms)  # type: ignore[arg-type]  # As it was given.

    monkeypatch.setattr(core, "handle", fail)
    shell._on_timer()
    assert world.quorum.renounced == 1
    assert not core.is_active
    ended = [response async for response in stream.responses()]
    assert ended[-1].error.code == ErrorCode.NOT_CONTROLLER
    world.quorum.lead(1)  # Told again, as when the voters change.
    shell._on_timer()
    assert not core.is_active
    assert world.quorum.renounced == 1
    monkeypatch.undo()
    world.quorum.lead(2)
    assert not core.is_active, "not at once: what failed may fail again"
    await eventually(lambda: core.is_active)
    stream = shell.open_stream()
    shell.heartbeat(stream, controller_pb2.BrokerHeartbeatRequest(node_id=1, broker_epoch=epoch))
    answer = await anext(stream.responses())
    assert not answer.HasField("error")
    shell.stop()


async def test_an_office_that_is_given_up_again_and_again_is_claimed_ever_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone controller that fails at each start would else make hundreds of terms a second."""
    shell, now_ms = world.shell, 1_000_000
    monkeypatch.setattr(shell, "_clock_ms", lambda: now_ms)
    delays: list[float] = []
    monkeypatch.setattr(shell, "_claim_later", lambda _payload, after_s: delays.append(after_s))
    for term in range(2, 12):
        shell._epoch = term - 1
        shell._renounce()
        world.quorum.lead(term)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    now_ms += 60_000
    shell._on_leadership(Leadership(11, -1, leading=False))
    world.quorum.lead(12)
    assert len(delays) == 10, "it was quiet for long: as if nothing had been"
    assert shell._core.is_active
    shell.stop()
