"""One of several data directories fails, or is away at the start: nothing in it is made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import DataDirectoryError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import BrokenDisk, Clock, batch, values_of

ONE = TopicId(b"1" * 16)
EPOCH = 17
Open = Callable[..., LogManager]


@pytest.fixture
def disks(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def open_logs() -> Iterator[Open]:
    managers = []

    def open_manager(
        *paths: Path, disk: Disk | None = None, failed: Mapping[Path, str] | None = None
    ) -> LogManager:
        manager = LogManager(
            paths,
            LogSettings(),
            lambda _: None,
            Clock(),
            cluster_id="c1",
            disk=disk,
            failed=failed,
        )
        manager.open()
        manager.record_broker_epoch(EPOCH)
        managers.append(manager)
        return manager

    yield open_manager
    for manager in managers:
        manager.close()


def key(partition: int) -> TopicIdPartition:
    return TopicIdPartition(ONE, partition)


def make(manager: LogManager, partition: int, *, is_new: bool = True) -> PartitionLog:
    return manager.get_or_create("t", partition, ONE, {}, is_new=is_new)


def fill(manager: LogManager) -> None:
    """Two partitions in each of two directories, with a record each."""
    for partition in range(4):
        make(manager, partition).append_as_leader(batch(f"p{partition}"), 0, now_ms=1)


def in_directory(manager: LogManager, path: Path) -> list[int]:
    return sorted(key.partition for key in manager.held_in(path))


class OneBroken(BrokenDisk):
    """Fails below directories of one name alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def open(self, path: Path, flags: int) -> int:
        if self._name in path.parts:
            self._check("open")
        return super().open(path, flags)


async def fail_one(manager: LogManager, disk: OneBroken) -> None:
    """Let the directory fail by a flush, which writes an epoch checkpoint."""
    disk.failing = {"open"}
    for log in manager.logs():
        log.assign_epoch(1)  # type: ignore[arg-type]
    await eventually(lambda: bool(manager.failed_directories))
    disk.failing = set()


async def test_what_a_failed_directory_holds_is_refused_and_the_rest_goes_on(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    disk = OneBroken("b")
    manager = open_logs(*disks, disk=disk)
    fill(manager)
    held = in_directory(manager, disks[1])
    assert len(held) == 2
    await fail_one(manager, disk)
    assert manager.failed_directories == [disks[1]]
    for partition in held:
        with pytest.raises(StorageError, match="failed while flushing"):
            make(manager, partition)
        with pytest.raises(StorageError):
            manager.delete(key(partition))
        with pytest.raises(StorageError):
            manager.set_aside(key(partition))
    assert in_directory(manager, disks[1]) == held, "it is kept for the next start"
    assert {log.directory.parent for log in manager.logs()} == {disks[0]}
    for log in manager.logs():
        log.append_as_leader(batch("more"), 1, now_ms=1)
    assert make(manager, 9).directory.parent == disks[0]


async def test_after_a_start_without_a_directory_no_log_is_made_that_may_be_in_it(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    manager = open_logs(*disks)
    fill(manager)
    there, away = (in_directory(manager, path) for path in disks)
    manager.close()
    manager = open_logs(*disks, failed={disks[1]: "cannot read meta.json: Input/output error"})
    assert manager.failed_directories == [disks[1]]
    assert manager.previous_broker_epoch() == -1
    for partition in there:
        assert values_of(make(manager, partition, is_new=False)) == [f"p{partition}"]
    for partition in away:
        with pytest.raises(StorageError, match=r"may be in .*b, so no empty one is made"):
            make(manager, partition, is_new=False)
    assert make(manager, 9).directory.parent == disks[0]
    manager.close()
    # The disk is mended: everything is there, and the stop before was not clean.
    manager = open_logs(*disks)
    assert manager.previous_broker_epoch() == -1
    for partition in range(4):
        assert values_of(make(manager, partition, is_new=False)) == [f"p{partition}"]


async def test_a_start_without_any_directory_is_refused(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    with pytest.raises(DataDirectoryError, match="no data directory can be used"):
        open_logs(*disks, failed=dict.fromkeys(disks, "Input/output error"))


async def test_a_directory_that_fails_while_it_is_opened_is_known_by_what_is_in_it(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    manager = open_logs(*disks)
    fill(manager)
    away = in_directory(manager, disks[1])
    manager.close()
    for path in disks:  # As after a crash: the logs are to be checked, and a disk fails then.
        shutil.rmtree(path / ".state")
    disk = OneBroken("b")
    disk.failing = {"open"}
    manager = open_logs(*disks, disk=disk)
    assert manager.failed_directories == [disks[1]]
    assert in_directory(manager, disks[1]) == away
    for partition in away:
        with pytest.raises(StorageError, match="failed while opening"):
            make(manager, partition)


async def test_a_stop_with_a_failed_directory_is_clean_for_none_of_them(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    disk = OneBroken("b")
    manager = open_logs(*disks, disk=disk)
    fill(manager)
    await fail_one(manager, disk)
    manager.close()
    # Not even where the failed one is left out from now on.
    assert open_logs(disks[0]).previous_broker_epoch() == -1


async def test_a_partition_in_two_directories_is_opened_in_none(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    manager = open_logs(*disks)
    fill(manager)
    away = in_directory(manager, disks[1])
    manager.close()
    # It was left out, its partitions were made anew, and now it is back.
    manager = open_logs(disks[0])
    for partition in away:
        make(manager, partition, is_new=False)
    manager.close()
    manager = open_logs(*disks)
    assert manager.previous_broker_epoch() == -1
    for partition in away:
        with pytest.raises(StorageError, match="move the older of the two away"):
            make(manager, partition)
        assert (disks[1] / f"t-{partition}").is_dir()
    assert set(manager.unopened()) == {key(partition) for partition in away}
