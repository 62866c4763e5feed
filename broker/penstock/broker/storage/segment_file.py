"""The log file of a segment: written at its end, cut, and read where it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Buffer, SharedFile, write_all
from penstock.broker.storage.placing import SegmentDamagedError, file_name

_WORTH_BYTES: Final = 1024 * 1024  # Less than this is what file systems do by themselves.


class SegmentFile:
    """``BASE.log``, of which the first ``size_bytes`` are batches. Used on one thread.

    It is opened when it is needed.
    """

    __slots__ = ("_file", "_home", "base_offset", "directory", "name", "size_bytes")

    def __init__(
        self, home: DataDirectory, directory: Path, name: str, base_offset: int, *, size_bytes: int
    ) -> None:
        self._home = home
        self.name = name  # The partition's, for messages.
        self._file: SharedFile | None = None
        self.directory = directory
        self.base_offset = base_offset
        self.size_bytes = size_bytes

    def _make(self) -> None:
        """Make the file. Raises OSError; FileExistsError when there is one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._file = SharedFile(self.path, self._home.disk.open(self.path, flags))

    @property
    def path(self) -> Path:
        """The log file."""
        return self.directory / file_name(self.base_offset, "log")

    @property
    def file(self) -> SharedFile:
        """The open log file. Raises StorageError when it can't be opened."""
        if self._file is None:
            try:
                fd = self._home.disk.open(self.path, os.O_RDWR)
            except OSError as error:
                raise self._home.translate(error, f"opening {self.path}") from error
            self._file = SharedFile(self.path, fd)
        return self._file

    def close_file(self) -> None:
        """Close the descriptor once nobody uses it; it is opened anew when it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def allocate(self, size_bytes: int, reserve_bytes: int) -> None:
        """Have room on the disk for so many bytes, and leave ``reserve_bytes`` free.

        Raises OSError, and nothing is allocated; StorageError when it could not be given back.
        """
        if not self._home.room.fits(size_bytes, reserve_bytes):
            what = f"{size_bytes} bytes for {self.path} would leave less than log.min.free.bytes"
            raise OSError(errno.ENOSPC, what)
        file = self.file
        try:
            self._home.disk.allocate(file.fd, size_bytes)
        except OSError:
            self._cut_off(file.fd, self.size_bytes)
            raise

    def give_back(self) -> None:
        """Free what was allocated and not written, also by an earlier process. Raises OSError."""
        disk, file = self._home.disk, self.file
        if disk.allocated_bytes(file.fd) - self.size_bytes > _WORTH_BYTES:
            disk.truncate(file.fd, self.size_bytes)

    def append(self, buffers: Sequence[Buffer], size_bytes: int) -> int:
        """Write the buffers at the end and return where they begin.

        Raises OSError; what was written of them has then been cut off again. StorageError when that
        failed too: nobody knows then whether the next start will find them.
        """
        position = self.size_bytes
        file = self.file
        try:
            write_all(self._home.disk, file.fd, buffers, position, size_bytes)
        except OSError:
            self._cut_off(file.fd, position)
            raise
        self.size_bytes = position + size_bytes
        return position

    def _cut_off(self, fd: int, position: int) -> None:
        try:
            self._home.disk.truncate(fd, position)
        except OSError as error:
            doing = f"cutting off what a failed append left in {self.path}"
            raise self._home.fail(error, doing) from error

    def overwrite(self, data: Buffer, position: int) -> None:
        """Write what was read at ``position`` where it was. Raises OSError; nothing has changed."""
        write_all(self._home.disk, self.file.fd, [data], position, len(data))

    def damaged(self, position: int, what: str, offset: int = -1) -> SegmentDamagedError:
        """The error that names the place; ``offset`` is what is missing, if that is known."""
        return SegmentDamagedError(
            f"{self.name}: {what} (segment {self.path}, byte {position}); it is not served, and "
            "mended from another replica that is in sync, as soon as there is one",
            max(offset, self.base_offset),
        )

    def read_at(self, size: int, position: int) -> bytes:
        """The bytes of the log file. Raises StorageError."""
        file = self.file
        try:
            return self._home.disk.read_at(file.fd, size, position)
        except OSError as error:
            raise self._home.translate(error, f"reading {self.path}") from error

    def cold_read(self, position: int, size: int) -> Callable[[], None] | None:
        """What reads the bytes into the page cache, in any thread; None when they are there."""
        file, disk = self.file, self._home.disk
        size = min(size, self.size_bytes - position)
        if disk.is_cached(file.fd, position, size):
            return None
        file.acquire()

        def warm() -> None:
            try:
                disk.read_at(file.fd, size, position)
            except OSError:
                return  # The read proper will say so.
            finally:
                file.release()

        return warm
