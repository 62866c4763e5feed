"""What a replica that begins anew is handed over of producers of deleted records stays known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from penstock.broker.core.partition_events import (
    Diverge,
    FollowerPositioned,
    PartitionChanged,
    PartitionState,
    StartPush,
)
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.producer_state import ANY_PRODUCER
from penstock.broker.core.replica import Replica
from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import DiskFullError
from tests.unit.storage.storage_kit import EVERYTHING, FullDisk, PowerCutDisk, batch, open_in
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


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_does_not_take_it_and_leave_what_came_behind(
    tmp_path: Path, root: Path, leader: PartitionLog, seed: int
) -> None:
    """Batches that nobody flushed may be on the disk all the same."""
    disk = PowerCutDisk()
    log = open_in(root, disk=disk)
    log.flush()
    disk.settle(root)
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    copy(log, leader)
    disk.cut_power(root, tmp_path / "after", Random(seed))
    log = open_in(tmp_path / "after", saved=SavedState(0, 0))
    assert log.producers.entry(7) is not None


def position_of(log: PartitionLog) -> FollowerPositioned:
    return FollowerPositioned(
        node_id=2,
        session=1,
        broker_epoch=1,
        leader_epoch=1,
        log_end_offset=log.log_end_offset,
        last_epoch=log.last_epoch,
        log_start_offset=log.log_start_offset,
        now_ms=0,
        knows_no_producers=log.knows_no_producers,
    )


def leading(leader: PartitionLog) -> Replica:
    replica = Replica(1, leader, high_watermark=6, lag_max_ms=1000)
    state = PartitionState(
        leader=1, leader_epoch=1, partition_epoch=1, replicas=(1, 2), isr=frozenset({1}), min_isr=1
    )
    replica.handle(PartitionChanged(state=state, min_isr=1, now_ms=0))
    return replica


def test_one_that_begins_anew_by_itself_is_handed_it_over(root: Path, leader: PartitionLog) -> None:
    log = open_in(root)
    assert not log.knows_no_producers
    copy_of_the_first = batch("v0", producer=(7, 0, 0), leader_epoch=1)
    log.append_as_follower(copy_of_the_first)
    log.flush()
    crash(log)
    # The log start was on the disk, and what had been appended up to there was not.
    log = open_in(root, saved=SavedState(recovery_point=1, log_start_offset=START))
    assert (log.log_start_offset, log.log_end_offset) == (START, START)
    assert log.knows_no_producers
    replica = leading(leader)
    [diverge] = replica.handle(position_of(log))
    assert diverge == Diverge(2, 1, EpochEnd(-1, START))
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    assert not log.knows_no_producers
    effects = replica.handle(position_of(log))
    assert StartPush(2, 1, START) in effects
    copy(log, leader)
    assert log.append_as_leader(RETRY, 2, now_ms=1).duplicate


def test_it_is_asked_for_once_whatever_there_is(root: Path, leader: PartitionLog) -> None:
    log = open_in(root, saved=SavedState(recovery_point=0, log_start_offset=START))
    assert log.knows_no_producers
    log.truncate_fully_and_start_at(START)
    assert log.producers.forgotten_up_to == ANY_PRODUCER
    assert not log.knows_no_producers
    assert StartPush(2, 1, START) in leading(leader).handle(position_of(log))


def test_a_log_that_was_handed_it_over_does_not_ask_again_after_a_crash(
    root: Path, leader: PartitionLog
) -> None:
    log = open_in(root)
    log.truncate_fully_and_start_at(START, leader.producers_below(START))
    crash(log)
    log = open_in(root, saved=SavedState(START, START))
    assert not log.knows_no_producers


def test_one_that_begins_above_the_leaders_end_begins_where_the_leader_does(
    root: Path, leader: PartitionLog
) -> None:
    log = open_in(root, saved=SavedState(recovery_point=0, log_start_offset=9))
    assert log.knows_no_producers
    [diverge] = leading(leader).handle(position_of(log))
    assert diverge == Diverge(2, 1, EpochEnd(-1, START))


def test_who_is_handed_nothing_keeps_what_it_knows(tmp_path: Path) -> None:
    """As by a leader that was handed nothing itself."""
    replica = leader_in(tmp_path / "replica")
    (tmp_path / "leader").mkdir()
    saved = SavedState(recovery_point=0, log_start_offset=START)
    leader = open_in(tmp_path / "leader", saved=saved)
    assert len(leader.producers) == 0
    replica.truncate_fully_and_start_at(START, leader.producers_below(START))
    assert replica.append_as_leader(RETRY, 2, now_ms=1).duplicate


class HookedDisk(Disk):
    """Has something happen before the first snapshot gets its name."""

    hook: Callable[[], None] | None = None

    def rename(self, source: Path, target: Path) -> None:
        if self.hook is not None and target.name.endswith(".snapshot"):
            hook, self.hook = self.hook, None
            hook()
        super().rename(source, target)


def test_a_log_may_begin_anew_while_a_flush_writes_a_snapshot_of_the_same_offset(
    tmp_path: Path,
) -> None:
    disk = HookedDisk()
    log = open_in(tmp_path, disk=disk)
    for sequence in range(2):
        log.append_as_leader(batch("v", producer=(7, 0, sequence)), 1, now_ms=1)
    log.flush()
    log.roll()
    log.append_as_leader(batch("tail", producer=(7, 0, 2)), 1, now_ms=1)
    log.advance_log_start(2)
    disk.hook = lambda: log.truncate_to(2)  # The next leader lacks the tail.
    task = log.begin_flush()
    task.run()
    assert task.error is None
    log.finish_flush(task)
    assert log.home.failure is None
    assert [path.name for path in log.directory.glob("*.tmp")] == []
    assert [offset for offset, _ in snapshots(log.directory)] == [2]
