"""When the local state of a data directory is written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import lmdb

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.log import PartitionLog
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicIdPartition

_Starts = list[tuple[PartitionLog, Callable[[], bool]]]
"""Logs whose starts are being saved, and what is to be called when that is done."""


class Saves:
    """Saves what changed of the logs of a directory, one save after the other.

    On the loop ``note(key)`` puts what is to be kept of a log into local state, and returns the log
    if it is here; ``run`` then has ``write`` run in a thread, which makes it durable.
    ``on_durable`` is told of each log whose start is durable further on; what lies below is deleted
    by then.
    """

    def __init__(
        self,
        home: DataDirectory,
        *,
        note: Callable[[TopicIdPartition], PartitionLog | None],
        write: Callable[[], None],
        run: Callable[[Callable[[], None]], None],
        on_durable: Callable[[PartitionLog], None],
    ) -> None:
        self.timer: asyncio.Handle | None = None  # From when a save is asked for until it begins.
        self.changed: dict[TopicIdPartition, None] = {}
        self._home = home
        self._note = note
        self._write = write
        self._run = run
        self._on_durable = on_durable
        self._is_under_way = False
        self._must_follow = False  # Another one waits for it.
        self._stopped = False

    def soon(self) -> None:
        """Save within the checkpoint interval."""
        if self.timer is None:
            delay = self._home.settings.checkpoint_interval_ms / 1000
            self.timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def now(self, log: PartitionLog) -> None:
        """Save what changed of the log, as soon as no other save is under way."""
        if self._stopped:
            return  # Closing saves everything.
        self.changed[log.key] = None
        if self._must_follow:
            return
        if self.timer is not None:
            self.timer.cancel()
        # What else this turn of the loop changes is in the same save.
        self.timer = asyncio.get_running_loop().call_soon(self._begin)

    def stop(self) -> None:
        """Begin no save any more. Timers are left to find that there is nothing to do."""
        self._stopped = True

    def _begin(self) -> None:
        if self._is_under_way:
            self._must_follow = True
            return
        self.timer, self._must_follow = None, False
        if self._stopped or self._home.failure is not None:
            return  # Closing saves everything. Failed: nothing is trusted any more.
        changed, self.changed = self.changed, {}
        starts: _Starts = []
        for key in changed:
            log = self._note(key)
            if log is not None:
                starts.append((log, log.start.saving()))
        loop = asyncio.get_running_loop()
        self._is_under_way = True
        self._run(lambda: self._save(loop, starts))

    def _save(self, loop: asyncio.AbstractEventLoop, starts: _Starts) -> None:
        """In the thread."""
        failure: Exception | None = None
        try:
            self._write()
        except (OSError, lmdb.Error) as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(self._end, starts, failure)

    def _end(self, starts: _Starts, failure: Exception | None) -> None:
        self._is_under_way = False
        if self._stopped:
            return
        if failure is None:
            self._saved(starts)
        else:
            self._not_saved(starts, failure)
        if self._must_follow:
            self._begin()

    def _saved(self, starts: _Starts) -> None:
        for log, saved in starts:
            if log.is_closed or not saved():
                continue
            with contextlib.suppress(StorageError):  # The directory has failed; everybody knows.
                log.delete_old_segments()
            self._on_durable(log)

    def _not_saved(self, starts: _Starts, error: Exception) -> None:
        """What is saved lags, which a start allows for. For want of room it is tried again."""
        self._home.translate(error, "saving local state")
        if self._home.failure is None:
            for log, _ in starts:
                self.changed[log.key] = None
            self.soon()


def in_next_turn(job: Callable[[], None]) -> None:
    """Have the loop run ``job`` in another turn; a StorageError of it is known to everybody."""

    def run() -> None:
        with contextlib.suppress(StorageError):
            job()

    with contextlib.suppress(RuntimeError):  # No loop: it stops. The next start does it.
        asyncio.get_running_loop().call_soon(run)
