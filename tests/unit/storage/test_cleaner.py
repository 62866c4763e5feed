"""Compaction: which log is cleaned, within what bounds, and what becomes of it when something
goes wrong.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.broker.storage.cleaner import cleaner, copying
from penstock.broker.storage.cleaner.copying import Copied
from penstock.broker.storage.cleaner.offset_map import SLOT_BYTES, OffsetMap
from penstock.broker.storage.cleaner.throttle import Throttle
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import StorageError
from tests.support import eventually
from tests.unit.storage.cleaning import (
    COMPACTED,
    Broker,
    close_segment,
    compacted,
    names_in,
    put,
    shown,
)
from tests.unit.storage.storage_kit import (
    KEY,
    BrokenDisk,
    Clock,
    NoRoom,
    open_in,
)

# --- which log, and when -------------------------------------------------------------------------


async def test_a_log_waits_until_enough_of_it_is_dirty(tmp_path: Path) -> None:
    log = compacted(tmp_path, min_cleanable_dirty_ratio=0.5)
    broker = Broker(log)
    for number in range(4):
        put(log, (str(number), "x" * 300))
    close_segment(log)
    assert await broker.cleaner.clean_one()  # All of it is dirty.
    put(log, ("0", "y" * 300))
    close_segment(log)
    assert not await broker.cleaner.clean_one()
    for number in range(4):
        put(log, (str(number), "z" * 300))
    close_segment(log)
    assert await broker.cleaner.clean_one()


async def test_the_dirtiest_log_comes_first(tmp_path: Path) -> None:
    logs = []
    for name, dirty in (("one", 1), ("two", 3), ("three", 2)):
        (tmp_path / name).mkdir()
        log = compacted(tmp_path / name)
        log.key = KEY._replace(partition=dirty)
        put(log, ("k", "x" * 500))
        close_segment(log)
        await Broker(log).cleaner.clean_one()
        for _ in range(dirty):
            put(log, ("k", "y" * 500))
            close_segment(log)
        logs.append(log)
    broker = Broker(*logs)
    order = []
    while await broker.cleaner.clean_one():
        clean = [log.key.partition for log in logs if log.cleaned_offset == log.log_end_offset]
        order += [partition for partition in clean if partition not in order]
    assert order == [3, 2, 1]


async def test_young_records_are_left_alone(tmp_path: Path) -> None:
    log = compacted(tmp_path, min_compaction_lag_ms=500)
    clock = Clock()
    broker = Broker(log, clock=clock)
    for age_ms in (1000, 500, 499):
        put(log, ("a", str(age_ms)), timestamp_ms=clock.now_ms - age_ms)
        close_segment(log)
    await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "500"), 2: ("a", "499")}


async def test_old_records_wait_no_longer_not_even_in_the_active_segment(tmp_path: Path) -> None:
    log = compacted(tmp_path, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=500)
    clock = Clock()
    broker = Broker(log, clock=clock)
    put(log, ("a", "x" * 300), timestamp_ms=clock.now_ms - 500)
    put(log, ("a", "2"), timestamp_ms=clock.now_ms - 1)
    assert not await broker.cleaner.clean_one()
    clock.now_ms += 1
    assert not await broker.cleaner.clean_one()  # It is closed now, and not on the disk yet.
    log.flush()
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


def much_clean_and_little_dirty(
    root: Path, partition: int, dirty: int, **config: int
) -> PartitionLog:
    """The dirty records are of the time 900."""
    root.mkdir()
    log = compacted(root, min_cleanable_dirty_ratio=0.9, **config)
    log.key = KEY._replace(partition=partition)
    for number in range(4):
        put(log, (str(number), "x" * 300))
    close_segment(log)
    log.cleaned_up_to(log.log_end_offset)
    for _ in range(dirty):
        put(log, ("0", "y" * 300), timestamp_ms=900)
    close_segment(log)
    return log


async def test_what_has_waited_for_so_long_is_cleaned_however_little_it_is(tmp_path: Path) -> None:
    log = much_clean_and_little_dirty(tmp_path / "a", 0, 1, max_compaction_lag_ms=500)
    broker = Broker(log)
    broker.clock.now_ms = 1400
    assert not await broker.cleaner.clean_one()
    broker.clock.now_ms = 1401
    assert await broker.cleaner.clean_one()
    assert log.cleaned_offset == log.log_end_offset
    assert (0, ("0", "x" * 300)) not in shown(log).items()


async def test_and_comes_before_what_is_dirtier(tmp_path: Path) -> None:
    dirtier = much_clean_and_little_dirty(tmp_path / "a", 0, 60)
    overdue = much_clean_and_little_dirty(tmp_path / "b", 1, 1, max_compaction_lag_ms=500)
    broker = Broker(dirtier, overdue)
    broker.clock.now_ms = 1401
    assert await broker.cleaner.clean_one()
    assert overdue.cleaned_offset == overdue.log_end_offset
    assert dirtier.cleaned_offset < dirtier.log_end_offset
    assert await broker.cleaner.clean_one()
    assert dirtier.cleaned_offset == dirtier.log_end_offset


async def test_a_topic_that_is_not_compacted_is_left_alone(tmp_path: Path) -> None:
    log = compacted(tmp_path, compacts=False)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    assert not await Broker(log).cleaner.clean_one()


# --- bounds --------------------------------------------------------------------------------------


async def test_with_little_memory_a_log_is_cleaned_in_several_rounds(tmp_path: Path) -> None:
    log = compacted(tmp_path, segment_bytes=5000)
    for round_number in range(3):
        for number in range(60):
            put(log, (f"key {number}", str(round_number)))
    close_segment(log)
    broker = Broker(log, dedupe_buffer_bytes=50 * SLOT_BYTES)
    rounds = 0
    while await broker.cleaner.clean_one():
        rounds += 1
    assert rounds > 3
    assert shown(log) == {120 + number: (f"key {number}", "2") for number in range(60)}


async def test_a_batch_with_too_many_keys_is_reported_once(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, *((str(number), "v") for number in range(50)))
    close_segment(log)
    broker = Broker(log, dedupe_buffer_bytes=0)
    with capture_logs() as logs:
        await broker.cleaner.clean_one()
        assert not await broker.cleaner.clean_one()
    [line] = [line for line in logs if line["event"] == "log_not_cleanable"]
    assert "log.cleaner.dedupe.buffer.bytes" in line["reason"]
    assert len(shown(log)) == 50


def test_the_map_knows_the_last_offset_of_each_key_and_when_it_is_full() -> None:
    found = OffsetMap(100 * SLOT_BYTES)
    assert found.room == 80
    for number in range(80):
        found.put(str(number).encode(), number)
    found.put(b"5", 500)
    assert found.room == 0
    assert [found.get(str(number).encode()) for number in range(80)] == [
        500 if number == 5 else number for number in range(80)
    ]
    assert found.get(b"none") == -1
    found.close()


def test_the_throttle_waits_as_long_as_the_rate_asks_for() -> None:
    now_s = 0.0
    waits: list[float] = []
    throttle = Throttle(100, waits.append, lambda: now_s)
    throttle.spend(50)
    throttle.spend(100)
    now_s = 10.0
    throttle.spend(200)
    assert waits == [0.5, 1.5, 2.0]


async def test_all_that_is_read_and_written_is_throttled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = list[int]()
    monkeypatch.setattr(Throttle, "spend", lambda _, size_bytes: spent.append(size_bytes))
    log = compacted(tmp_path, segment_bytes=5000)
    for number in range(9):
        put(log, (str(number % 3), "x" * 300))
    close_segment(log)
    before = log.files.segments[0].size_bytes
    assert await Broker(log).cleaner.clean_one()
    after = log.files.segments[0].size_bytes
    assert after < before
    assert sum(spent) == 2 * before + after, "the keys are read first, then what is copied"


# --- what goes wrong -----------------------------------------------------------------------------


async def test_without_room_the_log_stays_as_it_was_and_is_cleaned_later(tmp_path: Path) -> None:
    disk = NoRoom()
    log = open_in(tmp_path, config=COMPACTED, disk=disk)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    broker = Broker(log)
    for call in ("create", "write", "sync"):
        disk.full, disk.only = {call}, ".cleaned"
        assert not await broker.cleaner.clean_one()
        assert shown(log) == {0: ("a", "1"), 1: ("a", "2")}
        assert names_in(log) == [f"{0:020d}.log", f"{2:020d}.log"]
    assert log.home.failure is None
    disk.full = set()
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


async def test_no_clean_uses_what_must_stay_free(tmp_path: Path) -> None:
    disk, clock = NoRoom(), Clock()
    settings = LogSettings(min_free_bytes=1000)
    log = open_in(tmp_path, config=COMPACTED, disk=disk, clock=clock, settings=settings)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    broker = Broker(log)
    disk.free = 500
    clock.now_ms += 1000
    assert not await broker.cleaner.clean_one()
    assert shown(log) == {0: ("a", "1"), 1: ("a", "2")}
    disk.free = 1000
    clock.now_ms += 1000
    assert await broker.cleaner.clean_one()
    assert shown(log) == {1: ("a", "2")}


async def test_a_disk_that_fails_fails_the_directory(tmp_path: Path) -> None:
    disk = BrokenDisk()
    log = open_in(tmp_path, config=COMPACTED, disk=disk)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    disk.failing = {"sync"}
    assert not await Broker(log).cleaner.clean_one()
    with pytest.raises(StorageError, match=r"cleaning orders-3.*Input/output error"):
        log.home.check()


class NoRoomForNames(Disk):
    """Has no room to sync a directory, once so many of these calls went well."""

    def __init__(self) -> None:
        self.room: int | None = None

    def sync_directory(self, path: Path) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "no room")
        if self.room is not None:
            self.room -= 1
        super().sync_directory(path)


async def test_a_swap_that_can_not_be_ended_for_want_of_room_fails_the_directory(
    tmp_path: Path,
) -> None:
    """A later clean would make a larger segment, and the next start put this one over it."""
    disk = NoRoomForNames()
    log = open_in(tmp_path, config=COMPACTED, disk=disk)
    for number in range(2):
        put(log, ("a", str(number)))
        close_segment(log)
    put(log, ("b", "1"))
    broker = Broker(log)
    disk.room = 1  # For the commit, and not for the end.
    assert not await broker.cleaner.clean_one()
    with pytest.raises(StorageError, match=r"cleaning orders-3.*no room"):
        log.home.check()
    assert not await broker.cleaner.clean_one()
    log.close(save=False)
    again = open_in(tmp_path, config=COMPACTED, saved=SavedState(3))
    assert shown(again) == {1: ("a", "1"), 2: ("b", "1")}
    assert names_in(again) == [f"{0:020d}.log", f"{2:020d}.log"]


async def test_without_memory_for_keys_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    close_segment(log)
    broker = Broker(log)
    with monkeypatch.context() as patch:

        def no_memory(_fileno: int, _length: int) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        patch.setattr("mmap.mmap", no_memory)
        assert not await broker.cleaner.clean_one()
    assert log.home.failure is None
    assert await broker.cleaner.clean_one()


async def test_a_fault_of_the_cleaners_own_leaves_it_to_the_other_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    close_segment(log)
    broker = Broker(log)
    monkeypatch.setattr("penstock.broker.storage.cleaner.cleaner.copy", lambda *_: 1 / 0)
    with capture_logs() as logs:
        assert await broker.cleaner.clean_one()
        assert not await broker.cleaner.clean_one()
    assert [line["event"] for line in logs] == ["log_not_cleaned", "log_not_cleanable"]
    assert names_in(log) == [f"{0:020d}.log", f"{1:020d}.log"]


class PausingDisk(NoRoom):
    """Calls back before a step of a swap."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC)
        self.before: dict[str, asyncio.Event] = {}
        self.go_on = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def rename(self, source: Path, target: Path) -> None:
        if source.suffix in self.before:
            self.loop.call_soon_threadsafe(self.before.pop(source.suffix).set)
            asyncio.run_coroutine_threadsafe(self.go_on.wait(), self.loop).result(20)
        super().rename(source, target)


