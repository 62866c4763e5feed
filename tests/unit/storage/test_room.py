"""When a full directory counts as one with room again, and what is done where nobody can tell."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.wire.errors import DiskFullError
from tests.unit.storage.storage_kit import Clock, NoRoom, batch, values_of
from tests.unit.storage.test_full_disk import limited


def told_of(append: Callable[[], object]) -> list[str]:
    with capture_logs() as lines:
        append()
    return [line["event"] for line in lines]


def test_a_directory_has_room_once_as_much_fits_as_was_refused_and_for_a_while(
    tmp_path: Path,
) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    disk.free = 600
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("a"), 0, now_ms=1)
    clock.now_ms += 5_000
    copied = batch("a", leader_epoch=0)
    assert told_of(lambda: log.append_as_follower(copied)) == [], "it may use half of it"
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("b"), 0, now_ms=1)
    disk.free = 1 << 30
    clock.now_ms += 4_999
    assert told_of(lambda: log.append_as_leader(batch("b"), 0, now_ms=1)) == []
    clock.now_ms += 1
    told = told_of(lambda: log.append_as_leader(batch("c"), 0, now_ms=1))
    assert told == ["data_directory_has_room"]


def test_where_the_file_system_does_not_say_the_write_tells(tmp_path: Path) -> None:
    class Silent(NoRoom):
        def free_bytes(self, path: Path) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = Silent()
    log = limited(tmp_path, disk, Clock())
    log.append_as_leader(batch("a"), 0, now_ms=1)
    disk.full.add("write")
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("b"), 0, now_ms=1)
    assert values_of(log) == ["a"]
