"""A crash at any step of a clean, and of the recovery after it, leaves the old or the new."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from tests.unit.storage.cleaning import COMPACTED, Broker, close_segment, names_in, put, shown
from tests.unit.storage.storage_kit import (
    PARTITION,
    PowerCutDisk,
    PowerCutError,
    lose_power,
    open_in,
    read_all,
)

SEEDS = 6


class Prepared:
    """A log of four segments that become one, as bytes: before a clean and after it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "prepared"
        self.root.mkdir()
        log = open_in(self.root, config=COMPACTED)
        for number in range(4):
            put(
                log,
                ("a", str(number)),
                (f"b{number % 2}", str(number)),
                producer=(1, 0, 2 * number),
            )
            if number % 2:
                put(log, ("a", f"{number}.5"))
            close_segment(log)
        put(log, ("a", "active"))
        self.old = read_all(log)
        self.names = names_in(log)
        log.close(save=False)

    def copy(self, target: Path, disk: Disk) -> PartitionLog:
        """The log in another directory."""
        shutil.copytree(self.root, target)
        for path in (target / str(PARTITION)).iterdir():
            settle(disk, path)
        disk.sync_directory(target / str(PARTITION))
        return reopen(target, disk)


def settle(disk: Disk, path: Path) -> None:
    """What a disk finds when the power is back is on the disk."""
    fd = disk.open(path, os.O_RDWR)
    disk.sync_data(fd)
    os.close(fd)


def reopen(root: Path, disk: Disk) -> PartitionLog:
    return open_in(root, config=COMPACTED, saved=SavedState(11), disk=disk)


async def clean(log: PartitionLog) -> None:
    broker = Broker(log)
    try:
        while await broker.cleaner.clean_one():
            pass
    finally:
        await broker.cleaner.stop()


async def steps_of_a_clean(prepared: Prepared, tmp_path: Path) -> tuple[int, bytes]:
    """How many calls to the disk it takes, and what the log has after it."""
    disk = PowerCutDisk()
    log = prepared.copy(tmp_path / "whole", disk)
    disk.cut_after = 1000
    await clean(log)
    steps = 1000 - disk.cut_after
    new = read_all(log)
    assert len(names_in(log)) == 2 < len(prepared.names)
    log.close(save=False)
    return steps, new


async def test_a_crash_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    steps, new = await steps_of_a_clean(prepared, tmp_path)
    assert steps > 15
    assert len(new) < len(prepared.old)
    seen = set()
    for step in range(steps):
        for seed in range(SEEDS):
            root = tmp_path / f"{step}-{seed}"
            disk = PowerCutDisk()
            log = prepared.copy(root, disk)
            disk.cut_after = step
            with contextlib.suppress(PowerCutError):
                await clean(log)
            log.close(save=False)
            disk = lose_power(root, disk, random.Random(seed))
            disk.cut_after = seed  # And once more, while it starts.
            with contextlib.suppress(PowerCutError):
                reopen(root, disk).close(save=False)
            disk = lose_power(root, disk, random.Random(seed + 1))
            log = reopen(root, disk)
            found = read_all(log)
            assert found in (prepared.old, new), f"neither after step {step}, seed {seed}"
            seen.add(found == new)
            assert not [name for name in names_in(log) if not name.endswith(".log")]
            await clean(log)
            assert read_all(log) == new
            log.close(save=False)
            shutil.rmtree(root)
    assert seen == {False, True}


class Held:
    """Step 4 of a swap, which does not begin before ``go_on`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr("penstock.broker.storage.cleaner.cleaner.finish", self._finish)

    def _finish(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.go_on.wait(20)


def drop_and_write(log: PartitionLog) -> None:
    log.truncate_fully_and_start_at(0)
    put(log, ("b", "new"))


def cut_and_write(log: PartitionLog) -> None:
    log.truncate_to(5)
    put(log, ("b", "new"))


@pytest.mark.parametrize("change", [drop_and_write, cut_and_write])
async def test_a_cut_in_the_last_step_of_a_swap_is_safe_from_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[PartitionLog], None]
) -> None:
    prepared = Prepared(tmp_path)
    done = False
    for step in itertools.count():
        if done:
            break
        for seed in range(SEEDS):
            root = tmp_path / f"{step}-{seed}"
            disk = PowerCutDisk()
            log = prepared.copy(root, disk)
            saved = SavedState(11)

            def lower(_key: object, offset: int) -> None:
                nonlocal saved
                saved = saved._replace(recovery_point=min(saved.recovery_point, offset))

            log.home.lower_recovery_point = lower
            held = Held(monkeypatch)
            cleaning = asyncio.create_task(clean(log))
            await held.reached.wait()
            kept = [one for one in shown(log).items() if one[0] < 5]
            disk.cut_after = step
            with contextlib.suppress(PowerCutError):
                change(log)
                done = True
            written = shown(log) if done else None
            crashed = lose_power(root, disk, random.Random(seed))
            cleaning.cancel()  # The machine is dead, and the log maybe between two calls.
            held.go_on.set()
            with contextlib.suppress(asyncio.CancelledError):
                await cleaning
            log.close(save=False)
            again = open_in(root, config=COMPACTED, saved=saved, disk=crashed)
            if written is not None:
                assert shown(again) == written, f"seed {seed}"
            elif change is cut_and_write:
                assert [one for one in shown(again).items() if one[0] < 5] == kept
            again.close(save=False)
            shutil.rmtree(root)


@pytest.mark.parametrize("gone", ["deleted", "dropped"])
async def test_a_swap_file_that_comes_back_later_counts_for_nothing(
    tmp_path: Path, gone: str
) -> None:
    """A name that was removed, but not durably, when the segments have gone since."""
    prepared = Prepared(tmp_path)
    log = prepared.copy(tmp_path / "log", Disk())
    await clean(log)
    stale = log.directory / f"{0:020d}-{10:020d}.log.swap"
    stale.write_bytes(log.files.segments[0].path.read_bytes())
    if gone == "deleted":
        log.advance_log_start(10)
        log.flush()
    else:
        log.truncate_fully_and_start_at(20)
    expected = log.log_start_offset, log.log_end_offset, read_all(log)
    point = log.recovery_point
    log.close(save=False)
    again = open_in(tmp_path / "log", saved=SavedState(point, expected[0]))
    assert (again.log_start_offset, again.log_end_offset, read_all(again)) == expected
    assert not stale.exists()


async def test_a_swap_file_within_a_larger_one_counts_for_nothing(tmp_path: Path) -> None:
    """It was discarded, and its removal was not durable yet when the power went."""
    prepared = Prepared(tmp_path)
    log = prepared.copy(tmp_path / "log", Disk())
    inner = (log.directory / f"{5:020d}.log").read_bytes()
    await clean(log)
    new, cleaned = read_all(log), log.files.segments[0].path.read_bytes()
    log.close(save=False)
    log = prepared.copy(tmp_path / "again", Disk())
    log.close(save=False)
    (log.directory / f"{0:020d}-{10:020d}.log.swap").write_bytes(cleaned)
    (log.directory / f"{5:020d}-{7:020d}.log.swap").write_bytes(inner)
    again = reopen(tmp_path / "again", Disk())
    assert read_all(again) == new
    assert names_in(again) == [f"{0:020d}.log", f"{10:020d}.log"]
