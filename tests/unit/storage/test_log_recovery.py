from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from structlog.testing import capture_logs

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.core.producer_state import Duplicate, ProducerState
from penstock.broker.storage.checkpoints import EPOCHS_FILE, newest_snapshot, snapshots
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.wire.errors import CorruptRecordError, DiskFullError, StorageError
from penstock.wire.records import iter_batches, parse_header
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    PARTITION,
    FullDisk,
    PowerCutDisk,
    batch,
    lose_power,
    open_in,
    read_all,
    records_of,
    small_config,
    values_of,
)


def newest_segment(root: Path) -> Path:
    return max((root / str(PARTITION)).glob("*.log"))


def crash(log: PartitionLog) -> None:
    log.close(save=False)


def filled(root: Path, *values: str, epoch: int = 1, flush: bool = False) -> PartitionLog:
    log = open_in(root)
    for number, value in enumerate(values):
        log.append_as_leader(batch(value, producer=(7, 0, number)), epoch, now_ms=1)
    if flush:
        log.flush()
    return log


def test_a_tail_torn_at_any_byte_is_cut_to_whole_batches(tmp_path: Path) -> None:
    crash(filled(tmp_path, "one", "two", "three"))
    path = newest_segment(tmp_path)
    whole = path.read_bytes()
    *_, (last, view) = iter_batches(whole)
    start = len(whole) - len(view)
    for size in range(start, len(whole)):
        for rest in (b"", bytes(len(whole) - size), random.Random(size).randbytes(40)):
            path.write_bytes(whole[:size] + rest)
            log = open_in(tmp_path)
            assert log.log_end_offset == last.base_offset == log.durable_offset
            assert values_of(log) == ["one", "two"]
            assert path.stat().st_size == start
            answer = log.producers.check(parse_header(batch("two", producer=(7, 0, 1))))
            assert answer == Duplicate(1, 1)
            assert log.append_as_leader(batch("new"), 2, now_ms=1).base_offset == 2
            crash(log)
    path.write_bytes(whole)
    assert values_of(open_in(tmp_path)) == ["one", "two", "three"]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(part=st.floats(0, 0.9999), bit=st.integers(0, 7))
def test_a_bit_flipped_above_the_recovery_point_costs_no_sound_batch_before_it(
    tmp_path: Path, part: float, bit: int
) -> None:
    for path in (tmp_path / str(PARTITION)).glob("*"):
        path.unlink()
    log = filled(tmp_path, "one", "two", flush=True)
    point = log.recovery_point
    for value in ("three", "four", "five"):
        log.append_as_leader(batch(value), 1, now_ms=1)
    crash(log)
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    sound = records_of(bytes(data))
    flushed = sum(len(view) for header, view in iter_batches(data) if header.next_offset <= point)
    at = flushed + int((len(data) - flushed) * part)
    ends = [view.nbytes for _, view in iter_batches(bytes(data))]
    before = sum(1 for end in accumulate(ends) if end <= at)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    log = open_in(tmp_path, saved=SavedState(recovery_point=point))
    kept = records_of(read_all(log))
    # No checksum covers the leader epoch, and above the recovery point nothing else tells what it
    # was: a newer one may have begun there. The batches after it, of an older one, are cut then.
    in_epoch = 12 <= at - sum(ends[:before]) < 16
    is_newer = in_epoch and parse_header(data, sum(ends[:before])).leader_epoch > 1
    assert kept == sound[: before + is_newer]
    newer = 1 if is_newer else 0
    assert len(log.epochs.entries) == 1 + newer
    assert log.epochs.entries[0] == (1, 0)
    assert log.noted_damage == ()
    log.append_as_leader(batch("next"), log.last_epoch, now_ms=1)
    assert values_of(log)[-1] == "next"
    log.close(save=False)


