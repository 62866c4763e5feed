"""The loop of `penstock replay`: reads partitions, writes them elsewhere, knows how far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.errors import report
from penstock.cli.interrupts import Interrupt
from penstock.cli.pace import Progress, Schedule
from penstock.wire.errors import DeliveryFailedError, PenstockError, RequestTimedOutError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    from penstock.client import Consumer, ConsumerRecord, Producer

ON_THEIR_WAY_BYTES: Final = 32 * 1024 * 1024
_RECORD_BYTES: Final = 100
"""More than a record needs beside its key and its value."""
_POLL_MS: Final = 1_000.0
_STOP_SECONDS: Final = 5.0
_LOOK_UP_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets of a partition: ``start`` is the first, ``end`` the one after the last."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """How many offsets it has."""
        return max(0, self.end - self.start)


@dataclass(frozen=True, slots=True)
class _Sent:
    partition: TopicPartition
    offset: int
    size_bytes: int
    future: Future[Any]


@dataclass(slots=True)
class Replay:
    """One run. ``next_offsets`` says how far: what is before was acknowledged, or is no record."""

    consumer: Consumer
    producer: Producer
    dest: str
    spans: Mapping[TopicPartition, Span]
    same_partition: bool
    limit: int | None
    schedule: Schedule
    interrupt: Interrupt
    progress: Progress
    records: int = 0
    value_bytes: int = 0
    unacknowledged: int = 0
    """Records that were sent, and of which it is not known whether they are there."""
    seconds: float = 0.0
    next_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    _open: set[TopicPartition] = field(default_factory=set)
    _sent: deque[_Sent] = field(default_factory=deque)
    _sent_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every span was replayed to its end."""
        return all(self.next_offsets[where] >= span.end for where, span in self.spans.items())

    def run(self) -> None:
        """Replay until the spans or the limit end, or a stop signal does. Raises what failed.

        However it ends, what is on its way is waited for, for some seconds at most after a failure
        or a stop signal.
        """
        started = time.monotonic()
        self.next_offsets = {where: span.start for where, span in self.spans.items()}
        self._open = {where for where, span in self.spans.items() if span.length}
        try:
            with suppress(KeyboardInterrupt):
                self._copy()
                if not self.interrupt.count:
                    with self.interrupt.may_break():
                        self.producer.flush()
        finally:
            self._finish()
            self.seconds = time.monotonic() - started
            self.progress.end()
        if self._sent and not self.interrupt.count:
            # What failed is the first that is left, and raises why.
            self._sent[0].future.result(timeout=0)

    def _copy(self) -> None:
        if not self._open:
            return
        with self.interrupt.may_break():
            self.consumer.assign(sorted(self._open))
            for where in self._open:
                self.consumer.seek(where, self.spans[where].start)
        reading = set(self._open)
        while self._open and not self._is_full:
            with self.interrupt.may_break():
                records = self.consumer.poll(_POLL_MS)
            for record in records:
                if self._is_full or not self._replay(record):
                    return
            if not records:
                self._close_what_ended()
            if ended := reading - self._open:
                # What is still written there would come for ever, where other spans end in nothing.
                self.consumer.pause(*ended)
                reading -= ended
            self._settle()

    @property
    def _is_full(self) -> bool:
        return self.limit is not None and self.records + len(self._sent) >= self.limit

    def _replay(self, record: ConsumerRecord) -> bool:
        """Send one record, if it is one of the span; False at a stop signal, with nothing done."""
        where = record.topic_partition
        if where not in self._open:
            return True
        end = self.spans[where].end
        if record.offset < end:
            if not self._await_room() or not self.schedule.wait_for(self.records + len(self._sent)):
                return False
            self._send(record, where)
        if record.offset + 1 >= end:
            self._open.discard(where)
        return True

    def _send(self, record: ConsumerRecord, where: TopicPartition) -> None:
        try:
            future = self.producer.send(
                self.dest,
                record.value,
                record.key,
                record.headers,
                partition=record.partition if self.same_partition else None,
                timestamp_ms=record.timestamp_ms if record.timestamp_ms >= 0 else None,
            )
        except PenstockError as error:
            error.add_note(f"at offset {record.offset} of {where}")
            raise
        size = len(record.value or b"")
        self._sent.append(_Sent(where, record.offset, size, future))
        self._sent_bytes += size + _RECORD_BYTES
        self.progress.advance(1)

    def _await_room(self) -> bool:
        """Wait, where a stop signal is seen, until less is on its way; False at a stop signal."""
        while self._sent_bytes >= ON_THEIR_WAY_BYTES and not self.interrupt.count:
            with suppress(NotYet):
                self._sent[0].future.result(timeout=_LOOK_UP_SECONDS)
            self._settle()
        return not self.interrupt.count

    def _settle(self) -> None:
        """Count what was acknowledged, in the order of sending. Raises what failed."""
        while self._sent and self._sent[0].future.done():
            sent = self._sent[0]
            sent.future.result()
            self._sent.popleft()
            self._sent_bytes -= sent.size_bytes + _RECORD_BYTES
            self.records += 1
            self.value_bytes += sent.size_bytes
            self.next_offsets[sent.partition] = sent.offset + 1

    def _close_what_ended(self) -> None:
        """Where a span ends with offsets that no record has any more, nothing comes."""
        for where in list(self._open):
            if self.consumer.position(where) >= self.spans[where].end:
                self._open.discard(where)

    def _finish(self) -> None:
        """Take down what was acknowledged, and how far each partition is."""
        if self._sent and not all(sent.future.done() for sent in self._sent):
            report("stopping: waiting for what is on its way")
            with suppress(RequestTimedOutError, DeliveryFailedError, KeyboardInterrupt):
                self.producer.flush(timeout_ms=_STOP_SECONDS * 1000)
        with suppress(PenstockError):  # Raised in the end, by whoever asks first.
            self._settle()
        self.unacknowledged = len(self._sent)
        waiting = {sent.partition for sent in self._sent}
        for where in self.spans.keys() - self._open - waiting:
            self.next_offsets[where] = max(self.next_offsets[where], self.spans[where].end)
