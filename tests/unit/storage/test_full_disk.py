"""A disk that is full for a while: refusals say so, nothing is lost, nobody restarts anything."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest
from structlog.testing import capture_logs

from penstock.broker.storage import flusher, local_state
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Buffer, Disk
from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.recovery import SavedState, open_log
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import DiskFullError, StorageError
from penstock.wire.ids import TopicId
from tests.support import eventually
from tests.unit.storage.storage_kit import (
    KEY,
    PARTITION,
    Clock,
    ForgetfulDisk,
    FullDisk,
    NoRoom,
    batch,
    open_in,
    path_of,
    small_config,
    values_of,
)

ONE = TopicId(b"1" * 16)
ERRORS = (errno.ENOSPC, errno.EDQUOT)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ROOM_RETRY_S", 0.01)


# --- one log -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("call", ["write", "create"])
def test_an_append_without_room_is_undone_and_the_next_one_goes_well(
    tmp_path: Path, call: str, number: int
) -> None:
    disk = NoRoom(number)
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    log.append_as_leader(batch("a" * 100, producer=(7, 0, 0)), 0, now_ms=1)
    disk.full = {call}
    # Two batches: the first may still fit into the segment, the second needs another one.
    two = batch("b" * 40, producer=(7, 0, 1)) + batch("c" * 150, producer=(7, 0, 2))
    with pytest.raises(DiskFullError, match=f"no room in data directory {tmp_path}"):
        log.append_as_leader(two, 0, now_ms=1)
    assert (log.log_end_offset, values_of(log)) == (1, ["a" * 100])
    disk.full = set()
    log.append_as_leader(two, 0, now_ms=1)
    log.flush()
    log.close(save=False)
    assert values_of(open_in(tmp_path)) == ["a" * 100, "b" * 40, "c" * 150]


def test_an_append_that_is_taken_back_flushes_nothing(tmp_path: Path) -> None:
    """The error of a write before would be lost on it, and a flush after it would go well."""
    disk = ForgetfulDisk()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    disk.full = {"create", "sync"}
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("b" * 40) + batch("c" * 150), 0, now_ms=1)
    log.home.check()


class NoCut(FullDisk):
    """Takes a part of what is written, and then can neither take more nor cut the file."""

    cut_off = True
    blank = False  # What is read is zeros.

    def truncate(self, fd: int, size: int) -> None:
        if not self.cut_off:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().truncate(fd, size)

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        data = super().read_at(fd, size, position)
        return bytes(len(data)) if self.blank else data


@pytest.mark.parametrize("how", ["within a segment", "over two segments", "unreadable"])
def test_a_refusal_that_cannot_be_undone_fails_the_directory(tmp_path: Path, how: str) -> None:
    """The first batch may be found after a crash: nobody may be told that it is not in the log."""
    disk = NoCut()
    config = small_config() if how == "within a segment" else small_config(segment_bytes=400)
    log = open_in(tmp_path, disk=disk, config=config)
    log.append_as_leader(batch("a" * 50), 0, now_ms=1)
    first, second = batch("b" * 50), batch("c" * 150)
    disk.room = len(first) + 10
    disk.cut_off, disk.blank = how == "unreadable", how == "unreadable"
    for _ in range(2):
        with pytest.raises(StorageError, match="and the broker is restarted"):
            log.append_as_leader(first + second, 0, now_ms=1)
        assert log.home.failure is not None
    assert log.log_end_offset == 1
    log.close(save=False)
    assert values_of(open_in(tmp_path)) in (["a" * 50], ["a" * 50, "b" * 50])


def test_a_flush_without_room_promises_nothing_and_is_done_again_with_what_it_dropped(
    tmp_path: Path,
) -> None:
    disk = ForgetfulDisk()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    log.flush()
    log.append_as_leader(batch("b") + batch("c"), 0, now_ms=1)
    disk.full, disk.only = {"sync"}, ".log"
    with pytest.raises(DiskFullError, match="flushing orders-3"):
        log.flush()
    assert log.durable_offset == 1
    with pytest.raises(DiskFullError, match="the last flush found no space"):
        log.append_as_leader(batch("d"), 0, now_ms=1)
    assert not log.has_room
    assert values_of(log) == ["a", "b", "c"], "what is there can be read"
    disk.full = set()
    log.flush()
    assert log.durable_offset == 3
    assert log.has_room
    log.append_as_leader(batch("d"), 0, now_ms=1)
    log.flush()
    [path] = log.directory.glob("*.log")
    assert disk.on_disk[path.name] == path.read_bytes(), "durable is what is on the disk"


def test_every_segment_of_a_flush_without_room_is_written_again(tmp_path: Path) -> None:
    class Counting(NoRoom):
        def __init__(self) -> None:
            super().__init__()
            self.written: dict[str, int] = {}

        def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
            written = super().write_at(fd, buffers, position)
            name = path_of(fd).name
            self.written[name] = self.written.get(name, 0) + written
            return written

    disk = Counting()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    for value in "abcdefgh":
        log.append_as_leader(batch(value * 100), 0, now_ms=1)
    disk.full, disk.only = {"sync"}, ".log"
    with pytest.raises(DiskFullError):
        log.flush()
    disk.full, disk.written = set(), {}
    log.flush()
    sizes = {path.name: path.stat().st_size for path in log.directory.glob("*.log")}
    assert len(sizes) > 2
    assert {name: disk.written.get(name) for name in sizes} == sizes
    assert log.durable_offset == 8
    log.close(save=False)
    saved = SavedState(recovery_point=8)
    assert values_of(open_in(tmp_path, saved=saved)) == [value * 100 for value in "abcdefgh"]


def test_what_was_dropped_for_good_fails_the_directory(tmp_path: Path) -> None:
    disk = NoRoom()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    disk.full = {"sync"}
    with pytest.raises(DiskFullError):
        log.flush()
    disk.full = set()
    [path] = log.directory.glob("*.log")
    path.write_bytes(bytes(path.stat().st_size))  # The pages are gone from memory, too.
    with pytest.raises(StorageError, match="writing again what could not be flushed"):
        log.flush()
    with pytest.raises(StorageError):
        log.append_as_leader(batch("b"), 0, now_ms=1)


@pytest.mark.parametrize("call", ["create", "write", "sync"])
def test_a_checkpoint_without_room_is_written_later(tmp_path: Path, call: str) -> None:
    disk = NoRoom()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    for sequence in range(4):
        log.append_as_leader(batch("a" * 100, producer=(7, 0, sequence)), 5, now_ms=1)
    disk.full, disk.only = {call}, ".tmp"
    with pytest.raises(DiskFullError):
        log.flush()
    assert log.durable_offset == 0
    assert not list(log.directory.glob("*.tmp")), "what is left of it takes no room"
    disk.full = set()
    log.flush()
    assert log.durable_offset == 4
    names = {path.suffix for path in log.directory.iterdir()}
    assert {".index", ".timeindex", ".snapshot"} <= names
    log.close(save=False)
    again = open_in(tmp_path, saved=SavedState(recovery_point=4))
    assert (again.last_epoch, values_of(again)) == (5, ["a" * 100] * 4)


def test_old_segments_are_deleted_where_they_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_in(tmp_path, config=small_config(segment_bytes=300))
    for _ in range(9):
        log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    log.flush()

    def full(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    before = len(list(log.directory.glob("*.log")))
    log.advance_log_start(8)
    assert len(list(log.directory.glob("*.log"))) < before
    assert values_of(log) == ["a" * 100]


# --- the reserve ---------------------------------------------------------------------------------


def limited(root: Path, disk: Disk, clock: Clock) -> PartitionLog:
    return open_in(root, disk=disk, clock=clock, settings=LogSettings(min_free_bytes=1000))


def test_a_leader_leaves_the_reserve_and_a_follower_half_of_it(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    disk.free = 1000
    with pytest.raises(DiskFullError, match=r"log\.min\.free\.bytes keeps 1000"):
        log.append_as_leader(batch("a"), 0, now_ms=1)
    log.append_as_follower(batch("a", leader_epoch=0))
    assert log.has_room
    clock.now_ms += 1000
    disk.free = 499
    assert not log.has_room
    with pytest.raises(DiskFullError):
        log.append_as_follower(batch("b", base_offset=1, leader_epoch=0))
    log.internal = True
    log.append_as_follower(batch("b", base_offset=1, leader_epoch=0))
    log.append_as_leader(batch("c"), 0, now_ms=1)
    assert values_of(log) == ["a", "b", "c"]


def test_a_refusal_for_the_reserve_says_how_the_reserve_is_lowered(tmp_path: Path) -> None:
    disk = NoRoom()
    log = limited(tmp_path, disk, Clock())
    disk.free = 1000
    with pytest.raises(DiskFullError) as refused:
        log.append_as_leader(batch("a"), 0, now_ms=1)
    assert refused.value.message.endswith(
        "nothing was changed; next: free space on that disk, or lower log.min.free.bytes "
        "(`penstock cluster alter --reset log.min.free.bytes` where the cluster shares it, "
        "else in the node's own file); no restart is needed then"
    )


def test_what_is_in_the_log_already_is_answered_without_room(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    log.append_as_leader(batch("a", producer=(7, 0, 0)), 0, now_ms=1)
    clock.now_ms += 1000
    disk.free = 0
    assert log.append_as_leader(batch("a", producer=(7, 0, 0)), 0, now_ms=1).duplicate


def test_the_file_system_is_asked_once_in_a_second_or_a_megabyte(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    for _ in range(100):
        log.append_as_leader(batch("a"), 0, now_ms=1)
    assert disk.asked == 1
    clock.now_ms += 1000
    log.append_as_leader(batch("a"), 0, now_ms=1)
    assert disk.asked == 2
    log.config = small_config(max_message_bytes=2_000_000, segment_bytes=10_000_000)
    log.append_as_leader(batch("a" * 1_100_000), 0, now_ms=1)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    assert disk.asked == 3


def test_a_full_directory_is_reported_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    log = limited(tmp_path, disk, clock)
    with capture_logs() as logs:
        disk.free = 0
        for _ in range(5):
            with pytest.raises(DiskFullError):
                log.append_as_leader(batch("a"), 0, now_ms=1)
            clock.now_ms += 1000
        disk.free = 1 << 30
        for _ in range(10):
            clock.now_ms += 1000
            log.append_as_leader(batch("a"), 0, now_ms=1)
    assert [line["event"] for line in logs] == ["data_directory_full", "data_directory_has_room"]


# --- a directory of logs -------------------------------------------------------------------------


class Managed:
    """Managers on one directory, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.disk = NoRoom()
        self.failed: list[Path] = []
        self.manager = self.open()

    def open(self, policy: FlushPolicy = FlushPolicy.COMMIT) -> LogManager:
        self.manager = LogManager(
            [self.path],
            LogSettings(checkpoint_interval_ms=10, flush_policy=policy, flush_interval_ms=10),
            lambda _: None,
            Clock(),
            cluster_id="c1",
            on_directory_failed=lambda path, _: self.failed.append(path),
            disk=self.disk,
        )
        self.manager.open()
        return self.manager


