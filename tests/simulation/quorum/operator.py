"""Whoever runs the cluster: adds and removes controllers, replaces those that lost their disks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.wire.errors import PenstockError

if TYPE_CHECKING:
    from tests.simulation.quorum.node import Process
    from tests.simulation.quorum.world import World

_CHANGE_MS = 3000
_PATIENCE = 0.9
_QUIET_S = 1.0  # After it nothing is under way any more of a change whose outcome is not known.


class Operator:
    """Mostly one command at a time, to whoever is the active controller."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[int, float] = {}  # When each command began, by its number.
        self._commands = 0
        self._quiet_from_s = 0.0
        self.replacements: set[int] = set()  # To be added, after a majority was lost.

    def turn(self) -> None:
        """Do the next thing, and come again."""
        world = self._world
        world.scheduler.after(world.rng.uniform(0.2, 1.5), self.turn)
        process = world.active()
        if process is None or process.is_stopping:
            return
        if self._is_busy() and (world.is_healed or world.rng.random() < _PATIENCE):
            return
        voters = world.voters()
        lost = sorted(world.wiped.intersection(voters))
        others = [number for number in world.processes if number not in voters]
        new = sorted(self.replacements.difference(voters))
        if lost:
            self._begin(process, lost[0], remove=True)
        elif new:
            self._begin(process, new[0], remove=False)
        elif world.is_healed:
            return
        elif others and world.rng.random() < 0.5:
            self._begin(process, world.rng.choice(sorted(others)), remove=False)
        elif len(voters) > 1 and world.rng.random() < 0.3:
            self._begin(process, world.rng.choice(voters), remove=True)

    def _is_busy(self) -> bool:
        """A command that its controller took with it into the grave is given up."""
        given_up_s = self._world.scheduler.now_s - _CHANGE_MS / 1000 - 1
        return any(since_s > given_up_s for since_s in self._under_way.values())

    def _begin(self, process: Process, number: int, *, remove: bool) -> None:
        now_s = self._world.scheduler.now_s
        self._commands += 1
        self._under_way[self._commands] = now_s
        self._quiet_from_s = now_s + _CHANGE_MS / 1000 + _QUIET_S
        self._world.note(f"controller {number} is to be {'removed' if remove else 'added'}")
        change = self._remove if remove else self._add
        process.loop.enter(process.spawn, partial(change, self._commands, process, number))

    async def _add(self, command: int, process: Process, number: int) -> None:
        try:
            await process.quorum.add_voter(number, ("simulated", number), timeout_ms=_CHANGE_MS)
            self.replacements.discard(number)
            self._ended(command, "voters added")
        except PenstockError as error:
            self._ended(command, f"not added: {type(error).__name__}")

    async def _remove(self, command: int, process: Process, number: int) -> None:
        try:
            await process.quorum.remove_voter(number, timeout_ms=_CHANGE_MS)
        except PenstockError as error:
            self._ended(command, f"not removed: {type(error).__name__}")
            return
        self._ended(command, "voters removed")
        self._world.wiped.discard(number)
        if self._world.rng.random() < 0.5:  # Its machine is given back; another takes its number.
            self._world.empty(number)

    def _ended(self, command: int, how: str) -> None:
        self._world.note(how)
        self._world.counts[how] += 1
        del self._under_way[command]
        if not how.startswith("not ") and not self._under_way:
            self._quiet_from_s = 0.0

    def may_lose_a_disk(self) -> bool:
        """A voter's disk may be lost: nothing is under way, and the others are enough.

        They are enough while those that were lost before are being removed, too.
        """
        world = self._world
        leader = world.some_leader()
        voter = None if leader is None else leader.voter
        return (
            bool(world.settings.spares)
            and len(world.wiped) < (len(world.voters()) - 1) // 2
            and voter is not None
            and 0 < voter._journal.voters_index <= voter._journal.commit_index
            and self.is_quiet()
        )

    def is_quiet(self) -> bool:
        """No change of the voters is under way, nor one of which the outcome is not known."""
        return self._world.scheduler.now_s >= self._quiet_from_s and not self._is_busy()

    def is_done(self) -> bool:
        """Nobody votes who lost its disk, and nothing is under way."""
        world = self._world
        voters = world.voters()
        return (
            not world.wiped.intersection(voters)
            and self.replacements.issubset(voters)
            and not self._is_busy()
        )
