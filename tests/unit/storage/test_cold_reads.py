"""What is not in memory is brought there in a thread, so that the event loop does not wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.storage import page_cache
from penstock.broker.storage.damage import Examination, mend
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import parse_header
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    batch,
    open_descriptors,
    open_in,
    small_config,
)


@pytest.mark.parametrize("counted", [True, False])
def test_a_read_is_cold_wherever_of_it_a_page_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, counted: bool
) -> None:
    page = 4096
    missing: set[int] = set()

    def preadv(fd: int, buffers: list[bytearray], position: int, _flags: int) -> int:
        """As the kernel: what is in memory up to the first page that is not."""
        wanted = min(sum(map(len, buffers)), os.fstat(fd).st_size - position)
        pages = range(position // page, (position + wanted - 1) // page + 1)
        gap = next((at for at in pages if at in missing), None)
        if gap == position // page:
            raise BlockingIOError
        return wanted if gap is None else gap * page - position

    def count(_fd: int, position: int, size: int) -> int | None:
        pages = range(position // page, (position + size - 1) // page + 1)
        return len(set(pages) - missing) if counted else None

    log = open_in(tmp_path, config=small_config(segment_bytes=1 << 20))
    while log.size_bytes < 200_000:
        log.append_as_leader(batch("x" * 1000), 0, now_ms=1)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(page_cache, "count_cached_pages", count)
    assert log.cold_read(0, 1 << 20) is None
    for at in (0, 7, 20, log.size_bytes // page):
        missing = {at}
        warm = log.cold_read(0, 1 << 20)
        assert warm is not None
        warm()
    missing = {30}
    assert log.cold_read(0, 29 * page) is None, "beyond what is to be read"


class LoopDisk(Disk):
    """Counts what this thread reads."""

    read_bytes = 0

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        data = super().read_at(fd, size, position)
        if threading.current_thread() is threading.main_thread():
            self.read_bytes += len(data)
        return data


def in_a_thread(job: Callable[[], None] | None) -> None:
    assert job is not None
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


def closed(root: Path, disk: Disk) -> tuple[PartitionLog, Segment]:
    """A log whose first segment is closed, on the disk, and without its index."""
    log = open_in(root, disk=disk, config=small_config(segment_bytes=100_000))
    while len(log.files.segments) < 3:
        log.append_as_leader(batch("x" * 100, timestamp_ms=log.log_end_offset), 0, now_ms=1)
    log.flush()
    segment = log.files.segments[0]
    segment.index_path.unlink()
    return log, segment


def test_a_read_without_an_index_has_it_made_in_another_thread(tmp_path: Path) -> None:
    disk = LoopDisk()
    log, segment = closed(tmp_path, disk)
    disk.read_bytes = 0
    first, second = log.cold_read(300, 1000), log.cold_read(301, 1000)
    in_a_thread(first)
    in_a_thread(second)
    assert log.cold_read(300, 1000) is None
    data = log.read(300, 1000, below=EVERYTHING)
    assert parse_header(data).base_offset == 300
    assert disk.read_bytes < 20_000
    assert segment.index is None
    assert segment.index_path.exists()
    assert not Examination(log, segment).run().index_is_damaged


def test_an_index_made_of_a_segment_that_was_cut_meanwhile_is_not_used(tmp_path: Path) -> None:
    log, segment = closed(tmp_path, LoopDisk())
    job = log.cold_read(300, 1000)
    in_a_thread(job)
    log.truncate_to(200)
    while len(log.files.segments) < 3:
        log.append_as_leader(batch("y" * 333), 1, now_ms=1)
    log.flush()
    for offset in range(0, log.log_end_offset, 7):
        data = log.read(offset, 1, below=EVERYTHING)
        assert parse_header(data).base_offset == offset
    assert not Examination(log, segment).run().index_is_damaged


def test_an_index_that_cannot_be_made_leaves_the_error_to_the_read(tmp_path: Path) -> None:
    log, segment = closed(tmp_path, LoopDisk())
    data = bytearray(segment.path.read_bytes())
    data[11] ^= 0x7F  # The first batch's length.
    segment.path.write_bytes(data)
    in_a_thread(log.cold_read(300, 1000))
    with pytest.raises(CorruptRecordError):
        log.read(300, 1000, below=EVERYTHING)


def test_an_index_made_of_a_damaged_segment_is_not_used_once_that_is_mended(tmp_path: Path) -> None:
    log, segment = closed(tmp_path, LoopDisk())
    largest, sound = segment.largest_timestamp(), segment.path.read_bytes()
    data = bytearray(sound)
    data[35] ^= 0x40  # The first batch's largest timestamp: it is as late as can be.
    segment.path.write_bytes(data)
    in_a_thread(log.cold_read(300, 1000))
    [damage] = Examination(log, segment).run().damages
    mend(log, segment, damage, sound[: parse_header(sound).size_bytes])()
    segment.mend_index()
    assert (segment.is_doubtful, segment.largest_timestamp()) == (False, largest)
    assert not Examination(log, segment).run().index_is_damaged


def test_a_cold_read_is_told_and_can_be_warmed_in_another_thread(tmp_path: Path) -> None:
    class ColdDisk(Disk):
        cold = False

        def is_cached(self, fd: int, position: int, size: int) -> bool:
            return super().is_cached(fd, position, size) and not self.cold

    disk = ColdDisk()
    log = open_in(tmp_path, disk=disk)
    for _ in range(30):
        log.append_as_leader(batch("x" * 100), 0, now_ms=1)
    log.flush()
    assert log.cold_read(0, 500) is None, "it was just written"
    assert log.cold_read(log.log_end_offset, 500) is None
    disk.cold = True
    warm = log.cold_read(4, 500)
    assert warm is not None
    before = open_descriptors()
    log.close(save=False)
    thread = threading.Thread(target=warm)  # The segment's file stays open for it.
    thread.start()
    thread.join()
    assert open_descriptors() < before
