"""Whether a read would find its pages in memory, without reading them.

Linux says since 6.5 how many pages of a range it has (cachestat(2)); elsewhere, or where a sandbox
forbids the call, a read that refuses to wait (preadv2(2) with RWF_NOWAIT) into a place that nobody
looks at finds out: that costs as much as the read itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Final

_IOV_MAX: Final = 1024
_SCRATCH: Final = bytearray(64 * 1024)
"""Over and over into the same place, which is cheaper than to have a place for all of it."""
_SAMPLE_BYTES: Final = 128 * 1024
"""Of so much one byte is read: a page may be counted while it is still on its way from the disk,
and what is read ahead comes in such pieces."""
_CACHESTAT: Final = 451
"""The call's number, the same on every architecture that Penstock's dependencies are built for."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("written_back", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def count_cached_pages(fd: int, position: int, size: int) -> int | None:
    """How many pages of the range are in memory or on their way; None where nobody says."""
    if not sys.platform.startswith("linux"):
        return None
    pages = _Pages()
    asked = _Range(position, size)
    failed = _syscall(
        ctypes.c_long(_CACHESTAT), fd, ctypes.byref(asked), ctypes.byref(pages), ctypes.c_uint(0)
    )
    return None if failed else int(pages.cached)


def is_cached(fd: int, position: int, size: int) -> bool:
    """Whether a read there finds all its pages in memory. True where the system can't tell."""
    if size <= 0:
        return True
    first, last = position // mmap.PAGESIZE, (position + size - 1) // mmap.PAGESIZE
    if count_cached_pages(fd, position, size) == last - first + 1:
        samples = [*range(position, position + size - 1, _SAMPLE_BYTES), position + size - 1]
        return all(_reads_at_once(fd, sample, 1) for sample in samples)
    # Some are missing, or behind the file's end, or nobody counts them.
    return _reads_at_once(fd, position, size)


def _reads_at_once(fd: int, position: int, size: int) -> bool:
    end = position + size
    while position < end:
        scratches = -(-(end - position) // len(_SCRATCH))
        buffers: list[bytearray | memoryview] = [_SCRATCH] * min(scratches, _IOV_MAX)
        if end - position < len(_SCRATCH):
            buffers = [memoryview(_SCRATCH)[: end - position]]
        try:
            found = os.preadv(fd, buffers, position, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if found == 0:
            return True  # The file's end.
        position += found
    return True
