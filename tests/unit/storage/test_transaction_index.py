"""The index of aborted transactions: its file, and what happens to it with its segment."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.broker.core.transactions import EndedTransaction, OpenTransactions
from penstock.broker.storage.damage import Examination
from penstock.broker.storage.index import IndexDamagedError
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.transaction_index import TransactionIndex
from penstock.wire.errors import CorruptRecordError
from penstock.wire.markers import MarkerType, encode_marker, marker_type
from penstock.wire.records import RecordData, encode_batch, parse_header
from tests.unit.storage.cleaning import Broker, compacted
from tests.unit.storage.storage_kit import PARTITION, batch, mark, open_in, transactional

ABORT, COMMIT = MarkerType.ABORT, MarkerType.COMMIT
TRANSACTION = EndedTransaction(7, 3, 9, 10)


def spread(root: Path) -> PartitionLog:
    """A log whose producer 7 begins in the first segment and is aborted in the third."""
    log = open_in(root)
    log.append_as_follower(transactional("x", producer=(7, 0, 0)))
    log.append_as_follower(transactional("y", producer=(8, 0, 0), base_offset=1))
    log.append_as_follower(mark(COMMIT, 8, base_offset=2))
    log.roll()
    log.append_as_follower(transactional("z", producer=(8, 0, 1), base_offset=3))
    log.append_as_follower(mark(ABORT, 8, base_offset=4))
    log.roll()
    log.append_as_follower(mark(ABORT, 7, base_offset=5))
    log.append_as_follower(batch("plain", base_offset=6, leader_epoch=1))
    return log


FOUND = [EndedTransaction(8, 3, 4, 0), EndedTransaction(7, 0, 5, 6)]


def found_in(log: PartitionLog) -> list[EndedTransaction]:
    return log.aborted_transactions(log.log_start_offset, below=log.log_end_offset)


# --- the file ------------------------------------------------------------------------------------


@given(
    gaps=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(0, 9)), max_size=12),
    cut=st.integers(0, 80),
    bounds=st.tuples(st.integers(0, 80), st.integers(0, 80)),
)
def test_lookups_and_cuts_agree_with_a_list(
    gaps: list[tuple[int, int, int]], cut: int, bounds: tuple[int, int]
) -> None:
    index, model, last = TransactionIndex(), list[EndedTransaction](), 0
    for gap, length, behind in gaps:
        last += gap
        stable = max(last + 1 - behind, 0)
        model.append(EndedTransaction(length, max(0, last - length), last, stable))
        index.append(model[-1])
    before = index.copy()
    index.truncate(cut)
    kept = [one for one in model if one.last_offset < cut]
    assert (list(index), list(before)) == (kept, model)
    expected, is_complete = [], False
    for one in kept:
        if one.last_offset >= bounds[0]:
            expected += [one] if one.first_offset < bounds[1] else []
            is_complete = one.last_stable_offset >= bounds[1]
            if is_complete:
                break
    assert index.aborted(*bounds) == (expected, is_complete)
    assert list(TransactionIndex.decode(index.encode(), 0)) == kept


@pytest.mark.parametrize("entries", [0, 2])
def test_every_bit_that_flips_and_every_byte_that_is_lost_is_seen(entries: int) -> None:
    index = TransactionIndex()
    for at in range(entries):
        index.append(EndedTransaction(7, 3 + 10 * at, 9 + 10 * at, 10))
    sound = index.encode()
    assert len(sound) == 8 + 34 * entries
    damaged = [sound[:size] for size in range(len(sound))] + [bytes(len(sound)), sound + b"\0"]
    for bit in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        with pytest.raises(IndexDamagedError):
            TransactionIndex.decode(data, 0)


def test_the_index_of_another_segment_is_damage() -> None:
    index = TransactionIndex()
    index.append(TRANSACTION)
    assert list(TransactionIndex.decode(index.encode(), 9)) == [TRANSACTION]
    with pytest.raises(IndexDamagedError, match="bad entry"):
        TransactionIndex.decode(index.encode(), 10)


# --- open transactions and marks -----------------------------------------------------------------


def test_what_a_mark_marks_is_read_from_its_record() -> None:
    for kind in MarkerType:
        assert marker_type(mark(kind, 7)) is kind
    header = parse_header(mark(ABORT, 7))
    assert (header.is_control, header.is_transactional, header.base_sequence) == (True, True, -1)
    for key in (None, b"\0\0\0", b"\0\0\0\5", b"\xff\xff\0\0"):
        data = encode_batch([RecordData(1, key, b"")], producer_id=7, is_control=True)
        with pytest.raises(CorruptRecordError):
            marker_type(data)
    later = encode_batch([RecordData(1, b"\0\1\0\0more", b"")], producer_id=7, is_control=True)
    assert marker_type(later) is ABORT


def test_the_marks_bytes_are_kafkas() -> None:
    data = encode_marker(
        COMMIT, producer_id=7, producer_epoch=1, coordinator_epoch=5, timestamp_ms=1
    )
    assert data.endswith(b"\x20\x00\x00\x00\x08\x00\x00\x00\x01\x0c\x00\x00\x00\x00\x00\x05\x00")


@given(st.binary(max_size=60))
def test_open_transactions_read_nothing_into_damage(data: bytes) -> None:
    try:
        decoded = OpenTransactions.decode(data)
    except CorruptRecordError:
        return
    assert OpenTransactions.decode(decoded.encode()) == decoded or decoded.last_offset < 0


# --- with the segment ----------------------------------------------------------------------------


def test_a_transaction_may_begin_in_an_earlier_segment(tmp_path: Path) -> None:
    log = spread(tmp_path)
    assert found_in(log) == FOUND
    assert log.aborted_transactions(0, below=2) == [FOUND[1]]
    log.close(save=True)
    paths = sorted(log.directory.glob("*.txnindex"))
    assert [path.stat().st_size for path in paths] == [8, 42, 42]
    log = open_in(tmp_path, saved=SavedState(7, clean=True))
    assert found_in(log) == FOUND


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("snapshots", [True, False])
def test_indexes_that_are_gone_or_damaged_are_made_anew(
    tmp_path: Path, clean: bool, snapshots: bool
) -> None:
    log = spread(tmp_path)
    log.close(save=True)
    *_, second, third = sorted(log.directory.glob("*.txnindex"))
    third.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    if not snapshots:
        for path in log.directory.glob("*.snapshot"):
            path.unlink()
    log = open_in(tmp_path, saved=SavedState(7, clean=clean))
    assert found_in(log) == FOUND
    assert second.stat().st_size == 42
    log.append_as_follower(transactional("x", producer=(7, 0, 5), base_offset=7))
    log.append_as_follower(mark(ABORT, 7, base_offset=8))
    expected = [*FOUND, EndedTransaction(7, 7, 8, 9)]
    assert found_in(log) == expected
    log.close(save=True)
    log = open_in(tmp_path, saved=SavedState(9, clean=True))
    assert found_in(log) == expected


def test_after_a_crash_all_that_lies_above_the_recovery_point_is_indexed(tmp_path: Path) -> None:
    spread(tmp_path).close(save=False)
    directory = tmp_path / str(PARTITION)
    assert not list(directory.glob("*.txnindex"))
    log = open_in(tmp_path)
    assert len(list(directory.glob("*.txnindex"))) == 2, "of the closed segments"
    assert found_in(log) == FOUND


def warmed_without_indexes(root: Path) -> PartitionLog:
    """A log that lost its indexes, and for which a thread has read what makes them anew."""
    spread(root).close(save=True)
    for path in (root / str(PARTITION)).glob("*.txnindex"):
        path.unlink()
    log = open_in(root, saved=SavedState(7, clean=True))
    warm = log.cold_aborted(0)
    assert warm is not None
    warm()
    return log


def test_an_index_made_anew_in_a_thread_takes_in_what_came_meanwhile(tmp_path: Path) -> None:
    log = warmed_without_indexes(tmp_path)
    log.append_as_follower(transactional("x", producer=(9, 0, 0), base_offset=7))
    log.append_as_follower(mark(ABORT, 9, base_offset=8))
    assert log.cold_aborted(0) is None
    assert found_in(log) == [*FOUND, EndedTransaction(9, 7, 8, 9)]


def test_indexes_are_read_in_a_thread(tmp_path: Path) -> None:
    spread(tmp_path).close(save=True)
    log = open_in(tmp_path, saved=SavedState(7, clean=True))
    warm = log.cold_aborted(0)
    assert warm is not None
    warm()
    for path in (tmp_path / str(PARTITION)).glob("*.txnindex"):
        path.write_bytes(b"not read again")
    assert log.cold_aborted(0) is None
    assert found_in(log) == FOUND


def test_behind_the_last_mark_no_index_is_read(tmp_path: Path) -> None:
    log = spread(tmp_path)
    assert log.aborted_transactions(6, below=7) == []
    log.close(save=True)
    log = open_in(tmp_path, saved=SavedState(7, clean=True))
    assert log.cold_aborted(6) is None
    assert log.aborted_transactions(6, below=7) == []
    assert all(segment.transactions is None for segment in log.files.segments[:-1])
    assert log.cold_aborted(4) is not None


def test_a_cut_makes_void_what_was_read_before_it(tmp_path: Path) -> None:
    log = warmed_without_indexes(tmp_path)
    log.truncate_to(5)
    log.append_as_follower(mark(COMMIT, 7, base_offset=5, leader_epoch=2))
    log.append_as_follower(batch("plain", base_offset=6, leader_epoch=2))
    assert found_in(log) == FOUND[:1]


def test_a_cut_takes_the_marks_away_and_opens_their_transactions_again(tmp_path: Path) -> None:
    log = spread(tmp_path)
    log.flush()
    log.truncate_to(4)
    assert found_in(log) == []
    assert log.producers.transactions.first_offset(7) == 0
    assert log.producers.transactions.first_offset(8) == 3
    log.append_as_follower(mark(ABORT, 7, base_offset=4, leader_epoch=2))
    assert found_in(log) == [EndedTransaction(7, 0, 4, 3)]


def test_a_flush_writes_the_marks_that_there_were_when_it_began(tmp_path: Path) -> None:
    log = spread(tmp_path)
    path = log.files.segments[1].transaction_index_path
    task = log.begin_flush()
    encode = dict(task.writes)[path]
    before = encode()
    log.truncate_to(4)  # While the flush is in another thread.
    assert encode() == before
    task.run()
    log.finish_flush(task)
    assert found_in(log) == []


def with_a_mark_that_says_commit(log: PartitionLog, segment: int) -> None:
    """A bit flips in the segment's mark, so that it commits what was aborted."""
    path = log.files.segments[segment].path
    data = bytearray(path.read_bytes())
    [at] = (match.start() for match in re.finditer(rb"\x08\0\0\0\0", data))
    data[at + 4] ^= int(COMMIT)
    path.write_bytes(data)


