"""The measuring loops of `penstock bench produce` and `penstock bench latency`.

They do for each record what an application does: call ``send`` and keep the future, or hand many
records to ``send_many``. All else is done once in a block of records, so that what is measured is
the client.
"""

from __future__ import annotations

import random
import string
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.cli.bench_figures import Figures, Stopwatch
from penstock.cli.errors import report
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import format_count
from penstock.cli.pace import Progress, Schedule
from penstock.wire.errors import DeliveryFailedError, PenstockError, RequestTimedOutError

if TYPE_CHECKING:
    from penstock.client import Producer
    from penstock.client.bulk import BulkDeliveryFuture

_MOST_IN_BLOCK: Final = 1_000
_MOST_IN_CALL: Final = 10_000
_CALL_BYTES: Final = 1_000_000
"""What ``send_many`` is given at a time has at most so many records, or so many bytes."""
_CALLS: Final = 100
_BLOCKS: Final = 5_000
"""Of an unthrottled run, as long as its blocks are not larger than that."""
_BLOCK_SECONDS: Final = 0.01
"""The records of so much time are sent together at a given rate."""
_MOST_KEPT: Final = 1_000_000
"""Futures beyond are looked at while the run goes on, which counts as CPU time of the client."""
_STOP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be sent: ``rate`` is in records a second, 0 for as fast as possible."""

    topic: str
    records: int
    size_bytes: int
    rate: float
    many: bool = False
    """Whether a block is what ``send_many`` is given at a time."""

    @property
    def block(self) -> int:
        """How many records are sent between two looks at the clock; the first of them is timed."""
        size = max(1, min(_MOST_IN_BLOCK, self.records // _BLOCKS))
        if self.many:
            most = min(_MOST_IN_CALL, _CALL_BYTES // max(1, self.size_bytes))
            size = max(1, min(most, self.records // _CALLS))
        return size if not self.rate else max(1, min(size, int(self.rate * _BLOCK_SECONDS)))

    def values(self) -> list[bytes]:
        """The values of a block: random letters and digits, the same in each run."""
        letters = (string.ascii_letters + string.digits).encode()
        chance = random.Random(self.size_bytes)
        return [bytes(chance.choices(letters, k=self.size_bytes)) for _ in range(self.block)]


def warm_up(producer: Producer, topic: str, partitions: int, value: bytes) -> None:
    """Write one record to each partition, so that every connection is there. Raises why not."""
    futures = [producer.send(topic, value, partition=number) for number in range(partitions)]
    for future in futures:
        future.result()


class SendRun:
    """Calls ``send`` for every record, and looks at every future in the end."""

    mode = "send"

    def __init__(self, producer: Producer, load: Load, interrupt: Interrupt) -> None:
        self._producer = producer
        self._load = load
        self._interrupt = interrupt
        self._values = load.values()
        self._kept: deque[tuple[Sequence[Future[Any]], int]] = deque()
        self._kept_records = 0
        block = len(self._values)
        self.figures = Figures(
            "produce",
            self.mode,
            load.topic,
            self._timed_what(format_count(block)),
        )

    def _timed_what(self, block: str) -> str:
        how_many = "" if block == "1" else f", of one record in {block}"
        return f"from send to acknowledgement{how_many}"

    def run(self, progress: Progress) -> Figures:
        """Send all, wait for all verdicts, and say what came of it. A stop signal ends it early."""
        figures = self.figures
        watch = Stopwatch()
        schedule = Schedule(self._load.rate, self._interrupt)
        try:
            self._send_all(schedule, progress)
        except PenstockError as error:
            _blame(figures, error)
            figures.errors += 1
        flush(self._producer, self._interrupt, figures)
        watch.mark()
        progress.end()
        while self._kept:
            self._settle(*self._kept.popleft())
        figures.seconds, figures.cpu_seconds = watch.seconds, watch.cpu_seconds
        figures.value_bytes = float(figures.records) * self._load.size_bytes
        figures.behind = schedule.behind if self._load.rate else None
        return figures

    def _send_all(self, schedule: Schedule, progress: Progress) -> None:
        values, sent = self._values, 0
        while sent < self._load.records and schedule.wait_for(sent):
            self._send_block(values[: self._load.records - sent])
            sent += len(values)
            progress.advance(len(values))
            while self._kept_records > _MOST_KEPT:
                self._settle(*self._kept.popleft())

    def _send_block(self, values: Sequence[bytes]) -> None:
        topic, send = self._load.topic, self._producer.send
        futures: list[Future[Any]] = []
        self._keep(futures, len(values))
        append = futures.append
        append(self._timed(time.perf_counter(), send(topic, values[0])))
        for value in values[1:]:
            append(send(topic, value))

    def _timed(self, sent_at: float, future: Future[Any]) -> Future[Any]:
        future.add_done_callback(partial(self._note, sent_at))
        return future

    def _note(self, sent_at: float, future: Future[Any]) -> None:
        """Called by the client's thread."""
        if future.exception() is None:
            self.figures.latencies.append(time.perf_counter() - sent_at)

    def _keep(self, futures: Sequence[Future[Any]], records: int) -> None:
        self._kept.append((futures, records))
        self._kept_records += records

    def _settle(self, futures: Sequence[Future[Any]], records: int) -> None:
        self._kept_records -= records
        self._count(futures, records)

    def _count(self, futures: Sequence[Future[Any]], _records: int) -> None:
        """Count what became of a block. Of a stopped run the undecided are not waited for."""
        settle(self.figures, futures, is_stopped=self._interrupt.count > 0)


