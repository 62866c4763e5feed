"""Group commit: one thread a data directory makes what all its logs appended durable."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Final

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.flush import FlushTask
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.settings import FlushPolicy
from penstock.wire.errors import DiskFullError, StorageError

_SYNCS_AT_ONCE: Final = 4

ROOM_RETRY_S = 1.0
"""So long after a flush found no room on the disk the log is flushed again."""


class Flusher:
    """Gathers the logs that have something to flush, and flushes them in rounds.

    A round covers everything that arrived while the one before was under way; what it covers is
    fixed when it begins, on the loop, and handed to the thread. Nothing runs, and no timer, while
    nothing is asked. All methods are called on the loop's thread; ``on_flushed`` is called there,
    with the log and whether its durable_offset advanced.
    """

    def __init__(
        self, home: DataDirectory, on_flushed: Callable[[PartitionLog, bool], None]
    ) -> None:
        self._home = home
        self._path = home.path
        self._settings = home.settings
        self._on_flushed = on_flushed
        self._asked_s = 0.0  # When the first was asked of those that wait.
        self._round_asked_s = 0.0  # The same of those under way.
        self._waiting: dict[PartitionLog, None] = {}
        self._without_room: dict[PartitionLog, None] = {}  # Until the timer below.
        self._retries: asyncio.TimerHandle | None = None
        self._under_way: list[FlushTask] = []
        # Between the loop's thread and one that calls ``stop``.
        self._ending = threading.RLock()
        self._begins: asyncio.Handle | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._helpers: ThreadPoolExecutor | None = None  # Of the thread, once a round needs them.
        self._stopped = False

    def request(self, log: PartitionLog) -> None:
        """Flush the log as soon as its policy asks for."""
        policy = self._settings.flush_policy
        if self._stopped:
            return
        if policy is FlushPolicy.OS and not (log.has_rolled or log.flush_failed):
            return
        if log in self._without_room:
            return
        if not self._waiting:
            self._asked_s = perf_counter()
        self._waiting[log] = None
        if self._under_way or self._begins is not None:
            return
        loop = asyncio.get_running_loop()
        if policy is FlushPolicy.INTERVAL:
            delay = self._settings.flush_interval_ms / 1000
            self._begins = loop.call_later(delay, self._begin_round)
        else:
            # What else this turn of the loop appends is in the same round.
            self._begins = loop.call_soon(self._begin_round)

    def is_busy_in(self, directory: Path) -> bool:
        """Whether a log in this partition directory, deleted or not, is being flushed."""
        return any(task.directory == directory for task in self._under_way)

    def _begin_round(self) -> None:
        with self._ending:
            self._begins = None
            if self._stopped:
                return
            waiting, self._waiting = self._waiting, {}
            self._round_asked_s = self._asked_s
            tasks: list[FlushTask] = []
            for log in waiting:
                if log.needs_flush:
                    try:
                        tasks.append(log.begin_flush())
                    except DiskFullError:
                        self._wait_for_room(log)
                    except StorageError:
                        continue  # The directory has failed, and everybody knows by now.
            if tasks:
                self._under_way = tasks
                loop = asyncio.get_running_loop()
                self.run(lambda: self._run_round(tasks, loop))

    def _run_round(self, tasks: list[FlushTask], loop: asyncio.AbstractEventLoop) -> None:
        if len(tasks) == 1:
            tasks[0].run()
        else:
            self._run_side_by_side(tasks)
        try:
            loop.call_soon_threadsafe(self._end_round)
        except RuntimeError:
            return  # The loop has ended: ``stop`` takes over what was done.

    def _run_side_by_side(self, tasks: list[FlushTask]) -> None:
        """A file system commits its journal once for several fsyncs."""
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(_SYNCS_AT_ONCE, f"sync {self._path}")
        begun = [False] * len(tasks)

        def run(at: int) -> None:
            begun[at] = True
            tasks[at].run()

        try:
            list(self._helpers.map(run, range(len(tasks))))
        except RuntimeError:
            # There is no thread for it now. What was not begun is done here, one after the other.
            self._helpers.shutdown(cancel_futures=True)
            self._helpers = None
            for at, is_begun in enumerate(begun):
                if not is_begun:
                    run(at)

    def _end_round(self) -> None:
        with self._ending:
            if self._stopped:
                return
            self._finish()
            self._home.flush_counts.flush_waited(perf_counter() - self._round_asked_s)
            if self._waiting and self._begins is None:
                self.request(next(iter(self._waiting)))

    def _finish(self) -> None:
        """Let the logs take over what the round under way did for them."""
        tasks, self._under_way = self._under_way, []
        for task in tasks:
            try:
                advanced = task.log.finish_flush(task)
            except StorageError:
                continue  # The directory has failed, and everybody knows by now.
            if self._stopped:
                continue
            if task.error is not None:
                self._wait_for_room(task.log)
            self._on_flushed(task.log, advanced)

    def _wait_for_room(self, log: PartitionLog) -> None:
        self._waiting.pop(log, None)
        self._without_room[log] = None
        if self._retries is None:
            loop = asyncio.get_running_loop()
            self._retries = loop.call_later(ROOM_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retries = None
        logs, self._without_room = self._without_room, {}
        for log in logs:
            self.request(log)

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which raises nothing, in the thread, after the jobs before it.

        Where the system has no thread it is run at once: slowly is better than never.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"flush {self._path}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                job()
                return
            self._thread = thread
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """Wait until the thread has done what it was given, and end it.

        May be called in another thread than the loop's, once nothing is appended any more. Timers
        are left to the loop, to find that there is nothing to do.
        """
        with self._ending:
            self._stopped = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._helpers is not None:
            self._helpers.shutdown()
            self._helpers = None
        self._finish()
