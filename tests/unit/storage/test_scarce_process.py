"""A process without descriptors or threads for a while: its disk is well, and not given up."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.broker.storage import flusher
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.recovery import SavedState
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import DiskFullError
from penstock.wire.ids import TopicId
from tests.support import eventually
from tests.unit.storage.storage_kit import Clock, batch, open_in, small_config, values_of


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "ROOM_RETRY_S", 0.01)


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[LogManager]:
    failed: list[Path] = []
    made = LogManager(
        [tmp_path / "logs"],
        LogSettings(checkpoint_interval_ms=10),
        lambda _: None,
        Clock(),
        cluster_id="c1",
        on_directory_failed=lambda path, _: failed.append(path),
    )
    made.open()
    yield made
    made.close()
    assert not failed


# --- without descriptors --------------------------------------------------------------------------


class Exhausted(Disk):
    """Opens nothing for want of descriptors while ``is_exhausted``; what is open works."""

    is_exhausted = False

    def _check(self, path: Path) -> None:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    def open(self, path: Path, flags: int) -> int:
        self._check(path)
        return super().open(path, flags)

    def sync_directory(self, path: Path) -> None:
        self._check(path)
        super().sync_directory(path)


def test_a_segment_that_cannot_be_opened_for_want_of_descriptors_fails_nothing(
    tmp_path: Path,
) -> None:
    disk = Exhausted()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    disk.is_exhausted = True
    with pytest.raises(DiskFullError, match="next: raise the node's limit of open files"):
        log.append_as_leader(batch("b" * 200), 0, now_ms=1)
    assert (log.log_end_offset, log.home.failure) == (1, None)
    disk.is_exhausted = False
    log.append_as_leader(batch("b" * 200), 0, now_ms=1)
    log.flush()
    assert (log.durable_offset, values_of(log)) == (2, ["a" * 100, "b" * 200])


def test_a_flush_without_descriptors_promises_nothing_and_is_done_again(tmp_path: Path) -> None:
    disk = Exhausted()
    log = open_in(tmp_path, disk=disk, config=small_config(segment_bytes=300))
    for sequence in range(4):
        log.append_as_leader(batch("a" * 100, producer=(7, 0, sequence)), 5, now_ms=1)
    disk.is_exhausted = True
    with pytest.raises(DiskFullError, match="Too many open files"):
        log.flush()
    assert (log.durable_offset, log.home.failure) == (0, None)
    disk.is_exhausted = False
    log.flush()
    assert log.durable_offset == 4
    log.close(save=False)
    again = open_in(tmp_path, saved=SavedState(recovery_point=4))
    assert (again.last_epoch, values_of(again)) == (5, ["a" * 100] * 4)


def test_names_that_cannot_be_synced_for_want_of_descriptors_are_synced_later(
    tmp_path: Path,
) -> None:
    class NoDirectories(Exhausted):
        def open(self, path: Path, flags: int) -> int:
            return Disk.open(self, path, flags)

    disk = NoDirectories()
    log = open_in(tmp_path, disk=disk)
    log.append_as_leader(batch("a"), 0, now_ms=1)
    disk.is_exhausted = True
    with pytest.raises(DiskFullError):
        log.flush()
    assert (log.durable_offset, log.home.failure) == (0, None)
    disk.is_exhausted = False
    log.flush()
    assert log.durable_offset == 1


def test_a_closed_segment_that_cannot_be_opened_to_be_read_fails_nothing(tmp_path: Path) -> None:
    disk = Exhausted()
    log = open_in(
        tmp_path,
        disk=disk,
        config=small_config(segment_bytes=300),
        settings=LogSettings(open_segments_max=1),
    )
    for _ in range(6):
        log.append_as_leader(batch("a" * 100), 0, now_ms=1)
    log.flush()
    disk.is_exhausted = True
    with pytest.raises(DiskFullError, match="raise the node's limit"):
        values_of(log)
    assert log.home.failure is None
    disk.is_exhausted = False
    assert values_of(log) == ["a" * 100] * 6


# --- without threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["flush", "sync"])
async def test_flushes_for_which_there_is_no_thread_are_done_all_the_same(
    manager: LogManager, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refused: list[str] = []
    scarce = [True]

    def limited(thread: threading.Thread) -> None:
        if scarce and thread.name.startswith(f"{which} "):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    logs = [manager.get_or_create(f"t{n}", 0, TopicId(b"%d" % n * 16), {}) for n in (1, 2)]
    for end in (1, 2):
        for log in logs:  # In one round.
            log.append_as_leader(batch("a"), 0, now_ms=1)
        await eventually(lambda end=end: all(one.durable_offset == end for one in logs))
        scarce.clear()
    assert refused
