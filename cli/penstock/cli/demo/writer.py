"""The demo's writer: the lines of the log, keyed by client address, with acks=all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Final, Self

from penstock.cli.demo.members import LINE_HEADER
from penstock.cli.demo.verdict import Sent
from penstock.client import Producer, RecordMetadata

_STEP_LINES: Final = 50
_STEP_SECONDS: Final = 0.02
"""2,500 lines a second: brisk for one web site, and slow enough that a kill falls in between."""


class Writer:
    """Sends lines at an even pace and keeps what became of each. Use as a context manager."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = Producer(bootstrap, client_id="demo-writer", acks="all")
        self._lock = threading.Lock()
        self._sent: list[Sent] = []
        self._failures: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Whoever leaves early does not wait for deliveries that nobody counts any more.
        self._producer.close(timeout_ms=None if kind is None else 0)

    def send(
        self, lines: Sequence[str], first: int, last: int, on_step: Callable[[int], None]
    ) -> None:
        """Send the lines numbered from ``first`` up to ``last``, and tell of each step."""
        begun = time.monotonic()
        for step, start in enumerate(range(first, last, _STEP_LINES)):
            pause = begun + step * _STEP_SECONDS - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            for number in range(start, min(start + _STEP_LINES, last)):
                self._send_line(number, lines[number])
            on_step(number + 1)

    def flush(self) -> None:
        """Wait until every line was acknowledged or failed."""
        self._producer.flush()

    def sent(self) -> list[Sent]:
        """The lines acknowledged until now."""
        with self._lock:
            return list(self._sent)

    def failures(self) -> list[str]:
        """Why lines failed, one entry a line."""
        with self._lock:
            return list(self._failures)

    def _send_line(self, number: int, line: str) -> None:
        address, _, _ = line.partition(" ")
        future = self._producer.send(
            self._topic,
            value=line.encode(),
            key=address.encode(),
            headers={LINE_HEADER: str(number).encode()},
        )
        future.add_done_callback(partial(self._settle, number, time.monotonic()))

    def _settle(self, number: int, sent_at: float, future: Future[RecordMetadata]) -> None:
        error = future.exception()
        now = time.monotonic()
        with self._lock:
            if error is not None:
                self._failures.append(f"line {number + 1}: {error}")
            else:
                self._sent.append(Sent(number, future.result().partition, sent_at, now))
