"""The measuring loops of `penstock bench consume`, one for each way to read."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.bench_figures import Figures, Stopwatch
from penstock.cli.interrupts import Interrupt
from penstock.cli.pace import Progress

if TYPE_CHECKING:
    from penstock.client import Consumer, ConsumerRecord

_BLOCK: Final = 500
_SILENT_MS: Final = 10_000.0
"""Whoever gets nothing for so long has read all there is."""


class ConsumeMode(enum.StrEnum):
    """How records are read."""

    ITERATE = "iterate"
    POLL = "poll"
    POLL_BATCH = "poll_batch"
    ARROW = "arrow"


_TIMED: Final = {
    ConsumeMode.ITERATE: f"of {_BLOCK} steps of the iteration",
    ConsumeMode.POLL: "of one call of poll",
    ConsumeMode.POLL_BATCH: "of one call of poll_batch",
    ConsumeMode.ARROW: "of one call of fetch_arrow",
}


class ConsumeRun:
    """Reads so many records, and counts them by the call."""

    def __init__(
        self,
        consumer: Consumer,
        mode: ConsumeMode,
        topic: str,
        wanted: int,
        interrupt: Interrupt,
    ) -> None:
        self._consumer = consumer
        self._wanted = wanted
        self._interrupt = interrupt
        self._read: Callable[[int], tuple[int, int]] = {
            ConsumeMode.ITERATE: self._iterate,
            ConsumeMode.POLL: self._poll,
            ConsumeMode.POLL_BATCH: self._poll_batch,
            ConsumeMode.ARROW: self._fetch_arrow,
        }[mode]
        self.figures = Figures("consume", mode.value, topic, _TIMED[mode])

    def run(self, progress: Progress) -> Figures:
        """Read until all is read, nothing comes any more, or a stop signal does.

        What the stop signal interrupts does not count, neither its records nor its time.
        """
        figures = self.figures
        watch = Stopwatch()
        with suppress(KeyboardInterrupt), self._interrupt.may_break():
            while figures.records < self._wanted:
                began = time.perf_counter()
                count, size_bytes = self._read(self._wanted - figures.records)
                if not count:
                    break
                figures.latencies.append(time.perf_counter() - began)
                figures.records += count
                figures.value_bytes += count * size_bytes
                watch.mark()
                progress.advance(count)
        progress.end()
        figures.seconds, figures.cpu_seconds = watch.seconds, watch.cpu_seconds
        return figures

    # Each way gives back how many records it read, and the size of the value of one of them.

    def _iterate(self, wanted: int) -> tuple[int, int]:
        count = 0
        last: ConsumerRecord | None = None
        for record in islice(self._consumer, min(_BLOCK, wanted)):
            count += 1
            last = record
        return count, _size(last)

    def _poll(self, _wanted: int) -> tuple[int, int]:
        records = self._consumer.poll(_SILENT_MS)
        return len(records), _size(records[-1] if records else None)

    def _poll_batch(self, _wanted: int) -> tuple[int, int]:
        batches = self._consumer.poll_batch(_SILENT_MS)
        count, last = 0, None
        for records in batches.values():
            count += len(records)
            last = records[-1]
        return count, _size(last)

    def _fetch_arrow(self, _wanted: int) -> tuple[int, int]:
        table = self._consumer.fetch_arrow(_SILENT_MS)
        count = table.num_rows
        last = table.column("value")[count - 1].as_py() if count else None
        return count, 0 if last is None else len(last)


def _size(record: ConsumerRecord | None) -> int:
    value: Any = None if record is None else record.value
    return 0 if value is None else len(value)