@pytest.fixture
async def managed(tmp_path: Path) -> AsyncIterator[Managed]:
    managed = Managed(tmp_path / "logs")
    yield managed
    managed.manager.close()
    assert not managed.failed


@pytest.mark.parametrize("policy", list(FlushPolicy))
async def test_a_flush_is_tried_until_there_is_room(managed: Managed, policy: FlushPolicy) -> None:
    managed.manager.close()
    log = managed.open(policy).get_or_create("t", 0, ONE, {"segment.bytes": "300"})
    managed.disk.full, managed.disk.only = {"sync"}, ".log"
    log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    log.append_as_leader(batch("b" * 150), 0, now_ms=1)  # In a segment of its own.
    await eventually(lambda: log.flush_failed)
    with pytest.raises(DiskFullError):
        log.append_as_leader(batch("c"), 0, now_ms=1)
    assert log.recovery_point == 0
    managed.disk.full = set()
    await eventually(lambda: not log.flush_failed)
    assert log.recovery_point == log.durable_offset == 2
    log.append_as_leader(batch("c"), 0, now_ms=1)


@pytest.mark.parametrize("call", ["create", "write", "sync"])
async def test_a_log_that_there_was_no_room_for_is_made_once_there_is(
    managed: Managed, call: str
) -> None:
    managed.disk.full = {call}
    for _ in range(2):
        with pytest.raises(DiskFullError):
            managed.manager.get_or_create("t", 0, ONE, {})
        assert [path.name for path in managed.path.iterdir()] == [".state"]
    managed.disk.full = set()
    log = managed.manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a"), 0, now_ms=1)
    assert log.directory.name == "t-0"


