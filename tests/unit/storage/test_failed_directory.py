"""One of several data directories fails, or is away at the start: nothing in it is made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

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
        *paths: Path,
        disk: Disk | None = None,
        failed: Mapping[Path, str] | None = None,
        on_log_failed: Callable[[TopicIdPartition, StorageError], None] = lambda *_: None,
    ) -> LogManager:
        manager = LogManager(
            paths,
            LogSettings(),
            lambda _: None,
            Clock(),
            cluster_id="c1",
            disk=disk,
            failed=failed,
            on_log_failed=on_log_failed,
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
        if self._name in path.relative_to(path.parents[2]).parts:
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


def damage_state(path: Path) -> Path:
    """Garbage in all of a directory's local state but its first two pages; its path."""
    state = path / ".state"
    data = (state / "data.mdb").read_bytes()
    (state / "data.mdb").write_bytes(data[:8192] + b"?" * (len(data) - 8192))
    return state


async def test_damaged_local_state_takes_down_its_directory_until_it_is_moved_away(
    open_logs: Open, disks: tuple[Path, Path], tmp_path: Path
) -> None:
    manager = open_logs(*disks)
    fill(manager)
    there, away = (in_directory(manager, disk) for disk in disks)
    manager.close()
    state = damage_state(disks[1])
    manager = open_logs(*disks)
    assert manager.failed_directories == [disks[1]]
    for partition in there:
        assert values_of(make(manager, partition, is_new=False)) == [f"p{partition}"]
    for partition in away:
        with pytest.raises(StorageError, match="is damaged") as told:
            make(manager, partition, is_new=False)
        assert f"; next: move {state} away" in told.value.message
        assert "disk is mended" not in told.value.message
    manager.close()
    state.rename(tmp_path / "away")
    manager = open_logs(*disks)
    assert manager.previous_broker_epoch() == -1
    for partition in range(4):
        assert values_of(make(manager, partition, is_new=False)) == [f"p{partition}"]
    manager.close()
    assert open_logs(*disks).previous_broker_epoch() == EPOCH


