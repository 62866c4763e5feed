"""After the faults: everything heals, and then more must hold than that nothing bad happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.quorum.checkers import require
from tests.simulation.quorum.lagging import catches_up_under_load

if TYPE_CHECKING:
    from tests.simulation.quorum.world import World

_LEADER_S = 10.0
_SETTLED_S = 30.0
_BAD_LINK_S = 2.5
_CALM_S = 1.0
_FULL_S = 1.5


def heal(world: World) -> None:
    """All faults end; within bounded time all is well; a bad link unseats nobody."""
    world.note("everything heals")
    world.is_healed = True
    world.network.weather.clear()
    for number in world.settings.nodes:
        disk = world.disks[number]
        disk.disarm()
        disk.make_room()
        world.start(number)
    for process in list(world.processes.values()):  # What one does when it goes on may end another.
        process.failures = 0
        process.loop.release()
        process.loop.clock.set(rate=1.0)
        process.loop.clock_changed()
    for broker in world.brokers.values():
        broker.loop.release()
    # Who gave up its office claims it again after its penance, if nobody else does.
    penance_s = max(process.shell._penance_s for process in world.processes.values())
    _within(
        world,
        _LEADER_S + penance_s,
        lambda: world.active() is not None,
        "there is no active controller",
    )
    decided = len(world.checkers.decided)
    _within(
        world,
        _LEADER_S,
        lambda: len(world.checkers.decided) > decided,
        "nothing is committed any more",
    )
    _within(world, _SETTLED_S, world.operator.is_done, "the operator has not mended the voters")
    for client in world.administrators:
        client.kill()
    _within(world, _SETTLED_S, lambda: not _unsettled(world), lambda: _unsettled(world))
    _promises(world)
    _failure_is_outlived(world)
    _full_disk_is_outlived(world)
    catches_up_under_load(world)
    if len(world.voters()) > 2:  # Of two, one with a bad link is half of them.
        _healthy_leader_stays(world)


def _within(
    world: World, seconds: float, condition: Callable[[], bool], what: str | Callable[[], str]
) -> None:
    end_s = world.scheduler.now_s + seconds
    while not condition():
        complaint = what if isinstance(what, str) else what()
        require(world.scheduler.now_s < end_s, f"{seconds:.0f} s after healing: {complaint}")
        world.let(0.1)


def _unsettled(world: World) -> str:
    """What is not in order yet, or nothing."""
    if len(world.processes) < len(world.settings.nodes):
        return "a controller is down"
    active = world.active()
    if active is None:
        return "there is no active controller"
    ends = {world.processes[number].applied_index for number in world.voters()}
    if len(ends) > 1:
        return f"controllers are at {sorted(ends)}"
    if len(world.brokers) < world.settings.brokers:
        return "a broker is down"
    for number, broker in sorted(world.brokers.items()):
        record = active.shell.state.brokers.get(number)
        if record is None or record.fenced or record.broker_epoch != broker.epoch:
            return f"broker {number} is not in: {record}"
        if broker.index < active.shell._core.changed_index:
            return f"broker {number} knows {broker.index}"
    for key, partition in active.shell.state.all_partitions():
        if partition.leader == -1:
            return f"partition {key} has no leader: {partition}"
    return ""


def _promises(world: World) -> None:
    """What was promised is there, on every controller."""
    for number in world.voters():
        process = world.processes[number]
        topics = process.shell.state.topics
        for topic_id, name in world.topics_promised.items():
            require(topic_id in topics, f"node {process.node_id} lost topic {name}")
        for topic_id, name in world.topics_gone.items():
            require(topic_id not in topics, f"node {process.node_id} has the deleted topic {name}")


def _failure_is_outlived(world: World) -> None:
    """The active controller fails over what a broker's death calls for; it is done all the same."""
    active = world.active()
    require(active is not None, "there is no active controller")
    assert active is not None
    active.failures = 1
    world.kill_broker(world.rng.choice(sorted(world.brokers)))
    _within(world, _SETTLED_S, lambda: not active.failures, "nothing calls for a proposal")
    _within(world, _SETTLED_S, lambda: not _unsettled(world), lambda: _unsettled(world))


def _full_disk_is_outlived(world: World) -> None:
    """The leader's disk is full, and has room again: it, or another one, is active after that."""
    leader = world.some_leader()
    require(leader is not None, "there is no leader")
    assert leader is not None
    world.note(f"the disk of controller {leader.node_id} is full, and has room again")
    leader.disk.fullness = 1.0
    world.let(_FULL_S)
    leader.disk.make_room()
    decided = len(world.checkers.decided)
    _within(
        world,
        _LEADER_S,
        lambda: world.active() is not None and len(world.checkers.decided) > decided,
        "nothing is committed any more, though the disks have room again",
    )
    _within(world, _SETTLED_S, lambda: not _unsettled(world), lambda: _unsettled(world))


def _healthy_leader_stays(world: World) -> None:
    """A leader that a majority hears is not unseated by a voter with a bad link.

    First a voter hears nobody, though everybody hears it; then it does not hear the leader alone
    and is not heard by it.
    """
    leader = world.some_leader()
    require(leader is not None, "there is no leader")
    assert leader is not None
    voter = leader.voter
    assert voter is not None
    term = voter.status().term
    other = next(number for number in world.voters() if number != leader.node_id)
    both = {leader.node_id, other}
    weather = world.network.weather
    for what, cut in (
        ("hears nobody", lambda _source, target: target == other),
        ("is cut off from the leader", lambda source, target: {source, target} == both),
    ):
        world.note(f"controller {other} {what}")
        weather.cut = cut
        world.let(_BAD_LINK_S)
        weather.clear()
        world.let(_CALM_S)
        now = leader.voter
        require(
            now is not None
            and now.status().term == term
            and now.status().leader_id == leader.node_id,
            f"the leader of term {term} was unseated when controller {other} {what}",
        )
