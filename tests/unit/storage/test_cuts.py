"""Cuts of long logs: what they must read first is read elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.core.producer_state import Append, ProducerState
from penstock.broker.storage import producers
from penstock.broker.storage.checkpoints import newest_snapshot, snapshots
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.producers import CutDelayedError
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import CorruptRecordError, DiskFullError, StorageError
from penstock.wire.records import parse_header
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    BrokenDisk,
    Clock,
    NoRoom,
    batch,
    open_in,
    read_all,
    records_of,
    small_config,
)
from tests.unit.storage.test_log_recovery import crash


class LoopDisk(Disk):
    """Counts what this thread reads."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        data = super().read_at(fd, size, position)
        if threading.current_thread() is threading.main_thread():
            self.read_bytes += len(data)
        return data


Jobs = list[Callable[[], None]]


def in_a_thread(jobs: Jobs) -> None:
    while jobs:
        thread = threading.Thread(target=jobs.pop(0))
        thread.start()
        thread.join()


def long_log(
    root: Path, *, disk: Disk | None = None, committed: int = 400
) -> tuple[PartitionLog, Jobs]:
    """A log of several segments whose snapshots are gone, and what is to be run elsewhere."""
    log = open_in(root, disk=disk, config=small_config(segment_bytes=20_000))
    for number in range(400):
        log.append_as_follower(
            batch(
                "x" * 100,
                timestamp_ms=5000 + number % 7,
                producer=(number % 3, 0, number // 3),
                base_offset=number,
                leader_epoch=number // 100,
            )
        )
    log.flush()
    log.note_committed(committed)
    for _, path in snapshots(log.directory):
        path.unlink()
    jobs: Jobs = []
    log.home.run_in_background = jobs.append
    return log, jobs


def replayed(log: PartitionLog) -> ProducerState:
    state = ProducerState()
    for header in log.headers(0, log.log_end_offset):
        state.record(header, header.base_offset, log.home.clock_ms())
    return state


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "_INLINE_BYTES", 10_000)


@pytest.mark.usefixtures("little")
def test_a_cut_that_needs_much_of_the_log_waits_until_that_was_read_elsewhere(
    tmp_path: Path,
) -> None:
    disk = LoopDisk()
    log, jobs = long_log(tmp_path, disk=disk)
    size, everything = log.size_bytes, read_all(log)
    disk.read_bytes = 0
    for _ in range(3):  # It is begun once.
        with pytest.raises(CutDelayedError):
            log.truncate_to(390)
    assert (log.log_end_offset, read_all(log), len(jobs)) == (400, everything, 1)
    assert not log.has_room
    disk.read_bytes = 0
    in_a_thread(jobs)
    assert log.has_room
    log.truncate_to(390)
    assert disk.read_bytes < size / 4
    assert log.log_end_offset == 390
    assert log.producers == replayed(log)


@pytest.mark.usefixtures("little")
def test_a_cut_elsewhere_is_not_made_with_what_was_read_for_another(tmp_path: Path) -> None:
    log, jobs = long_log(tmp_path)
    for offset in (390, 350):
        with pytest.raises(CutDelayedError):
            log.truncate_to(offset)
        in_a_thread(jobs)
    log.truncate_to(350)
    assert log.producers == replayed(log)


@pytest.mark.usefixtures("little")
def test_what_is_read_for_a_cut_is_read_anew_when_segments_go_meanwhile(tmp_path: Path) -> None:
    log, jobs = long_log(tmp_path)
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)
    [job] = jobs
    log.advance_log_start(200)
    job()
    jobs.clear()
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)  # What was begun is void; the next attempt begins anew.
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)
    in_a_thread(jobs)
    log.truncate_to(390)
    assert log.log_end_offset == 390
    entry = log.producers.entry(0)
    assert entry is not None
    assert [one.base_offset for one in entry.batches] == [375, 378, 381, 384, 387]


@pytest.mark.usefixtures("little")
def test_a_disk_that_fails_meanwhile_fails_the_directory(tmp_path: Path) -> None:
    disk = BrokenDisk()
    log, jobs = long_log(tmp_path, disk=disk)
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)
    disk.failing = {"read"}
    in_a_thread(jobs)
    with pytest.raises(StorageError):
        log.truncate_to(390)
    assert log.home.failure is not None


@pytest.mark.usefixtures("little")
def test_a_damaged_header_below_the_cut_is_told_before_anything_is_cut(tmp_path: Path) -> None:
    log, jobs = long_log(tmp_path)
    path = log.files.segments[0].path
    data = bytearray(path.read_bytes())
    data[11] ^= 0x7F  # The first batch's length.
    path.write_bytes(data)
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)
    in_a_thread(jobs)
    with pytest.raises(CorruptRecordError):
        log.truncate_to(390)
    assert log.log_end_offset == 400
    assert log.home.failure is None


