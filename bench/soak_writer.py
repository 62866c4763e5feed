"""One writer of bench/soak.py as a process: numbered values at a steady rate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future
from typing import Final

from children import Answer, serve, settings
from soak_gaps import Waits

from penstock.client import Producer, RecordMetadata

_STEP_SECONDS: Final = 0.02
_MOST_REASONS: Final = 100


class Writer:
    """Sends ``NAME-NUMBER``, counted from 0. Keeps no more of what is sent than its count."""

    def __init__(self, name: str, producer: Producer, topic: str, rate: int) -> None:
        self._name = name
        self._producer = producer
        self._topic = topic
        self._rate = rate
        self._sent = 0
        self._acknowledged = 0  # Written on the client's thread alone, as the next.
        self._failed = 0
        self._failures: list[str] = []  # The first of them.
        self._longest = 0.0
        self._waits = Waits()
        self._stopping = asyncio.Event()
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Send until told to stop."""
        begun = time.monotonic()
        while not self._stopping.is_set():
            due = int((time.monotonic() - begun) * self._rate)
            while self._sent < due:
                # May wait for room while no leader is there; nothing else is to be done then.
                await asyncio.to_thread(self._send_up_to, min(due, self._sent + self._rate))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _STEP_SECONDS)

    def _send_up_to(self, end: int) -> None:
        for number in range(self._sent, end):
            value = f"{self._name}-{number}".encode()
            future = self._producer.send(self._topic, value=value, key=value)
            sent_at = time.monotonic()
            future.add_done_callback(lambda done, at=sent_at: self._settle(at, done))
            self._sent = number + 1

    def _settle(self, sent_at: float, future: Future[RecordMetadata]) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - sent_at)
        error = future.exception()
        if error is None:
            self._waits.add(future.result().partition, sent_at, now)
            self._acknowledged += 1
            return
        self._failed += 1
        if len(self._failures) < _MOST_REASONS:
            self._failures.append(str(error))

    def _wait_counted(self) -> None:
        """The last outcomes are known, and are being counted on the client's thread."""
        while self._acknowledged + self._failed < self._sent:
            time.sleep(_STEP_SECONDS)

    async def finish(self) -> Answer:
        """Send no more, wait for all acknowledgements, and say what became of everything."""
        self._stopping.set()
        await self._writing
        await asyncio.to_thread(self._producer.flush)
        await asyncio.to_thread(self._wait_counted)
        return {
            "sent": self._sent,
            "acknowledged": self._acknowledged,
            "failed": self._failed,
            "failures": self._failures,
            "longest_seconds": self._longest,
            "waits": self._waits.all(),
        }


async def main() -> None:
    """Write until the parent is gone."""
    given = settings()
    with Producer(given["bootstrap"], client_id=given["name"], linger_ms=5) as producer:
        writer = Writer(given["name"], producer, given["topic"], given["rate"])
        await serve({"finish": writer.finish})


if __name__ == "__main__":
    asyncio.run(main())
