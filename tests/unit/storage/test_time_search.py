"""Records are found by their time, whatever a time index says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.timestamps import needs_time
from penstock.wire.errors import CorruptRecordError
from penstock.wire.rewriting import filler
from tests.unit.storage.storage_kit import EVERYTHING, batch, open_in, small_config


def test_records_are_found_by_time_across_segments(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    stamps = [100, 50, 300, 300, 200, 900, 10, 500] * 4
    for stamp in stamps:
        log.append_as_leader(batch("v" * 80, timestamp_ms=stamp), 3, now_ms=1)
    log.flush()
    end = log.log_end_offset
    for wanted in (0, 51, 100, 101, 300, 301, 900, 901):
        first = next((index for index, stamp in enumerate(stamps) if stamp >= wanted), None)
        found = log.offset_for_timestamp(wanted, below=end)
        assert (found.offset if found else None) == first
    assert log.max_timestamp(below=end) == TimestampedOffset(5, 900, 3)
    assert log.max_timestamp(below=5) == TimestampedOffset(2, 300, 3)
    assert log.offset_for_timestamp(900, below=5) is None


@pytest.mark.parametrize("checksum", [True, False])
def test_no_bit_that_flips_in_a_time_index_hides_a_record(
    tmp_path: Path, *, checksum: bool
) -> None:
    log = open_in(tmp_path)
    for number in range(6):
        log.append_as_leader(batch(f"{number}", timestamp_ms=1000 + number), 3, now_ms=1)
    log.roll()
    log.flush()
    [segment, _] = log.files.segments
    sound = segment.time_index_path.read_bytes()
    sound = sound if checksum else sound[:-4]
    log.close(save=True)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        segment.time_index_path.write_bytes(damaged)
        again = open_in(tmp_path, saved=SavedState(6, 0, clean=True))
        for offset in (0, 2, 5):
            found = again.offset_for_timestamp(1000 + offset, below=6)
            assert found == TimestampedOffset(offset, 1000 + offset, 3), bit
        assert again.max_timestamp(below=6) == TimestampedOffset(5, 1005, 3)
        again.close(save=False)


def reopened(root: Path, count: int) -> PartitionLog:
    """A log of segments of one record each, at times 1000 and so on, just opened."""
    log = open_in(root)
    for number in range(count):
        log.append_as_leader(batch(f"{number}", timestamp_ms=1000 + number), 3, now_ms=1)
        log.roll()
    log.close(save=True)
    return open_in(root, saved=SavedState(count, 0, clean=True))


def test_once_times_are_learnt_only_the_segment_with_the_answer_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = reopened(tmp_path, 30)
    learn = log.cold_times(below=30)
    assert learn is not None
    thread = threading.Thread(target=learn)
    thread.start()
    thread.join()
    assert log.cold_times(below=30) is None
    looked_at: set[Path] = set()
    opened = os.open

    def noting(path: Path, flags: int, *rest: int) -> int:
        looked_at.add(Path(path))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", noting)
    for _ in range(2):
        found = log.offset_for_timestamp(1020, below=30)
        assert found == TimestampedOffset(20, 1020, 3)
        assert looked_at
        assert {path.stem for path in looked_at} == {f"{20:020d}"}
    assert log.max_timestamp(below=30) == TimestampedOffset(29, 1029, 3)


def test_what_is_damaged_or_gone_is_not_learnt(tmp_path: Path) -> None:
    log = reopened(tmp_path, 4)
    damaged, emptied, gone, sound, _ = log.files.segments
    damaged.time_index_path.write_bytes(bytes(16))
    emptied.index_path.write_bytes(b"?")
    learn = log.cold_times(below=4)
    assert learn is not None
    moved = gone.path.rename(gone.path.with_suffix(".away"))
    learn()
    moved.rename(gone.path)
    assert [needs_time(one) for one in (damaged, gone, sound)] == [True, True, False]
    assert damaged.time_index_path.read_bytes() == bytes(16), "nothing is mended there"
    for number in range(4):
        found = log.offset_for_timestamp(1000 + number, below=4)
        assert found == TimestampedOffset(number, 1000 + number, 3)


def in_a_thread(job: Callable[[], None] | None) -> None:
    assert job is not None
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


class CountingDisk(Disk):
    """Counts what the main thread reads."""

    read_bytes = 0

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        data = super().read_at(fd, size, position)
        if threading.current_thread() is threading.main_thread():
            self.read_bytes += len(data)
        return data


def long_log(root: Path, disk: Disk | None = None) -> PartitionLog:
    """A log with a closed segment of some 300 KiB, of rising times."""
    log = open_in(root, config=small_config(segment_bytes=300_000), disk=disk)
    while len(log.files.segments) < 3:
        end = log.log_end_offset
        log.append_as_leader(batch("x" * 1000, timestamp_ms=1000 + end), 3, now_ms=1)
    log.flush()
    return log


def opened_again(log: PartitionLog, root: Path, disk: Disk) -> PartitionLog:
    log.close(save=True)
    saved = SavedState(log.log_end_offset, 0, clean=True)
    return open_in(root, config=small_config(segment_bytes=300_000), saved=saved, disk=disk)


def test_an_index_that_is_damaged_is_made_anew_in_the_thread(tmp_path: Path) -> None:
    log = long_log(tmp_path)
    wanted = log.files.segments[1].base_offset + 7
    path = log.files.segments[1].time_index_path
    disk = CountingDisk()
    log = opened_again(log, tmp_path, disk)
    path.write_bytes(b"rubbish")
    in_a_thread(log.cold_times(below=EVERYTHING))
    disk.read_bytes = 0
    for _ in range(2):
        found = log.offset_for_timestamp(1000 + wanted, below=EVERYTHING)
        assert found == TimestampedOffset(wanted, 1000 + wanted, 3)
    assert disk.read_bytes < 50_000
    assert path.read_bytes() != b"rubbish"


@pytest.mark.parametrize("learnt", [False, True])
def test_an_index_that_is_not_made_anew_in_a_thread_is_told(tmp_path: Path, learnt: bool) -> None:
    log = long_log(tmp_path)
    segment = log.files.segments[1]
    wanted = segment.base_offset + 7
    disk = CountingDisk()
    log = opened_again(log, tmp_path, disk)
    segment = log.files.segments[1]
    if learnt:
        in_a_thread(log.cold_times(below=EVERYTHING))
        assert log.offset_for_timestamp(1000 + wanted, below=EVERYTHING)
    sound = segment.time_index_path.read_bytes()
    # Each entry names another batch than the one of its time.
    other = bytes(byte ^ (at % 12 == 11) for at, byte in enumerate(sound))
    segment.time_index_path.write_bytes(other)
    told: list[int] = []
    log.home.damage_found = lambda _, offset: told.append(offset)
    disk.read_bytes = 0
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match=r"index .* made anew now"):
            log.offset_for_timestamp(1000 + wanted, below=EVERYTHING)
    assert disk.read_bytes < 50_000
    assert set(told) == {segment.base_offset}
    in_a_thread(segment.preparation())
    segment.mend_index()  # As Repairs does.
    found = log.offset_for_timestamp(1000 + wanted, below=EVERYTHING)
    assert found == TimestampedOffset(wanted, 1000 + wanted, 3)


def with_a_hole(root: Path, at_start: bool) -> tuple[PartitionLog, int, int]:
    """A log of 12 records whose time rises, which lacks some; the first and the last of these."""
    log = open_in(root, config=small_config(segment_bytes=400))
    for number in range(12):
        log.append_as_leader(batch("x" * 40, timestamp_ms=1000 + number), 3, now_ms=1)
    log.flush()
    first, second = log.files.segments[:2]
    *_, last = first.walk(0, 0)
    if at_start:
        log.close(save=True)
    os.truncate(first.path, last.position)
    first.size_bytes = last.position
    if at_start:
        log = open_in(root, config=small_config(segment_bytes=400), saved=SavedState(12, 0))
    return log, last.header.base_offset, second.base_offset - 1


@pytest.mark.parametrize("at_start", [False, True])
def test_a_search_by_time_stops_at_what_is_missing(tmp_path: Path, at_start: bool) -> None:
    log, missing, last = with_a_hole(tmp_path, at_start)
    told: list[int] = []
    log.home.damage_found = lambda _, offset: told.append(offset)
    found = log.offset_for_timestamp(1000 + missing - 1, below=EVERYTHING)
    assert found == TimestampedOffset(missing - 1, 1000 + missing - 1, 3), "it lies before"
    with pytest.raises(CorruptRecordError, match=f"behind offset {missing} are missing"):
        log.offset_for_timestamp(1000 + missing, below=EVERYTHING)
    assert told == [missing]
    assert log.offset_for_timestamp(1000 + missing, below=missing) is None
    log.advance_log_start(last + 1)
    found = log.offset_for_timestamp(1000 + missing, below=EVERYTHING)
    assert found == TimestampedOffset(last + 1, 1000 + last + 1, 3)
    assert log.max_timestamp(below=EVERYTHING) == TimestampedOffset(11, 1011, 3)


@pytest.mark.parametrize("at_start", [False, True])
def test_an_index_made_anew_hides_no_hole(tmp_path: Path, at_start: bool) -> None:
    log, missing, last = with_a_hole(tmp_path, at_start)
    log.files.segments[0].time_index_path.unlink()
    for timestamp_ms in (1000 + missing, 1000 + last + 1, 1011):
        with pytest.raises(CorruptRecordError, match="are missing"):
            log.offset_for_timestamp(timestamp_ms, below=EVERYTHING)
    with pytest.raises(CorruptRecordError, match="are missing"):
        log.max_timestamp(below=EVERYTHING)


def test_times_learnt_before_a_cut_are_not_believed_after_it(tmp_path: Path) -> None:
    log = reopened(tmp_path, 3)
    learn = log.cold_times(below=3)
    assert learn is not None
    log.truncate_to(1)
    log.append_as_leader(batch("young", timestamp_ms=5), 4, now_ms=1)
    learn()
    assert log.max_timestamp(below=2) == TimestampedOffset(0, 1000, 3)
    assert log.offset_for_timestamp(1001, below=2) is None


def test_a_search_by_time_leaves_a_log_without_records_writable(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_follower(filler(0, 4, 3, 1000))
    assert log.offset_for_timestamp(0, below=EVERYTHING) is None
    log.append_as_follower(batch("a", base_offset=5, leader_epoch=3))
    assert log.max_timestamp(below=EVERYTHING) == TimestampedOffset(5, 1000, 3)
    log.roll()
    log.flush()
    again = open_in(tmp_path, saved=SavedState(6))
    assert again.max_timestamp(below=EVERYTHING) == TimestampedOffset(5, 1000, 3)
