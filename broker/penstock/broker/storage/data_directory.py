"""What the logs of one data directory share: its disk, its health, its open segments."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.broker.storage.counting import FlushCounts, UncountedFlushes
from penstock.broker.storage.disk import Disk, is_disk_full, leaves_all_as_it_was
from penstock.broker.storage.room import Room
from penstock.broker.storage.settings import LogSettings
from penstock.wire.errors import PenstockError, StorageError
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.broker.storage.log import PartitionLog
    from penstock.broker.storage.log_start import Why
    from penstock.broker.storage.segment import Segment


def _run_now(job: Callable[[], None]) -> None:
    job()


def _keep_no_point(_key: TopicIdPartition, _offset: int) -> None:
    return None


def _keep_no_note(_log: PartitionLog, _offset: int) -> None:
    return None


def _count_nothing(_why: Why, _size_bytes: int) -> None:
    return None


def _keep_nothing(_directory: Path, _error: StorageError) -> None:
    return None


def _flush_on_request(_log: PartitionLog) -> None:
    return None


def _keep_no_start(log: PartitionLog) -> None:
    log.start.saving()()


class DataDirectory:
    """One directory of partition directories. Used on one thread, like the logs in it.

    The defaults serve a log on its own (tools, tests): nobody flushes but who calls ``flush``.
    ``clock_ms`` says how long producers were silent: it is to advance steadily, whatever happens to
    the wall clock (penstock.broker.storage.clock).

    A manager puts its own callables in place: ``request_flush`` is called when a log has
    something to flush, ``lower_recovery_point`` must have made the lower value durable when it
    returns, ``save_soon`` makes what local state keeps of the log durable, in the background and
    soon, ``run_in_background`` runs what may take long (deleting files), ``run_soon`` what another
    turn of the loop is to do, ``damage_found`` is called when a read came upon a batch that is not
    sound, with an offset in or near it, ``segment_deleted`` for each old segment that goes, with
    the reason and its size in bytes, ``flush_counts`` hears of flushes, ``partition_lost``, in any
    thread, with a partition's directory in which somebody removed files.
    """

    def __init__(
        self,
        path: Path,
        settings: LogSettings,
        clock_ms: Callable[[], int],
        *,
        disk: Disk | None = None,
        on_failed: Callable[[Path, StorageError], None] | None = None,
    ) -> None:
        self.path = path
        self.settings = settings
        self.clock_ms = clock_ms
        self.disk = disk or Disk()
        self.room = Room(path, self.disk, clock_ms)
        self.failure: StorageError | None = None
        self.request_flush: Callable[[PartitionLog], None] = _flush_on_request
        self.lower_recovery_point: Callable[[TopicIdPartition, int], None] = _keep_no_point
        self.save_soon: Callable[[PartitionLog], None] = _keep_no_start
        self.run_soon: Callable[[Callable[[], None]], None] = _run_now
        self.run_in_background: Callable[[Callable[[], None]], None] = _run_now
        self.damage_found: Callable[[PartitionLog, int], None] = _keep_no_note
        self.segment_deleted: Callable[[Why, int], None] = _count_nothing
        self.flush_counts: FlushCounts = UncountedFlushes()
        self.partition_lost: Callable[[Path, StorageError], None] = _keep_nothing
        self.cleaning: set[Path] = set()  # The partition directories that the cleaner works in.
        self._on_failed = on_failed
        self._identity: tuple[int, int] | None = None  # Once it is known: device and inode.
        self._open_segments: OrderedDict[Segment, None] = OrderedDict()

    def check(self) -> None:
        """Raise StorageError when the directory has failed."""
        if self.failure is not None:
            raise StorageError(self.failure.message)

    def note_identity(self) -> None:
        """Know this very directory again. Raises OSError."""
        status = self.path.stat()
        self._identity = status.st_dev, status.st_ino

    def where_removed(self, error: BaseException) -> Path | None:
        """The partition's directory in which somebody removed files, where that is the error.

        No disk that fails says that a name is not there. One that was unmounted does, but then
        this is another directory; and a file system that went read-only syncs nothing.
        """
        name = error.filename if isinstance(error, FileNotFoundError) else None
        if name is None or self._identity is None:
            return None
        try:
            first = Path(os.fsdecode(name)).relative_to(self.path).parts[:1]
            status = self.path.stat()
            self.disk.sync_directory(self.path)
        except (OSError, ValueError):
            return None
        if not first or first[0].startswith("."):
            return None
        is_same = self._identity == (status.st_dev, status.st_ino)
        return self.path / first[0] if is_same else None

    def is_another(self) -> bool:
        """Whether this is not the directory any more that was opened. Blocks; in any thread."""
        if self._identity is None:
            return False
        try:
            status = self.path.stat()
        except OSError:
            return True
        return self._identity != (status.st_dev, status.st_ino)

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """What the disk refuses in the body fails the directory: raises StorageError."""
        try:
            yield
        except OSError as error:
            raise self.fail(error, doing) from error

    def fail(self, error: Exception, doing: str, next_step: str = "") -> StorageError:
        """The directory is not to be trusted any more. Returns the error for the caller to raise.

        Where somebody removed files of one partition it is that partition alone that is given up.
        ``next_step`` is what a person is to do where that is not to mend the disk.

        After a failed fsync nobody knows what is on the disk: the kernel may drop the pages that
        it could not write and report success the next time. So a failure is for good.
        """
        removed = None if self.failure is not None else self.where_removed(error)
        if removed is not None:
            lost = StorageError(
                f"files of {removed} were removed while this broker ran ({doing}: {error}); its "
                "replica here is offline; next: restart this broker: what is missing is copied "
                "anew from the leader, if another replica is in sync"
            )
            self.partition_lost(removed, lost)
            return lost
        if self.failure is None:
            mended = "there is room on the disk" if is_disk_full(error) else "the disk is mended"
            until = f" until {mended} and the broker is restarted"
            self.failure = StorageError(
                f"data directory {self.path} failed while {doing}: {error}; its partitions are "
                f"offline on this broker{f'; next: {next_step}' if next_step else until}"
            )
            if self._on_failed is not None:
                self._on_failed(self.path, self.failure)
        return StorageError(self.failure.message)

    def translate(self, error: Exception, doing: str) -> PenstockError:
        """The typed error for a failed call: a full disk passes, and so does want of descriptors;
        anything else is for good.

        For calls that left everything as it was, or whose caller has undone what they did. A
        flush of appended records is none of them: see PartitionLog.finish_flush.
        """
        if leaves_all_as_it_was(error):
            return self.room.refused_by(error, doing)
        return self.fail(error, doing)

    def used(self, segment: Segment) -> None:
        """A closed segment was opened or read: keep the ones last used open, close the others."""
        self._open_segments[segment] = None
        self._open_segments.move_to_end(segment)
        if len(self._open_segments) > self.settings.open_segments_max:
            oldest, _ = self._open_segments.popitem(last=False)
            oldest.close_file()

    def forget(self, segment: Segment) -> None:
        """The segment is active again, closed or deleted."""
        self._open_segments.pop(segment, None)
