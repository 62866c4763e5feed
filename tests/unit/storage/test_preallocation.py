"""Segments that get their room on the disk in advance."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.recovery import SavedState, open_log
from penstock.broker.storage.settings import LogSettings, TopicLogConfig
from penstock.wire.errors import DiskFullError, StorageError
from penstock.wire.ids import LeaderEpoch, TopicIdPartition, TopicPartition
from tests.unit.storage.storage_kit import (
    TOPIC_ID,
    Clock,
    NoRoom,
    batch,
    open_in,
    small_config,
    values_of,
)

SIZE = 8 * 1024 * 1024
CONFIG = small_config(segment_bytes=SIZE, max_message_bytes=SIZE, preallocate=True)
EPOCH = LeaderEpoch(0)


class Allocating(NoRoom):
    """Counts as allocated what it was told to, and gives back what a cut gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[str, int] = {}

    def _name(self, fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    def allocate(self, fd: int, size: int) -> None:
        self.allocated[self._name(fd)] = size
        self._check_fd("allocate", fd)

    def allocated_bytes(self, fd: int) -> int:
        return max(self.allocated.get(self._name(fd), 0), os.fstat(fd).st_size)

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.allocated[self._name(fd)] = size


def log_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


def test_a_segment_gets_its_room_with_its_first_record_and_keeps_what_it_needs(
    tmp_path: Path,
) -> None:
    disk = Allocating()
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    assert disk.allocated == {}, "an empty partition takes nothing"
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    log.append_as_leader(batch("b"), EPOCH, now_ms=1)
    assert disk.allocated == {log_name(0): SIZE}
    assert log.files.active.path.stat().st_size == log.size_bytes, "no zeros behind the end"
    log.roll()
    assert disk.allocated == {log_name(0): log.size_bytes}
    log.append_as_leader(batch("c"), EPOCH, now_ms=1)
    assert disk.allocated[log_name(2)] == SIZE
    log.close(save=True)
    log = open_in(tmp_path, config=CONFIG, disk=disk, saved=SavedState(3, clean=True))
    assert (log.opened_clean, values_of(log)) == (True, ["a", "b", "c"])


def test_a_start_gives_back_what_a_crash_left_allocated_of_a_closed_segment(
    tmp_path: Path,
) -> None:
    """A power cut may undo that it was given back: nothing but a later flush would have it kept."""
    disk = Allocating()
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    closed = log.files.active
    log.roll()
    log.append_as_leader(batch("b"), EPOCH, now_ms=1)
    log.close(save=False)
    disk.allocated[log_name(0)] = SIZE
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    assert disk.allocated == {log_name(0): closed.size_bytes, log_name(1): SIZE}
    assert values_of(log) == ["a", "b"]


def test_nothing_is_allocated_by_default(tmp_path: Path) -> None:
    assert TopicLogConfig.of({}).preallocate is None
    assert not LogSettings().preallocate
    disk = Allocating()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    assert disk.allocated == {}


@pytest.mark.parametrize(
    ("topic", "node", "allocates"),
    [
        ({}, True, True),
        ({"preallocate": "false"}, True, False),
        ({"preallocate": "true"}, False, True),
    ],
)
def test_the_topic_says_so_or_else_the_node(
    tmp_path: Path, topic: dict[str, str], node: bool, allocates: bool
) -> None:
    disk = Allocating()
    config = TopicLogConfig.of({"segment.bytes": "4096", **topic})
    log = open_in(tmp_path, config=config, disk=disk, settings=LogSettings(preallocate=node))
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    assert disk.allocated == ({log_name(0): 4096} if allocates else {})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_segment_that_finds_no_room_grows_as_it_is_written(tmp_path: Path, number: int) -> None:
    disk = Allocating()
    disk.number = number
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    disk.full = {"allocate"}
    with capture_logs() as lines:
        log.append_as_leader(batch("a"), EPOCH, now_ms=1)
        log.append_as_leader(batch("b"), EPOCH, now_ms=1)
    assert [line["event"] for line in lines] == ["segment_not_preallocated"], "once for a segment"
    assert disk.allocated == {log_name(0): 0}, "not even a part of it stays"
    disk.full = set()
    log.append_as_leader(batch("c"), EPOCH, now_ms=1)
    assert disk.allocated == {log_name(0): 0}
    log.roll()
    log.append_as_leader(batch("d"), EPOCH, now_ms=1)
    assert disk.allocated[log_name(3)] == SIZE
    assert values_of(log) == ["a", "b", "c", "d"]


def test_no_allocation_takes_what_must_stay_free(tmp_path: Path) -> None:
    disk = Allocating()
    disk.free = SIZE + 999
    settings = LogSettings(min_free_bytes=1000)
    log = open_in(tmp_path, config=CONFIG, disk=disk, settings=settings)
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    assert disk.allocated == {}
    log.roll()
    log.append_as_follower(batch("b", base_offset=1, leader_epoch=1))
    assert disk.allocated == {log_name(1): SIZE}, "followers leave half as much"
    disk.free = 999
    log.home.room.ask_again()
    with pytest.raises(DiskFullError, match=r"log\.min\.free\.bytes"):
        log.append_as_leader(batch("c"), LeaderEpoch(1), now_ms=1)


def test_segments_that_begin_in_the_same_second_leave_together_what_must_stay_free(
    tmp_path: Path,
) -> None:
    class Shrinking(Allocating):
        def allocate(self, fd: int, size: int) -> None:
            super().allocate(fd, size)
            self.free -= size

    disk = Shrinking()
    disk.free = 5 * SIZE + SIZE // 2
    settings = LogSettings(min_free_bytes=2 * SIZE)
    home = DataDirectory(tmp_path, settings, Clock(), disk=disk)
    for partition in range(10):
        directory = tmp_path / f"orders-{partition}"
        directory.mkdir()
        log = open_log(
            home,
            directory,
            partition=TopicPartition("orders", partition),
            key=TopicIdPartition(TOPIC_ID, partition),
            config=CONFIG,
        )
        log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    assert disk.free == 2 * SIZE + SIZE // 2


def test_an_append_that_finds_no_room_in_its_new_segment_can_be_made_again(
    tmp_path: Path,
) -> None:
    disk = Allocating()
    config = small_config(preallocate=True)
    log = open_in(tmp_path, config=config, disk=disk)
    log.append_as_leader(batch("a" * 500), EPOCH, now_ms=1)
    disk.full, disk.only = {"write"}, log_name(1)
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("b" * 500), EPOCH, now_ms=1)
    assert [one.size_bytes for one in log.files.segments[1:]] == [0]
    assert disk.allocated[log_name(1)] == 0
    assert (log.log_end_offset, values_of(log)) == (1, ["a" * 500])
    disk.full = set()
    log.append_as_leader(batch("b" * 500), EPOCH, now_ms=1)
    log.flush()
    log.close(save=True)
    log = open_in(tmp_path, config=config, saved=SavedState(2, clean=True))
    assert values_of(log) == ["a" * 500, "b" * 500]


