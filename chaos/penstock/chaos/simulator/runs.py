"""What a node's disk keeps of the runs of its broker, as penstock.broker.storage.manager does."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from penstock.broker.core.last_run import FoundDirectory, RunMark, epoch_to_report
from penstock.wire.ids import TopicIdPartition


class Runs:
    """The marks on one node's disk. ``waits``: flush.policy is commit."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.heard_epoch = -1  # The last broker epoch that a process here was told.
        self.was_doubted = False  # In that run the disk failed.
        self._is_lossy = False  # In this run the disk lost what it had confirmed.
        self._number = 0  # Of the disk in this place.
        self._reported = -1  # By the process that runs.
        self._clean: RunMark | None = None
        self._durable: RunMark | None = None
        self._is_whole = True
        self._left_shut: AbstractSet[TopicIdPartition] = frozenset()  # By a clean stop.
        self._has_shut = False  # This run has logs that do not open.

    def _mark(self, broker_epoch: int) -> RunMark:
        return RunMark(broker_epoch, frozenset({bytes([self._number])}))

    def begin(self, shut: AbstractSet[TopicIdPartition] = frozenset()) -> int:
        """A process starts: the broker epoch that it may register with.

        The logs ``shut`` do not open. What was shut all through a run, as only a clean stop can
        say, had no part in it.
        """
        self._is_whole = self._is_whole and self._left_shut >= shut
        self._left_shut, self._has_shut = frozenset(), bool(shut)
        marks = self._clean, self._durable
        known = any(mark is not None for mark in marks)
        found = [FoundDirectory(bytes([self._number]), *marks, self._is_whole)] if known else []
        self._clean, self._is_whole, self._is_lossy = None, True, False
        self._reported = epoch_to_report(found)
        return self._reported

    def registered(self, broker_epoch: int, *, failed: bool) -> None:
        """The process has its broker epoch; maybe the disk has ``failed`` by then."""
        is_durable = self.waits and not failed and not self._is_lossy
        self._durable = self._mark(broker_epoch) if is_durable else None
        self.heard_epoch, self.was_doubted = broker_epoch, failed or self._has_shut

    def stopped(self, broker_epoch: int, shut: AbstractSet[TopicIdPartition] = frozenset()) -> None:
        """The process stopped cleanly, and flushed all.

        One that was never registered (-1) leaves what the one before had.
        """
        self._left_shut = shut
        epoch = broker_epoch if broker_epoch >= 0 else self._reported
        self._clean = None if self._is_lossy else self._mark(epoch)

    def doubt(self) -> None:
        """The disk fails: in every other run it can still take the mark away."""
        self.was_doubted = True
        if self.heard_epoch % 2:
            self._durable = None

    def records_lost(self) -> None:
        """The disk lost what it had confirmed: nothing that this run leaves says otherwise."""
        self.was_doubted = self._is_lossy = True
        self._durable = None

    def log_taken_away(self) -> None:
        """A person deletes a partition's log while nothing runs here."""
        self._is_whole = False

    def lost(self) -> None:
        """An empty disk is in the place of this one."""
        self._number += 1
        self._clean = self._durable = None
