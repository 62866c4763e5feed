"""Compaction: what stays of a log, and of a tombstone for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.storage.cleaner.filtering import AbortedRanges, Filter
from penstock.broker.storage.cleaner.offset_map import OffsetMap
from penstock.broker.storage.recovery import SavedState
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import (
    Compression,
    RecordData,
    encode_batch,
    iter_batches,
    parse_header,
)
from tests.unit.storage.cleaning import (
    COMPACTED,
    Broker,
    close_segment,
    compacted,
    names_in,
    put,
    shown,
)
from tests.unit.storage.storage_kit import (
    KEY,
    open_in,
    read_all,
    records_of,
)


async def test_of_each_key_the_last_record_stays_where_it_was(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"), ("b", "1"))
    put(log, ("a", "2"))
    put(log, ("c", "1"), ("a", "3"))
    close_segment(log)
    assert await Broker(log).cleaner.clean_one()
    assert shown(log) == {1: ("b", "1"), 3: ("c", "1"), 4: ("a", "3")}
    assert (log.log_start_offset, log.log_end_offset, log.cleaned_offset) == (0, 5, 5)


@pytest.mark.parametrize("compression", list(Compression))
async def test_compressed_batches_stay_compressed(tmp_path: Path, compression: Compression) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "x" * 200), ("b", "y" * 200), compression=compression)
    put(log, ("a", "2"))
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert shown(log) == {1: ("b", "y" * 200), 2: ("a", "2")}
    [(header, _), _] = iter_batches(read_all(log))
    assert header.compression is compression


async def test_the_active_segment_is_left_alone(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    close_segment(log)
    put(log, ("a", "2"))
    put(log, ("a", "3"))
    await Broker(log).cleaner.clean_one()
    assert shown(log) == {0: ("a", "1"), 1: ("a", "2"), 2: ("a", "3")}


async def test_what_is_not_committed_replaces_nothing(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    close_segment(log)
    put(log, ("a", "2"))
    close_segment(log)
    broker = Broker(log)
    broker.committed[KEY] = 1
    await broker.cleaner.clean_one()
    assert shown(log) == {0: ("a", "1"), 1: ("a", "2")}
    assert log.cleaned_offset == 1
    broker.committed[KEY] = 2
    await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


async def test_small_segments_become_one(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for number in range(4):
        put(log, ("a", str(number)))
        close_segment(log)
    assert len(log.files.segments) == 5
    await Broker(log).cleaner.clean_one()
    assert names_in(log) == [f"{0:020d}.log", f"{4:020d}.log"]
    assert shown(log) == {3: ("a", "3")}
    assert len(list(iter_batches(read_all(log)))) == 2  # One batch in place of the first three.


async def test_segments_do_not_become_larger_than_segment_bytes(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for number in range(6):
        put(log, (str(number), "x" * 350))
        close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert max(segment.size_bytes for segment in log.files.segments) <= 900
    assert len(log.files.segments) == 4
    assert len(shown(log)) == 6


async def test_a_segment_in_which_nothing_changes_is_not_written_again(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "x" * 800))
    close_segment(log)
    inode = log.files.segments[0].path.stat().st_ino
    await Broker(log).cleaner.clean_one()
    assert log.files.segments[0].path.stat().st_ino == inode
    assert names_in(log) == [f"{0:020d}.log", f"{1:020d}.log"]
    assert log.cleaned_offset == 1


async def test_records_without_a_key_go(tmp_path: Path) -> None:
    log = compacted(tmp_path, compacts=False)
    put(log, (None, "1"), ("a", "1"))
    log.config = COMPACTED
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    assert shown(log) == {1: ("a", "1")}


async def test_a_batch_that_is_gone_leaves_no_gap_in_another_leaders_epoch(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for epoch in range(3):
        for _ in range(2):
            data = encode_batch([RecordData(1, b"k", b"v")])
            log.append_as_leader(data, LeaderEpoch(epoch), now_ms=1)
    log.flush()
    close_segment(log)
    await Broker(log).cleaner.clean_one()
    batches = [header for header, _ in iter_batches(read_all(log))]
    assert [(one.base_offset, one.last_offset, one.leader_epoch) for one in batches] == [
        (0, 1, 0),
        (2, 3, 1),
        (4, 4, 2),
        (5, 5, 2),
    ]
    assert [one.record_count for one in batches] == [0, 0, 0, 1]


@pytest.mark.parametrize(("base_offset", "stays"), [(4, False), (5, True)])
def test_what_the_map_has_not_seen_stays_as_it_is(base_offset: int, stays: bool) -> None:
    """A tombstone there may be all that keeps an older value, not looked at either, deleted."""
    batches = filter_to(5)
    for value in (None, b"v"):
        data = encode_batch([RecordData(1, None, value)], base_offset=base_offset)
        assert (batches.apply(parse_header(data), data) is data) is stays
    batches.latest.close()


def test_a_control_batch_outside_of_transactions_stays_too() -> None:
    batches = filter_to(5)
    data = encode_batch([RecordData(1, None, b"v")], is_control=True)
    assert not parse_header(data).is_transactional
    assert batches.apply(parse_header(data), data) is data
    batches.latest.close()


def filter_to(end_offset: int) -> Filter:
    return Filter(
        latest=OffsetMap(1 << 10),
        aborted=AbortedRanges(()),
        log_start_offset=0,
        end_offset=end_offset,
        last_batches={},
        epochs={},
        now_ms=1,
        delete_retention_ms=1,
    )


# --- tombstones ----------------------------------------------------------------------------------


async def test_a_tombstone_stays_for_a_while_after_it_was_cleaned(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=1000)
    broker = Broker(log)
    put(log, ("a", "1"), ("b", "1"))
    put(log, ("a", None), timestamp_ms=5)
    close_segment(log)
    await broker.cleaner.clean_one()
    assert shown(log) == {1: ("b", "1"), 2: ("a", None)}
    broker.clock.now_ms += 999
    assert not await broker.cleaner.clean_one()
    broker.clock.now_ms += 1
    assert await broker.cleaner.clean_one()  # Although nothing new is dirty.
    assert shown(log) == {1: ("b", "1")}
    assert not await broker.cleaner.clean_one()


async def test_a_clean_before_that_time_leaves_the_tombstone(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=1000)
    broker = Broker(log)
    put(log, ("a", None))
    close_segment(log)
    await broker.cleaner.clean_one()
    broker.clock.now_ms += 999
    put(log, ("b", "1"))
    close_segment(log)
    assert await broker.cleaner.clean_one()
    assert shown(log) == {0: ("a", None), 1: ("b", "1")}


async def test_the_time_of_a_tombstone_counts_from_the_first_clean(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=1000)
    broker = Broker(log)
    put(log, ("a", None), ("b", "1"), timestamp_ms=77)
    close_segment(log)
    await broker.cleaner.clean_one()
    log.close(save=True)
    again = open_in(tmp_path, config=log.config, saved=SavedState(2, 0, True, log.cleaned_offset))
    assert records_of(read_all(again))[0].timestamp_ms == 77
    put(again, ("c", "1"))
    close_segment(again)
    broker = Broker(again, clock=broker.clock)
    broker.clock.now_ms += 1000
    await broker.cleaner.clean_one()
    assert shown(again) == {1: ("b", "1"), 2: ("c", "1")}


async def test_no_later_clean_puts_that_time_off(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=1000)
    broker = Broker(log)
    put(log, ("a", None))
    close_segment(log)
    await broker.cleaner.clean_one()
    for _ in range(2):
        broker.clock.now_ms += 500
        put(log, ("b", "1"))
        close_segment(log)
        assert await broker.cleaner.clean_one()
    assert shown(log) == {2: ("b", "1")}


async def test_a_tombstone_may_be_told_to_stay_for_ever(tmp_path: Path) -> None:
    log = compacted(tmp_path, delete_retention_ms=2**63 - 1)
    broker = Broker(log)
    put(log, ("a", "1"))
    put(log, ("a", None))
    close_segment(log)
    await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", None)}
    assert broker.cleaner.uncleanable_count == 0