def test_what_a_closed_segment_gave_back_is_synced_by_the_next_flush(tmp_path: Path) -> None:
    class Syncing(Allocating):
        synced: list[str]

        def sync_data(self, fd: int) -> None:
            super().sync_data(fd)
            self.synced.append(self._name(fd))

    disk = Syncing()
    disk.synced = []
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    log.flush()
    disk.synced.clear()
    log.roll()
    log.flush()
    assert log_name(0) in disk.synced, "else a power cut could let it keep all of it"


def test_what_a_crash_left_allocated_is_given_back_when_the_segment_is_closed(
    tmp_path: Path,
) -> None:
    disk = Allocating()
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    log.close(save=False)
    off = small_config(segment_bytes=SIZE)
    log = open_in(tmp_path, config=off, disk=disk)
    assert values_of(log) == ["a"]
    log.roll()
    assert disk.allocated == {log_name(0): log.size_bytes}


def test_a_real_file_takes_up_its_room_and_has_its_size(tmp_path: Path) -> None:
    log = open_in(tmp_path, config=CONFIG)
    path = log.files.active.path
    log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    if path.stat().st_blocks * 512 < SIZE:
        pytest.skip("the file system of the test can't allocate in advance")
    assert path.stat().st_size == log.size_bytes
    log.roll()
    assert path.stat().st_blocks * 512 < SIZE // 2


def test_an_error_of_the_disk_in_an_allocation_is_one(tmp_path: Path) -> None:
    disk = Allocating()
    disk.number = errno.EIO
    log = open_in(tmp_path, config=CONFIG, disk=disk)
    disk.full = {"allocate"}
    with pytest.raises(StorageError, match="failed while appending"):
        log.append_as_leader(batch("a"), EPOCH, now_ms=1)
    assert log.home.failure is not None