async def test_a_start_is_refused_whose_only_local_state_is_damaged(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    fill(manager)
    manager.close()
    state = damage_state(tmp_path)
    with pytest.raises(DataDirectoryError, match=f"; next: move {state} away"):
        open_logs(tmp_path)


@pytest.mark.parametrize("how", ["the directory", "the file", "emptied"])
async def test_local_state_that_is_gone_is_told_of_and_the_stop_not_clean(
    open_logs: Open, tmp_path: Path, how: str
) -> None:
    manager = open_logs(tmp_path)
    fill(manager)
    manager.close()
    if how == "the directory":
        shutil.rmtree(tmp_path / ".state")
    elif how == "the file":
        (tmp_path / ".state" / "data.mdb").unlink()
    else:
        (tmp_path / ".state" / "data.mdb").write_bytes(b"")
    with capture_logs() as lines:
        manager = open_logs(tmp_path)
    [line] = [line for line in lines if line["event"] == "local_state_missing"]
    assert line["path"] == str(tmp_path / ".state")
    assert line["partitions"] == 4
    assert manager.previous_broker_epoch() == -1
    for partition in range(4):
        assert values_of(make(manager, partition, is_new=False)) == [f"p{partition}"]


async def test_a_new_directory_is_not_told_of_as_one_without_local_state(
    open_logs: Open, tmp_path: Path
) -> None:
    with capture_logs() as lines:
        open_logs(tmp_path / "new")
    assert lines == []


async def test_partitions_without_local_state_void_the_stop_of_the_other_directories(
    open_logs: Open, disks: tuple[Path, Path]
) -> None:
    manager = open_logs(disks[1])
    fill(manager)
    manager.close()
    open_logs(disks[0]).close()  # A clean stop, of a run that knew nothing of the other one.
    shutil.rmtree(disks[1] / ".state")
    assert open_logs(*disks).previous_broker_epoch() == -1


async def test_files_that_were_removed_take_down_their_partition_alone(
    open_logs: Open, tmp_path: Path
) -> None:
    told: list[tuple[TopicIdPartition, StorageError]] = []
    manager = open_logs(tmp_path, on_log_failed=lambda *what: told.append(what))
    gone, other = (make(manager, partition) for partition in range(2))
    gone.config = replace(gone.config, segment_bytes=80)  # Each batch has a segment.
    gone.append_as_leader(batch("a"), 0, now_ms=1)
    await eventually(lambda: gone.durable_offset == 1)
    shutil.rmtree(gone.directory)
    with pytest.raises(StorageError, match=r"t-0 were removed while this broker ran .*; next: "):
        gone.append_as_leader(batch("b"), 0, now_ms=1)
    assert [key for key, _ in told] == [gone.key]
    with pytest.raises(StorageError, match="were removed"):
        gone.read(0, 1000, below=1)
    with pytest.raises(StorageError, match="were removed"):
        make(manager, 0)
    assert manager.failed_directories == []
    assert manager.logs() == [other]
    other.append_as_leader(batch("c"), 0, now_ms=1)
    await eventually(lambda: other.durable_offset == 1)
    assert make(manager, 2).log_end_offset == 0
    manager.close()
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1, "it may have had what nobody else has"
    assert (make(manager, 0).log_end_offset, values_of(make(manager, 1))) == (0, ["c"])


async def test_a_flush_finds_that_files_were_removed_and_nothing_counts_as_durable(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    gone, other = (make(manager, partition) for partition in range(2))
    shutil.rmtree(gone.directory)
    gone.append_as_leader(batch("a"), 0, now_ms=1)  # A new epoch: the flush writes that.
    other.append_as_leader(batch("b"), 0, now_ms=1)
    await eventually(lambda: other.durable_offset == 1)
    assert (gone.is_closed, gone.durable_offset) == (True, 0)
    assert manager.failed_directories == []


async def test_one_segment_that_was_removed_takes_down_its_partition_alone(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    gone, other = (make(manager, partition) for partition in range(2))
    for log in (gone, other):
        log.config = replace(log.config, segment_bytes=80)
        for value in "abc":
            log.append_as_leader(batch(value), 0, now_ms=1)
        log.flush()
    for segment in gone.files.segments[:-1]:
        segment.close_file()
        segment.path.unlink()
    with pytest.raises(StorageError, match="were removed"):
        gone.read(0, 1000, below=3)
    assert manager.failed_directories == []
    manager.close()
    manager = open_logs(tmp_path)
    assert manager.previous_broker_epoch() == -1
    assert values_of(make(manager, 1)) == ["a", "b", "c"]


async def test_a_partition_whose_directory_is_gone_can_be_deleted(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path)
    gone = make(manager, 0)
    shutil.rmtree(gone.directory)
    manager.delete(gone.key)
    assert manager.failed_directories == []
    assert make(manager, 0).log_end_offset == 0
    manager.close()
    assert open_logs(tmp_path).previous_broker_epoch() == EPOCH


@pytest.mark.parametrize("how", ["unmounted", "read-only"])
async def test_a_data_directory_that_is_not_there_any_more_fails_as_a_whole(
    open_logs: Open, tmp_path: Path, how: str
) -> None:
    path, disk = tmp_path / "disk", OneBroken("disk")
    manager = open_logs(path, disk=disk)
    log = make(manager, 0)
    log.config = replace(log.config, segment_bytes=80)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    if how == "unmounted":
        path.rename(tmp_path / "away")
        path.mkdir()
    else:
        shutil.rmtree(log.directory)
        disk.failing = {"name"}
    with pytest.raises(StorageError, match=r"data directory .* failed"):
        log.append_as_leader(batch("b"), 0, now_ms=1)
    assert manager.failed_directories == [path]


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