@pytest.mark.parametrize("position", [22, 50])
def test_of_a_damaged_mark_no_index_is_made_anew(tmp_path: Path, position: int) -> None:
    """One that is not taken for a mark, or whose producer is another one."""
    log = spread(tmp_path)
    path = log.files.segments[2].path
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)
    log.close(save=True)
    log.files.segments[2].transaction_index_path.unlink()
    log = open_in(tmp_path, saved=SavedState(7, clean=True))
    with pytest.raises(CorruptRecordError, match="CRC"):
        found_in(log)


def test_after_a_crash_what_a_damaged_mark_hides_is_refused_and_not_taken_for_committed(
    tmp_path: Path,
) -> None:
    log = spread(tmp_path)
    with_a_mark_that_says_commit(log, 2)
    log.flush()
    log.close(save=False)
    log = open_in(tmp_path, saved=SavedState(7))
    with pytest.raises(CorruptRecordError, match="CRC"):
        found_in(log)


def test_deleted_segments_take_their_indexes_with_them(tmp_path: Path) -> None:
    log = spread(tmp_path)
    log.flush()
    assert (log.directory / f"{0:020d}.txnindex").exists()
    log.advance_log_start(3)
    assert not (log.directory / f"{0:020d}.txnindex").exists()
    assert found_in(log) == FOUND


