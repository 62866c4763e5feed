"""Leaders lost in silence, one soon after the other: each is replaced as fast as the first.

A leader that hangs or is cut off closes no connection, so that its silence alone tells.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.quorum.disk import Disk
from tests.simulation.quorum.mutants import MUTANTS
from tests.simulation.quorum.node import simulated
from tests.simulation.quorum.world import World, quiet

SEEDS = range(16)
STEP_S = 0.02
WITHIN_S = 1.0


class SilentWorld(World):
    """Five controllers, of which two are cut off for good; nothing else goes wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.settings = replace(
            self.settings, controllers=5, spares=0, brokers=1, operations_a_step=4096,
            slow_disks=False, clock_drift=0.0,
        )  # fmt: skip
        self.disks = {number: Disk(self.rng) for number in self.settings.nodes}
        self.lost: set[int] = set()
        self.network.weather.cut = lambda source, target: (
            (source in self.lost) != (target in self.lost)
        )

    def replaced_after_s(self) -> list[float]:
        """How long the cluster had no active controller, each time that one was cut off."""
        for number in self.settings.nodes:
            self.start(number)
        self.let(5.0)
        return [self._lose_active() for _ in range(2)]

    def _actives(self) -> list[int]:
        return [
            number
            for number, process in self.processes.items()
            if number not in self.lost and process.shell._core.is_active
        ]

    def _lose_active(self) -> float:
        (active,) = self._actives()
        self.lost.add(active)
        since_s = self.scheduler.now_s
        while not self._actives():
            self.let(STEP_S)
            assert self.scheduler.now_s - since_s < 60.0
        took_s = self.scheduler.now_s - since_s
        self.let(3.0)
        assert not self.processes[active].shell._core.is_active, "it is alone, and must know it"
        return took_s


def replaced_after_s(seed: int) -> list[float]:
    world = SilentWorld(seed)
    settings = world.settings
    with quiet(), simulated(batch_bytes=settings.batch_bytes, chunk_bytes=settings.chunk_bytes):
        try:
            return world.replaced_after_s()
        finally:
            for process in world.processes.values():
                process.loop.kill()


@pytest.mark.simulation
def test_a_minority_lost_in_silence_is_replaced_at_once_each_time():
    found = [replaced_after_s(seed) for seed in SEEDS]
    assert all(took_s <= WITHIN_S for each in found for took_s in each), found


@pytest.mark.simulation
def test_with_patience_that_needs_no_reason_the_second_takes_longer():
    with MUTANTS["patient without a reason"].planted():
        found = [replaced_after_s(seed) for seed in SEEDS]
    assert all(second > WITHIN_S for _, second in found), found
