"""Logs that do not open are copied anew by the others, and dropped for nothing less."""

from __future__ import annotations

from random import Random

import pytest

from penstock.broker.core.ports import DamagedLogError
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.faults import DAMAGED_LOG, Fault
from penstock.chaos.simulator.known_bug import NO_LOSS
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.simulation import Simulation
from tests.simulation.test_checkers import KEY, append


def disk_with_log(*, high_watermark: int = 0) -> Disk:
    """Of a node that is down: a log of three records."""
    disk = Disk(Scheduler(Random(0)), Random(0))
    append(disk.log(KEY), b"a", b"b", b"c")
    disk.high_watermarks[KEY] = high_watermark
    disk.close(7)
    return disk


def test_a_damaged_log_does_not_open_until_it_is_put_right() -> None:
    ends = set()
    for chance in range(40):
        disk = disk_with_log(high_watermark=2)
        disk.damage(KEY, Random(chance))
        with pytest.raises(DamagedLogError) as raised:
            disk.log(KEY)
        assert raised.value.committed_offset == 2
        ends.add(raised.value.end_offset)
        assert disk.partitions() == []
        assert disk.durable_end(KEY) == 3, "what is in the files is there"
        disk.put_right(KEY)
        assert disk.log(KEY).log_end_offset == 3
    assert ends == {1, 2, 3}


def test_a_log_that_is_kept_makes_way_for_an_empty_one() -> None:
    disk = disk_with_log(high_watermark=2)
    disk.damage(KEY, Random(0))
    disk.keep_damaged(KEY)
    assert disk.log(KEY).log_end_offset == 0
    assert not disk.high_watermarks


def test_a_run_is_not_whole_whose_log_does_not_open_but_the_next_ones_are() -> None:
    disk = disk_with_log()
    disk.damage(KEY, Random(0))
    assert disk.runs.begin(disk.shut.keys()) == -1
    disk.runs.registered(8, failed=False)
    disk.close(8)
    assert disk.runs.begin(disk.shut.keys()) == 8, "it had no part in that run"
    disk.runs.registered(9, failed=False)
    disk.crash(power_loss=False)
    assert disk.runs.begin(disk.shut.keys()) == -1, "nobody knows what a crash left shut"


@pytest.mark.simulation
def test_damaged_logs_alone_are_all_copied_anew_by_the_others() -> None:
    damaged = copied = 0
    for seed in range(6):
        report = Simulation(seed, only=(DAMAGED_LOG,), given=NO_LOSS).run()
        assert report.violation is None, str(report)
        assert not any("a person" in line for line in report.story)
        damaged += sum("the log is damaged" in line for line in report.story)
        copied += sum("the copy goes to" in line for line in report.story)
    assert damaged == copied > 6


@pytest.mark.simulation
def test_the_last_in_sync_one_keeps_its_log_until_a_person_mends_it() -> None:
    mended = 0
    for seed in range(6):
        faults = [
            *(Fault(1500 + 100 * node, "kill", (node,), 2500) for node in (2, 3)),
            *(Fault(at_ms, DAMAGED_LOG, (1,), 100) for at_ms in (2300, 2500)),
        ]
        given = {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 1, "min_isr": 1}
        report = Simulation(seed, faults, given=given).run()
        assert report.violation is None, str(report)
        told = "\n".join(report.story)
        if "a person mends the log" in told:
            mended += 1
            assert "it can't be copied anew: no other replica is in sync" in told
            assert "the copy goes to" not in told
    assert mended > 0
