"""Where a log begins: durable before anything is deleted, whenever the power goes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.log_start import AT_ONCE
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.retention import delete_old
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import StorageError
from penstock.wire.ids import LeaderEpoch, TopicId
from tests.support import eventually
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    PARTITION,
    Clock,
    PowerCutDisk,
    batch,
    open_in,
    small_config,
    values_of,
)

EPOCH = LeaderEpoch(0)


def filled(tmp_path: Path, count: int, disk: PowerCutDisk | None = None) -> PartitionLog:
    """A log with a segment for each batch, all of them on the disk."""
    log = open_in(tmp_path, config=small_config(segment_bytes=100), disk=disk)
    for number in range(count):
        log.append_as_leader(batch(str(number)), EPOCH, now_ms=0)
        log.flush()
    assert segments_on_disk(log) == count
    return log


def segments_on_disk(log: PartitionLog) -> int:
    return len(list(log.directory.glob("*.log")))


class LateState:
    """Local state of one log, which says when it is on the disk."""

    def __init__(self, log: PartitionLog) -> None:
        self.log_start_offset = log.log_start_offset
        self._saving: list[tuple[int, Callable[[], bool]]] = []
        log.home.save_soon = self._note

    def _note(self, log: PartitionLog) -> None:
        self._saving.append((log.log_start_offset, log.start.saving()))

    def save(self) -> list[bool]:
        """Everything noted is on the disk: whether that was news to the log."""
        saving, self._saving = self._saving, []
        self.log_start_offset = saving[-1][0]
        return [saved() for _, saved in saving]


# --- one log -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery_point", [0, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_while_segments_are_deleted_takes_nothing_else(
    tmp_path: Path, seed: int, recovery_point: int
) -> None:
    disk, chance = PowerCutDisk(), random.Random(seed)
    log = filled(tmp_path, 4, disk)
    state = LateState(log)
    log.home.run_in_background = lambda _: None
    log.advance_log_start(3)
    for saved in (False, True):
        if saved:
            assert state.save() == [True]
            log.delete_old_segments()
            assert segments_on_disk(log) == 1
        root = tmp_path / f"saved-{saved}"
        root.mkdir()
        disk.cut_power(log.directory, root / str(PARTITION), chance)
        again = open_in(root, saved=SavedState(recovery_point, state.log_start_offset))
        assert (again.log_end_offset, again.dropped_records) == (4, False)
        assert values_of(again) == (["3"] if saved else ["0", "1", "2", "3"])


@pytest.mark.parametrize("seed", range(20))
def test_a_start_above_all_that_a_power_cut_left_is_obeyed(tmp_path: Path, seed: int) -> None:
    """What was deleted need not have been flushed; what comes after it may have been lost."""
    disk, chance = PowerCutDisk(), random.Random(seed)
    log = filled(tmp_path, 2, disk)
    for number in range(2, 7):
        log.append_as_follower(batch(str(number), base_offset=number, leader_epoch=EPOCH))
    state = LateState(log)
    log.advance_log_start(5)
    assert state.save() == [True]
    log.delete_old_segments()
    root = tmp_path / "crashed"
    root.mkdir()
    disk.cut_power(log.directory, root / str(PARTITION), chance)
    again = open_in(root, saved=SavedState(2, state.log_start_offset))
    assert again.log_start_offset == 5
    end = again.log_end_offset
    assert values_of(again) == [str(number) for number in range(5, end)]
    assert (again.holes, again.durable_offset) == ((), end)
    again.append_as_follower(batch("next", base_offset=end, leader_epoch=EPOCH))
    assert values_of(again)[-1] == "next"


def test_a_start_above_the_end_does_not_excuse_what_was_flushed(tmp_path: Path) -> None:
    log = filled(tmp_path, 4)
    log.close(save=False)
    os.truncate(log.files.segments[-1].path, 0)
    with pytest.raises(StorageError, match="was on the disk up to 4"):
        open_in(tmp_path, saved=SavedState(4, 7))


def test_nothing_is_deleted_before_the_new_start_is_durable(tmp_path: Path) -> None:
    log = filled(tmp_path, 4)
    state = LateState(log)
    log.advance_log_start(2)
    log.flush()
    assert (segments_on_disk(log), log.log_start_offset, log.durable_start_offset) == (4, 2, 0)
    log.advance_log_start(3)
    assert state.save() == [True, True]
    assert log.durable_start_offset == 3
    log.delete_old_segments()
    assert segments_on_disk(log) == 1


def test_what_was_saved_of_a_log_before_it_began_anew_says_nothing_of_it(tmp_path: Path) -> None:
    log = filled(tmp_path, 4)
    state = LateState(log)
    log.advance_log_start(3)
    log.truncate_fully_and_start_at(1)  # Local state will have that as well, after the other.
    for number in range(4):
        log.append_as_leader(batch(str(number)), EPOCH, now_ms=0)
    log.flush()
    log.advance_log_start(4)
    assert state.save() == [False, True, True]
    log.advance_log_start(5)
    assert (log.log_start_offset, log.durable_start_offset) == (5, 4)


def test_many_old_segments_are_deleted_a_few_in_a_turn(tmp_path: Path) -> None:
    log = filled(tmp_path, 2 * AT_ONCE + 2)
    turns: list[Callable[[], None]] = []
    log.home.run_soon = turns.append
    log.advance_log_start(2 * AT_ONCE + 1)
    left = []
    while turns:
        left.append(segments_on_disk(log))
        turns.pop(0)()
    assert [*left, segments_on_disk(log)] == [AT_ONCE + 2, 2, 1]


def test_what_is_as_good_as_gone_is_not_due_again(tmp_path: Path) -> None:
    log = filled(tmp_path, AT_ONCE + 4)
    LateState(log)
    size = log.size_bytes // (AT_ONCE + 4)
    log.advance_log_start(AT_ONCE)
    log.config = small_config(segment_bytes=100, retention_bytes=2 * size)
    assert delete_old(log, high_watermark=EVERYTHING, now_ms=0) == AT_ONCE + 2
    log.config = small_config(segment_bytes=100, retention_ms=1)
    assert delete_old(log, high_watermark=EVERYTHING, now_ms=2**62) == AT_ONCE + 4


# --- in a data directory -------------------------------------------------------------------------


class Kit:
    """A manager of one directory, and what it told."""

    def __init__(self, path: Path) -> None:
        self.durable: list[tuple[int, int]] = []
        self.failed: list[Path] = []
        self._path = path
        self._managers: list[LogManager] = []

    def open(self, checkpoint_interval_ms: int = 10**9) -> LogManager:
        manager = LogManager(
            [self._path],
            LogSettings(checkpoint_interval_ms=checkpoint_interval_ms),
            lambda log: self.durable.append((log.durable_offset, log.durable_start_offset)),
            Clock(),
            on_directory_failed=lambda path, _: self.failed.append(path),
        )
        manager.open()
        self._managers.append(manager)
        return manager

    async def filled(self, manager: LogManager) -> PartitionLog:
        """A log of three segments with a record each, and an empty one, on the disk."""
        log = manager.get_or_create("t", 0, TopicId(b"1" * 16), {})
        for value in "abc":
            log.append_as_leader(batch(value), EPOCH, now_ms=1)
            await eventually(lambda: log.durable_offset == log.log_end_offset)
            log.roll()
        await eventually(lambda: log.files.named_up_to == 3)
        return log

    def close(self) -> None:
        for manager in self._managers:
            manager.close()


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path / "logs")
    yield made
    made.close()


async def test_local_state_has_a_log_start_before_a_segment_goes(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await kit.filled(kit.open())
    seen: list[tuple[int, int]] = []
    write = LocalState.write

    def looking(state: LocalState) -> None:
        before = segments_on_disk(log)
        write(state)
        seen.append((before, state.get(log.key).log_start_offset))

    monkeypatch.setattr(LocalState, "write", looking)
    log.advance_log_start(1)
    log.advance_log_start(2)
    assert (log.log_start_offset, log.durable_start_offset, segments_on_disk(log)) == (2, 0, 4)
    await eventually(lambda: segments_on_disk(log) == 2)
    assert log.durable_start_offset == 2
    assert kit.durable[-1] == (3, 2)  # Who waits for that is told.
    assert seen[0] == (4, 2)


async def test_where_a_log_start_finds_no_room_the_segments_wait(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await kit.filled(kit.open(checkpoint_interval_ms=20))
    refused = threading.Event()

    def full(_state: LocalState) -> None:
        refused.set()
        raise lmdb.MapFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalState, "write", full)
        log.advance_log_start(2)
        await eventually(refused.is_set)
        refused.clear()
        await eventually(refused.is_set)  # It is tried again.
        assert (log.durable_start_offset, segments_on_disk(log)) == (0, 4)
    await eventually(lambda: segments_on_disk(log) == 2)
    assert not kit.failed


async def test_one_save_follows_another_with_all_that_came_meanwhile(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await kit.filled(kit.open())
    begun, gate = threading.Event(), threading.Event()
    writes: list[int] = []
    write = LocalState.write

    def slow(state: LocalState) -> None:
        writes.append(state.get(log.key).log_start_offset)
        begun.set()
        assert gate.wait(20)
        write(state)

    monkeypatch.setattr(LocalState, "write", slow)
    log.advance_log_start(1)
    await eventually(begun.is_set)
    for start in (2, 3):
        log.advance_log_start(start)
        await asyncio.sleep(0)  # A turn of the loop each.
    assert log.durable_start_offset == 0
    gate.set()
    await eventually(lambda: log.durable_start_offset == 3)
    assert writes == [1, 3]


async def test_a_start_that_local_state_does_not_know_yet_is_saved_when_the_log_is_opened(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = kit.open()
    key = (await kit.filled(manager)).key
    manager.close()
    log = kit.open().get(key)
    assert log is not None
    with monkeypatch.context() as patch:
        patch.setattr(LocalState, "write", lambda _: None)
        log.advance_log_start(2)
        log.flush()  # The checkpoint of the leader epochs tells of it.
        shutil.copytree(tmp_path / "logs", tmp_path / "killed")
    killed = Kit(tmp_path / "killed")
    again = killed.open().get(log.key)
    assert again is not None
    assert (again.log_start_offset, again.durable_start_offset, segments_on_disk(again)) == (
        2,
        2,
        4,
    )
    again.append_as_leader(batch("d"), EPOCH, now_ms=1)
    await eventually(lambda: segments_on_disk(again) == 2)
    killed.close()
