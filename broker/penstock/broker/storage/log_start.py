"""Where a log begins, and the deletion of what lies before."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from penstock.broker.storage.checkpoints import snapshots
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.log_files import LogFiles, deletion
from penstock.broker.storage.segment import Segment

AT_ONCE: Final = 16
"""So many segments go in one step: each costs a few renames, on the event loop."""


class Why(enum.Enum):
    """Why a segment was deleted."""

    TIME = "time"
    """Its records were too old, and it was the leader here that found so."""
    SIZE = "size"
    """The log was too large, and it was the leader here that found so."""
    LOG_START = "log_start"
    """The log's start moved: another broker led then, or somebody deleted records."""


class LogStart:
    """The start of one log. Used on the log's thread.

    ``offset`` is where readers may begin. Up to ``durable_offset`` it has risen for good: no crash,
    not even a power cut, makes the log begin earlier. Only what lies below that is deleted. The
    names of deleted segments may come back in any order after a power cut, one without the next,
    and a recovery that did not know that they are below the start would take that for a hole and
    drop what comes after it.
    """

    __slots__ = ("_due", "_files", "_generation", "_home", "_name", "durable_offset", "offset")

    def __init__(
        self, home: DataDirectory, files: LogFiles, name: str, *, offset: int, durable_offset: int
    ) -> None:
        self._home = home
        self._files = files
        self._name = name
        self.offset = offset
        self.durable_offset = durable_offset
        # Counts the times that the log was cut back: what was to be saved before is not meant any
        # more, whether it was saved or not.
        self._generation = 0
        self._due: dict[int, Why] = {}

    def due(self, segment: Segment, why: Why) -> None:
        """Retention wants the segment to go: this is what is said of it once it is deleted."""
        self._due[segment.base_offset] = why

    def restart(self, offset: int) -> None:
        """The log was cut back and begins at ``offset`` now."""
        self.offset = offset
        self.durable_offset = min(self.durable_offset, offset)
        self._generation += 1
        self._due.clear()

    def saving(self) -> Callable[[], bool]:
        """The start is about to be written to local state.

        What is returned is to be called once that is durable; it says whether the start had not
        been so far.
        """
        offset, generation = self.offset, self._generation

        def saved() -> bool:
            if generation != self._generation or offset <= self.durable_offset:
                return False
            self.durable_offset = offset
            return True

        return saved

    def delete_some(self) -> bool:
        """Let go of the oldest segments below the durable start; whether there are more.

        Their files are removed in the background. Raises StorageError, which fails the directory.
        """
        files, limit = self._files, self.durable_offset
        if not files.has_below(limit):
            return False
        oldest = files.segments[:AT_ONCE]
        try:
            doomed = files.delete_below(limit, at_most=AT_ONCE)
            first = files.segments[0].base_offset
            old = [path for taken_at, path in snapshots(files.directory) if taken_at < first]
        except OSError as error:
            doing = f"deleting old segments of {self._name}"
            raise self._home.fail(error, doing) from error
        for segment in oldest:
            if segment.base_offset < first:
                why = self._due.pop(segment.base_offset, Why.LOG_START)
                self._home.segment_deleted(why, segment.size_bytes)
        # The newest of the snapshots is what a rebuild of the first segment starts from.
        self._home.run_in_background(deletion(self._home.disk, doomed + old[1:]))
        return files.has_below(limit)
