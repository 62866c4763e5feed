"""What is said of a data directory that has no room, in the log and in metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker.metrics import BrokerMetrics
from penstock.broker.storage.log import PartitionLog
from penstock.wire.errors import DiskFullError
from tests.unit.storage.storage_kit import Clock, NoRoom, batch
from tests.unit.storage.test_full_disk import limited


def refused(log: PartitionLog) -> None:
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("a"), 0, now_ms=1)


def test_a_directory_that_fills_again_after_it_had_room_is_reported_again(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    with capture_logs() as logs:
        for _ in range(2):
            disk.free = 0
            refused(log)
            clock.now_ms += 2000
            disk.free = 1 << 30
            log.append_as_leader(batch("a"), 0, now_ms=1)  # Too soon to say that there is room.
            clock.now_ms += 4000
    assert [line["event"] for line in logs] == ["data_directory_full"] * 2


def test_a_directory_that_stays_full_is_reported_every_ten_minutes(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    disk.free = 0
    with capture_logs() as logs:
        for _ in range(60 * 21):
            refused(log)
            clock.now_ms += 1000
    assert [line["event"] for line in logs] == ["data_directory_full"] * 3


def test_a_reserve_that_was_lowered_ends_what_was_refused_for_the_higher_one(
    tmp_path: Path,
) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    disk.free = log.home.settings.min_free_bytes
    refused(log)
    lower = log.home.settings.min_free_bytes // 2
    log.home.settings = replace(log.home.settings, min_free_bytes=lower)
    log.home.room.reserve_changed(lower)
    clock.now_ms += 5000
    with capture_logs() as logs:
        log.append_as_leader(batch("a"), 0, now_ms=1)
    assert [line["event"] for line in logs] == ["data_directory_has_room"]


def test_metrics_tell_how_much_is_free_and_which_directories_are_full(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    metrics = BrokerMetrics()
    metrics.storage.watch_room([log.home])
    free = "penstock_log_directory_free_bytes", {"directory": str(tmp_path)}

    def shown() -> tuple[float | None, float | None]:
        value = metrics.registry.get_sample_value
        return value(*free), value("penstock_full_log_directories")

    disk.free = 1 << 30
    assert shown() == (1 << 30, 0)
    disk.free = 5
    assert shown() == (5, 0)
    refused(log)
    assert shown() == (5, 1)
    clock.now_ms += 600_000
    assert shown() == (5, 1)
    # Nobody appends, and there is room all the same.
    disk.free = 1 << 30
    assert shown() == (1 << 30, 0)
    # Where it is not bytes that there are none of, only appends can tell.
    log.home.room.refused("no inode is left", "making a segment")
    assert shown() == (1 << 30, 1)
    log.home.fail(OSError("away"), "reading")
    value, full = shown()
    assert value is not None
    assert math.isnan(value)
    assert full == 0


def test_a_controllers_disk_is_shown_unless_its_broker_shows_the_same(tmp_path: Path) -> None:
    raft, same, other, gone = (tmp_path / name for name in ("raft", "same", "other", "gone"))
    devices = {raft: 1, same: 1, other: 2}

    def device_of(path: Path) -> int:
        if path not in devices:
            raise OSError("no such file or directory")
        return devices[path]

    def shown(directory: Path, *beside: Path, disk: NoRoom) -> tuple[float | None, ...]:
        metrics = BrokerMetrics()
        metrics.storage.watch_metadata_room(directory, beside, device_of, disk)
        return tuple(
            metrics.registry.get_sample_value(
                f"penstock_log_directory_{what}_bytes", {"directory": str(directory)}
            )
            for what in ("free", "total")
        )

    raft.mkdir()
    disk = NoRoom()
    disk.free = 7
    total = disk.total_bytes(raft)
    assert shown(raft, disk=disk) == (7, total), "there is no broker"
    assert shown(raft, gone, other, disk=disk) == (7, total), "it has a disk of its own"
    assert shown(raft, other, same, disk=disk) == (None, None)
    # One that cannot be looked at may be the one that is full.
    devices[gone] = 3
    _, unknown = shown(gone, other, disk=disk)
    assert unknown is not None
    assert math.isnan(unknown)
