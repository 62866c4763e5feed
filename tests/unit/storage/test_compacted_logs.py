"""Compacted logs, as those see them who read, copy and write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.wire.errors import InvalidRecordError
from penstock.wire.records import RecordData, encode_batch
from tests.unit.storage.cleaning import (
    EPOCH,
    Broker,
    close_segment,
    compacted,
    put,
    shown,
)
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    batch,
    open_in,
    read_all,
)


async def test_a_follower_may_end_anywhere_where_a_batch_was(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for number in range(8):
        put(log, ("a" if number != 3 else "b", str(number)))
    close_segment(log)
    behind = []
    for end in range(9):
        (tmp_path / str(end)).mkdir()
        follower = open_in(tmp_path / str(end), config=log.config)
        if end:
            follower.append_as_follower(log.read(0, 10_000, below=end))
        behind.append(follower)
    await Broker(log).cleaner.clean_one()
    for end, follower in enumerate(behind):
        assert follower.log_end_offset == end
        while follower.log_end_offset < 8:
            data = log.read(follower.log_end_offset, 100, below=EVERYTHING)
            follower.append_as_follower(data)
        got = shown(follower)
        assert {offset: pair for offset, pair in got.items() if offset >= end} == {
            offset: pair for offset, pair in shown(log).items() if offset >= end
        }


async def test_records_are_found_by_time_where_others_are_gone(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for number, key in enumerate("abacbd"):
        put(log, (key, str(number)), timestamp_ms=9000 if number == 1 else 100 * number)
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert sorted(shown(log)) == [2, 3, 4, 5]
    found = [log.offset_for_timestamp(time, below=EVERYTHING) for time in (0, 150, 250, 500, 501)]
    assert [one.offset if one else None for one in found] == [2, 2, 3, 5, None]
    largest = log.max_timestamp(below=EVERYTHING)
    assert largest is not None
    assert (largest.offset, largest.timestamp_ms) == (5, 500)


async def test_a_copy_finds_the_latest_record_although_a_later_one_is_gone(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for time_ms, key in ((1000, "a"), (9000, "b"), (500, "b"), (700, "c")):
        put(log, (key, "x" * 100), timestamp_ms=time_ms)
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert sorted(shown(log)) == [0, 2, 3]
    (tmp_path / "copy").mkdir()
    copy = open_in(tmp_path / "copy", config=log.config)
    copy.append_as_follower(read_all(log))
    for one in (log, copy):
        largest = one.max_timestamp(below=EVERYTHING)
        assert largest is not None
        assert (largest.offset, largest.timestamp_ms) == (0, 1000)


async def test_a_log_of_which_all_records_are_gone_has_no_latest(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=0)
    put(log, ("a", None))
    put(log, ("b", None))
    close_segment(log)
    broker = Broker(log)
    while await broker.cleaner.clean_one():
        pass
    assert (shown(log), log.log_end_offset) == ({}, 2)
    for _ in range(2):
        assert log.max_timestamp(below=EVERYTHING) is None
        assert log.offset_for_timestamp(0, below=EVERYTHING) is None


def test_a_record_without_a_key_is_refused(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    keyed, keyless = RecordData(1, b"k", b"v"), RecordData(1, None, b"v")
    with pytest.raises(
        InvalidRecordError, match=r"record 1 of a batch has no key.*compacted.*--key-separator"
    ):
        log.append_as_leader(encode_batch([keyed, keyless]), EPOCH, now_ms=1)
    assert log.log_end_offset == 0
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    log.internal = True
    log.append_as_leader(encode_batch([keyless]), EPOCH, now_ms=1)
    assert log.log_end_offset == 2