def test_a_cut_reads_little_of_its_segment_though_all_batches_have_one_time(
    tmp_path: Path,
) -> None:
    disk = LoopDisk()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=1 << 20))
    for number in range(1000):
        log.append_as_leader(batch("x" * 100, timestamp_ms=5000), 1, now_ms=number)
    disk.read_bytes = 0
    log.truncate_to(900)
    assert disk.read_bytes < 20_000


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_the_largest_time_is_that_of_what_a_cut_left(tmp_path: Path, cut: int) -> None:
    log = open_in(tmp_path, config=small_config(segment_bytes=1 << 20, index_interval_bytes=300))
    for number in range(40):
        time_ms = 5000 + number * 7 % 31
        log.append_as_leader(batch("x" * 20, timestamp_ms=time_ms), 1, now_ms=1)
    log.truncate_to(cut)
    largest = max(record.timestamp_ms for record in records_of(read_all(log)))
    found = log.max_timestamp(below=EVERYTHING)
    assert found is not None
    assert found.timestamp_ms == largest
    known = log.files.active.largest_timestamp()
    assert known is not None
    assert known.timestamp_ms == largest


def test_a_roll_that_outlives_its_append_keeps_what_the_producers_had_written(
    tmp_path: Path,
) -> None:
    disk = NoRoom()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a" * 500, producer=(7, 0, 0)), 0, now_ms=1)
    disk.full, disk.only = {"write"}, "1.log"
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("b" * 500, producer=(7, 0, 1)), 0, now_ms=1)
    disk.full = set()
    log.append_as_leader(batch("b" * 500, producer=(7, 0, 1)), 0, now_ms=1)
    log.flush()
    assert [segment.base_offset for segment in log.files.segments] == [0, 1]
    found = newest_snapshot(log.directory, 1, log.epochs)
    assert found is not None
    state, end_offset = found
    assert (end_offset, state.last_batches(2)) == (1, {7: 0})


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("cut", [399, 396, 393])
def test_a_cut_of_what_was_not_committed_reads_next_to_nothing(tmp_path: Path, cut: int) -> None:
    """However long the log is: with each change of the leader acks=all waits for such cuts."""
    disk = LoopDisk()
    log, jobs = long_log(tmp_path, disk=disk, committed=391)
    size = log.size_bytes
    disk.read_bytes = 0
    log.truncate_to(cut)
    assert jobs == []
    assert disk.read_bytes < size / 8
    assert log.log_end_offset == cut
    assert log.producers == replayed(log)
    log.truncate_to(392)
    assert (jobs, log.producers) == ([], replayed(log))
    with pytest.raises(CutDelayedError):
        log.truncate_to(390)


def test_a_cut_within_an_append_knows_what_the_part_that_stays_wrote(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_follower(batch("a", producer=(7, 0, 0), leader_epoch=1))
    records = [
        batch(
            "b",
            producer=(8 - number % 2, 0, (number + 1) // 2),
            base_offset=number + 1,
            leader_epoch=1,
        )
        for number in range(4)
    ]
    log.append_as_follower(b"".join(records))
    log.truncate_to(3)
    assert log.producers == replayed(log)
    log.truncate_to(2)
    assert log.producers == replayed(log)


def test_a_cut_after_producers_were_forgotten_reads_the_log(tmp_path: Path) -> None:
    clock = Clock()
    settings = LogSettings(producer_expiration_ms=3_600_000)
    log = open_in(tmp_path, clock=clock, settings=settings)
    log.append_as_leader(batch("a", producer=(7, 0, 0)), 0, now_ms=1)
    log.append_as_leader(batch("b", producer=(8, 0, 0)), 0, now_ms=1)
    clock.now_ms += 4_000_000
    log.append_as_leader(batch("c", producer=(9, 0, 0)), 0, now_ms=1)
    assert log.producers.entry(7) is None
    log.truncate_to(1)
    assert log.producers == replayed(log)


@pytest.mark.usefixtures("little")
def test_a_cut_of_what_a_start_found_at_the_end_reads_next_to_nothing(tmp_path: Path) -> None:
    """A killed broker holds a message or two that no leader has."""
    log, _ = long_log(tmp_path)
    crash(log)
    disk = LoopDisk()
    log = open_in(tmp_path, disk=disk, config=log.config, saved=SavedState(recovery_point=0))
    jobs: Jobs = []
    log.home.run_in_background = jobs.append
    size = log.size_bytes
    disk.read_bytes = 0
    log.truncate_to(396)
    assert jobs == []
    assert disk.read_bytes < size / 8
    assert log.producers == replayed(log)


def test_a_cut_does_not_take_back_from_what_was_read_what_was_known_before(tmp_path: Path) -> None:
    """A state read from the log knows again who was forgotten, and that nobody was."""
    clock = Clock()
    settings = LogSettings(producer_expiration_ms=3_600_000)
    log = open_in(tmp_path, settings=settings, clock=clock)
    log.append_as_leader(batch("a", producer=(9, 0, 0)), 1, now_ms=1)
    log.roll()
    log.flush()
    clock.now_ms += 3_600_000
    log.append_as_leader(batch("b", producer=(7, 0, 0)), 1, now_ms=1)
    assert log.producers.entry(9) is None
    second = batch("c", producer=(9, 0, 1))
    log.append_as_leader(second, 1, now_ms=1)
    log.append_as_leader(batch("d", producer=(7, 0, 1)), 1, now_ms=1)
    log.producers.doubt(parse_header(batch("d", producer=(7, 0, 1), base_offset=3)), 0)
    log.truncate_to(3)
    log.truncate_to(2)
    assert log.producers.check(parse_header(second)) == Append()
