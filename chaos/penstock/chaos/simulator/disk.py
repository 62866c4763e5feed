"""A node's disk: its logs, when they are flushed, and what a crash leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from penstock.broker.core.ports import DamagedLogError
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.runs import Runs
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.wire.ids import TopicIdPartition

_FILES_GONE: Final = 0.3  # Of the logs that do not open; in the others a header is damaged.
_FLUSH_MS: Final = {"commit": (1, 6), "interval": (100, 1000), "os": (500, 5000)}


def is_failure_heeded() -> bool:
    """Whether a failed flush ends the use of the disk. Tests of the checkers put a bug here."""
    return True


def stays_shut() -> bool:
    """Whether a log that does not open is left as it is. Tests of the checkers put a bug here."""
    return True


class Disk:
    """One node's disk. It outlives the processes of the node.

    ``flush_policy`` is commit, interval or os; but for commit, a flush comes when it comes.
    ``hands_over`` is that of its logs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rng: Random,
        flush_policy: str = "commit",
        *,
        hands_over: bool = True,
    ) -> None:
        self.slow_ms = 0  # At most so much longer does a flush take.
        self.flush_fails = False  # The next flush does, and what it was for is in doubt.
        self.high_watermarks: dict[TopicIdPartition, int] = {}
        self.aside: set[TopicIdPartition] = set()
        self.failed: set[TopicIdPartition] = set()  # What is not flushed of these is in doubt.
        self.shut: dict[TopicIdPartition, DamagedLogError] = {}  # These do not open, and why.
        self.runs = Runs(waits=flush_policy == "commit")
        self._flush_ms = _FLUSH_MS[flush_policy]
        self._waits = self.runs.waits
        self._hands_over = hands_over
        self._scheduler = scheduler
        self._rng = rng
        self._kept: dict[TopicIdPartition, Contents] = {}
        self._open: dict[TopicIdPartition, MemoryLog] = {}
        self._flushing: set[int] = set()

    def hurry(self) -> None:
        """Be as fast as ever again."""
        self.slow_ms = 0

    def log(self, key: TopicIdPartition) -> MemoryLog:
        """Open (or make) a partition's log. Raises DamagedLogError where it does not open."""
        if key in self.shut:
            if stays_shut():
                raise self.shut[key]
            self.keep_damaged(key)
        if key not in self._open:
            kept = self._kept.pop(key, Contents())
            self._open[key] = MemoryLog(
                kept,
                waits=self._waits,
                hands_over=self._hands_over,
                clock_ms=lambda: self._scheduler.now_ms,
            )
            self.cut_high_watermark(key, self._open[key].log_end_offset)
        return self._open[key]

    def cut_high_watermark(self, key: TopicIdPartition, offset: int) -> None:
        """None is kept above the end of a log: what is appended there is other records."""
        if self.high_watermarks.get(key, 0) > offset:
            self.high_watermarks[key] = offset

    def partitions(self) -> list[TopicIdPartition]:
        """The partitions that there is a log of which is open, or opens."""
        return sorted({*self._kept, *self._open}.difference(self.shut))

    def contents(self, key: TopicIdPartition) -> Contents | None:
        """What a process has in a partition's log, or would find there."""
        log = self._open.get(key)
        return self._kept.get(key) if log is None else log.contents

    def synced(self, key: TopicIdPartition) -> Contents:
        """What a power loss would leave of a partition's log."""
        log = self._open.get(key)
        return self._kept.get(key, Contents()) if log is None else log.on_disk

    def durable_end(self, key: TopicIdPartition) -> int:
        """Up to where a partition's log counts as durable; -1 without one."""
        log = self._open.get(key)
        if log is not None:
            return log.durable_offset
        return self._kept[key].end if key in self._kept else -1

    def erase(self, key: TopicIdPartition) -> None:
        """Delete a partition's log."""
        self._open.pop(key, None)
        self._kept.pop(key, None)
        self.shut.pop(key, None)
        self.high_watermarks.pop(key, None)

    def set_aside(self, key: TopicIdPartition) -> None:
        """Take a partition's log out of use, for a person to look at."""
        self.aside.add(key)
        self.erase(key)

    def replace(self) -> None:
        """Put an empty disk in its place."""
        self._kept.clear()
        self.shut.clear()
        self.high_watermarks.clear()
        self.runs.lost()

    # Logs that do not open.

    def damage(self, key: TopicIdPartition, rng: Random) -> None:
        """Let a log that is not in use open no more, as storage.recovery tells of it.

        A header below the recovery point is damaged: the end is that of the last batch that is
        sound. Or the files are gone: the end is the recovery point, as it was saved seconds ago.
        """
        contents = self._kept[key]
        end, committed = contents.end, self.high_watermarks.get(key, 0)
        if rng.random() < _FILES_GONE:
            end = rng.randint(contents.start + 1, contents.end)
        self.shut_off(key, DamagedLogError("what was on the disk is gone", end, committed))

    def shut_off(self, key: TopicIdPartition, error: DamagedLogError) -> None:
        """Let a log, in use or not, open no more."""
        self.shut[key] = error
        self.runs.was_doubted = True

    def keep_damaged(self, key: TopicIdPartition) -> None:
        """Put a log that does not open where no start looks."""
        self.erase(key)

    def put_right(self, key: TopicIdPartition) -> None:
        """A person has mended a log's files, or found them: it opens as it was."""
        del self.shut[key]

    def flush_soon(
        self, log: MemoryLog, on_durable: Callable[[], None], on_failed: Callable[[], None]
    ) -> None:
        """Flush; what comes meanwhile is flushed after it."""
        if id(log) in self._flushing or any(self._open.get(key) is log for key in self.failed):
            return
        self._flushing.add(id(log))
        slow = self._rng.randint(0, self.slow_ms) if self.slow_ms else 0
        if self._waits:
            finish = log.begin_flush()

        def done() -> None:
            self._flushing.discard(id(log))
            if log not in self._open.values():
                return  # The process that wrote it is gone.
            if any(self._open.get(key) is log for key in self.failed):
                return
            failed, self.flush_fails = self.flush_fails, False
            if failed and is_failure_heeded():
                on_failed()
                return
            if failed:
                log.believe_flushed(self._rng)
            elif self._waits:
                finish()
            else:  # The system writes what there is when it comes to it.
                log.begin_flush()()
            on_durable()
            if log.needs_flush:
                self.flush_soon(log, on_durable, on_failed)

        self._scheduler.after(self._rng.randint(*self._flush_ms) + slow, done)

    def crash(self, *, power_loss: bool) -> None:
        """The process ended without a word."""
        for key, log in self._open.items():
            in_doubt = power_loss or key in self.failed
            self._kept[key] = log.after_crash(self._rng if in_doubt else None)
        self._open.clear()
        self.failed.clear()
        self._flushing.clear()
        self.flush_fails = False

    def close(self, broker_epoch: int) -> None:
        """The process stopped of itself, and flushed what it could: all, or it leaves no marker."""
        is_clean = not self.failed
        self.crash(power_loss=False)
        if is_clean:
            self.runs.stopped(broker_epoch, frozenset(self.shut))
