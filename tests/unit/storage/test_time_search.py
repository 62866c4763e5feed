"""Records are found by their time, whatever a time index says."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.core.ports import TimestampedOffset
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