async def test_a_new_log_whose_segment_finds_no_room_fails_nothing(managed: Managed) -> None:
    managed.disk.full, managed.disk.only = {"create"}, ".log"
    with pytest.raises(DiskFullError):
        managed.manager.get_or_create("t", 0, ONE, {})
    managed.disk.full = set()
    managed.manager.get_or_create("t", 0, ONE, {})


async def crashed_after_a_flush(managed: Managed) -> None:
    """Go on with what a kill leaves of a log with two records, both below the recovery point."""
    log = managed.manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    state = managed.manager._directories[0]._use_state()
    await eventually(lambda: state.get(log.key).recovery_point == 2 and not state._changed)
    crashed = managed.path.with_name("crashed")
    shutil.copytree(managed.path, crashed)
    managed.manager.close()
    managed.path = crashed


async def refuses_writes_and_goes_on(managed: Managed, manager: LogManager) -> None:
    """What a start on a full disk found is read, is not written to, and then is."""
    log = manager.get_or_create("t", 0, ONE, {})
    assert values_of(log) == ["a", "b"]
    assert not manager.failed_directories
    for _ in range(2):
        with pytest.raises(DiskFullError):
            log.append_as_leader(batch("c"), 0, now_ms=1)
        await asyncio.sleep(0.02)  # So that what is tried again is.
    assert not log.has_room
    managed.disk.full, FullEnvironment.full = set(), False
    await eventually(lambda: log.has_room)
    log.append_as_leader(batch("c"), 0, now_ms=1)
    await eventually(lambda: log.durable_offset == 3)
    assert values_of(log) == ["a", "b", "c"]


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_start_on_a_disk_without_room_serves_reads_and_refuses_writes(
    environment: type[FullEnvironment], managed: Managed, is_clean: bool
) -> None:
    managed.manager.record_broker_epoch(17)
    await crashed_after_a_flush(managed)
    if is_clean:
        managed.open().close()
    managed.disk.full, environment.full = {"write", "create"}, True
    manager = managed.open()
    assert manager.previous_broker_epoch() == 17
    await refuses_writes_and_goes_on(managed, manager)


