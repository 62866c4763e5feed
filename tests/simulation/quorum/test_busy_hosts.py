"""Controllers on hosts that are too busy: processes stand still while their messages wait.

Or their event loops do, long at one thing, while the voters' threads go on.

A leader that has just been elected stands still longest, as a new active controller does that has
thousands of partitions to see to. The control runs the rules as Raft's paper has them alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.raft_meta import elections
from tests.simulation.quorum.disk import Disk
from tests.simulation.quorum.mutants import MUTANTS
from tests.simulation.quorum.node import Process, simulated
from tests.simulation.quorum.world import World, quiet

SEEDS = range(6)
BUSY_S = 60.0
LATER_S = 30.0  # The last part, in which it should have settled.


class BusyWorld(World):
    """Three controllers and two brokers on busy hosts; nothing else goes wrong."""

    def __init__(self, seed: int, *, loops_alone: bool) -> None:
        super().__init__(seed)
        self.loops_alone = loops_alone
        self.settings = replace(
            self.settings, controllers=3, spares=0, brokers=2, operations_a_step=4096,
            slow_disks=False, clock_drift=0.0,
        )  # fmt: skip
        self.disks = {number: Disk(self.rng) for number in self.settings.nodes}
        self.busy = False
        self.worked_for: set[tuple[int, int]] = set()

    def live(self) -> tuple[int, int]:
        """Changes of leader in the whole busy time, and in its later part."""
        for number in self.settings.nodes:
            self.start(number)
        for number in self.broker_numbers():
            self.start_broker(number)
        self.let(5.0)
        assert self.active() is not None
        self.busy = True
        for process in list(self.processes.values()):
            self._stall(process)
        self.scheduler.after(0.01, self._work)
        before = self.checkers.leader_changes
        self.let(BUSY_S - LATER_S)
        midway = self.checkers.leader_changes
        self.let(LATER_S)
        self.busy = False
        return self.checkers.leader_changes - before, self.checkers.leader_changes - midway

    def _stall(self, process: Process) -> None:
        """Hold it up, again and again, for up to a second."""
        if not self.busy or not process.is_alive:
            return
        awake_s, still_s = self.rng.uniform(0.1, 0.5), self.rng.uniform(0.2, 1.0)
        self._hold(process, still_s)
        self.scheduler.after(still_s + awake_s, lambda: self._stall(process))

    def _hold(self, process: Process, seconds: float) -> None:
        (process.loop.hold_loop if self.loops_alone else process.loop.hold)(seconds)

    def _work(self) -> None:
        """Whoever has become active has much to do at once."""
        active = self.active()
        if active is not None and (active.node_id, active.shell._epoch) not in self.worked_for:
            self.worked_for.add((active.node_id, active.shell._epoch))
            self._hold(active, 1.5)
        if self.busy:
            self.scheduler.after(0.01, self._work)


def changes(seed: int, *, loops_alone: bool) -> tuple[int, int]:
    world = BusyWorld(seed, loops_alone=loops_alone)
    settings = world.settings
    with quiet(), simulated(batch_bytes=settings.batch_bytes, chunk_bytes=settings.chunk_bytes):
        try:
            return world.live()
        finally:
            for process in world.processes.values():
                process.loop.kill()
            for client in world.brokers.values():
                client.loop.kill()


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Without patience, and with every silence taken for the leader's."""
    kept = elections.Elections.stood_still
    with MUTANTS["impatience"].planted():
        elections.Elections.stood_still = lambda *_: 0.0  # type: ignore[method-assign]  # As said.
        try:
            yield
        finally:
            elections.Elections.stood_still = kept  # type: ignore[method-assign]  # As above.


@pytest.mark.simulation
@pytest.mark.parametrize("loops_alone", [False, True])
def test_leaders_change_all_the_time_without_patience_and_settle_with_it(loops_alone):
    with impatient():
        control = [changes(seed, loops_alone=loops_alone) for seed in SEEDS]
    settled = [changes(seed, loops_alone=loops_alone) for seed in SEEDS]
    (changed, later), (kept, kept_later) = (
        [sum(column) for column in zip(*found, strict=True)] for found in (control, settled)
    )
    assert changed >= 6 * len(SEEDS), control
    assert later >= 3 * len(SEEDS), control
    assert kept <= 2 * len(SEEDS), settled
    assert kept_later <= 1.5 * len(SEEDS), settled
