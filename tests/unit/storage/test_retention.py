"""What is too old or too much: which segments go, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.core.partition_events import PartitionChanged, PartitionState
from penstock.broker.core.replica import Replica
from penstock.broker.replication.partition import Partition
from penstock.broker.retention import Retention
from penstock.broker.storage.damage import Examination, mend
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.retention import AT_ONCE, delete_old
from penstock.wire.errors import DiskFullError
from penstock.wire.ids import LeaderEpoch, TopicIdPartition
from penstock.wire.records import RecordData, encode_batch
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    KEY,
    PARTITION,
    NoRoom,
    batch,
    open_in,
    records_of,
    small_config,
    values_of,
)

EPOCH = LeaderEpoch(0)


def filled(tmp_path: Path, count: int, **config: int | bool) -> PartitionLog:
    """A log with a segment for each batch; batch i is of the time 1000 * i."""
    log = open_in(tmp_path, config=small_config(segment_bytes=100, **config))
    for number in range(count):
        log.append_as_leader(batch(str(number), timestamp_ms=1000 * number), EPOCH, now_ms=0)
    log.flush()
    assert len(log.files.segments) == count
    return log


def segments_on_disk(log: PartitionLog) -> int:
    return len(list(log.directory.glob("*.log")))


def test_without_bounds_everything_stays(tmp_path: Path) -> None:
    log = filled(tmp_path, 5)
    assert delete_old(log, high_watermark=5, now_ms=2**62) == 0


def test_segments_whose_records_are_all_older_go(tmp_path: Path) -> None:
    log = filled(tmp_path, 5, retention_ms=1000)
    assert delete_old(log, high_watermark=5, now_ms=3000) == 2  # Exactly so old is not older.
    assert delete_old(log, high_watermark=5, now_ms=3001) == 3


def test_the_first_that_is_young_enough_keeps_those_after_it(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(segment_bytes=100, retention_ms=100))
    for number, timestamp_ms in enumerate((0, 9000, 0, 0)):
        log.append_as_leader(batch(str(number), timestamp_ms=timestamp_ms), EPOCH, now_ms=0)
    log.flush()
    assert delete_old(log, high_watermark=4, now_ms=5000) == 1


def test_nothing_goes_that_is_not_committed(tmp_path: Path) -> None:
    log = filled(tmp_path, 5, retention_ms=1)
    assert delete_old(log, high_watermark=2, now_ms=2**62) == 2
    assert delete_old(log, high_watermark=0, now_ms=2**62) == 0
    assert len(log.files.segments) == 5


def test_the_oldest_go_while_the_rest_is_large_enough(tmp_path: Path) -> None:
    log = filled(tmp_path, 5)
    size = log.size_bytes // 5
    log.config = small_config(retention_bytes=2 * size)
    assert delete_old(log, high_watermark=5, now_ms=0) == 3
    log.config = small_config(retention_bytes=2 * size + 1)
    assert delete_old(log, high_watermark=5, now_ms=0) == 2
    log.config = small_config(retention_bytes=9 * size)
    assert delete_old(log, high_watermark=5, now_ms=0) == 0


def test_a_topic_that_is_only_compacted_keeps_what_is_old(tmp_path: Path) -> None:
    log = filled(tmp_path, 3, retention_ms=1, retention_bytes=0, deletes=False)
    assert delete_old(log, high_watermark=3, now_ms=2**62) == 0


def test_an_active_segment_that_is_too_old_is_closed_and_goes(tmp_path: Path) -> None:
    log = filled(tmp_path, 3, retention_ms=1000)
    start = delete_old(log, high_watermark=3, now_ms=2**62)
    assert start == 3
    log.advance_log_start(start)
    log.flush()
    assert (log.log_start_offset, log.log_end_offset, segments_on_disk(log)) == (3, 3, 1)
    assert delete_old(log, high_watermark=3, now_ms=2**62) == 3  # An empty one is left alone.
    assert segments_on_disk(log) == 1
    log.append_as_leader(batch("next"), EPOCH, now_ms=0)
    log.close(save=True)
    again = open_in(tmp_path, saved=SavedState(4, 3, clean=True))
    assert (again.log_start_offset, values_of(again)) == (3, ["next"])


def young(tmp_path: Path, *, checksum: bool) -> PartitionLog:
    """A log with a closed segment; without checksums its index files are as they once were."""
    log = open_in(tmp_path, config=small_config(retention_ms=1000, index_interval_bytes=100))
    for number in range(6):
        log.append_as_leader(batch(str(number), timestamp_ms=10_000 + number), EPOCH, now_ms=0)
    log.roll()
    log.flush()
    [segment, _] = log.files.segments
    segment.max_timestamp = None
    if not checksum:
        for path in (segment.index_path, segment.time_index_path):
            path.write_bytes(path.read_bytes()[:-4])
    return log


@pytest.mark.parametrize("checksum", [True, False])
def test_no_bit_that_flips_in_a_time_index_deletes_young_records(
    tmp_path: Path, *, checksum: bool
) -> None:
    log = young(tmp_path, checksum=checksum)
    segment = log.files.segments[0]
    sound = segment.time_index_path.read_bytes()
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        segment.time_index_path.write_bytes(damaged)
        segment.max_timestamp = None
        assert delete_old(log, high_watermark=6, now_ms=11_005) == 0, bit
        assert delete_old(log, high_watermark=6, now_ms=11_006) == 6


@pytest.mark.parametrize("checksum", [True, False])
def test_no_time_index_that_lost_its_end_deletes_young_records(
    tmp_path: Path, *, checksum: bool
) -> None:
    log = young(tmp_path, checksum=checksum)
    segment = log.files.segments[0]
    sound = segment.time_index_path.read_bytes()
    for size in range(len(sound)):
        segment.time_index_path.write_bytes(sound[:size])
        segment.max_timestamp = None
        assert delete_old(log, high_watermark=6, now_ms=11_005) == 0, size


@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_header_of_the_latest_batch_deletes_nothing_young_and_keeps_nothing_for_ever(
    tmp_path: Path, *, checksum: bool
) -> None:
    log = young(tmp_path, checksum=checksum)
    segment = log.files.segments[0]
    *_, latest = segment.walk(0, 0)
    damaged = bytearray(segment.path.read_bytes())
    damaged[latest.position + 41] ^= 0x20  # A bit of its largest timestamp, which is then lower.
    segment.path.write_bytes(damaged)
    os.utime(segment.path, (50, 50))
    # By its checksum the index is right; an unsealed one is no better than the header.
    newest_ms = 10_005 if checksum else 50_000
    for _ in range(2):
        assert delete_old(log, high_watermark=6, now_ms=newest_ms + 1000) == 0
        assert delete_old(log, high_watermark=6, now_ms=newest_ms + 1001) == 6


def test_an_index_made_anew_beside_a_damaged_batch_deletes_nothing_young(tmp_path: Path) -> None:
    """Its file is gone, and the header says an earlier time than the record has."""
    log = young(tmp_path, checksum=True)
    segment = log.files.segments[0]
    *_, latest = segment.walk(0, 0)
    sound = segment.path.read_bytes()
    damaged = bytearray(sound)
    for at in range(latest.position + 35, latest.position + 43):
        damaged[at] = 0  # Its largest timestamp.
    segment.path.write_bytes(damaged)
    segment.time_index_path.unlink()
    os.utime(segment.path, (50, 50))
    for _ in range(2):
        assert delete_old(log, high_watermark=6, now_ms=51_000) == 0
        assert delete_old(log, high_watermark=6, now_ms=51_001) == 6
    assert values_of_first(log, 5) == ["0", "1", "2", "3", "4"], "what is sound is served"
    assert not segment.time_index_path.exists(), "a start may not believe it"
    [damage] = Examination(log, segment).run().damages
    mend(log, segment, damage, sound[latest.position :])()
    findings = Examination(log, segment).run()
    assert (findings.damages, findings.index_is_damaged) == ([], True)
    segment.mend_index()
    assert segment.time_index_path.exists()
    assert delete_old(log, high_watermark=6, now_ms=11_005) == 0
    assert delete_old(log, high_watermark=6, now_ms=11_006) == 6


def values_of_first(log: PartitionLog, count: int) -> list[str]:
    data = log.read(0, 1 << 20, below=count)
    return [(record.value or b"").decode() for record in records_of(data)]


def test_what_has_no_time_counts_from_when_it_was_written(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=small_config(retention_ms=1000))
    log.append_as_leader(encode_batch([RecordData(-1, b"k", b"v")]), EPOCH, now_ms=0)
    log.flush()
    os.utime(log.files.active.path, (50, 50))
    assert delete_old(log, high_watermark=1, now_ms=51_000) == 0
    assert delete_old(log, high_watermark=1, now_ms=51_001) == 1


def test_a_few_segments_go_at_once(tmp_path: Path) -> None:
    log = filled(tmp_path, AT_ONCE + 3, retention_ms=1)
    assert delete_old(log, high_watermark=EVERYTHING, now_ms=2**62) == AT_ONCE


def test_what_was_deleted_stays_deleted_after_a_crash(tmp_path: Path) -> None:
    log = filled(tmp_path, 4, retention_ms=1)
    log.advance_log_start(delete_old(log, high_watermark=3, now_ms=2**62))
    log.flush()
    again = open_in(tmp_path, saved=SavedState(log.recovery_point, 3))
    assert (again.log_start_offset, values_of(again)) == (3, ["3"])


def test_a_full_disk_keeps_the_active_segment_as_it_was(tmp_path: Path) -> None:
    disk = NoRoom()
    log = open_in(tmp_path, config=small_config(retention_ms=1), disk=disk)
    log.append_as_leader(batch("a"), EPOCH, now_ms=0)
    disk.full = {"create"}
    with pytest.raises(DiskFullError):
        delete_old(log, high_watermark=1, now_ms=2**62)
    disk.full = set()
    assert values_of(log) == ["a"]
    assert delete_old(log, high_watermark=1, now_ms=2**62) == 1


# --- the loop ------------------------------------------------------------------------------------


class Host:
    """What a partition asks of its manager, as far as these tests go."""

    def clock_ms(self) -> int:
        return 0

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


class Broker:
    """A broker with one partition."""

    def __init__(self, log: PartitionLog, *, leader: int) -> None:
        self.log = log
        replica = Replica(1, log, high_watermark=log.log_end_offset, lag_max_ms=1)
        self.partition = Partition(KEY, PARTITION, log, replica, Host())  # type: ignore[arg-type]
        state = PartitionState(leader, 5, 1, (1, 2), frozenset({leader}))
        self.partition.handle(PartitionChanged(state, 1, 0))
        self.retention = Retention(self, self, interval_ms=1, wall_clock_ms=lambda: 2**62)

    def partitions(self) -> Iterator[Partition]:
        return iter([self.partition])

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        return self.log if key == KEY else None


async def test_the_leader_deletes_all_that_is_due_step_by_step(tmp_path: Path) -> None:
    log = filled(tmp_path, 2 * AT_ONCE + 3, retention_ms=1)
    await Broker(log, leader=1).retention.check()
    assert log.log_start_offset == log.log_end_offset == 2 * AT_ONCE + 3
    log.flush()
    assert segments_on_disk(log) == 1


async def test_a_follower_waits_for_its_leader(tmp_path: Path) -> None:
    log = filled(tmp_path, 3, retention_ms=1)
    broker = Broker(log, leader=2)
    await broker.retention.check()
    assert log.log_start_offset == 0
    log.advance_log_start(3)  # As the leader's push has it.
    log.flush()
    assert segments_on_disk(log) == 1
    assert log.files.active.size_bytes > 0
    await broker.retention.check()
    log.flush()
    assert (segments_on_disk(log), log.size_bytes) == (1, 0)


async def test_a_fault_of_our_own_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 3, retention_ms=1)
    broker = Broker(log, leader=1)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.broker.retention.delete_old", lambda *_, **__: 1 / 0)
        await broker.retention.check()
    assert log.log_start_offset == 0
    await broker.retention.check()
    assert log.log_start_offset == 3


async def test_a_partition_that_fails_does_not_stop_the_loop(tmp_path: Path) -> None:
    log = filled(tmp_path, 3, retention_ms=1)
    broker = Broker(log, leader=1)
    log.home.fail(OSError("broken"), "testing")
    await broker.retention.check()
    assert log.log_start_offset == 0
