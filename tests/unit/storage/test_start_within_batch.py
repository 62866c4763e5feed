"""A log that begins within a batch: records were deleted up to there, and batches are not split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.broker.core.producer_state import ProducerState
from penstock.broker.storage.disk import Buffer
from penstock.broker.storage.recovery import SavedState
from penstock.wire.errors import (
    CorruptRecordError,
    DiskFullError,
    OutOfOrderSequenceError,
    StorageError,
)
from tests.unit.storage.storage_kit import FullDisk, NoRoom, batch, open_in, read_all, values_of


def test_a_follower_that_begins_anew_takes_the_batch_that_holds_its_start(tmp_path: Path) -> None:
    leader, follower = (tmp_path / "leader", tmp_path / "follower")
    leader.mkdir()
    follower.mkdir()
    source = open_in(leader)
    for values in (["a", "b", "c"], ["d", "e", "f"], ["g"]):
        source.append_as_leader(batch(*values), 3, now_ms=1)
    source.advance_log_start(4)
    copy = open_in(follower)
    copy.append_as_follower(batch("old", leader_epoch=1))
    copy.truncate_fully_and_start_at(4)
    info = copy.append_as_follower(source.read(4, 1, below=7))
    assert (info.base_offset, info.last_offset) == (3, 5)
    assert (copy.log_start_offset, copy.log_end_offset) == (4, 6)
    assert copy.log_start_offset <= copy.durable_offset
    copy.append_as_follower(source.read(6, 1, below=7))
    assert read_all(copy) == read_all(source)
    copy.flush()
    assert copy.durable_offset == 7
    assert copy.end_of_epoch(3) == source.end_of_epoch(3)
    point = copy.recovery_point
    copy.close(save=False)
    again = open_in(follower, saved=SavedState(recovery_point=point, log_start_offset=4))
    assert (again.log_start_offset, again.log_end_offset) == (4, 7)
    assert values_of(again) == values_of(source)


@pytest.mark.parametrize("start", [2, 4, 6])
@pytest.mark.parametrize("crashes", [False, True])
def test_a_replica_that_begins_anew_knows_the_producers_of_what_was_deleted(
    tmp_path: Path, start: int, crashes: bool
) -> None:
    """Else it would append a retry, once it leads, that the old leader recognises."""
    roots = tmp_path / "leader", tmp_path / "follower"
    for root in roots:
        root.mkdir()
    source = open_in(roots[0])
    sent = [batch("a", "b", producer=(9, 0, 0)), batch("c", "d", "e", "f", producer=(8, 0, 0))]
    for data in sent:
        source.append_as_leader(data, 3, now_ms=1)
    source.advance_log_start(start)
    copy = open_in(roots[1])
    copy.truncate_fully_and_start_at(start, source.producers_below(start))
    if start < 6:
        copy.append_as_follower(source.read(start, 1 << 20, below=6))
    copy.flush()
    if crashes:
        saved = SavedState(copy.recovery_point, copy.log_start_offset)
        copy.close(save=False)
        copy = open_in(roots[1], saved=saved)
    copy.producers.validate()
    for data in sent:
        info = copy.append_as_leader(data, 4, now_ms=1)
        assert info.duplicate
        assert info == source.append_as_leader(data, 4, now_ms=1)
    for log in (copy, source):
        with pytest.raises(OutOfOrderSequenceError):
            log.append_as_leader(batch("x", producer=(7, 0, 5)), 4, now_ms=1)


@pytest.mark.parametrize(
    "handed",
    [b"", b"damaged", ProducerState().encode(3, -1)],
    ids=["nothing", "damaged", "of another offset"],
)
def test_where_nothing_is_handed_over_any_producer_may_go_on(tmp_path: Path, handed: bytes) -> None:
    log = open_in(tmp_path)
    log.truncate_fully_and_start_at(4, handed)
    assert log.append_as_leader(batch("x", producer=(7, 0, 5)), 4, now_ms=1).base_offset == 4


def test_so_it_is_after_a_crash_where_no_snapshot_is_left(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.truncate_fully_and_start_at(4)
    log.append_as_follower(batch("a", base_offset=4, leader_epoch=4))
    log.flush()
    log.close(save=False)
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    again = open_in(tmp_path, saved=SavedState(recovery_point=5, log_start_offset=4))
    assert again.append_as_leader(batch("x", producer=(7, 0, 5)), 4, now_ms=1).base_offset == 5


def test_a_log_that_is_copied_anew_from_its_start_keeps_what_it_knew_below(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for producer in (9, 8):
        log.append_as_leader(batch("a", "b", producer=(producer, 0, 0)), 3, now_ms=1)
    log.advance_log_start(2)
    log.truncate_fully_and_start_at(2)
    assert log.append_as_leader(batch("a", "b", producer=(9, 0, 0)), 3, now_ms=1).duplicate
    assert not log.append_as_leader(batch("a", "b", producer=(8, 0, 0)), 3, now_ms=1).duplicate


def test_a_crash_right_after_leaves_an_empty_log_at_its_start(tmp_path: Path) -> None:
    copy = open_in(tmp_path)
    copy.truncate_fully_and_start_at(4)
    copy.append_as_follower(batch("d", "e", "f", base_offset=3, leader_epoch=3))
    assert copy.recovery_point <= 3, "the batch is not on the disk yet"
    point = copy.recovery_point
    copy.close(save=False)
    for path in tmp_path.glob("*/*.log"):
        path.write_bytes(b"")
    again = open_in(tmp_path, saved=SavedState(recovery_point=point, log_start_offset=4))
    assert (again.log_start_offset, again.log_end_offset) == (4, 4)


@pytest.mark.parametrize("values", [["c"], ["a", "b", "c"]])
def test_a_batch_that_does_not_hold_the_start_is_refused(tmp_path: Path, values: list[str]) -> None:
    log = open_in(tmp_path)
    log.truncate_fully_and_start_at(4)
    before = 4 - len(values)
    with pytest.raises(CorruptRecordError):
        log.append_as_follower(batch(*values, base_offset=before, leader_epoch=1))
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (4, 4, 4)


def test_only_an_empty_log_takes_a_batch_that_begins_before_its_end(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_follower(batch("a", "b", leader_epoch=1))
    with pytest.raises(CorruptRecordError):
        log.append_as_follower(batch("b", "c", base_offset=1, leader_epoch=1))
    assert values_of(log) == ["a", "b"]


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    disk = FullDisk()
    log = open_in(tmp_path, disk=disk)
    log.truncate_fully_and_start_at(4)
    disk.room = 0
    records = batch("d", "e", "f", base_offset=3, leader_epoch=1)
    with pytest.raises(DiskFullError):
        log.append_as_follower(records)
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (4, 4, 4)
    disk.room = 1 << 40
    log.append_as_follower(records)
    assert (log.log_start_offset, log.log_end_offset) == (4, 6)


def test_a_full_disk_that_lets_nothing_be_made_anew_leaves_an_empty_log(tmp_path: Path) -> None:
    """The files begin before the log's start while it is tried, and can't be put back."""

    class NoRoomAfterwards(NoRoom):
        def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
            self.full = {"write", "create"}
            return super().write_at(fd, buffers, position)

    log = open_in(tmp_path, disk=NoRoomAfterwards())
    log.truncate_fully_and_start_at(4)
    with pytest.raises(StorageError, match="beginning orders-3 at offset 4"):
        log.append_as_follower(batch("d", "e", "f", base_offset=3, leader_epoch=1))
    assert log.home.failure is not None
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (4, 4, 4)
    log.close(save=False)
    again = open_in(tmp_path, saved=SavedState(log_start_offset=4))
    assert (again.log_start_offset, again.log_end_offset) == (4, 4)


@pytest.mark.parametrize("full_after", [0, 1])
def test_recovery_points_that_cannot_be_lowered_leave_the_log_as_it_was(
    tmp_path: Path, full_after: int
) -> None:
    disk = FullDisk()
    log = open_in(tmp_path, disk=disk)
    log.truncate_fully_and_start_at(4)
    disk.room = 0
    calls: list[int] = []

    def lower(_key: object, offset: int) -> None:
        calls.append(offset)
        if len(calls) > full_after:
            raise DiskFullError("local state has no room")

    log.home.lower_recovery_point = lower
    with pytest.raises(DiskFullError):
        log.append_as_follower(batch("d", "e", "f", base_offset=3, leader_epoch=1))
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (4, 4, 4)
    assert [path.name for path in log.directory.glob("*.log")] == ["00000000000000000004.log"]
    assert log.home.failure is None
