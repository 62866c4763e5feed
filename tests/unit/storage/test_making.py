"""New partitions whose directories are made ahead, away from the event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.broker.storage.disk import Disk
from penstock.wire.errors import DiskFullError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from tests.unit.storage.storage_kit import BrokenDisk, NoRoom, batch, path_of, values_of
from tests.unit.storage.test_log_manager import Kit, crash

ONE, TWO = TopicId(b"1" * 16), TopicId(b"2" * 16)


def wanted(count: int, topic_id: TopicId = ONE) -> dict[TopicIdPartition, TopicPartition]:
    return {TopicIdPartition(topic_id, n): TopicPartition("t", n) for n in range(count)}


class RecordingDisk(Disk):
    """Notes in their order the calls that make something durable, and those made on the loop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.on_loop = 0

    def _note(self, call: str, path: Path) -> None:
        self.calls.append((call, f"{path.parent.name}/{path.name}"))
        self.on_loop += threading.current_thread() is threading.main_thread()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self.calls.append(("create", f"{path.parent.name}/{path.name}"))
        return super().open(path, flags)

    def sync_data(self, fd: int) -> None:
        self._note("sync", path_of(fd))
        super().sync_data(fd)

    def sync_directory(self, path: Path) -> None:
        self._note("sync", path)
        super().sync_directory(path)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    kit = Kit(tmp_path / "one", tmp_path / "two")
    yield kit
    for manager in kit.managers:
        manager.close()


async def test_the_event_loop_waits_for_no_disk_when_many_partitions_are_made(kit: Kit) -> None:
    disk = RecordingDisk()
    manager = kit.open(disk=disk)
    disk.calls, disk.on_loop = [], 0  # Nothing runs on the loop yet while a broker opens.
    await manager.make_ahead(wanted(20), is_new=True)
    logs = [manager.get_or_create("t", n, ONE, {}, is_new=True) for n in range(20)]
    assert disk.on_loop == 0
    parents = [log.directory.parent.name for log in logs]
    assert (parents.count("one"), parents.count("two")) == (10, 10)
    assert len([name for call, name in disk.calls if name.endswith("/one")]) == 1
    for log in logs:
        log.append_as_leader(batch(log.name), 0, now_ms=1)
    await kit.until_durable(*logs)
    crash(manager, kit)
    again = kit.open()
    assert sorted(value for log in again.logs() for value in values_of(log)) == sorted(
        log.name for log in logs
    )


async def test_what_is_made_ahead_is_on_the_disk_in_the_order_that_a_crash_can_bear(
    kit: Kit,
) -> None:
    disk = RecordingDisk()
    manager = kit.open(disk=disk)
    disk.calls.clear()
    await manager.make_ahead(wanted(1), is_new=True)
    root = kit.paths[0].parent.name
    assert disk.calls == [
        ("create", "t-0/partition.metadata.tmp"),
        ("sync", "t-0/partition.metadata.tmp"),
        ("sync", f"{root}/one"),
        ("create", "t-0/00000000000000000000.log"),
        ("sync", "one/t-0"),
    ]


async def test_what_is_here_is_not_made_again(kit: Kit) -> None:
    manager = kit.open()
    log = manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("kept"), 0, now_ms=1)
    await manager.make_ahead(wanted(1), is_new=True)
    assert manager.get_or_create("t", 0, ONE, {}) is log
    await manager.make_ahead(wanted(1, TWO), is_new=True)  # The topic was made anew meanwhile.
    other = manager.get_or_create("t", 0, TWO, {}, is_new=True)
    assert other.directory != log.directory
    assert (values_of(log), other.log_end_offset) == (["kept"], 0)


@pytest.mark.parametrize("call", ["create", "write", "sync"])
async def test_without_room_nothing_is_left_and_it_is_tried_again(kit: Kit, call: str) -> None:
    disk = NoRoom()
    manager = kit.open(disk=disk)
    disk.full = {call}
    await manager.make_ahead(wanted(3), is_new=True)
    assert not any(path.name.startswith("t-") for root in kit.paths for path in root.iterdir())
    with pytest.raises(DiskFullError):
        manager.get_or_create("t", 0, ONE, {}, is_new=True)
    disk.full = set()
    await manager.make_ahead(wanted(3), is_new=True)
    for number in range(3):
        manager.get_or_create("t", number, ONE, {}, is_new=True)
    assert not kit.failed


async def test_a_disk_that_fails_meanwhile_fails_the_directory(kit: Kit) -> None:
    disk = BrokenDisk()
    manager = kit.open(disk=disk)
    disk.failing = {"sync"}
    await manager.make_ahead(wanted(2), is_new=True)
    assert sorted(kit.failed) == sorted(kit.paths)  # They fail side by side.
    with pytest.raises(StorageError):
        manager.get_or_create("t", 0, ONE, {}, is_new=True)


async def test_what_nobody_came_for_is_no_partition(kit: Kit) -> None:
    manager = kit.open()
    manager.record_broker_epoch(17)
    await manager.make_ahead(wanted(2), is_new=True)
    manager.close()
    again = kit.open()
    assert again.previous_broker_epoch() == 17
    assert not again.logs()


async def test_a_replica_that_a_failed_disk_may_have_is_not_made_ahead(kit: Kit) -> None:
    kit.open().close()
    (kit.paths[1] / ".state" / "data.mdb").write_bytes(b"not a database")
    manager = kit.open()
    manager._directories[1].is_listed = False
    await manager.make_ahead(wanted(1), is_new=False)
    assert not (kit.paths[0] / "t-0").exists()
    await manager.make_ahead(wanted(1), is_new=True)
    assert (kit.paths[0] / "t-0").exists()
