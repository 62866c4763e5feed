"""Futures of records that know whether anybody looked at them, so that no failure is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Final, Protocol, Self

from penstock.client.model import RecordMetadata
from penstock.wire.errors import DeliveryFailedError, PenstockError
from penstock.wire.wording import counted

_SAMPLES: Final = 100


class Promise(Protocol):
    """What both kinds of futures give to the engine."""

    was_read: bool
    unread: Unread | None

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""


class DeliveryFuture(concurrent.futures.Future[RecordMetadata]):
    """The future of ``Producer.send``. It cannot be cancelled: the record may be on its way."""

    was_read = False
    unread: Unread | None = None

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""
        self.set_result(metadata)

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""
        self.set_exception(_own(error))

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """The record's place; raises why there is none. Waits up to ``timeout`` seconds."""
        result = super().exception(timeout)
        _note_read(self)
        if result is not None:
            # Otherwise each call would add its frames to those of the calls before.
            raise result.with_traceback(None)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the record was not written, or None. Waits up to ``timeout`` seconds."""
        error = super().exception(timeout)
        _note_read(self)
        return error

    def add_done_callback(
        self, fn: Callable[[concurrent.futures.Future[RecordMetadata]], object]
    ) -> None:
        """Call ``fn`` with this future when the verdict is there; it may be on another thread."""
        _note_read(self)
        super().add_done_callback(fn)


class AsyncDeliveryFuture(asyncio.Future[RecordMetadata]):
    """The future of ``AsyncProducer.send``."""

    was_read = False
    unread: Unread | None = None

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""
        if not self.done():
            self.set_result(metadata)

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""
        if not self.done():
            self.set_exception(_own(error))
            # flush() and close() raise what nobody read; asyncio need not log it as well.
            self._log_traceback = False

    def result(self) -> RecordMetadata:
        """The record's place; raises why there is none."""
        _note_read(self)
        return super().result()

    def exception(self) -> BaseException | None:
        """Why the record was not written, or None."""
        _note_read(self)
        return super().exception()

    def add_done_callback(
        self,
        fn: Callable[[Self], object],
        /,
        *,
        context: Context | None = None,
    ) -> None:
        """Call ``fn`` with this future when the verdict is there."""
        _note_read(self)
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        """The record's place; raises why there is none."""
        _note_read(self)
        return super().__await__()


def _own(error: BaseException) -> BaseException:
    """A copy of a failure that many records share: raising an exception changes it.

    What Penstock did not make is passed on as it is, for nobody knows how to copy it.
    """
    if not isinstance(error, PenstockError):
        return error
    own = type(error)(error.message, leader=error.leader)
    own.__cause__ = error.__cause__
    for note in getattr(error, "__notes__", ()):
        own.add_note(note)
    return own


def _note_read(promise: Promise) -> None:
    promise.was_read = True  # First: who adds it to the unread ones looks at this last.
    unread = promise.unread
    if unread is not None:
        unread.forget(promise)


class Unread:
    """The failures of one period that nobody looked at yet. Thread-safe.

    Counts, and pins nothing but a few samples: those who hold futures may read them at any time
    until the period ends, and those who do not must not fill the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._samples: list[tuple[Promise, BaseException]] = []
        self._latest: BaseException | None = None

    def add(self, promise: Promise, error: BaseException) -> None:
        """A record failed; ``forget`` follows when somebody looks at its promise."""
        with self._lock:
            promise.unread = self
            if promise.was_read:  # Looked at before we were there to be told.
                promise.unread = None
                return
            self._count += 1
            self._latest = error
            if len(self._samples) >= _SAMPLES:
                self._samples = self._unread_samples()
            if len(self._samples) < _SAMPLES:
                self._samples.append((promise, error))

    def forget(self, promise: Promise) -> None:
        """Somebody looks at the promise."""
        with self._lock:
            if promise.unread is self:
                promise.unread = None
                self._count -= 1

    def count_and_first(self) -> tuple[int, BaseException | None]:
        """How many there are, and why the first one (or, after very many, a later one) failed."""
        with self._lock:
            left = self._unread_samples()
            return self._count, left[0][1] if left else self._latest

    def _unread_samples(self) -> list[tuple[Promise, BaseException]]:
        return [sample for sample in self._samples if not sample[0].was_read]


class FailureLedger:
    """The failures since the last flush, until somebody has heard of them."""

    def __init__(self) -> None:
        self._unread = Unread()
        self.delivered = 0

    def add(self, promise: Promise, error: BaseException) -> None:
        """A record failed."""
        self._unread.add(promise, error)

    def raise_unread(self) -> None:
        """Raise DeliveryFailedError if there are failures that nobody looked at; then forget."""
        count, first = self._unread.count_and_first()
        delivered = self.delivered
        self._unread, self.delivered = Unread(), 0
        if count:
            raise DeliveryFailedError(
                f"{counted(count, 'record', 'was')} not delivered, and nobody read "
                f"{'its future' if count == 1 else 'their futures'} "
                f"({delivered} were delivered since the last flush); the first because: {first}"
            ) from first
