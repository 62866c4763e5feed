"""The work of a flush, which may run in another thread than the log's."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.broker.storage.checkpoints import write_atomically
from penstock.broker.storage.counting import FlushCounts, UncountedFlushes
from penstock.broker.storage.disk import Disk, SharedFile

if TYPE_CHECKING:
    from penstock.broker.storage.log import PartitionLog
    from penstock.broker.storage.log_files import FileWrite
    from penstock.broker.storage.segment import Segment


class FlushStep(enum.Enum):
    """What a flush does, in order."""

    DATA = enum.auto()  # The batches.
    FILES = enum.auto()  # What is written whole.
    NAMES = enum.auto()  # The directory.


@dataclass(slots=True)
class FlushTask:
    """What a log wants on the disk, as it was when the task was made.

    ``end_offset`` is durable once ``run`` is over without ``error``, unless the log was cut since
    (``generation``). ``run`` touches nothing of the log, and holds its files open.
    """

    log: PartitionLog
    disk: Disk
    directory: Path
    end_offset: int
    generation: int
    files: Sequence[SharedFile]  # Oldest segment first.
    writes: Sequence[FileWrite]
    snapshots: Sequence[FileWrite]  # Those of ``writes`` that only the log's past knows.
    names_changed: bool
    closed: Sequence[Segment]
    named_up_to: int  # The base offset of the newest segment in the directory.
    counts: FlushCounts = field(default_factory=UncountedFlushes)
    error: Exception | None = field(default=None)
    step: FlushStep = FlushStep.DATA  # Where it was when the error came.

    def run(self) -> None:
        """Do it, in any thread, once. Raises nothing: what failed is in ``error``."""
        try:
            for file in self.files:
                begun_s = perf_counter()
                self.disk.sync_data(file.fd)
                self.counts.synced(perf_counter() - begun_s)
            self.step = FlushStep.FILES
            for path, encode in self.writes:
                write_atomically(self.disk, path, encode())
            self.step = FlushStep.NAMES
            if self.names_changed:
                self.disk.sync_directory(self.directory)
        except Exception as error:  # Whatever it is: nobody may believe that it went well.
            self.error = error
        finally:
            for file in self.files:
                file.release()
