"""What goes wrong: the weather, deaths, clocks, and the world's time in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.quorum.network import CALM_DELAY_S

if TYPE_CHECKING:
    from tests.simulation.quorum.virtual_time import ProcessLoop
    from tests.simulation.quorum.world import World

_FLUSHES = 6
_DISK_OPERATIONS = 12  # A snapshot, its file and its directory take about so many.
_WEATHERS = (
    "calm", "calm", "lossy", "slow", "rough", "rough", "cut", "one way", "isolate", "split",
    "stale leader",
)  # fmt: skip


class Faults:
    """Draws what happens next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng

    def turn(self) -> None:
        """Some faults, and some time in which they act."""
        world, rng = self._world, self._rng
        self._weather()
        for _ in range(rng.choice([0, 1, 1, 2])):
            self._harm()
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.25:
                self._arm_fuse()
            world.let(rng.choice([0.02, 0.2, 0.6, 1.0]))

    # The network.

    def _weather(self) -> None:
        world, rng, weather = self._world, self._rng, self._world.network.weather
        voters, everybody = list(world.settings.nodes), self._everybody()
        kind = rng.choice(_WEATHERS)
        weather.clear()
        if kind in ("lossy", "rough"):
            weather.loss, weather.duplication = rng.uniform(0.02, 0.3), rng.uniform(0, 0.3)
        if kind in ("slow", "rough"):
            weather.delay_s = (CALM_DELAY_S[0], rng.choice([0.02, 0.1, 0.3, 1.0]))
        if kind == "cut":
            side = set(rng.sample(everybody, rng.randint(1, len(everybody) - 1)))
            weather.cut = lambda source, target: (source in side) != (target in side)
        if kind == "one way":
            victim, other = rng.sample(everybody, 2)
            weather.cut = lambda source, target: (source, target) == (victim, other)
        if kind == "isolate":
            leader = world.some_leader()
            lone = leader.node_id if leader and rng.random() < 0.6 else rng.choice(voters)
            weather.cut = lambda source, target: lone in (source, target)
        if kind == "split":  # The leader keeps its clients, and loses the other controllers.
            leader = world.some_leader()
            lone = leader.node_id if leader else rng.choice(voters)
            weather.cut = lambda source, target: (
                (source == lone and target in voters) or (target == lone and source in voters)
            )
        if kind == "stale leader":
            self._make_stale()
        world.note(f"weather: {kind}")

    def _make_stale(self) -> None:
        """The leader is alone, its clock slow: it goes on to think that it leads."""
        world, leader = self._world, self._world.some_leader()
        if leader is None:
            return
        lone, voters = leader.node_id, list(world.settings.nodes)
        world.network.weather.cut = lambda source, target: (
            lone in (source, target) and source in voters and target in voters
        )
        leader.loop.clock.set(rate=0.1)
        leader.loop.clock_changed()
        world.scheduler.after(self._rng.uniform(2.0, 4.0), lambda: self._mend(leader.loop))
        world.let(self._rng.uniform(1.0, 3.0))  # Others must have the time to be elected.

    def _everybody(self) -> list[int]:
        world = self._world
        clients = [client.node_id for client in world.administrators]
        return [*world.settings.nodes, *sorted(world.brokers), *clients]

    # Processes.

    def _harm(self) -> None:
        harms: list[Callable[[], None]] = [
            self._kill, self._kill, self._kill_leader, self._kill_all, self._stop, self._hold,
            self._clock, self._clock, self._strobe, self._kill_broker, self._stop_broker,
            self._hold_broker, self._wipe, self._break_connection,
            self._fill_disk, self._fail_flush, self._fail_flush, self._fail_active,
        ]  # fmt: skip
        self._rng.choice(harms)()

    def _alive(self) -> list[int]:
        return sorted(self._world.processes)

    def _kill(self) -> None:
        if self._alive():
            self._world.crash(self._rng.choice(self._alive()))

    def _break_connection(self) -> None:
        """Two processes that live lose the connection between them, and take it for a death."""
        if len(self._alive()) < 2:
            return
        world = self._world
        one, other = self._rng.sample(self._alive(), 2)
        leader = world.some_leader()
        if leader is not None and leader.node_id != other and self._rng.random() < 0.5:
            one = leader.node_id
        world.note(f"the connection between controllers {one} and {other} breaks")
        for here, there in ((one, other), (other, one)):
            process = world.processes[here]
            if process.link is not None:
                process.loop.enter(process.link.on_lost, there)

    def _kill_leader(self) -> None:
        leader = self._world.some_leader()
        if leader is not None:
            self._world.crash(leader.node_id)

    def _kill_all(self) -> None:
        if self._rng.random() < 0.4:
            power = self._rng.random() < 0.7
            for number in self._alive():
                self._world.crash(number, power=power)

    def _arm_fuse(self) -> None:
        """A process dies at one of its next disk operations: before, within or after a sync."""
        if self._alive():
            number = self._rng.choice(self._alive())
            self._world.disks[number].fuse = self._rng.randint(0, _DISK_OPERATIONS)
            self._world.note(f"controller {number} will die at its disk")

    def _stop(self) -> None:
        leader = self._world.some_leader()
        if leader is not None and not leader.is_stopping and leader.thread is not None:
            self._world.note(f"controller {leader.node_id} is to stop")
            leader.loop.enter(leader.spawn, leader.stop)

    def _hold(self) -> None:
        """The whole process stands still, as on an overloaded host; or its loop does, and the
        voter's thread goes on.
        """
        if self._alive():
            process = self._world.processes[self._rng.choice(self._alive())]
            seconds = self._rng.uniform(0.05, 2.0)
            is_whole = self._rng.random() < 0.5
            (process.loop.hold if is_whole else process.loop.hold_loop)(seconds)
            what = f"controller {process.node_id}" + ("" if is_whole else "'s loop")
            self._world.note(f"{what} is held up for {seconds:.2f} s")

    def _wipe(self) -> None:
        """A voter loses its disk: it must count for nothing until somebody has removed it.

        Where the others are a majority: more is more than Raft can bear.
        """
        world = self._world
        if world.operator.may_lose_a_disk():
            number = self._rng.choice([n for n in world.voters() if n not in world.wiped])
            world.note(f"controller {number} loses its disk")
            world.counts["disks lost"] += 1
            world.wiped.add(number)
            world.empty(number)

    def _fill_disk(self) -> None:
        """There is no room on a disk, or on all of them, for a while; or for some writes."""
        world, rng, leader = self._world, self._rng, self._world.some_leader()
        number = rng.choice(list(world.settings.nodes))
        if leader is not None and rng.random() < 0.5:
            number = leader.node_id
        numbers = list(world.settings.nodes) if rng.random() < 0.15 else [number]
        fullness = rng.choice([1.0, 1.0, 0.5])
        world.note(f"the disks of controllers {numbers} are full")
        world.counts["disks filled"] += len(numbers)
        for each in numbers:
            disk = world.disks[each]
            disk.fullness = fullness
            world.scheduler.after(rng.uniform(0.3, 4.0), disk.make_room)

    def _fail_flush(self) -> None:
        """One of the next flushes of a disk fails."""
        if self._alive():
            number = self._rng.choice(self._alive())
            disk, after = self._world.disks[number], self._rng.randint(0, _FLUSHES)
            if self._rng.random() < 0.5:
                disk.flush_fuse = after
            else:  # A snapshot's file and its directory.
                disk.file_flush_fuse = after % 3
            self._world.note(f"a flush of controller {number} will fail")

    def _fail_active(self) -> None:
        """The active controller raises an exception, and so may those that follow it."""
        for process in self._world.processes.values():
            process.failures = self._rng.choice([0, 1, 1, 2])

    # Clocks.

    def _clock(self) -> None:
        """A clock leaps, runs at another rate, or stands still for a while."""
        if not self._alive():
            return
        rng, world = self._rng, self._world
        process = world.processes[rng.choice(self._alive())]
        kind = rng.choice(["leap", "rate", "freeze"])
        clock, loop = process.loop.clock, process.loop
        if kind == "leap":
            clock.set(rate=clock.rate, leap_s=rng.choice([0.1, 1.0, 10.0, 1000.0]))
        elif kind == "rate":
            clock.set(rate=rng.choice([0.2, 0.5, 2.0, 5.0]))
        else:
            clock.set(rate=0.0)
        loop.clock_changed()
        world.note(f"the clock of controller {process.node_id}: {kind}")

        world.scheduler.after(rng.uniform(0.1, 3.0), lambda: self._mend(loop))

    def _mend(self, loop: ProcessLoop) -> None:
        if not self._world.is_healed:
            loop.clock.set(rate=1.0)
            loop.clock_changed()

    def _strobe(self) -> None:
        """A clock stands still and leaps, again and again."""
        if not self._alive():
            return
        rng, world = self._rng, self._world
        process = world.processes[rng.choice(self._alive())]
        clock, loop = process.loop.clock, process.loop
        world.note(f"the clock of controller {process.node_id} strobes")
        for number in range(20):

            def flash(number: int = number) -> None:
                if world.is_healed:
                    return
                leap_s = 0.0 if number % 2 else rng.uniform(0, 1.0)
                clock.set(rate=0.0 if number % 2 and number < 19 else 1.0, leap_s=leap_s)
                loop.clock_changed()

            world.scheduler.after(0.05 * number + rng.uniform(0, 0.04), flash)

    # Brokers.

    def _kill_broker(self) -> None:
        if self._world.brokers:
            self._world.kill_broker(self._rng.choice(sorted(self._world.brokers)))

    def _stop_broker(self) -> None:
        if not self._world.brokers:
            return
        number = self._rng.choice(sorted(self._world.brokers))
        broker = self._world.brokers[number]
        broker.wants_shutdown = True

        def stop() -> None:
            if self._world.brokers.get(number) is broker:
                self._world.kill_broker(number)

        self._world.note(f"broker {number} is to stop")
        self._world.scheduler.after(self._rng.uniform(0.5, 3.0), stop)

    def _hold_broker(self) -> None:
        if self._world.brokers:
            broker = self._world.brokers[self._rng.choice(sorted(self._world.brokers))]
            seconds = self._rng.uniform(0.5, 8.0)
            broker.loop.hold(seconds)
            self._world.note(f"broker {broker.node_id} hangs for {seconds:.1f} s")
