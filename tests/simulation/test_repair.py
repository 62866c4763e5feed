"""Bits that flip on disks are found and mended, while everything else goes wrong."""

from __future__ import annotations

from random import Random

import pytest

from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.simulation import Simulation
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import RecordData, encode_batch


def log_of(*values: bytes, epoch: int = 0) -> MemoryLog:
    log = MemoryLog(Contents())
    for value in values:
        batch = encode_batch([RecordData(0, None, value)])
        log.append_as_leader(batch, LeaderEpoch(epoch), now_ms=0)
    log.begin_flush()()
    return log


def flip(log: MemoryLog, offset: int) -> None:
    kept = {batch.data for batch in log.batches_from(offset)}
    assert log.flip_bit(Random(1), offset + 1, kept) == offset


def test_a_damaged_batch_is_replaced_and_everything_else_stays() -> None:
    log, other = log_of(b"a", b"b", b"c"), log_of(b"a", b"b", b"c")
    flip(log, 1)
    assert log.first_damage() == 1
    assert log.mend(1, other.read(1, 0, below=3))
    assert log.first_damage() is None
    assert log.read(0, 1000, below=3) == other.read(0, 1000, below=3)
    assert MemoryLog(log.after_crash(None)).read(1, 0, below=3) == other.read(1, 0, below=3)


@pytest.mark.parametrize(("value", "epoch"), [(b"longer", 0), (b"b", 1)])
def test_what_does_not_fit_is_left_alone(value: bytes, epoch: int) -> None:
    log, other = log_of(b"a", b"b"), log_of(b"a")
    flip(log, 1)
    batch = encode_batch([RecordData(0, None, value)])
    other.append_as_leader(batch, LeaderEpoch(epoch), now_ms=0)
    assert not log.mend(1, other.read(1, 0, below=2))
    assert log.first_damage() == 1


def test_damage_that_was_deleted_is_none() -> None:
    log = log_of(b"a", b"b")
    flip(log, 0)
    log.advance_log_start(1)
    assert log.first_damage() is None


@pytest.mark.simulation
def test_bit_flips_alone_are_all_mended_by_the_other_replicas() -> None:
    flipped = mended = 0
    for seed in range(4):
        # In a quiet time old records are deleted, and what is damaged of them is never mended.
        report = Simulation(seed, only=("bit flip",), given={"quiet_ms": 0}).run()
        assert report.violation is None, str(report)
        flipped += sum("a bit flips at" in line for line in report.story)
        mended += sum("is mended" in line for line in report.story)
        assert not any("crashes" in line for line in report.story)
    assert flipped == mended > 4