EPOCH_AT = 12  # Where a batch's header has its leader epoch, of four bytes.


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("bit", range(32))
def test_a_bit_flipped_in_a_flushed_leader_epoch_is_damage_and_no_news(
    tmp_path: Path, number: int, bit: int
) -> None:
    """The checkpoint was flushed with the batches, and has a checksum."""
    log = filled(tmp_path, "one", "two", "three", epoch=5, flush=True)
    log.append_as_leader(batch("four"), 6, now_ms=1)
    crash(log)
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    sizes = [view.nbytes for _, view in iter_batches(bytes(data))]
    data[sum(sizes[:number]) + EPOCH_AT + 3 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with capture_logs() as lines:
        log = open_in(tmp_path, saved=SavedState(recovery_point=3))
    assert log.epochs.entries == ((5, 0), (6, 3))
    assert (log.log_end_offset, log.dropped_records) == (4, False)
    assert log.noted_damage == (number,), "Repairs are told of it"
    told = [line for line in lines if line["event"] == "log_has_a_damaged_batch"]
    assert [line["offset"] for line in told] == [number]
    assert path.read_bytes() == bytes(data), "it stays as it is"
    for offset, value in enumerate(["one", "two", "three", "four"]):
        if offset == number:
            with pytest.raises(CorruptRecordError, match="leader epoch"):
                log.read(offset, 1, below=EVERYTHING)
        else:
            assert values_of_batch(log, offset) == [value]
    log.assign_epoch(7)
    log.close(save=False)


def test_an_epoch_that_a_cut_has_undone_is_not_held_against_what_follows(tmp_path: Path) -> None:
    """The checkpoint still has it, from the recovery point on, which the cut has lowered."""
    log = filled(tmp_path, "one", epoch=1)
    log.append_as_leader(batch("two"), 5, now_ms=1)
    log.flush()
    log.truncate_to(1)
    log.append_as_follower(batch("other", base_offset=1, leader_epoch=3))
    crash(log)
    log = open_in(tmp_path, saved=SavedState(recovery_point=1))
    assert values_of(log) == ["one", "other"]
    assert log.epochs.entries == ((1, 0), (3, 1))
    assert log.noted_damage == ()


def test_batches_below_the_start_of_the_log_have_epochs_that_nobody_knows(tmp_path: Path) -> None:
    log = filled(tmp_path, "one", epoch=1)
    log.append_as_leader(batch("two"), 2, now_ms=1)
    log.append_as_leader(batch("three"), 3, now_ms=1)
    log.advance_log_start(2)
    log.flush()
    crash(log)
    log = open_in(tmp_path, saved=SavedState(recovery_point=3, log_start_offset=2))
    assert log.epochs.entries == ((3, 2),)
    assert log.noted_damage == ()


def test_damaged_records_below_the_recovery_point_stay_and_are_refused_on_reading(
    tmp_path: Path,
) -> None:
    log = filled(tmp_path, "one", "two", "three", flush=True)
    crash(log)
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(batch("one")) + 65] ^= 1
    path.write_bytes(data)
    log = open_in(tmp_path, saved=SavedState(recovery_point=3))
    assert log.log_end_offset == 3, "what was on the disk is never cut"
    assert values_of_batch(log, 0) == ["one"]
    assert values_of_batch(log, 2) == ["three"]
    with pytest.raises(CorruptRecordError, match="CRC-32C"):
        log.read(1, 1000, below=EVERYTHING)


def values_of_batch(log: PartitionLog, offset: int) -> list[str]:
    data = log.read(offset, 1, below=EVERYTHING)
    return [(record.value or b"").decode() for record in records_of(data)]


def test_a_broken_chain_below_the_recovery_point_keeps_the_log_shut(tmp_path: Path) -> None:
    crash(filled(tmp_path, "one", "two", "three", flush=True))
    path = newest_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(batch("one")) + 11] ^= 0x40  # The length of the second batch.
    path.write_bytes(data)
    with pytest.raises(DamagedLogError, match=r"orders-3: .*orders-3 holds is kept") as refusal:
        open_in(tmp_path, saved=SavedState(recovery_point=3))
    assert refusal.value.end_offset == 3
    assert path.read_bytes() == bytes(data), "nothing was cut"


