"""A controller whose event loop stood still hears of that before all that waited, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2, controller_pb2
from tests.simulation.quorum.virtual_time import Clock, ProcessLoop, Scheduler
from tests.unit.raft_meta.test_refusals import World
from tests.unit.raft_meta_core.metadata_driver import CLUSTER, incarnation

BROKERS = (1, 2, 3)


class Stalling:
    """An active controller on a loop of virtual time, and three brokers on streams."""

    def __init__(self, tmp_path: Path) -> None:
        self.scheduler = Scheduler()
        self.loop = ProcessLoop(self.scheduler, Clock(self.scheduler, 500.0, 1.0))
        self.world = World(tmp_path, self.loop.clock_ms)
        self.shell = self.world.shell
        self.loop.enter(self.world.quorum.lead)
        for node in BROKERS:
            self.loop.enter(self.loop.create_task, self.world.register(node))
        self.let(0.05)
        self.streams = {}
        for node in BROKERS:
            self.loop.enter(self._open, node)
        self.let(0.1)
        assert not any(self.fenced(node) for node in BROKERS)

    def _open(self, node: int) -> None:
        self.streams[node] = self.shell.open_stream()
        self.beat(node)

    def beat(self, node: int) -> None:
        request = controller_pb2.BrokerHeartbeatRequest(
            node_id=node,
            broker_epoch=self.shell.state.brokers[node].broker_epoch,
            metadata_index=1 << 40,
        )
        self.shell.heartbeat(self.streams[node], request)

    def let(self, seconds: float) -> None:
        self.scheduler.run_until(self.scheduler.now_s + seconds)

    def fenced(self, node: int) -> bool:
        return self.shell.state.brokers[node].fenced

    def stand_still(self, seconds: float) -> None:
        """From between two looks at the clock, so that what comes now is ahead of the next."""
        self.let(0.03)
        self.loop.hold(seconds)
        self.let(0.001)


@pytest.fixture
def stalling(tmp_path: Path) -> Stalling:
    return Stalling(tmp_path)


def test_a_stream_that_broke_in_a_stall_has_its_grace_after_it(stalling: Stalling) -> None:
    stalling.stand_still(13.0)
    # Live brokers break a stream that has been silent for half a session, and open another.
    stalling.loop.enter(stalling.shell.close_stream, stalling.streams[2])
    stalling.let(13.1)
    assert not stalling.fenced(2)
    stalling.loop.enter(stalling._open, 2)
    stalling.let(1.0)
    assert not stalling.fenced(2)


def test_who_was_heard_first_after_a_stall_has_a_session_and_no_more(stalling: Stalling) -> None:
    stalling.stand_still(60.0)
    stalling.loop.enter(stalling.beat, 2)
    stalling.let(60.0)
    stalling.loop.enter(stalling.beat, 1)
    stalling.let(5.9)
    assert not stalling.fenced(2)
    stalling.let(0.2)
    assert stalling.fenced(2)


def test_a_stall_is_no_silence_that_lets_another_process_in(stalling: Stalling) -> None:
    stalling.stand_still(4.0)
    conflicts = []
    anew = cluster_pb2.RegisterBrokerCommand(
        node_id=2, incarnation_id=incarnation(9), cluster_id=CLUSTER, host="h", port=1
    )
    stalling.loop.enter(lambda: conflicts.append(stalling.shell.registration_conflict(anew)))
    stalling.let(4.1)
    assert conflicts[0] is not None


def test_who_seems_gone_to_raft_is_given_up_soon(stalling: Stalling) -> None:
    world = stalling.world
    world.quorum.unconnected = frozenset({2})
    stalling.loop.enter(world.quorum.lose)
    stalling.loop.enter(world.quorum.lead, 2)
    stalling.loop.enter(stalling._open, 1)
    stalling.let(0.39)
    assert not stalling.fenced(2)
    stalling.let(0.1)
    assert [stalling.fenced(node) for node in BROKERS] == [False, True, False]


@pytest.mark.parametrize("unconnected", [frozenset({9}), frozenset()])
def test_a_broker_that_died_with_the_active_controller_is_missed_if_that_one_ended(
    stalling: Stalling, unconnected: frozenset[int]
) -> None:
    world = stalling.world
    stalling.loop.enter(world.quorum.lose)
    claim = cluster_pb2.BecomeControllerCommand(
        controller_id=9, cluster_id=CLUSTER, metadata_version=METADATA_VERSION
    )
    command = cluster_pb2.Command(controller_epoch=2, become_controller=claim)
    stalling.loop.enter(world.quorum.commit, command.SerializeToString())
    world.quorum.unconnected = unconnected
    stalling.loop.enter(world.quorum.lead, 3)
    for node in (1, 3):
        stalling.loop.enter(stalling._open, node)
    stalling.let(1.9)
    assert not stalling.fenced(2)
    stalling.let(0.2)
    assert stalling.fenced(2) == bool(unconnected)


def test_a_broker_that_is_unregistered_just_after_a_stall_costs_no_office(
    stalling: Stalling,
) -> None:
    shell, loop = stalling.shell, stalling.loop
    loop.enter(shell.close_stream, stalling.streams[2])
    stalling.let(0.5)
    assert stalling.fenced(2)
    stalling.stand_still(0.3)
    gone = cluster_pb2.Command(unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=2))
    loop.enter(stalling.world.quorum.commit, shell._stamp(gone))
    stalling.let(1.0)
    assert 2 not in shell.state.brokers
    assert stalling.world.quorum.renounced == 0
    assert not any(stalling.fenced(node) for node in (1, 3))
