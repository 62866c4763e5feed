"""What a replica that begins anew is handed over of producers of deleted records stays known."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.core.producer_state import ANY_PRODUCER
from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import DiskFullError
from tests.unit.storage.storage_kit import EVERYTHING, FullDisk, batch, open_in
from tests.unit.storage.test_log_recovery import crash

START = 4
RETRY = batch("v3", producer=(7, 0, 3))


def leader_in(root: Path) -> PartitionLog:
    """A log of which all that producer 7 wrote is deleted."""
    root.mkdir()
    log = open_in(root)
    for sequence in range(START):
        log.append_as_leader(batch(f"v{sequence}", producer=(7, 0, sequence)), 1, now_ms=1)
    log.append_as_leader(batch("other", producer=(8, 0, 0)), 1, now_ms=1)
    log.append_as_leader(batch("tail", producer=(9, 0, 0)), 1, now_ms=1)
    log.flush()
    log.advance_log_start(START)
    return log


@pytest.fixture
def leader(tmp_path: Path) -> PartitionLog:
    return leader_in(tmp_path / "leader")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "new"
    made.mkdir()
    return made


def copy(log: PartitionLog, leader: PartitionLog) -> None:
    log.append_as_follower(leader.read(log.log_end_offset, 10_000, below=EVERYTHING))


@pytest.mark.parametrize("policy", list(FlushPolicy))
@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("start", [0, START], ids=["start not saved", "start saved"])
def test_a_kill_does_not_take_it(
    root: Path, leader: PartitionLog, policy: FlushPolicy, has_more: bool, start: int
) -> None:
    settings = LogSettings(flush_policy=policy)
    log = open_in(root, settings=settings)
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    if has_more:
        copy(log, leader)
    crash(log)  # Nothing was flushed, and the page cache stays.
    log = open_in(root, settings=settings, saved=SavedState(start, start))
    copy(log, leader)
    assert log.append_as_leader(RETRY, 2, now_ms=1).duplicate


def test_a_cut_before_the_first_flush_does_not_take_it(root: Path, leader: PartitionLog) -> None:
    log = open_in(root)
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    copy(log, leader)
    log.truncate_to(START + 1)
    assert log.append_as_leader(RETRY, 2, now_ms=1).duplicate


def test_without_room_for_it_the_log_stays_as_it_is(root: Path, leader: PartitionLog) -> None:
    disk = FullDisk()
    log = open_in(root, disk=disk)
    log.append_as_leader(batch("mine", producer=(5, 0, 0)), 1, now_ms=1)
    log.flush()
    disk.room = 10
    with pytest.raises(DiskFullError):
        log.truncate_fully_and_start_at(START, leader.producers_below(START))
    assert log.home.failure is None
    assert (log.log_start_offset, log.log_end_offset) == (0, 1)
    assert not list(log.directory.glob("*.tmp"))
    disk.room = 1 << 60
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    assert log.producers.entry(7) is not None


def test_where_nothing_was_handed_over_nothing_is_written(root: Path) -> None:
    log = open_in(root)
    log.truncate_fully_and_start_at(START)
    assert log.producers.forgotten_up_to == ANY_PRODUCER
    assert not snapshots(log.directory)