def test_a_damaged_index_is_found_by_who_examines_the_segment(tmp_path: Path) -> None:
    log = spread(tmp_path)
    log.flush()
    segment = log.files.segments[1]
    segment.close_file()
    path = segment.transaction_index_path
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert Examination(log, segment).run().index_is_damaged
    segment.mend_index()
    assert not Examination(log, segment).run().index_is_damaged
    assert found_in(log) == FOUND


def test_a_mark_that_says_nothing_is_refused(tmp_path: Path) -> None:
    log = spread(tmp_path)
    log.append_as_follower(transactional("x", producer=(7, 0, 5), base_offset=7))
    bad = encode_batch(
        [RecordData(1, b"?", b"")],
        base_offset=8,
        leader_epoch=1,
        producer_id=7,
        producer_epoch=0,
        is_control=True,
    )
    with pytest.raises(CorruptRecordError, match="says what it marks"):
        log.append_as_follower(bad)
    assert (log.log_end_offset, found_in(log)) == (8, FOUND)


# --- compaction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
async def test_a_cleaned_segment_has_the_entries_of_those_it_replaces(
    tmp_path: Path, lost: bool
) -> None:
    log = compacted(tmp_path)
    for number in range(3):
        offset = 4 * number
        log.append_as_follower(transactional("x", producer=(7, 0, -1), base_offset=offset))
        log.append_as_follower(batch("old", base_offset=offset + 1, leader_epoch=1))
        log.append_as_follower(mark(ABORT, 7, base_offset=offset + 2))
        log.append_as_follower(batch("new", base_offset=offset + 3, leader_epoch=1))
        log.roll()
    log.flush()
    expected = found_in(log)
    assert len(expected) == 3
    for segment in log.files.segments:
        segment.close_file()
    if lost:
        log.files.segments[1].transaction_index_path.unlink()
    await Broker(log).cleaner.clean_one()
    assert len(log.files.segments) == 2
    cleaned = log.files.segments[0].transaction_index_path
    assert cleaned.exists(), "the clean asked what was aborted"
    assert found_in(log) == expected
    assert cleaned.stat().st_size == 8 + 3 * 34
