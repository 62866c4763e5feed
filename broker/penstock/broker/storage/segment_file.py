"""The log file of a segment: written at its end, cut, and read where it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Buffer, SharedFile, is_disk_full, write_all
from penstock.broker.storage.placing import SegmentDamagedError, file_name
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, parse_header
from penstock.wire.topic_config import MAX_MESSAGE_BYTES

_WORTH_BYTES: Final = 1024 * 1024  # Less than this is what file systems do by themselves.
_log = structlog.get_logger()


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
        """Have room on the disk for so many bytes, if that leaves ``reserve_bytes`` free.

        Where it does not the segment grows as others do: appends are not refused for what they do
        not need yet. Raises OSError when the disk fails, StorageError when a part of the room could
        not be given back.
        """
        file, room = self.file, self._home.room
        room.ask_again()  # In a second the segments of many partitions may begin.
        if not room.fits(size_bytes, reserve_bytes):
            self._grows_as_needed(size_bytes, "it would leave less than log.min.free.bytes")
            return
        try:
            self._home.disk.allocate(file.fd, size_bytes)
        except OSError as error:
            self._cut_off(file.fd, self.size_bytes)
            if not is_disk_full(error):
                raise
            self._grows_as_needed(size_bytes, str(error))
        finally:
            room.ask_again()

    def _grows_as_needed(self, wanted_bytes: int, reason: str) -> None:
        _log.warning(
            "segment_not_preallocated",
            segment=str(self.path),
            wanted_bytes=wanted_bytes,
            reason=reason,
        )

    def give_back(self) -> bool:
        """Free what was allocated and not written, also by an earlier process; whether it did.

        Raises OSError. It is for the caller to sync.
        """
        disk, file = self._home.disk, self.file
        if disk.allocated_bytes(file.fd) - self.size_bytes <= _WORTH_BYTES:
            return False
        disk.truncate(file.fd, self.size_bytes)
        self._home.room.ask_again()
        return True

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
        """What reads the bytes into the page cache, in any thread; None when they are there.

        All of the batch that begins there, if that is larger: a read returns it whole.
        """
        file, disk = self.file, self._home.disk
        room = self.size_bytes - position
        size = min(size, room)
        if disk.is_cached(file.fd, position, size):
            left = _left(self.read_at(HEADER_BYTES, position), size) if size < room else 0
            if left == 0 or disk.is_cached(file.fd, position + size, min(left, room - size)):
                return None
        file.acquire()

        def warm() -> None:
            try:
                left = _left(disk.read_at(file.fd, size, position), size)
                if left:
                    disk.read_at(file.fd, min(left, room - size), position + size)
            except OSError:
                return  # The read proper will say so.
            finally:
                file.release()

        return warm


def _left(beginning: bytes, size: int) -> int:
    """What of a batch comes after its first ``size`` bytes; 0 where no read would go so far."""
    try:
        header = parse_header(beginning)
    except CorruptRecordError:
        return 0  # The read proper will say so, as below.
    return header.size_bytes - size if size < header.size_bytes <= MAX_MESSAGE_BYTES else 0
