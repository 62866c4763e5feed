"""A majority's disks are lost for good, and the operator goes on with a survivor.

What docs/operating/controllers.md says about it is done step by step, but for one: that no
controller that was given up may start again is not always heeded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.raft_meta import recovery
from penstock.raft_meta.journal import NO_OP
from penstock.raft_meta.recovery import Recovery
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.wire.errors import DataDirectoryError
from tests.simulation.quorum import node
from tests.simulation.quorum.checkers import require
from tests.simulation.quorum.disk import Crash, SimulatedPath

if TYPE_CHECKING:
    from penstock.raft_meta.journal import LmdbJournal
    from tests.simulation.quorum.world import World

_SILENCE_S = 3.0  # After it nothing that was sent is under way any more.
_DISK_OPERATIONS = 6  # The command takes about so many.
_RETURNS = 0.7


class Log(NamedTuple):
    """What a stopped controller has: term and command by index, from where its snapshot ends."""

    entries: dict[int, tuple[int, bytes]]
    term: int
    commit_index: int
    last_index: int


def lose_a_majority(world: World) -> None:
    """All stop, a majority of the voters lose their disks, and one survivor is the only voter then.

    Nothing happens where there is no majority to lose, or nobody who could survive it.
    """
    doomed = _part(world)
    _shut_down(world)
    surveys = _surveys(world)
    newest = max(surveys.values(), key=_length, default=None)
    voters = () if newest is None else newest.voters_before
    survivors = [number for number in voters if number in surveys and number not in world.wiped]
    if len(voters) > 2:
        lost = doomed or world.rng.sample(voters, len(voters) // 2 + 1)
        survivors = [number for number in survivors if number not in lost]
        if survivors and 2 * len(set(lost).intersection(voters)) > len(voters):
            _recover(world, surveys, voters, survivors)
    _start_up(world)


def _part(world: World) -> list[int]:
    """Mostly those who will be lost are alone with the clients first, and decide for themselves."""
    voters, leader = world.voters(), world.some_leader()
    if leader is None or leader.node_id not in voters or world.rng.random() < 0.3:
        return []
    others = [number for number in voters if number != leader.node_id]
    doomed = [leader.node_id, *world.rng.sample(others, len(voters) // 2)]
    left = [number for number in world.settings.nodes if number not in doomed]
    world.network.weather.clear()
    world.network.weather.cut = lambda source, target: (source in left) != (target in left)
    world.let(world.rng.uniform(0.2, 3.0))
    return doomed


def _length(survey: Recovery) -> tuple[int, int]:
    return survey.last_term, survey.last_index


def _shut_down(world: World) -> None:
    """All nodes stop; what they said arrives, or does not."""
    world.note("everything is stopped")
    world.is_shut_down = True
    for number in sorted(world.processes):
        world.crash(number)
    world.network.weather.clear()
    for number in sorted(world.brokers):
        world.kill_broker(number)
    for disk in world.disks.values():
        disk.make_room()
    world.let(_SILENCE_S)


def _start_up(world: World) -> None:
    world.is_shut_down = False
    for number in world.settings.nodes:
        world.scheduler.after(world.rng.uniform(0, 0.5), lambda number=number: world.start(number))


def _surveys(world: World) -> dict[int, Recovery]:
    """What the command shows of each controller."""
    found: dict[int, Recovery] = {}
    for number in world.settings.nodes:
        try:
            found[number] = recovery.survey(
                _directory(world, number),  # type: ignore[arg-type]  # Enough of a path.
                cluster_id=node.CLUSTER_ID,
                node_id=number,
            )
        except DataDirectoryError:
            continue  # Nothing is in it.
    return found


def _recover(
    world: World, surveys: dict[int, Recovery], voters: tuple[int, ...], survivors: list[int]
) -> None:
    """The operator's part: who has most goes on alone, and all others begin anew."""
    chosen = max(survivors, key=lambda number: (_length(surveys[number]), number))
    others = [number for number in survivors if number != chosen]
    world.note(f"of the voters {voters}, {survivors} are left, and {chosen} goes on alone")
    world.counts["majorities lost"] += 1
    before = _log(world, chosen)
    world.checkers.survives(
        chosen, before.entries, [_log(world, number).entries for number in others]
    )
    require(
        _length(surveys[chosen]) == (before.entries[before.last_index][0], before.last_index),
        f"the survey of controller {chosen} says {surveys[chosen]}",
    )
    _insist(world, chosen)
    after = _log(world, chosen)
    require(
        all(after.entries.get(i, entry) == entry for i, entry in before.entries.items())
        and after.last_index > before.last_index,
        f"controller {chosen} recovered, and lacks some of what it had",
    )
    world.checkers.recovered(
        {i: entry for i, entry in after.entries.items() if before.commit_index < i},
        before.term,
        before.last_index + 1,
    )
    _forget(world)
    returning = [number for number in others if world.rng.random() < _RETURNS]
    for number in world.settings.nodes:
        if number == chosen:
            continue
        if number in returning:  # Against the advice; the operator notices it after a while.
            world.note(f"controller {number} returns with what it had")
            world.counts["voters given up that return"] += 1
            world.scheduler.after(
                world.rng.uniform(1.0, 5.0), lambda number=number: _replace(world, number)
            )
        else:
            world.empty(number)
            if number in voters:
                world.operator.replacements.add(number)
    if not world.settings.spares:  # Then the operator has had nothing to do until now.
        world.scheduler.after(1.0, world.operator.turn)