class ManyRun(SendRun):
    """Hands the records of each block to ``send_many``, and looks at every future in the end."""

    mode = "many"

    def _timed_what(self, block: str) -> str:
        return f"from send_many to the acknowledgement of its last record, {block} a call"

    def _send_block(self, values: Sequence[bytes]) -> None:
        sent_at = time.perf_counter()
        future = self._producer.send_many(self._load.topic, values)
        self._timed(sent_at, future)
        self._keep((future,), len(values))

    def _count(self, futures: Sequence[Future[Any]], records: int) -> None:
        (future,) = futures
        figures = self.figures
        if self._interrupt.count and not future.done():
            figures.unacknowledged += records
            return
        failed = 0
        if (error := future.exception()) is not None:
            # Of one call some may be there, and others not.
            outcomes = cast("BulkDeliveryFuture", future).outcomes()
            failed = sum(isinstance(one, BaseException) for one in outcomes)
            _blame(figures, error)
        figures.errors += failed
        figures.records += records - failed


class LatencyRun:
    """Times every record at a steady rate, and the longest time without an acknowledgement."""

    def __init__(self, producer: Producer, load: Load, interrupt: Interrupt) -> None:
        self._producer = producer
        self._load = load
        self._interrupt = interrupt
        self._value = load.values()[0]
        self._acknowledged_at: list[float] = []
        self.figures = Figures(
            "latency", "send", load.topic, "from send to acknowledgement, of every record"
        )

    def run(self, progress: Progress) -> Figures:
        """Send all, wait for all verdicts, and say what came of it. A stop signal ends it early."""
        figures = self.figures
        futures: list[Future[Any]] = []
        watch = Stopwatch()
        schedule = Schedule(self._load.rate, self._interrupt)
        try:
            for number in range(self._load.records):
                if not schedule.wait_for(number):
                    break
                sent_at = time.perf_counter()
                future = self._producer.send(self._load.topic, self._value)
                future.add_done_callback(partial(self._note, sent_at))
                futures.append(future)
                progress.advance(1)
        except PenstockError as error:
            _blame(figures, error)
            figures.errors += 1
        flush(self._producer, self._interrupt, figures)
        watch.mark()
        progress.end()
        settle(figures, futures, is_stopped=self._interrupt.count > 0)
        figures.seconds, figures.cpu_seconds = watch.seconds, watch.cpu_seconds
        figures.value_bytes = float(figures.records) * self._load.size_bytes
        figures.behind = schedule.behind if self._load.rate else None
        figures.longest_gap = longest_gap(
            watch.started, self._acknowledged_at, watch.started + watch.seconds
        )
        return figures

    def _note(self, sent_at: float, future: Future[Any]) -> None:
        """Called by the client's thread."""
        if future.exception() is None:
            now = time.perf_counter()
            self._acknowledged_at.append(now)
            self.figures.latencies.append(now - sent_at)


def longest_gap(started: float, acknowledged_at: Sequence[float], ended: float) -> float:
    """The longest time between two acknowledgements, or from the start, or to the end."""
    times = sorted([started, *acknowledged_at, ended])
    return max(later - earlier for earlier, later in pairwise(times))


def settle(figures: Figures, futures: Sequence[Future[Any]], *, is_stopped: bool) -> None:
    """Count what became of each record. Of a stopped run the undecided are not waited for."""
    for future in futures:
        if is_stopped and not future.done():
            figures.unacknowledged += 1
            continue
        error = future.exception()
        if error is None:
            figures.records += 1
        else:
            figures.errors += 1
            _blame(figures, error)


def flush(producer: Producer, interrupt: Interrupt, figures: Figures) -> None:
    """Wait for every verdict; after a stop signal for a few seconds, or till the next signal.

    What failed, or has no verdict then, is found at its future.
    """
    try:
        if not _flush_whole(producer, interrupt):
            report("stopping: waiting for what is on its way, Ctrl-C again to give up")
            producer.flush(timeout_ms=_STOP_SECONDS * 1000)
    except (RequestTimedOutError, DeliveryFailedError, KeyboardInterrupt):
        return
    except PenstockError as error:
        _blame(figures, error)


def _flush_whole(producer: Producer, interrupt: Interrupt) -> bool:
    """Whether every record has its verdict; False when a stop signal came before."""
    try:
        with interrupt.may_break():
            producer.flush()
    except KeyboardInterrupt:
        if interrupt.count != 1:
            raise
        return False
    return True


def _blame(figures: Figures, error: BaseException) -> None:
    if figures.first_error is None:
        figures.first_error = (
            error if isinstance(error, PenstockError) else DeliveryFailedError(str(error))
        )
