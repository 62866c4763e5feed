"""Records are found by their time, whatever a time index says."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.wire.rewriting import filler
from tests.unit.storage.storage_kit import EVERYTHING, batch, open_in


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
    assert [one.needs_time for one in (damaged, gone, sound)] == [True, True, False]
    assert damaged.time_index_path.read_bytes() == bytes(16), "nothing is mended there"
    for number in range(4):
        found = log.offset_for_timestamp(1000 + number, below=4)
        assert found == TimestampedOffset(number, 1000 + number, 3)


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
