"""A start after a flush that failed: memory holds what the disk may lack, and nothing tells."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.broker.storage.disk import Buffer, Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import DiskFullError, StorageError
from penstock.wire.ids import TopicId
from tests.unit.storage.storage_kit import (
    BrokenDisk,
    Clock,
    ForgetfulDisk,
    NoRoom,
    batch,
    open_in,
    path_of,
    small_config,
    values_of,
)

ONE = TopicId(b"1" * 16)
SMALL_SEGMENTS = small_config(segment_bytes=300)


class Recorder(Disk):
    """Knows what was written to log files: a piece a write, in order."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int, bytes]] = []

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        written = super().write_at(fd, buffers, position)
        path = path_of(fd)
        if path.suffix == ".log":
            self.pieces.append((path.name, position, os.pread(fd, written, position)))
        return written

    def spans(self) -> dict[str, tuple[int, int]]:
        """The bytes of each file that were written, once each and from front to back."""
        spans: dict[str, tuple[int, int]] = {}
        for name, position, data in self.pieces:
            begin, end = spans.get(name, (position, position))
            assert position == end, f"{name} is written at {position} after {end}"
            spans[name] = begin, end + len(data)
        return spans


def fail_to_flush(root: Path, disk: ForgetfulDisk, *, torn: bytes = b"") -> None:
    """Leave a log whose first record was flushed, and whose next seven could not be.

    They are in memory then, as the next process finds them, and gone from what is yet to be
    written; ``torn`` comes after them.
    """
    log = open_in(root, disk=disk, config=SMALL_SEGMENTS)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    log.flush()
    for value in "bcdefgh":
        log.append_as_leader(batch(value * 50), 0, now_ms=1)
    disk.full, disk.only = {"sync"}, ".log"
    with pytest.raises((DiskFullError, StorageError)):
        log.flush()
    assert log.durable_offset == 1
    log.close(save=False)
    disk.full = set()
    with max(log.directory.glob("*.log")).open("ab") as file:
        file.write(torn)


def in_files(log: PartitionLog) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.directory.glob("*.log")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("torn", [b"", b"half a batch"])
def test_what_a_start_counts_as_durable_is_on_the_disk(
    tmp_path: Path, number: int, torn: bytes
) -> None:
    disk = ForgetfulDisk(number)
    fail_to_flush(tmp_path, disk, torn=torn)
    log = open_in(tmp_path, disk=disk, config=SMALL_SEGMENTS, saved=SavedState(recovery_point=1))
    assert log.durable_offset == log.recovery_point == 8
    assert len(in_files(log)) > 2
    assert disk.on_disk == in_files(log)


def test_only_what_lies_above_the_recovery_point_is_written_again(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 30, max_message_bytes=4 << 20)
    log = open_in(tmp_path, config=config)
    log.append_as_leader(batch("a" * 1_200_000), 0, now_ms=1)
    log.append_as_leader(batch("b"), 0, now_ms=1)
    log.flush()
    point, position = log.recovery_point, log.size_bytes
    # What is read at once holds many batches, ends within one, or is less than one.
    sizes = [300_000] * 7 + [20] * 100 + [2_500_000, 10, 900_000]
    for size in sizes:
        log.append_as_leader(batch("c" * size), 0, now_ms=1)
    log.close(save=False)
    [(name, content)] = in_files(log).items()
    disk = Recorder()
    again = open_in(tmp_path, config=config, disk=disk, saved=SavedState(recovery_point=point))
    assert in_files(again) == {name: content}
    assert disk.spans() == {name: (position, len(content))}
    assert len(disk.pieces) < len(sizes) / 5, "it is written in large pieces"


def test_a_start_after_a_clean_stop_writes_no_batch_again(tmp_path: Path) -> None:
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    log.close(save=True)
    disk = Recorder()
    point = log.recovery_point
    assert open_in(tmp_path, disk=disk, saved=SavedState(point, clean=True)).opened_clean
    open_in(tmp_path, disk=disk, saved=SavedState(point))
    assert not disk.pieces


def test_what_cannot_be_written_again_for_want_of_room_is_tried_again(tmp_path: Path) -> None:
    disk = ForgetfulDisk()
    fail_to_flush(tmp_path, disk)
    disk.full = {"write"}
    for _ in range(2):
        with pytest.raises(DiskFullError, match="opening orders-3"):
            open_in(tmp_path, disk=disk, config=SMALL_SEGMENTS)
    disk.full = set()
    log = open_in(tmp_path, disk=disk, config=SMALL_SEGMENTS)
    assert log.durable_offset == 8
    assert disk.on_disk == in_files(log)


def test_a_disk_that_fails_when_it_is_written_again_fails_the_directory(tmp_path: Path) -> None:
    fail_to_flush(tmp_path, ForgetfulDisk(errno.EIO))
    disk = BrokenDisk()
    disk.failing = {"write"}
    with pytest.raises(StorageError, match="until the disk is mended"):
        open_in(tmp_path, disk=disk, config=SMALL_SEGMENTS)


def managed(path: Path, disk: Disk) -> LogManager:
    manager = LogManager([path], LogSettings(), lambda _: None, Clock(), cluster_id="c1", disk=disk)
    manager.open()
    return manager


async def test_a_stop_that_leaves_a_log_unrecovered_is_not_clean(tmp_path: Path) -> None:
    """The next start would open it as it is, and count as durable what nobody has checked."""
    disk = NoRoom()
    root = tmp_path / "logs"
    manager = managed(root, disk)
    manager.get_or_create("t", 0, ONE, {}).append_as_leader(batch("a" * 90), 0, now_ms=1)
    manager.close()
    manager = managed(root, disk)
    log = manager.get_or_create("t", 0, ONE, {})
    for value in "bc":
        log.append_as_leader(batch(value * 90), 0, now_ms=1)
    crashed = tmp_path / "crashed"
    shutil.copytree(root, crashed)
    manager.close()
    [path] = crashed.glob("t-0/*.log")
    path.write_bytes(path.read_bytes()[:-60] + bytes(60))  # The last header is whole.
    disk.full, disk.only = {"write"}, ".log"
    manager = managed(crashed, disk)
    assert [type(error) for error in manager.unopened().values()] == [DiskFullError]
    manager.close()
    disk.full = set()
    manager = managed(crashed, disk)
    log = manager.get_or_create("t", 0, ONE, {})
    assert values_of(log) == ["a" * 90, "b" * 90]
    manager.close()
