"""The simulator's disks, time and clocks."""

from __future__ import annotations

from random import Random

import pytest

from penstock.chaos.simulator.contents import Batch, Contents, is_sound
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.scheduler import Clock, Scheduler
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import RecordData, encode_batch
from tests.simulation.test_checkers import KEY, append, flush, log_of


def test_a_power_loss_takes_only_what_was_not_flushed() -> None:
    ends = set()
    for chance in range(60):
        log = log_of(b"a", b"b")
        flush(log)
        append(log, b"c", b"d", b"e")
        assert (log.durable_offset, log.log_end_offset, log.unflushed) == (2, 5, 3)
        found = MemoryLog(log.after_crash(Random(chance)))
        ends.add(found.log_end_offset)
        assert all(is_sound(batch) for batch in found.batches_from(0))
    assert ends == {2, 3, 4, 5}


def test_a_torn_batch_is_cut_with_all_that_follows_it() -> None:
    log = log_of(b"a", b"b", b"c")
    batches = list(log.batches_from(0))
    batches[1] = Batch(batches[1].header, batches[1].data[:-1])
    found = MemoryLog(Contents(0, 3, batches))
    assert found.log_end_offset == 1
    assert len(list(found.batches_from(0))) == 1


def test_what_waits_for_no_flush_counts_as_durable_and_is_lost_with_the_power() -> None:
    log = MemoryLog(Contents(), waits=False)
    append(log, b"a", b"b")
    assert log.durable_offset == 2
    assert min(len(log_lost(chance).batches) for chance in range(40)) == 0


def log_lost(chance: int) -> Contents:
    log = MemoryLog(Contents(), waits=False)
    append(log, b"a", b"b")
    return log.after_crash(Random(chance))


def test_a_flipped_bit_is_not_served() -> None:
    log = log_of(b"a", b"b", b"c")
    flush(log)
    at = log.flip_bit(Random(4), below=2, kept={batch.data for batch in log.batches_from(0)})
    assert at in (0, 1)
    with pytest.raises(CorruptRecordError, match=f"at {at} is damaged"):
        log.read(at, 1000, below=3)
    assert log.read(2, 1000, below=3)
    again = MemoryLog(log.after_crash(None))
    assert again.log_end_offset == 3  # It lies below what is looked at when a log is opened.
    with pytest.raises(CorruptRecordError):
        again.read(at, 1000, below=3)


def test_a_flush_that_fails_ends_the_use_of_the_disk() -> None:
    scheduler = Scheduler(Random(1))
    disk = Disk(scheduler, Random(1))
    log = disk.log(KEY)
    append(log, b"a")
    told: list[str] = []
    disk.flush_fails = True
    disk.flush_soon(log, lambda: told.append("durable"), lambda: told.append("failed"))
    scheduler.run_until(100, lambda: False)
    assert told == ["failed"]
    assert log.durable_offset == 0


def test_a_cut_during_a_flush_is_not_taken_for_durable() -> None:
    log = log_of(b"a", b"b")
    finish = log.begin_flush()
    log.truncate_to(1)
    log.append_as_leader(encode_batch([RecordData(0, None, b"x")]), LeaderEpoch(1), now_ms=0)
    finish()
    assert log.durable_offset == 0
    flush(log)
    assert log.durable_offset == 2
    again = MemoryLog(log.after_crash(None))
    assert again.last_epoch == 1
    assert again.end_of_epoch(0).end_offset == 1


def test_virtual_time_runs_in_the_order_of_its_events() -> None:
    scheduler = Scheduler(Random(1))
    seen: list[tuple[int, str]] = []
    scheduler.after(5, lambda: seen.append((scheduler.now_ms, "late")))
    scheduler.after(2, lambda: seen.append((scheduler.now_ms, "early")))
    scheduler.after(3, lambda: seen.append((scheduler.now_ms, "never"))).cancel()
    assert not scheduler.run_until(10, lambda: False)
    assert seen == [(2, "early"), (5, "late")]
    assert scheduler.now_ms == 10


def test_a_node_that_is_held_up_does_what_was_due_when_it_goes_on() -> None:
    scheduler = Scheduler(Random(1))
    seen: list[int] = []
    scheduler.after(5, lambda: seen.append(scheduler.now_ms), node=1)
    scheduler.after(6, lambda: seen.append(scheduler.now_ms), node=2)
    scheduler.held_until_ms[1] = 50
    scheduler.run_until(100, lambda: False)
    assert seen == [6, 50]


def test_a_clock_leaps_and_stands_still_but_never_goes_back() -> None:
    scheduler = Scheduler(Random(1))
    clock = Clock(scheduler)
    clock.leap(100)
    assert clock.now_ms == 100
    clock.leap(-60)
    assert clock.now_ms == 100
    scheduler.run_until(80, lambda: False)
    assert clock.now_ms == 120