async def test_nothing_changes_while_the_disk_calls_the_last_stop_clean(
    environment: type[FullEnvironment], managed: Managed
) -> None:
    """Local state alone has no room: the next start would take what a kill tore for sound."""
    log = managed.manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    managed.manager.close()
    environment.full = True
    log = managed.open().get_or_create("t", 0, ONE, {}, internal=True)  # May use all room.
    for change in (
        lambda: log.append_as_leader(batch("c"), 0, now_ms=1),
        lambda: log.append_as_follower(batch("c", base_offset=2, leader_epoch=0)),
        lambda: log.truncate_to(1),
        lambda: log.truncate_fully_and_start_at(0),
        log.roll,
    ):
        with pytest.raises(DiskFullError):
            change()
    assert values_of(log) == ["a", "b"]
    environment.full = False
    log.truncate_to(1)  # Which notes that the run has begun.
    shutil.copytree(managed.path / ".state", managed.path.with_name("copy") / ".state")
    assert LocalState(managed.path.with_name("copy"), 1 << 20).clean_stop is None
    assert log.append_as_leader(batch("c"), 0, now_ms=1).base_offset == 0


async def test_a_log_that_cannot_be_recovered_on_a_full_disk_is_opened_once_there_is_room(
    managed: Managed,
) -> None:
    await crashed_after_a_flush(managed)
    shutil.rmtree(managed.path / ".state")  # All of it is above the recovery point then.
    managed.disk.full = {"write"}
    manager = managed.open()
    assert [type(error) for error in manager.unopened().values()] == [DiskFullError]
    with pytest.raises(DiskFullError):
        manager.get_or_create("t", 0, ONE, {})
    managed.disk.full = set()
    assert values_of(manager.get_or_create("t", 0, ONE, {})) == ["a", "b"]
    assert not manager.unopened()


