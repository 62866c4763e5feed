"""A controller that was away catches up while commands go on, however often the log is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.raft_meta import transfer
from penstock.v1 import cluster_pb2
from penstock.wire.errors import PenstockError
from tests.simulation.quorum.checkers import Violation, require

if TYPE_CHECKING:
    from tests.simulation.quorum.node import Process
    from tests.simulation.quorum.world import World

_PACE_S: Final = 0.01
_CATCHING_UP_S: Final = 30.0
_CLOSE: Final = 5  # So little behind is what is on its way to it, and no more.
_MOST_INSTALLED: Final = 2
_CHUNK_BYTES: Final = 50  # To be sent a snapshot takes as long as a log needs to be cut, or longer.
_LONG_CUT: Final = 100  # Entries: a log that is cut so seldom would take a while to be cut.


def catches_up_under_load(world: World) -> None:
    """It is away until the log that it needs is cut, and then gets near the end of it."""
    if world.settings.snapshot_entries > _LONG_CUT or len(world.voters()) < 3:
        return
    leader = world.some_leader()
    require(leader is not None, "there is no leader")
    assert leader is not None
    number = next(number for number in world.voters() if number != leader.node_id)
    late = world.processes[number]
    world.note(f"controller {number} is cut off while commands go on")
    world.network.weather.cut = lambda source, target: number in (source, target)
    _load_until(
        world,
        leader,
        lambda: _log_begins(leader) > late.applied_index + 1,
        lambda: f"the log of controller {leader.node_id} is not cut any more",
    )
    world.note(f"controller {number} is back, and commands go on")
    world.network.weather.clear()
    installed = world.checkers.counts["snapshots installed"]
    transfer.CHUNK_BYTES = _CHUNK_BYTES  # type: ignore[misc]  # Until the seed ends.
    _load_until(
        world,
        leader,
        lambda: leader.applied_index - late.applied_index <= _CLOSE,
        lambda: (
            f"controller {number}, which only commands are in the way of, is at "
            f"{late.applied_index} of {leader.applied_index}"
        ),
    )
    installed = world.checkers.counts["snapshots installed"] - installed
    require(installed <= _MOST_INSTALLED, f"controller {number} was sent {installed} snapshots")
    world.counts["controllers that caught up under load"] += 1


def _log_begins(process: Process) -> int:
    voter = process.voter
    return 0 if voter is None else voter._journal.first_index


def _load_until(
    world: World, leader: Process, condition: Callable[[], bool], complaint: Callable[[], str]
) -> None:
    end_s = world.scheduler.now_s + _CATCHING_UP_S
    while not condition():
        if world.scheduler.now_s >= end_s:
            raise Violation(f"after {_CATCHING_UP_S:.0f} s of commands: {complaint()}")
        leader.loop.enter(leader.spawn, partial(_command, leader))
        world.let(_PACE_S)


async def _command(leader: Process) -> None:
    """One that changes next to nothing."""
    brokers = leader.shell.state.brokers
    about = brokers[min(brokers)]
    taken = cluster_pb2.AllocateProducerIdsCommand(
        node_id=about.node_id, broker_epoch=about.broker_epoch
    )
    with contextlib.suppress(PenstockError):  # It leads no more: nobody is given commands.
        await leader.shell.execute(cluster_pb2.Command(allocate_producer_ids=taken))
