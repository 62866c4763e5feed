"""Futures of records that know whether anybody looked at them, so that no failure is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Final, Protocol, Self

from penstock.client.model import RecordMetadata
from penstock.wire.errors import DeliveryFailedError

_KEPT: Final = 10_000


class Promise(Protocol):
    """What both kinds of futures give to the engine."""

    was_read: bool

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""


class DeliveryFuture(concurrent.futures.Future[RecordMetadata]):
    """The future of ``Producer.send``. It cannot be cancelled: the record may be on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.was_read = False
        self.set_running_or_notify_cancel()

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""
        self.set_result(metadata)

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""
        self.set_exception(error)

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """The record's place; raises why there is none. Waits up to ``timeout`` seconds."""
        result = super().exception(timeout)
        self.was_read = True
        if result is not None:
            raise result
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the record was not written, or None. Waits up to ``timeout`` seconds."""
        error = super().exception(timeout)
        self.was_read = True
        return error

    def add_done_callback(
        self, fn: Callable[[concurrent.futures.Future[RecordMetadata]], object]
    ) -> None:
        """Call ``fn`` with this future when the verdict is there; it may be on another thread."""
        self.was_read = True
        super().add_done_callback(fn)


class AsyncDeliveryFuture(asyncio.Future[RecordMetadata]):
    """The future of ``AsyncProducer.send``."""

    was_read = False

    def deliver(self, metadata: RecordMetadata) -> None:
        """The record is written."""
        if not self.done():
            self.set_result(metadata)

    def refuse(self, error: BaseException) -> None:
        """The record is not written."""
        if not self.done():
            self.set_exception(error)
            # flush() and close() raise what nobody read; asyncio need not log it as well.
            self._log_traceback = False

    def result(self) -> RecordMetadata:
        """The record's place; raises why there is none."""
        self.was_read = True
        return super().result()

    def exception(self) -> BaseException | None:
        """Why the record was not written, or None."""
        self.was_read = True
        return super().exception()

    def add_done_callback(
        self,
        fn: Callable[[Self], object],
        /,
        *,
        context: Context | None = None,
    ) -> None:
        """Call ``fn`` with this future when the verdict is there."""
        self.was_read = True
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        """The record's place; raises why there is none."""
        self.was_read = True
        return super().__await__()


class FailureLedger:
    """The failures since the last flush, until somebody has heard of them."""

    def __init__(self) -> None:
        self._failed: list[tuple[Promise, BaseException]] = []
        self._beyond = 0  # Failures past those kept; taken for unread.
        self._first: BaseException | None = None
        self.delivered = 0

    def add(self, promise: Promise, error: BaseException) -> None:
        """A record failed."""
        if self._first is None:
            self._first = error
        if len(self._failed) < _KEPT:
            self._failed.append((promise, error))
        else:
            self._beyond += 1

    def raise_unread(self) -> None:
        """Raise DeliveryFailedError if there are failures that nobody looked at; then forget."""
        unread = [error for promise, error in self._failed if not promise.was_read]
        count = len(unread) + self._beyond
        first = unread[0] if unread else self._first
        delivered = self.delivered
        self._failed, self._beyond, self._first, self.delivered = [], 0, None, 0
        if count:
            raise DeliveryFailedError(
                f"{count} records were not delivered, and nobody read their futures "
                f"({delivered} were delivered since the last flush); the first because: {first}"
            ) from first