def test_a_log_shorter_than_its_recovery_point_stays_shut(tmp_path: Path) -> None:
    crash(filled(tmp_path, "one", "two", "three", flush=True))
    path = newest_segment(tmp_path)
    path.write_bytes(path.read_bytes()[: -len(batch("three", producer=(7, 0, 2)))])
    with pytest.raises(DamagedLogError, match="ends at offset 2, but was on the disk up to 3"):
        open_in(tmp_path, saved=SavedState(recovery_point=3))


def test_later_segments_go_when_an_earlier_one_is_torn(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(30):
        log.append_as_leader(batch("x" * 100, f"{number}"), 1, now_ms=1)
    crash(log)
    paths = sorted((tmp_path / str(PARTITION)).glob("*.log"))
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    end = int(paths[2].stem) - 2
    log = open_in(tmp_path)
    assert log.log_end_offset == end
    assert sorted((tmp_path / str(PARTITION)).glob("*.log")) == paths[:2]
    assert values_of(log)[-1] == f"{end // 2 - 1}"


def test_a_missing_segment_above_the_recovery_point_ends_the_log_there(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 1, now_ms=1)
    crash(log)
    paths = sorted((tmp_path / str(PARTITION)).glob("*.log"))
    paths[1].unlink()
    log = open_in(tmp_path)
    assert log.log_end_offset == int(paths[1].stem)
    assert sorted((tmp_path / str(PARTITION)).glob("*.log")) == paths[:1]


def broken(tmp_path: Path, how: str) -> tuple[list[Path], SavedState, int]:
    """A log that was on the disk, with a hole: its files, what is known of it, and where it is."""
    log = open_in(tmp_path)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 1, now_ms=1)
    log.flush()
    saved = SavedState(log.recovery_point, 0, clean=how.startswith("clean"))
    first, second = log.files.segments[:2]
    *_, last = first.walk(0, 0)
    log.close(save=saved.clean)
    if how.endswith("missing"):
        second.path.unlink()
        hole = second.base_offset
    else:
        os.truncate(first.path, last.position)
        hole = last.header.base_offset
    return sorted(log.directory.glob("*.log")), saved, hole


@pytest.mark.parametrize("how", ["crash, missing", "crash, cut", "clean, missing", "clean, cut"])
def test_a_hole_below_the_recovery_point_is_told_of_and_never_passed_over(
    tmp_path: Path, how: str
) -> None:
    paths, saved, hole = broken(tmp_path, how)
    with capture_logs() as lines:
        log = open_in(tmp_path, saved=saved)
    assert [line["offset"] for line in lines if line["event"] == "log_has_a_hole"] == [hole]
    assert log.holes == (hole,)
    assert sorted(log.directory.glob("*.log")) == paths
    assert (log.log_start_offset, log.log_end_offset) == (0, 30)
    below = records_of(log.read(0, 1 << 20, below=EVERYTHING))
    assert [record.offset for record in below] == list(range(hole))
    with pytest.raises(CorruptRecordError, match=f"offset {hole} is missing"):
        log.read(hole, 1 << 20, below=EVERYTHING)
    assert log.read(29, 1 << 20, below=EVERYTHING)


def test_a_log_below_whose_start_something_is_missing_has_no_hole(tmp_path: Path) -> None:
    _, saved, _ = broken(tmp_path, "crash, missing")
    log = open_in(tmp_path, saved=saved._replace(log_start_offset=29))
    assert (log.holes, log.log_start_offset, log.log_end_offset) == ((), 29, 30)


