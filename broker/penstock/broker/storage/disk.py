"""The system calls that storage makes on files, behind one object that tests replace.

Every write, flush and cut goes through it, and every name that is made, changed or taken away, so
that a test can fill the disk, break it, or know what a power cut would leave. LMDB, which keeps
local state, makes its own calls: a test sees when it commits, and can have that fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from penstock.broker.storage import page_cache

Buffer = bytes | bytearray | memoryview

_IOV_MAX: Final = 1024
# Out of space, over quota, or larger than the process or file system lets a file be: all are
# "nothing was written, and the log is as good as before".
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Nothing was opened, and the disk was not even asked.
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE, which os.posix_fallocate does not know.
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's call; None elsewhere."""
    library = ctypes.CDLL(None, use_errno=True)
    found = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        found.restype = ctypes.c_int
    return found


_fallocate: Final = _load_fallocate()


def is_disk_full(error: BaseException) -> bool:
    """Whether the error means that there is no room, as opposed to a disk that fails.

    Also of LMDB's: its transaction is void then, and the environment is as it was before.
    """
    # Not imported: what only makes directories (the ``penstock`` command) does without it.
    lmdb = sys.modules.get("lmdb")
    if lmdb is not None and isinstance(error, lmdb.MapFullError):
        return True
    if lmdb is not None and isinstance(error, lmdb.Error):
        # Older releases give no code, but have a class for ENOSPC.
        return getattr(error, "code", None) in _FULL or isinstance(error, lmdb.DiskError)
    return isinstance(error, OSError) and error.errno in _FULL


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether the process, or the system, may open no more files: the disk may be well."""
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR


def leaves_all_as_it_was(error: BaseException) -> bool:
    """Whether a write, or an opening, for want of room or of a descriptor, may be tried again."""
    return is_disk_full(error) or is_out_of_descriptors(error)


class Disk:
    """The real thing. Stateless and safe from any thread; raises OSError."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of the file."""
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """Write what fits of the buffers, one after the other; how many bytes that was."""
        return os.pwritev(fd, buffers, position)

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        """Up to ``size`` bytes from ``position``; fewer at the file's end."""
        return os.pread(fd, size, position)

    def is_cached(self, fd: int, position: int, size: int) -> bool:
        """Whether a read there finds all its pages in memory. True where the system can't tell."""
        return page_cache.is_cached(fd, position, size)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write to the file system."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def total_bytes(self, path: Path) -> int:
        """What the file system holds, in use or free."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, in place of the file that had it; or a directory, a free name.

        Not yet on the disk.
        """
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second, new name. Not yet on the disk."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """Take a name away. Not yet on the disk."""
        path.unlink()

    def make_directory(self, path: Path) -> None:
        """Make an empty directory. Not yet on the disk. FileExistsError when there is one."""
        path.mkdir()

    def remove_directory(self, path: Path) -> None:
        """Take an empty directory away. Not yet on the disk."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Take a directory away with all that is in it, as far as that can be done."""
        shutil.rmtree(path, ignore_errors=True)

    def commit(self, environment: Path) -> None:
        """LMDB is about to commit a transaction, durably, in this directory; it does so itself."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Have room for a file of so many bytes; its size stays what it is.

        Where the system or the file system knows no such thing there is none. Raises OSError, and
        a part may have been allocated: ``truncate`` gives back what lies behind the end.
        """
        while _fallocate is not None and _fallocate(fd, _KEEP_SIZE, 0, size) != 0:
            number = ctypes.get_errno()
            if number in _NOT_SUPPORTED:
                return
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def allocated_bytes(self, fd: int) -> int:
        """What the file takes up of the disk."""
        return os.fstat(fd).st_blocks * 512

    def sync_data(self, fd: int) -> None:
        """Return when the file's data, and the size that makes it readable, are on the disk."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the names made, renamed and removed in the directory are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class SharedFile:
    """A descriptor that closes when its owner is done with it *and* nobody uses it any more.

    A flush in another thread must never find its descriptor closed, or reused for another file.
    Safe from any thread.
    """

    __slots__ = ("_closing", "_lock", "_users", "fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def acquire(self) -> SharedFile:
        """Keep the descriptor open until ``release``. Only while the owner has not closed it."""
        with self._lock:
            assert not self._closing, f"{self.path} is closed"
            self._users += 1
        return self

    def release(self) -> None:
        """The counterpart of ``acquire``."""
        with self._lock:
            self._users -= 1
            if self._closing and self._users == 0:
                os.close(self.fd)

    def close(self) -> None:
        """The owner is done: close now, or when the last user is."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._users == 0:
                os.close(self.fd)


def remove_if_there(disk: Disk, path: Path) -> None:
    """Take a name away that need not be there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        disk.remove(path)


def make_directories(disk: Disk, path: Path) -> None:
    """Make a directory where there is none, and those above it; their names are on the disk then.

    Else a power cut could take a directory in which files had long been synced. Raises OSError;
    a directory whose name could not be synced is then gone again.
    """
    missing = []
    at = path
    while not at.is_dir():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        try:
            disk.make_directory(directory)
        except FileExistsError:
            if not directory.is_dir():
                raise
        try:
            disk.sync_directory(directory.parent)
        except OSError:
            with contextlib.suppress(OSError):
                disk.remove_directory(directory)
            raise


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], position: int, left: int) -> None:
    """Write the buffers, of ``left`` bytes together, one after the other. Raises OSError."""
    pending = list(buffers)
    while True:
        written = disk.write_at(fd, pending[:_IOV_MAX], position)
        left -= written
        if left == 0:
            return
        position += written
        pending = _without(pending, written)


def _without(buffers: list[Buffer], written: int) -> list[Buffer]:
    """What is left of the buffers once so many bytes of them were written."""
    for at, buffer in enumerate(buffers):
        if written < len(buffer):
            return [memoryview(buffer)[written:], *buffers[at + 1 :]]
        written -= len(buffer)
    return []