def _replace(world: World, number: int) -> None:
    """The operator notices a controller that was given up, and empties it.

    One that somebody made a voter meanwhile is none of those any more: its disk counts.
    """
    if number in world.voters():
        return
    if not world.operator.is_quiet():
        world.scheduler.after(1.0, lambda: _replace(world, number))
        return
    world.empty(number)
    world.operator.replacements.add(number)


def _insist(world: World, number: int) -> None:
    """Give the command until it does not die at its disk."""
    disk = world.disks[number]
    if world.rng.random() < 0.5:
        disk.fuse = world.rng.randint(0, _DISK_OPERATIONS)
    while True:
        try:
            recovery.become_the_only_voter(
                _directory(world, number),  # type: ignore[arg-type]  # Enough of a path.
                cluster_id=node.CLUSTER_ID,
                node_id=number,
                addresses={number: ("simulated", number)},
            )
            break
        except Crash:
            world.counts["recoveries that died"] += 1
            if world.rng.random() < 0.5:
                disk.lose_power()
    disk.fuse = None


def _directory(world: World, number: int) -> SimulatedPath:
    return SimulatedPath(world.disks[number], "metadata")


def _log(world: World, number: int) -> Log:
    journal: LmdbJournal = node._journal(
        _directory(world, number) / "journal", cluster_id=node.CLUSTER_ID, node_id=number
    )
    try:
        entries = {entry.log_index: (entry.term, entry.command) for entry in journal[:]}
        term, commit_index = journal.getCurrentTerm(), journal.commit_index
    finally:
        journal.abandon()
    snapshot = SnapshotStore(_directory(world, number)).load()  # type: ignore[arg-type]  # As above.
    if snapshot is not None and entries.get(snapshot.index, (0, b""))[0] != snapshot.term:
        # It died as it installed a snapshot of what the journal lacks: that is what it has.
        world.counts["snapshots that a survivor's journal lacks"] += 1
        entries = {snapshot.index: (snapshot.term, NO_OP)}
        term, commit_index = max(term, snapshot.term), snapshot.index
    return Log(entries, term, commit_index, max(entries))


def _forget(world: World) -> None:
    """What the lost majority promised is lost, as far as the survivor does not know of it."""
    kept = world.checkers.topics()
    for topic_id in [topic_id for topic_id in world.topics_promised if topic_id not in kept]:
        del world.topics_promised[topic_id]
    for topic_id in [topic_id for topic_id in world.topics_gone if topic_id in kept]:
        del world.topics_gone[topic_id]
    world.blocks_told &= world.checkers.producer_blocks
    world.old_changes.clear()
    world.old_registrations.clear()
    world.wiped.clear()