async def paused_before_the_commit(tmp_path: Path) -> tuple[PausingDisk, PartitionLog, Broker]:
    disk = PausingDisk()
    log = open_in(tmp_path, config=COMPACTED, disk=disk)
    for number in range(3):
        put(log, ("a", str(number)))
        close_segment(log)
    return disk, log, Broker(log)


async def test_a_clean_that_is_overtaken_by_a_cut_is_dropped(tmp_path: Path) -> None:
    disk, log, broker = await paused_before_the_commit(tmp_path)
    reached = disk.before[".cleaned"] = asyncio.Event()
    clean = asyncio.create_task(broker.cleaner.clean_one())
    await reached.wait()
    log.truncate_fully_and_start_at(0)
    disk.go_on.set()
    assert not await clean
    assert (log.log_end_offset, log.cleaned_offset) == (0, 0)
    assert names_in(log) == [f"{0:020d}.log"]
    log.close(save=False)
    assert open_in(tmp_path).log_end_offset == 0


async def test_what_was_cut_while_it_was_copied_is_never_swapped_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would bring an end to a swap that a crash left: with what the cut has taken away."""

    renamed = list[str]()

    class Watched(Disk):
        def rename(self, source: Path, target: Path) -> None:
            renamed.append(target.suffix)
            super().rename(source, target)

    loop = asyncio.get_running_loop()

    def copy_and_cut(*arguments: Any) -> Copied:
        copied = copying.copy(*arguments)

        async def cut() -> None:
            log.truncate_to(1)

        asyncio.run_coroutine_threadsafe(cut(), loop).result(20)
        return copied

    monkeypatch.setattr(cleaner, "copy", copy_and_cut)
    log = open_in(tmp_path, config=COMPACTED, disk=Watched())
    for number in range(3):
        put(log, ("a", str(number)))
        close_segment(log)
    assert not await Broker(log).cleaner.clean_one()
    assert ".swap" not in renamed
    assert not [name for name in names_in(log) if not name.endswith(".log")]
    assert shown(log) == {0: ("a", "0")}


async def test_a_clean_whose_segments_were_deleted_meanwhile_is_dropped(tmp_path: Path) -> None:
    disk, log, broker = await paused_before_the_commit(tmp_path)
    reached = disk.before[".cleaned"] = asyncio.Event()
    clean = asyncio.create_task(broker.cleaner.clean_one())
    await reached.wait()
    log.advance_log_start(2)
    disk.go_on.set()
    assert not await clean
    assert shown(log) == {2: ("a", "2")}
    assert await broker.cleaner.clean_one()
    assert shown(log) == {2: ("a", "2")}


async def test_a_partition_that_is_deleted_while_it_is_cleaned_is_gone(tmp_path: Path) -> None:
    disk, log, broker = await paused_before_the_commit(tmp_path)
    reached = disk.before[".cleaned"] = asyncio.Event()
    clean = asyncio.create_task(broker.cleaner.clean_one())
    await reached.wait()
    assert log.home.cleaning == {log.directory}
    log.close(save=False)
    log.directory.rename(tmp_path / "gone")
    disk.go_on.set()
    assert not await clean
    assert log.home.failure is None
    assert not log.home.cleaning
    assert not log.directory.exists()


async def test_readers_of_the_old_segments_go_on(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    file = log.files.segments[0].file.acquire()
    before = log.home.disk.read_at(file.fd, 1 << 20, 0)
    await Broker(log).cleaner.clean_one()
    assert log.home.disk.read_at(file.fd, 1 << 20, 0) == before
    file.release()
    assert shown(log) == {1: ("a", "2")}


async def test_the_cleaner_works_by_itself_and_stops_at_once(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    broker = Broker(log, backoff_ms=1)
    await broker.cleaner.start()
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    await eventually(lambda: log.cleaned_offset == 2)
    put(log, ("a", "3"))
    close_segment(log)
    await eventually(lambda: shown(log) == {2: ("a", "3")})
    await broker.cleaner.stop()


async def test_a_clean_that_is_stopped_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    for number in range(20):
        put(log, ("a", str(number)))
    close_segment(log)
    broker = Broker(log, io_max_bytes_per_second=1)  # A second a byte, unless it is told to stop.
    await broker.cleaner.start()
    await eventually(lambda: bool(log.home.cleaning))
    await broker.cleaner.stop()
    assert len(shown(log)) == 20
    assert names_in(log) == [path.name for path in (one.path for one in log.files.segments)]