def test_nothing_is_dropped_behind_what_no_crash_explains(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 1, now_ms=1)
    log.flush()
    crash(log)
    paths = sorted(log.directory.glob("*.log"))
    point = int(paths[-1].stem)  # The last segment may have been begun since.
    os.truncate(paths[-2], 0)
    with pytest.raises(StorageError, match=f"was on the disk up to {point}"):
        open_in(tmp_path, saved=SavedState(recovery_point=point))
    assert sorted(log.directory.glob("*.log")) == paths


def test_a_missing_segment_below_the_recovery_point_keeps_the_log_shut(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 1, now_ms=1)
    log.flush()
    end = log.log_end_offset
    crash(log)
    newest_segment(tmp_path).unlink()
    with pytest.raises(StorageError, match="was on the disk up to"):
        open_in(tmp_path, saved=SavedState(recovery_point=end))


def test_a_batch_of_an_older_epoch_after_a_newer_one_is_a_stale_tail(tmp_path: Path) -> None:
    """What a cut that did not reach the disk may leave behind what was written after it."""
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 1, now_ms=1)
    log.append_as_leader(batch("b"), 4, now_ms=1)
    crash(log)
    path = newest_segment(tmp_path)
    stale = batch("stale", base_offset=2, leader_epoch=2)
    path.write_bytes(path.read_bytes() + stale)
    log = open_in(tmp_path)
    assert values_of(log) == ["a", "b"]
    assert log.epochs.entries == ((1, 0), (4, 1))


