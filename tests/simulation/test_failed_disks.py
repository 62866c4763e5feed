"""Disks fail under some of a broker's logs, while everything else goes wrong."""

from __future__ import annotations

from random import Random

import pytest

from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.simulation import Simulation
from penstock.wire.ids import TopicId, TopicIdPartition

KEY = TopicIdPartition(TopicId(b"t" * 16), 0)


@pytest.mark.simulation
def test_failed_disks_alone_move_leaders_and_lose_nothing() -> None:
    leaderships = 0
    for seed in range(6):
        report = Simulation(seed, only=("failed disk",)).run()
        assert report.violation is None, str(report)
        assert report.acknowledged > 0, str(report)
        leaderships += report.leaderships
    assert leaderships > 6 * 4, "more than there would be without a fault"


@pytest.mark.parametrize("is_failed", [False, True])
def test_who_stops_with_a_failed_disk_leaves_no_marker_of_a_clean_stop(is_failed: bool) -> None:
    disk = Disk(Scheduler(Random(0)), Random(0), "os")
    disk.log(KEY)
    if is_failed:
        disk.failed.add(KEY)
    disk.close(7)
    assert disk.runs.begin() == (-1 if is_failed else 7)


# In the first two one stops cleanly with a failed disk, which the checkers once took for whole; in
# the others a log begins anew that once kept the high watermark of the one before.
@pytest.mark.simulation
@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        (2, ("failed disk", "restart")),
        (3, ("failed disk", "restart")),
        (3, ("lost disk", "delete records", "lost tail", "kill leader")),
        (5, ("lost disk", "delete records", "lost tail", "kill leader")),
    ],
)
def test_runs_in_which_the_simulator_itself_was_wrong_are_clean(
    seed: int, kinds: tuple[str, ...]
) -> None:
    report = Simulation(seed, only=kinds, given={"quiet_ms": 0}).run()
    assert report.violation is None, str(report)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", [0, 1])
def test_no_bit_flips_in_a_partition_that_was_deleted_just_then(seed: int) -> None:
    faults = [Fault(1500, "topic"), Fault(2500, "topic"), Fault(2514, "bit flip", (1,))]
    report = Simulation(seed, faults, given={"quiet_ms": 0, "nodes": (1, 2, 3)}).run()
    assert report.violation is None, str(report)