def test_a_recovery_that_cannot_flush_is_not_tried_again(tmp_path: Path) -> None:
    """What it read may be in memory alone, and the next flush would call it durable."""
    log = open_in(tmp_path)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    log.close(save=False)
    disk = NoRoom()
    disk.full, disk.only = {"sync"}, ".log"
    home = DataDirectory(tmp_path, LogSettings(), Clock(), disk=disk)
    directory = tmp_path / str(PARTITION)
    for _ in range(2):
        with pytest.raises(StorageError, match="until there is room on the disk"):
            open_log(home, directory, partition=PARTITION, key=KEY, config=small_config())
        assert home.failure is not None


async def test_a_partition_that_cannot_be_renamed_stays_until_it_can(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = managed.manager.get_or_create("t", 0, ONE, {})

    def full(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DiskFullError):
            managed.manager.delete(log.key)
    assert (managed.path / "t-0").exists()
    managed.manager.delete(log.key)
    await eventually(lambda: [path.name for path in managed.path.iterdir()] == [".state"])


# --- local state ---------------------------------------------------------------------------------


class FullEnvironment:
    """An LMDB environment whose commits find no room while ``full``."""

    full = False
    refusals = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._environment = lmdb.open(*arguments, **options)

    def begin(self, *, write: bool = False) -> Any:
        transaction = self._environment.begin(write=write)
        return _Refusing(transaction) if write and type(self).full else transaction

    def close(self) -> None:
        self._environment.close()


class _Refusing:
    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def __enter__(self) -> Any:
        return self._transaction

    def __exit__(self, *_error: object) -> None:
        self._transaction.abort()
        FullEnvironment.refusals += 1
        raise lmdb.DiskError("mdb_txn_commit: No space left on device", errno.ENOSPC)


class _Lmdb:
    open = FullEnvironment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> type[FullEnvironment]:
    monkeypatch.setattr(local_state, "lmdb", _Lmdb)
    monkeypatch.setattr(FullEnvironment, "full", False)
    monkeypatch.setattr(FullEnvironment, "refusals", 0)
    return FullEnvironment


async def test_local_state_without_room_is_saved_later(
    environment: type[FullEnvironment], managed: Managed, tmp_path: Path
) -> None:
    log = managed.manager.get_or_create("t", 0, ONE, {})
    log.append_as_leader(batch("a", "b"), 0, now_ms=1)
    environment.full = True
    managed.manager.checkpoint_high_watermark(log.key, 2)
    await eventually(lambda: environment.refusals >= 3)
    environment.full = False
    state = managed.manager._directories[0]._use_state()
    await eventually(lambda: not state._changed)
    shutil.copytree(managed.path, tmp_path / "crashed")
    managed.manager.close()
    managed.path = tmp_path / "crashed"
    again = managed.open()
    assert again.high_watermark(log.key) == 2


async def test_a_cut_waits_until_it_can_be_noted(
    environment: type[FullEnvironment], managed: Managed
) -> None:
    log = managed.manager.get_or_create("t", 0, ONE, {})
    for value in "abc":
        log.append_as_leader(batch(value), 0, now_ms=1)
    await eventually(lambda: log.durable_offset == 3)
    state = managed.manager._directories[0]._use_state()
    await eventually(lambda: state.get(log.key).recovery_point == 3 and not state._changed)
    environment.full = True
    for _ in range(2):  # The second time it must not pass for noted.
        with pytest.raises(DiskFullError):
            log.truncate_to(1)
        assert (log.durable_offset, values_of(log)) == (3, ["a", "b", "c"])
    environment.full = False
    log.truncate_to(1)
    assert values_of(log) == ["a"]
    log.append_as_leader(batch("d"), 0, now_ms=1)


async def test_a_partition_is_made_once_what_was_known_of_it_can_be_forgotten(
    environment: type[FullEnvironment], managed: Managed
) -> None:
    log = managed.manager.get_or_create("t", 0, ONE, {})
    managed.manager.delete(log.key)
    environment.full = True
    for _ in range(2):
        with pytest.raises(DiskFullError):
            managed.manager.get_or_create("t", 0, ONE, {})
    environment.full = False
    managed.manager.get_or_create("t", 0, ONE, {})
