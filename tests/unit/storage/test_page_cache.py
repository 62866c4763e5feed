"""Whether a read would wait for the disk, of real files.

What is in memory is known here by mincore(2). To ask by a read that refuses to wait begins to read
what is missing, and where the disk is done before the answer, it is rightly said to be there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.broker.storage import page_cache
from penstock.broker.storage.page_cache import count_cached_pages, is_cached

PAGE = mmap.PAGESIZE
PAGES = 512


@pytest.fixture(params=["counted", "read"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to find out; an older kernel or a sandbox leaves only the second."""
    if request.param == "read":
        monkeypatch.setattr(page_cache, "count_cached_pages", lambda *_: None)
    return str(request.param)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of whole pages that are on the disk, and in memory as well."""
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(opened, os.urandom(PAGE * PAGES), 0)
    os.fsync(opened)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)  # Nothing is read ahead.
    yield opened
    os.close(opened)


def is_resident(fd: int, position: int, size: int) -> bool:
    """Whether all pages of the range are in memory, as mincore(2) has it: nothing is read."""
    first, last = position // PAGE, (position + size - 1) // PAGE
    found = (ctypes.c_ubyte * PAGES)()
    with mmap.mmap(fd, PAGES * PAGE) as mapped:
        pages = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.byref(pages), ctypes.c_size_t(PAGES * PAGE), found
        )
        del pages  # A map that is referred to cannot be closed.
    assert not failed, os.strerror(ctypes.get_errno())
    return all(page & 1 for page in found[first : last + 1])


def evict(fd: int) -> None:
    """Leave no page in memory; skip where the file system keeps its files there, and only there."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if any(is_resident(fd, page * PAGE, PAGE) for page in range(PAGES)):
        pytest.skip("this file system keeps its files in memory")


def assert_told(fd: int, position: int, size: int) -> None:
    """The answer is the truth of before it, or of after it."""
    before = is_resident(fd, position, size)
    answer = is_cached(fd, position, size)
    assert answer in (before, is_resident(fd, position, size))


@pytest.mark.usefixtures("how")
def test_what_was_written_is_there_and_what_was_evicted_is_not(fd: int) -> None:
    assert is_resident(fd, 0, PAGE * PAGES)
    assert is_cached(fd, 0, PAGE * PAGES)
    assert is_cached(fd, 17, 1)
    assert is_cached(fd, PAGE - 1, 2)
    evict(fd)
    os.pread(fd, 2 * PAGE, 0)
    assert is_resident(fd, 0, 2 * PAGE)
    assert is_cached(fd, 0, 2 * PAGE)
    assert is_cached(fd, 5, 2 * PAGE - 5)
    assert not is_resident(fd, PAGE * (PAGES - 1), PAGE)
    assert_told(fd, PAGE * (PAGES - 1), PAGE)
    assert_told(fd, 0, PAGE * PAGES)


@pytest.mark.parametrize("page", [1, 7, PAGES // 2, PAGES - 1])
def test_a_single_page_that_is_missing_is_counted(fd: int, page: int) -> None:
    if count_cached_pages(fd, 0, PAGE) is None:
        pytest.skip("this system does not count")
    evict(fd)
    for other in range(PAGES):
        if other != page:
            os.pread(fd, PAGE, other * PAGE)
    assert count_cached_pages(fd, 0, PAGES * PAGE) == PAGES - 1
    assert count_cached_pages(fd, page * PAGE + 3, 1) == 0


def refusing(fd: int, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    """Let reads that would wait for this page be refused."""
    read = os.preadv

    def preadv(fd: int, buffers: Sequence[bytearray], position: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if position <= missing * PAGE < position + sum(map(len, buffers)):
            raise BlockingIOError
        return read(fd, buffers, position, flags)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("counted", [None, 0, PAGES - 1])
@pytest.mark.parametrize("missing", [0, 1, PAGES // 2, PAGES - 1])
def test_one_that_a_read_would_wait_for_is_noticed(
    fd: int, monkeypatch: pytest.MonkeyPatch, counted: int | None, missing: int
) -> None:
    monkeypatch.setattr(page_cache, "count_cached_pages", lambda *_: counted)
    assert is_cached(fd, 0, PAGE * PAGES)
    refusing(fd, monkeypatch, missing)
    assert not is_cached(fd, 0, PAGE * PAGES)
    assert not is_cached(fd, missing * PAGE, 1)


@pytest.mark.usefixtures("how")
def test_behind_the_end_of_the_file_nothing_is_waited_for(fd: int) -> None:
    assert is_cached(fd, PAGE * PAGES, PAGE)
    assert is_cached(fd, PAGE * PAGES - 10, 100 * PAGE)
    assert is_cached(fd, 0, 0)
    os.ftruncate(fd, 100)
    assert is_cached(fd, 50, PAGE * PAGES)


def test_pages_are_counted_or_nobody_says(fd: int, tmp_path: Path) -> None:
    counted = count_cached_pages(fd, 0, PAGE * PAGES)
    assert counted in (None, PAGES)
    if counted is not None:
        assert count_cached_pages(fd, PAGE - 1, 2) == 2
        assert count_cached_pages(fd, PAGE * PAGES, PAGE) == 0
    assert count_cached_pages(-1, 0, PAGE) is None
    read_end, write_end = os.pipe()
    try:
        assert is_cached(read_end, 0, PAGE), "it can't tell"
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("missing", [0, PAGES // 2])
def test_a_page_still_on_its_way_is_not_there(
    fd: int, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """The count has it as soon as it is asked of the disk; a byte of it can't be read yet."""
    monkeypatch.setattr(page_cache, "count_cached_pages", lambda *_: PAGES)
    assert is_cached(fd, 0, PAGE * PAGES)
    refusing(fd, monkeypatch, missing)
    assert not is_cached(fd, 0, PAGE * PAGES)
