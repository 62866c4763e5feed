"""What is not in memory is brought there in a thread, so that the event loop does not wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.storage.storage_kit import batch, open_in, small_config


def test_a_read_is_cold_wherever_of_it_a_page_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    log = open_in(tmp_path, config=small_config(segment_bytes=1 << 20))
    while log.size_bytes < 200_000:
        log.append_as_leader(batch("x" * 1000), 0, now_ms=1)
    monkeypatch.setattr(os, "preadv", preadv)
    assert log.cold_read(0, 1 << 20) is None
    for at in (0, 7, 20, log.size_bytes // page):
        missing = {at}
        warm = log.cold_read(0, 1 << 20)
        assert warm is not None
        warm()
    missing = {30}
    assert log.cold_read(0, 29 * page) is None, "beyond what is to be read"
