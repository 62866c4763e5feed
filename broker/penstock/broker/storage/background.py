"""What may take long and is urgent to nobody: deleting files."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import structlog

_log = structlog.get_logger()


class BackgroundJobs:
    """Runs jobs in their order, one at a time, in a thread that lives while there are any.

    One and not one for each: a topic of thousands of partitions may be deleted at once. Any thread
    may call. What a job raises is logged, and the next one has its turn.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None  # While there are jobs.

    def run(self, job: Callable[[], None]) -> None:
        """Have ``job`` run. A process that ends without :meth:`wait` leaves it undone."""
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return once every job given so far is done. Blocks."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                _log.exception("background_job_failed", thread=self._name)