def test_what_was_cut_never_follows_what_was_written_after_the_cut(tmp_path: Path) -> None:
    """The old batch has the offset and the size to fit, and a newer epoch: only order saves us."""
    root = tmp_path / "root"
    root.mkdir()
    disk = PowerCutDisk()
    log = open_in(root, disk=disk)
    # A page a batch, so that each is lost or kept by itself.
    fill = "x" * (disk.PAGE * 2 - len(batch("")))
    for epoch in (1, 5, 5):
        log.append_as_leader(batch(fill), epoch, now_ms=1)
    log.flush()
    log.truncate_to(1)
    log.append_as_follower(batch(fill[:-1] + "D", base_offset=1, leader_epoch=3))
    for seed in range(150):
        crashed = tmp_path / f"crashed-{seed}"
        crashed.mkdir()
        disk.cut_power(log.directory, crashed / str(PARTITION), random.Random(seed))
        found = open_in(crashed)
        assert values_of(found) in ([fill], [fill, fill[:-1] + "D"]), seed
        found.close(save=False)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_recovery_found_outlives_a_power_cut_that_comes_next(
    tmp_path: Path, seed: int
) -> None:
    """Nobody looks for it any more: all of it lies below the recovery point then."""
    disk = PowerCutDisk()
    log = open_in(tmp_path, disk=disk)
    for number in range(30):
        log.append_as_leader(batch("x" * 100), number // 10, now_ms=1)
    epochs = log.epochs.entries
    crash(log)  # Of the process: the names of the new segments are in memory alone.
    log = open_in(tmp_path, disk=disk)
    saved = SavedState(log.recovery_point)
    assert saved.recovery_point == 30
    crash(log)
    disk = lose_power(tmp_path, disk, random.Random(seed))
    log = open_in(tmp_path, disk=disk, saved=saved)
    assert values_of(log) == ["x" * 100] * 30
    assert (log.epochs.entries, log.holes, log.noted_damage) == (epochs, (), ())


@pytest.mark.parametrize("how", ["missing", "garbage", "stale", "empty"])
def test_the_epoch_checkpoint_is_made_to_agree_with_the_log(tmp_path: Path, how: str) -> None:
    log = open_in(tmp_path)
    for number in range(30):
        log.append_as_leader(batch("x" * 100), number // 8, now_ms=1)
    log.flush()
    expected, point = log.epochs.entries, log.recovery_point
    crash(log)
    path = tmp_path / str(PARTITION) / EPOCHS_FILE
    if how == "missing":
        path.unlink()
    elif how == "garbage":
        path.write_bytes(path.read_bytes().replace(b"1 ", b"9 "))
    elif how == "empty":
        path.write_bytes(b"")
    # A stale one: nothing was flushed as far as local state knows.
    saved = SavedState(recovery_point=0 if how == "stale" else point)
    log = open_in(tmp_path, saved=saved)
    assert log.epochs.entries == expected
    assert log.end_of_epoch(2).end_offset == 24


def test_an_epoch_beyond_the_logs_end_is_forgotten(tmp_path: Path) -> None:
    log = filled(tmp_path, "a", epoch=1)
    log.assign_epoch(9)
    log.flush()
    crash(log)
    assert open_in(tmp_path).last_epoch == 1


def test_producers_are_known_again_after_a_crash(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(40):
        log.append_as_leader(batch("x" * 60, producer=(number % 3, 0, number // 3)), 1, now_ms=1)
    expected = {producer: log.producers.entry(producer) for producer in range(3)}
    crash(log)
    for snapshot in (True, False):
        if not snapshot:
            for path in (tmp_path / str(PARTITION)).glob("*.snapshot"):
                path.unlink()
        log = open_in(tmp_path)
        for producer, entry in expected.items():
            found = log.producers.entry(producer)
            assert found is not None
            assert entry is not None
            assert found.batches == entry.batches
        crash(log)


class CountingDisk(Disk):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        data = super().read_at(fd, size, position)
        self.read_bytes += len(data)
        return data


def pushes(sizes: Sequence[int]) -> Iterator[bytes]:
    """What a leader pushes: so many batches at once, of three producers, of epochs that rise."""
    offset = 0
    for push, count in enumerate(sizes):
        numbers = range(offset, offset + count)
        yield b"".join(
            batch(
                "x" * 200,
                producer=(number % 3, 0, number // 3),
                base_offset=number,
                leader_epoch=(number + push) // 20,
            )
            for number in numbers
        )
        offset += count


def test_of_what_a_follower_has_on_the_disk_only_the_newest_segment_is_read_again(
    tmp_path: Path,
) -> None:
    config = small_config(segment_bytes=4000)
    log = open_in(tmp_path, config=config)
    for push in pushes([16] * 20):  # Each of several segments.
        log.append_as_follower(push)
        log.flush()
    crash(log)
    disk = CountingDisk()
    again = open_in(tmp_path, config=config, disk=disk, saved=SavedState(log.recovery_point))
    *closed, active = again.files.segments
    ends_bytes = 800 * len(closed)  # From the last entry of the index on: where they end.
    assert disk.read_bytes <= 2 * active.size_bytes + ends_bytes
    assert again.producers == log.producers


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_snapshot_of_a_segment_closed_within_a_push_says_what_the_log_does(
    tmp_path: Path, sizes: list[int]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    log = open_in(root)
    for push in pushes(sizes):
        log.append_as_follower(push)
    log.flush()
    taken = dict(snapshots(log.directory))
    assert taken.keys() == {segment.base_offset for segment in log.files.segments[1:]}
    for offset, path in taken.items():
        replayed = ProducerState()
        for header in log.headers(0, offset):
            replayed.record(header, header.base_offset, log.home.clock_ms())
        assert newest_snapshot(log.directory, offset, log.epochs) == (replayed, offset), path
    crash(log)


def test_an_append_that_is_taken_back_leaves_no_snapshot_of_it(tmp_path: Path) -> None:
    log = open_in(tmp_path, disk=(disk := FullDisk()))
    first, second = pushes([1, 9])
    log.append_as_follower(first)
    disk.room = 800  # Less than all of it, and more than what is left of the segment.
    with pytest.raises(DiskFullError):
        log.append_as_follower(second)
    disk.room = 1 << 30
    for number in range(1, 5):  # Of the same epoch, but another's; less than a segment.
        log.append_as_follower(
            batch("y", producer=(9, 0, number - 1), base_offset=number, leader_epoch=0)
        )
    log.flush()
    crash(log)
    assert open_in(tmp_path).producers == log.producers


def test_a_snapshot_of_what_was_cut_off_is_not_believed(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(8):
        log.append_as_leader(batch("x" * 200, producer=(7, 0, number)), 1, now_ms=1)
    log.flush()
    directory = tmp_path / str(PARTITION)
    newest = max(directory.glob("*.snapshot"))
    taken_at = int(newest.stem)
    stale = newest.read_bytes()
    log.truncate_to(1)
    assert not newest.exists()
    while log.log_end_offset < taken_at + 1:
        base = log.log_end_offset
        log.append_as_follower(
            batch("y" * 200, producer=(8, 0, base - 1), base_offset=base, leader_epoch=2)
        )
    crash(log)
    newest.write_bytes(stale)  # The removal did not reach the disk.
    log = open_in(tmp_path)
    entry = log.producers.entry(7)
    assert entry is not None
    assert [one.base_offset for one in entry.batches] == [0]
    assert log.producers.entry(8) is not None


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    crash(filled(tmp_path, "a"))
    directory = tmp_path / str(PARTITION)
    for name in (
        "leader-epoch-checkpoint.tmp",
        "00000000000000000900.index",
        "00000000000000000900.timeindex",
        "00000000000000000000.log.deleted",
        "00000000000000000900.snapshot",
    ):
        (directory / name).write_bytes(b"leftover")
    log = open_in(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "00000000000000000000.log",
        "leader-epoch-checkpoint",
    ]
    assert values_of(log) == ["a"]


def test_a_log_that_ends_below_its_start_begins_anew_there(tmp_path: Path) -> None:
    crash(filled(tmp_path, "a", "b"))
    log = open_in(tmp_path, saved=SavedState(log_start_offset=50))
    assert (log.log_start_offset, log.log_end_offset) == (50, 50)
    assert log.append_as_leader(batch("c"), 2, now_ms=1).base_offset == 50


def test_a_log_start_that_a_clean_stop_cannot_have_left_deletes_nothing(tmp_path: Path) -> None:
    filled(tmp_path, "a", "b").close(save=True)
    for start in (3, 1 << 40):
        with pytest.raises(StorageError, match=rf"orders-3: .*begins at offset {start}.*move "):
            open_in(tmp_path, saved=SavedState(2, start, clean=True))
    assert values_of(open_in(tmp_path, saved=SavedState(2, 0, clean=True))) == ["a", "b"]


def test_after_a_clean_stop_the_log_is_not_read_again(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(60):
        log.append_as_leader(batch("x" * 50, timestamp_ms=number), number // 20, now_ms=1)
    log.close(save=True)
    saved = SavedState(log.recovery_point, 0, clean=True)
    again = open_in(tmp_path, saved=saved)
    assert again.opened_clean
    assert (again.log_end_offset, again.durable_offset) == (60, 60)
    assert again.epochs.entries == log.epochs.entries
    assert again.producers == log.producers
    assert again.max_timestamp(below=60) == log_max(again)
    assert not again.needs_flush
    again.close(save=True)


def log_max(log: PartitionLog) -> object:
    records = records_of(read_all(log))
    return log.offset_for_timestamp(max(record.timestamp_ms for record in records), below=60)


def test_a_log_changed_behind_a_clean_stop_is_recovered(tmp_path: Path) -> None:
    log = filled(tmp_path, "a", "b", "c")
    log.close(save=True)
    path = newest_segment(tmp_path)
    path.write_bytes(path.read_bytes() + b"torn")
    log = open_in(tmp_path, saved=SavedState(3, 0, clean=True))
    assert not log.opened_clean
    assert values_of(log) == ["a", "b", "c"]
