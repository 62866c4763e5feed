from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.core.producer_state import RESTART_GRACE_MS
from penstock.broker.storage.clock import steady_clock_ms
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import (
    CorruptRecordError,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidRecordError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    RecordTooLargeError,
    StorageError,
)
from penstock.wire.records import RecordData, encode_batch, parse_header
from penstock.wire.topic_config import MAX_MESSAGE_BYTES
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    PARTITION,
    BrokenDisk,
    Clock,
    FullDisk,
    batch,
    open_descriptors,
    open_in,
    read_all,
    records_of,
    small_config,
    values_of,
)


def files_of(root: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in (root / str(PARTITION)).glob(f"*.{suffix}"))


# --- appending and reading -----------------------------------------------------------------------


def test_an_empty_log_begins_and_ends_at_0(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (0, 0, 0)
    assert log.last_epoch == -1
    assert log.read(0, 1000, below=EVERYTHING) == b""
    assert log.max_timestamp(below=EVERYTHING) is None
    assert log.offset_for_timestamp(0, below=EVERYTHING) is None


def test_appended_records_get_offsets_and_the_leader_epoch(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    info = log.append_as_leader(batch("a", "b") + batch("c"), 5, now_ms=1)
    assert (info.base_offset, info.last_offset, info.log_append_time_ms) == (0, 2, -1)
    assert log.append_as_leader(batch("d"), 5, now_ms=1).base_offset == 3
    data = read_all(log)
    assert [record.offset for record in records_of(data)] == [0, 1, 2, 3]
    assert values_of(log) == ["a", "b", "c", "d"]
    assert parse_header(data).leader_epoch == 5 == log.last_epoch


def test_a_read_gives_whole_batches_within_its_bounds(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for value in "abcdef":
        log.append_as_leader(batch(value, value), 0, now_ms=1)
    size = len(batch("a", "a"))
    assert len(log.read(3, size * 2, below=EVERYTHING)) == size * 2
    assert parse_header(log.read(3, size, below=EVERYTHING)).base_offset == 2
    assert len(log.read(0, 10_000, below=6)) == size * 3
    assert len(log.read(0, 10_000, below=7)) == size * 3, "the fourth batch is not below 7"
    assert log.read(4, 10_000, below=4) == b""


def test_a_first_batch_larger_than_the_bound_comes_all_the_same(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("x" * 500), 0, now_ms=1)
    assert len(log.read(0, 10, below=EVERYTHING)) == len(batch("x" * 500))
    assert log.read(0, 10, below=EVERYTHING, min_one=False) == b""


@pytest.mark.parametrize("size_bytes", [50, 900, 40_000, 200_000])
@pytest.mark.parametrize("interval_bytes", [0, 4096, 1_000_000_000])
def test_no_large_batch_is_read_to_be_cut_off(
    tmp_path: Path, size_bytes: int, interval_bytes: int
) -> None:
    class CountingDisk(Disk):
        read_bytes = 0

        def read_at(self, fd: int, size: int, position: int) -> bytes:
            data = super().read_at(fd, size, position)
            self.read_bytes += len(data)
            return data

    disk = CountingDisk()
    config = small_config(
        index_interval_bytes=interval_bytes, segment_bytes=1 << 30, max_message_bytes=1 << 20
    )
    log = open_in(tmp_path, config=config, disk=disk)
    batches = [batch("x" * (size_bytes + 7 * number)) for number in range(12)]
    for each in batches:
        log.append_as_leader(each, 0, now_ms=1)
    data = read_all(log)
    for first in (0, 1, 7, 11):
        whole = [len(b"".join(batches[first : end + 1])) for end in range(first, 12)]
        behind = data[len(b"".join(batches[:first])) :]
        for max_bytes in range(1, whole[-1] + 100, max(1, size_bytes // 3)):
            most = max([size for size in whole if size <= max_bytes], default=whole[0])
            assert log.cold_read(first, 1) is None, "it knows now where the first one begins"
            disk.read_bytes = 0
            assert log.read(first, max_bytes, below=EVERYTHING) == behind[:most]
            if interval_bytes <= 4096 and max_bytes >= whole[0]:
                assert disk.read_bytes <= most + 16 * 1024 + 4096


def test_offsets_outside_of_the_log_are_refused(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a", "b", "c"), 0, now_ms=1)
    log.advance_log_start(2)
    for offset in (0, 1, 4):
        with pytest.raises(OffsetOutOfRangeError, match="orders-3 has offsets 2 to 3"):
            log.read(offset, 100, below=EVERYTHING)
    with pytest.raises(OffsetOutOfRangeError):
        log.advance_log_start(4)


def test_segments_roll_by_size_and_every_offset_is_found(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(60):
        log.append_as_leader(batch(f"{number}", f"{number}+"), 0, now_ms=1)
    assert len(files_of(tmp_path, "log")) > 5
    assert files_of(tmp_path, "log")[0] == "00000000000000000000.log"
    log.flush()
    for offset in range(120):
        found = records_of(log.read(offset, 1, below=EVERYTHING))
        assert offset in {record.offset for record in found}
    for name in files_of(tmp_path, "log"):
        assert (tmp_path / str(PARTITION) / name).stat().st_size <= 900


def test_segments_roll_by_the_age_of_their_first_batch(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(segment_ms=100))
    for timestamp in (1000, 1100, 1101, 1150, 1300):
        log.append_as_leader(batch("v", timestamp_ms=timestamp), 0, now_ms=1)
    bases = [int(name.partition(".")[0]) for name in files_of(tmp_path, "log")]
    assert bases == [0, 2, 4]


def test_one_append_may_fill_several_segments(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    sent = b"".join(batch(f"{number}" * 100) for number in range(12))
    info = log.append_as_leader(sent, 0, now_ms=1)
    assert (info.base_offset, info.last_offset) == (0, 11)
    assert len(files_of(tmp_path, "log")) > 1
    assert values_of(log) == [f"{number}" * 100 for number in range(12)]


def test_a_topic_with_log_append_time_stamps_records_itself(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(log_append_time=True))
    info = log.append_as_leader(batch("a", "b", timestamp_ms=5), 0, now_ms=777)
    assert info.log_append_time_ms == 777
    assert [record.timestamp_ms for record in records_of(read_all(log))] == [777, 777]
    assert log.max_timestamp(below=2) == TimestampedOffset(0, 777, 0)


def test_a_follower_has_the_leaders_bytes(tmp_path: Path) -> None:
    (tmp_path / "leader").mkdir()
    (tmp_path / "follower").mkdir()
    leader, follower = open_in(tmp_path / "leader"), open_in(tmp_path / "follower")
    for epoch in (1, 1, 4):
        sent = batch("a", "b", producer=(9, epoch, 0 if epoch == 4 else leader.log_end_offset))
        leader.append_as_leader(sent, epoch, now_ms=1)
    follower.append_as_follower(leader.read(0, 10_000, below=EVERYTHING))
    assert read_all(follower) == read_all(leader)
    assert follower.epochs.entries == leader.epochs.entries
    ours, theirs = leader.producers.entry(9), follower.producers.entry(9)
    assert ours is not None
    assert theirs is not None
    assert ours.batches == theirs.batches


# --- what is refused, with nothing appended ------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("records", "error", "says"),
    [
        (flipped(batch("a"), 70), CorruptRecordError, "orders-3: .*CRC-32C"),
        (batch("a")[:-1], CorruptRecordError, "orders-3: "),
        (b"\x00" * 61, CorruptRecordError, "magic 0"),
        (b"abc", CorruptRecordError, "61 bytes"),
        (batch("x" * 2000), RecordTooLargeError, "orders-3: .*2[0-9]{3} bytes.*max.message.bytes"),
        (batch("x" * 1000), RecordTooLargeError, "segment.bytes is 900"),
        (batch("a", producer=(7, 0, 3)), OutOfOrderSequenceError, "sequence 3"),
    ],
    ids=["flipped", "torn", "magic", "short", "large", "larger than a segment", "sequence"],
)
def test_what_is_not_sound_is_refused_whole(
    tmp_path: Path, records: bytes, error: type[Exception], says: str
) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("before"), 0, now_ms=1)
    for attempt in (records, batch("good", producer=(8, 0, 0)) + records):
        with pytest.raises(error, match=says):
            log.append_as_leader(attempt, 0, now_ms=1)
    assert log.log_end_offset == 1
    assert values_of(log) == ["before"]
    log.append_as_leader(batch("after", producer=(8, 0, 0)), 0, now_ms=1)
    assert values_of(log) == ["before", "after"]


def test_a_batch_that_no_topic_could_take_is_only_to_be_smaller(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    with pytest.raises(RecordTooLargeError, match=r"next: send smaller batches$"):
        log.append_as_leader(batch("x" * MAX_MESSAGE_BYTES), 0, now_ms=1)


def test_an_older_leader_epoch_writes_nothing(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 5, now_ms=1)
    with pytest.raises(FencedLeaderEpochError, match="epoch 5"):
        log.append_as_leader(batch("b"), 4, now_ms=1)
    with pytest.raises(FencedLeaderEpochError):
        log.assign_epoch(4)
    assert log.log_end_offset == 1


@pytest.mark.parametrize(
    "records",
    [
        batch("gap", base_offset=2, leader_epoch=5),
        batch("overlap", base_offset=0, leader_epoch=5),
        batch("old", base_offset=1, leader_epoch=4),
        batch("no epoch", base_offset=1),
        flipped(batch("flip", base_offset=1, leader_epoch=5), 70),
        batch("torn", base_offset=1, leader_epoch=5)[:-1],
        batch("a", base_offset=1, leader_epoch=6) + batch("b", base_offset=2, leader_epoch=5),
    ],
    ids=["gap", "overlap", "old epoch", "no epoch", "flipped", "torn", "epoch goes back"],
)
def test_a_follower_refuses_what_does_not_follow(tmp_path: Path, records: bytes) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 5, now_ms=1)
    with pytest.raises(CorruptRecordError, match=r"orders-3: .*nothing was appended"):
        log.append_as_follower(records)
    assert values_of(log) == ["a"]
    assert log.last_epoch == 5


def test_retries_are_answered_with_their_first_offsets(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    first, second = batch("a", "b", producer=(7, 0, 0)), batch("c", producer=(7, 0, 2))
    log.append_as_leader(first + second, 0, now_ms=1)
    again = log.append_as_leader(first + second, 0, now_ms=1)
    assert (again.base_offset, again.last_offset, again.duplicate) == (0, 2, True)
    assert log.append_as_leader(second, 0, now_ms=1).base_offset == 2
    with pytest.raises(InvalidRecordError, match="send them one by one"):
        log.append_as_leader(second + batch("d", producer=(7, 0, 3)), 0, now_ms=1)
    assert values_of(log) == ["a", "b", "c"]


def test_a_producer_is_forgotten_after_its_time(tmp_path: Path) -> None:
    clock = Clock()
    settings = LogSettings(producer_expiration_ms=3_600_000)
    log = open_in(tmp_path, clock=clock, settings=settings)
    log.append_as_leader(batch("a", producer=(7, 0, 0)), 0, now_ms=clock.now_ms)
    clock.now_ms += 4_000_000
    log.append_as_leader(batch("b"), 0, now_ms=clock.now_ms)
    assert log.producers.entry(7) is None


def test_a_jump_of_the_wall_clock_forgets_no_producer(tmp_path: Path) -> None:
    clock = Clock()  # It advances steadily; what records are stamped with does not.
    log = open_in(tmp_path, clock=clock)
    sent = batch("a", producer=(7, 0, 0))
    log.append_as_leader(sent, 0, now_ms=1_700_000_000_000)
    clock.now_ms += 2000
    again = log.append_as_leader(sent, 0, now_ms=1_700_000_000_000 + 25 * 3_600_000)
    assert (again.base_offset, again.duplicate) == (0, True)
    assert values_of(log) == ["a"]


@pytest.mark.parametrize("jump_hours", [25, 20_000, -20_000])
def test_a_jump_of_the_wall_clock_over_a_restart_forgets_producers_neither_at_once_nor_never(
    tmp_path: Path, jump_hours: int
) -> None:
    clock = Clock()
    log = open_in(tmp_path, clock=clock)
    sent = batch("a", producer=(7, 0, 0))
    log.append_as_leader(sent, 0, now_ms=1)
    log.close(save=True)
    clock.now_ms += jump_hours * 3_600_000
    saved = SavedState(log.recovery_point, 0, clean=True)
    log = open_in(tmp_path, clock=clock, saved=saved)
    clock.now_ms += RESTART_GRACE_MS - 1
    assert log.append_as_leader(sent, 0, now_ms=1).duplicate
    clock.now_ms += log.home.settings.producer_expiration_ms
    log.append_as_leader(batch("b"), 0, now_ms=1)
    assert log.producers.entry(7) is None


def test_the_clock_of_producers_does_not_jump() -> None:
    wall_ns, monotonic_ns = 1_700_000_000_000_000_000, 5_000_000_000
    clock = steady_clock_ms(lambda: wall_ns, lambda: monotonic_ns)
    assert clock() == 1_700_000_000_000
    wall_ns += 90_000_000_000_000
    assert clock() == 1_700_000_000_000
    monotonic_ns += 2_500_000
    assert clock() == 1_700_000_000_002


def test_control_batches_of_producers_are_refused(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    records = [RecordData(1, b"k", b"v")]
    data = encode_batch(records, producer_id=7, producer_epoch=0, base_sequence=0, is_control=True)
    with pytest.raises(InvalidRecordError):
        log.append_as_leader(data, 0, now_ms=1)
    assert log.log_end_offset == 0


# --- cutting -------------------------------------------------------------------------------------


def test_a_cut_takes_batches_epochs_and_producers_with_it(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(20):
        sent = batch(f"{number}", "x" * 60, producer=(7, 0, number * 2))
        log.append_as_leader(sent, number // 5, now_ms=1)
    log.flush()
    log.truncate_to(21)
    assert log.log_end_offset == 20 == log.durable_offset
    assert log.last_epoch == 1
    assert log.end_of_epoch(1).end_offset == 20
    assert log.append_as_leader(batch("new", producer=(7, 0, 20)), 9, now_ms=1).base_offset == 20
    assert values_of(log)[-1] == "new"


def test_cutting_at_the_end_forgets_an_epoch_that_wrote_nothing(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 1, now_ms=1)
    log.assign_epoch(5)
    log.truncate_to(1)
    assert log.last_epoch == 1
    log.append_as_follower(batch("b", base_offset=1, leader_epoch=3))
    assert log.epochs.entries == ((1, 0), (3, 1))


def test_dropping_everything_begins_anew(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for _ in range(20):
        log.append_as_leader(batch("x" * 100, producer=(7, 0, log.log_end_offset)), 1, now_ms=1)
    log.truncate_fully_and_start_at(500)
    assert (log.log_start_offset, log.log_end_offset, log.durable_offset) == (500, 500, 500)
    assert files_of(tmp_path, "log") == ["00000000000000000500.log"]
    log.append_as_follower(batch("a", base_offset=500, leader_epoch=2, producer=(7, 0, 44)))
    log.append_as_leader(batch("b", producer=(7, 0, 45)), 2, now_ms=1)
    assert values_of(log) == ["a", "b"]


def test_whole_segments_below_the_log_start_are_deleted(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for _ in range(40):
        log.append_as_leader(batch("x" * 100), 1, now_ms=1)
    log.flush()
    before = files_of(tmp_path, "log")
    log.advance_log_start(25)
    after = files_of(tmp_path, "log")
    assert log.log_start_offset == 25
    assert set(after) < set(before)
    assert int(after[0].partition(".")[0]) <= 25 < int(after[1].partition(".")[0])
    assert len(files_of(tmp_path, "index")) == len(after) - 1
    log.advance_log_start(10)
    assert log.log_start_offset == 25, "never down"
    assert len(records_of(read_all(log))) >= 15


# --- disks ---------------------------------------------------------------------------------------


def test_a_full_disk_appends_nothing_wherever_it_stops(tmp_path: Path) -> None:
    sent = batch("a" * 300) + batch("b" * 300) + batch("c" * 300)
    for room in range(0, len(sent), 37):
        disk = FullDisk()
        root = tmp_path / str(room)
        root.mkdir()
        log = open_in(root, disk=disk)
        log.append_as_leader(batch("before", producer=(7, 0, 0)), 0, now_ms=1)
        disk.room = room
        with pytest.raises(DiskFullError, match="no room in data directory"):
            log.append_as_leader(sent, 3, now_ms=1)
        assert log.log_end_offset == 1
        assert log.last_epoch == 0
        assert values_of(log) == ["before"]
        disk.room = 1 << 30
        log.append_as_leader(batch("after", producer=(7, 0, 1)), 1, now_ms=1)
        log.flush()
        log.close(save=False)
        assert values_of(open_in(root)) == ["before", "after"]


_LIMITED = """
import json, resource, sys
from pathlib import Path
from penstock.wire.errors import DiskFullError
from tests.unit.storage.storage_kit import batch, open_in, small_config, values_of
log = open_in(Path(sys.argv[1]), config=small_config(segment_bytes=100_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
log.append_as_leader(batch("a" * 300), 0, now_ms=1)
try:
    log.append_as_leader(batch("b" * 300), 0, now_ms=1)
except DiskFullError as error:
    told = error.message
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
size = next(log.directory.glob("*.log")).stat().st_size
log.append_as_leader(batch("c"), 0, now_ms=1)
print(json.dumps([told, size, values_of(log)]))
"""


def test_a_write_that_the_kernel_cuts_short_is_taken_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told, size, values = json.loads(done.stdout.splitlines()[-1])  # After what was logged.
    assert "no room" in told
    assert size == len(batch("a" * 300))
    assert values == ["a" * 300, "c"]


@pytest.mark.parametrize("call", ["write", "sync", "read"])
def test_a_failing_disk_takes_the_directory_down_for_good(tmp_path: Path, call: str) -> None:
    disk = BrokenDisk()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    disk.failing = {call}

    def use() -> None:
        log.read(0, 100, below=EVERYTHING)
        log.append_as_leader(batch("b"), 0, now_ms=1)
        log.flush()

    with pytest.raises(StorageError, match=f"{tmp_path} failed while"):
        use()
    disk.failing = set()
    with pytest.raises(StorageError, match="Input/output error"):
        use()
    assert log.durable_offset == 0


def test_an_append_that_cannot_be_taken_back_fails_the_directory(tmp_path: Path) -> None:
    disk = BrokenDisk()
    log = open_in(tmp_path, disk=disk)
    disk.failing = {"write", "truncate"}
    with pytest.raises(StorageError):
        log.append_as_leader(batch("a"), 0, now_ms=1)
    assert log.home.failure is not None


def test_every_flipped_bit_is_found_on_reading_and_never_served(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for value in ("first", "second", "third"):
        log.append_as_leader(batch(value), 2, now_ms=1)
    log.flush()
    path = tmp_path / str(PARTITION) / files_of(tmp_path, "log")[0]
    sound = path.read_bytes()
    first = len(batch("first"))
    second_end = first + len(batch("second"))
    for at in range(first, second_end):
        path.write_bytes(flipped(sound, at))
        log._files._positions.clear()
        assert log.read(0, 10_000, below=EVERYTHING) == sound[:first]
        with pytest.raises(CorruptRecordError, match=f"orders-3: .*{path}, byte {first}"):
            log.read(1, 10_000, below=EVERYTHING)
    path.write_bytes(sound)
    assert read_all(log) == sound


def test_a_damaged_or_missing_index_is_made_anew(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for number in range(60):
        log.append_as_leader(batch(f"{number}", timestamp_ms=number * 10), 0, now_ms=1)
    log.flush()
    data = read_all(log)
    directory = tmp_path / str(PARTITION)
    names = files_of(tmp_path, "index") + files_of(tmp_path, "timeindex")
    for name in names:
        path = directory / name
        good = path.read_bytes()
        garbage = [b"", good[:-1], bytes(len(good)), os.urandom(len(good)), good[::-1], None]
        for bad in garbage:
            path.unlink() if bad is None else path.write_bytes(bad)
            for segment in log._files.segments[:-1]:
                segment.max_timestamp = None
            log._files._positions.clear()
            for offset in (0, 7, 23, 41, 59):
                assert log.read(offset, 1, below=EVERYTHING) in data
                assert parse_header(log.read(offset, 1, below=EVERYTHING)).base_offset == offset
            path.write_bytes(good)


# --- durability ----------------------------------------------------------------------------------


def test_durable_is_what_was_there_when_the_flush_began(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    task = log.begin_flush()
    log.append_as_leader(batch("b"), 0, now_ms=1)
    task.run()
    assert log.finish_flush(task)
    assert (log.durable_offset, log.log_end_offset) == (1, 2)
    assert log.needs_flush
    log.flush()
    assert log.durable_offset == 2
    assert not log.needs_flush


def test_a_flush_from_before_a_cut_makes_nothing_written_after_it_durable(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    for value in ("a", "b", "c"):
        log.append_as_leader(batch(value), 1, now_ms=1)
    task = log.begin_flush()
    task.run()
    log.truncate_to(1)
    log.append_as_follower(batch("x", base_offset=1, leader_epoch=2))
    log.append_as_follower(batch("y", base_offset=2, leader_epoch=2))
    assert not log.finish_flush(task)
    assert log.durable_offset <= 1
    log.flush()
    assert log.durable_offset == 3


@pytest.mark.parametrize("policy", [FlushPolicy.INTERVAL, FlushPolicy.OS])
def test_under_other_policies_the_end_counts_as_durable(
    tmp_path: Path, policy: FlushPolicy
) -> None:
    log = open_in(tmp_path, settings=LogSettings(flush_policy=policy))
    log.append_as_leader(batch("a"), 0, now_ms=1)
    assert log.durable_offset == 1
    assert log.recovery_point == 0


def test_closing_twice_is_harmless_and_a_closed_log_refuses(tmp_path: Path) -> None:
    before = open_descriptors()
    log = open_in(tmp_path)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 0, now_ms=1)
    read_all(log)
    log.close(save=True)
    log.close(save=True)
    assert open_descriptors() == before
    with pytest.raises(StorageError, match="orders-3: the log is closed"):
        log.append_as_leader(batch("a"), 0, now_ms=1)
    with pytest.raises(StorageError):
        log.read(0, 1, below=EVERYTHING)


def test_closed_segments_do_not_hold_descriptors_beyond_the_bound(tmp_path: Path) -> None:
    before = open_descriptors()
    log = open_in(tmp_path, settings=LogSettings(open_segments_max=3))
    for _ in range(100):
        log.append_as_leader(batch("x" * 100), 0, now_ms=1)
    log.flush()
    read_all(log)
    assert len(files_of(tmp_path, "log")) > 10
    assert open_descriptors() - before <= 4
    log.close(save=False)
