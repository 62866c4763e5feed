"""What of one log is on the disk, and what a flush of it has to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.checkpoints import EPOCHS_FILE, encode_epochs
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import is_disk_full, is_out_of_descriptors
from penstock.broker.storage.flush import FlushStep, FlushTask
from penstock.broker.storage.log_files import FileWrite, LogFiles, index_writes
from penstock.wire.errors import CorruptRecordError

if TYPE_CHECKING:
    from penstock.broker.storage.log import PartitionLog


class LogFlushing:
    """The flushes of one log: ``begin`` says what is to be done, ``finish`` takes over what was.

    Used on the log's thread. Between the two, which may be long, the log may grow, be cut, or have
    its epochs assigned: each tells here, so that a flush never counts for more than it covered.
    """

    __slots__ = (
        "_epochs",
        "_epochs_saved",
        "_files",
        "_generation",
        "_home",
        "_name",
        "_pending_writes",
        "_unsure",
        "failed",
        "synced_offset",
    )

    def __init__(
        self,
        home: DataDirectory,
        files: LogFiles,
        epochs: EpochHistory,
        *,
        name: str,
        synced_offset: int,
        epochs_saved: bool,
    ) -> None:
        self.synced_offset = synced_offset  # Everything below is on the disk, whatever the policy.
        self.failed = False  # The last flush found no room.
        self._home = home
        self._files = files
        self._epochs = epochs
        self._name = name
        self._epochs_saved = epochs_saved  # The checkpoint on the disk has them all.
        self._pending_writes: list[FileWrite] = []
        # Counts the cuts: what a flush began before a cut says nothing about what came after it.
        self._generation = 0
        self._unsure = False  # It was batches that the last flush could not put on the disk.

    # --- what happens to the log -----------------------------------------------------------------

    def epochs_changed(self) -> None:
        """The checkpoint of the leader epochs is to be written anew."""
        self._epochs_saved = False

    def write_later(self, writes: Iterable[FileWrite]) -> None:
        """The next flush is to write these files as well."""
        self._pending_writes += writes

    def cut(self, end_offset: int) -> None:
        """From here on nothing at or after ``end_offset`` counts as durable."""
        self._generation += 1
        self._pending_writes.clear()
        self._epochs_saved = False
        self.synced_offset = min(self.synced_offset, end_offset)

    # --- flushing --------------------------------------------------------------------------------

    @property
    def is_needed(self) -> bool:
        """Whether something is not on the disk yet."""
        return self._home.failure is None and (
            self._files.has_unsynced or not self._epochs_saved or bool(self._pending_writes)
        )

    def begin(self, log: PartitionLog) -> FlushTask:
        """Everything to be done for what is in the log now to be on the disk.

        Raises DiskFullError when there is still no room for what a flush before found none for.
        """
        if self._unsure:
            self._write_again()
        files, names_changed, closed = self._files.take_unsynced()
        writes, self._pending_writes = self._pending_writes, []
        snapshots_taken = tuple(writes)
        for segment in closed:
            if segment.index is not None:
                writes += index_writes(segment, segment.index)
        if not self._epochs_saved:
            entries = self._epochs.entries
            writes.append((self._files.directory / EPOCHS_FILE, lambda: encode_epochs(entries)))
            self._epochs_saved = True
        return FlushTask(
            log=log,
            disk=self._home.disk,
            directory=self._files.directory,
            end_offset=log.log_end_offset,
            generation=self._generation,
            files=files,
            writes=writes,
            snapshots=snapshots_taken,
            names_changed=names_changed or bool(writes),
            closed=closed,
            named_up_to=self._files.active.base_offset,
            counts=self._home.flush_counts,
        )

    def finish(self, task: FlushTask) -> bool:
        """Take over what a flush did; whether it counts.

        A failed flush fails the data directory, but for want of room it is to be tried again
        later: ``failed`` is True until one went well. So it is for want of a descriptor: then the
        system was not asked to sync anything, and has dropped nothing.
        """
        if task.error is not None:
            is_later = task.step is not FlushStep.NAMES and is_disk_full(task.error)
            if is_later or is_out_of_descriptors(task.error):
                self._try_again(task)
            else:
                self._home.fail(task.error, f"flushing {self._name}")
            return False
        self.failed = False
        if task.generation != self._generation:
            # What was cut meanwhile may have been written anew, after the fsync.
            if self.is_needed:
                self._home.request_flush(task.log)
            return False
        for segment in task.closed:
            if segment is not self._files.active:
                segment.index = None
                self._home.used(segment)
        self._files.named_up_to = max(self._files.named_up_to, task.named_up_to)
        self.synced_offset = max(self.synced_offset, task.end_offset)
        return True

    def _try_again(self, task: FlushTask) -> None:
        """A flush found no room: what it was to do stays to be done.

        What it did of it counts for nothing. Where the batches themselves could not be flushed, the
        kernel may have dropped pages and call the next flush of them a success; so they are written
        again before that.
        """
        assert task.error is not None
        self._home.room.refused_by(task.error, f"flushing {self._name}")
        self.failed = True
        self._unsure |= task.step is FlushStep.DATA
        self._files.put_back(task.closed, names_changed=task.names_changed)
        self._epochs_saved = False
        if task.generation == self._generation:
            self._pending_writes[:0] = task.snapshots

    def _write_again(self) -> None:
        """Write all that is not known to be on the disk once more, as it can still be read."""
        doing = f"writing again what could not be flushed of {self._name}"
        try:
            self._files.write_again(self.synced_offset, self._epochs)
        except OSError as error:
            raise self._home.translate(error, doing) from error
        except CorruptRecordError as error:
            raise self._home.fail(error, doing) from error
        self._unsure = False
