"""What became of records that were sent: receipts of batches, and the futures that stand on them.

A batch has one receipt, which all its records share. The future of a record is a claim on it and
little else: it costs next to nothing until somebody waits for it or calls back on it, and most are
looked at when their verdict is there. Only what waits before that is kept by the receipt, and told.

No failure is lost: a receipt that fails counts its records whose futures nobody looks at, and
``flush`` and ``close`` raise for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Final, Protocol, Self

from penstock.client.background import contained
from penstock.client.model import RecordMetadata
from penstock.wire import codec
from penstock.wire.errors import DeliveryFailedError, PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

_SAMPLES: Final = 100
LOCK: Final = threading.RLock()
"""Guards who waits for which receipt, and who looked at what. Held for a few steps at a time, never
while anything of the application's is called. But the garbage collector may run in between and with
it anything, this module as well: hence one that its thread may take again."""


class Waiter(Protocol):
    """Who is told that a receipt has its verdict."""

    was_read: bool  # Somebody looked, or will: a failure is not unheard.

    def settle(self, receipt: Receipt, index: int) -> None:
        """The receipt is settled. ``index`` is the one that it waited for, -1 for all."""

    def count_in(self, receipt: Receipt, index: int) -> int:
        """How many records of the receipt it stands for."""

    def split(self) -> None:
        """It waits for one receipt more than before: one was split."""


class Receipt(codec.Receipt):
    """What became of one batch. Settled once, or split into two that are. Thread-safe."""

    __slots__ = ("_waiters", "middle", "parts", "period", "unread")

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(*partition, RecordMetadata)
        self.parts: tuple[Receipt, Receipt] | None = None
        self.middle = 0  # The first index that is the second part's, where there are parts.
        self.period: Unread | None = None  # That counts what is unread of the failure.
        self.unread = 0
        self._waiters: list[tuple[int, Waiter]] = []

    # --- the engine's side ------------------------------------------------------------------

    def deliver(self, base_offset: int, log_append_time_ms: int) -> None:
        """The batch is written."""
        self.base_offset = base_offset
        self.log_append_time_ms = log_append_time_ms
        with LOCK:
            waiters = self._end()
        self._tell(waiters)

    def refuse(self, error: BaseException, record_count: int, period: Unread) -> None:
        """The batch is not written; what nobody looks at of it is counted in ``period``."""
        self.error = error
        with LOCK:
            waiters = self._end()
            read = sum(waiter.count_in(self, index) for index, waiter in waiters if waiter.was_read)
            self.unread = max(0, record_count - read)
            if self.unread:
                self.period = period
                period.add(self)
        self._tell(waiters)

    def split(self, middle: int) -> tuple[Receipt, Receipt]:
        """The batch goes on as two, of which the second begins at ``middle``."""
        partition = TopicPartition(self.topic, self.partition)
        parts = Receipt(partition), Receipt(partition)
        with LOCK:
            for index, waiter in self._waiters:
                if index < 0:
                    waiter.split()
                    for part in parts:
                        part._waiters.append((-1, waiter))
                elif index < middle:
                    parts[0]._waiters.append((index, waiter))
                else:
                    parts[1]._waiters.append((index - middle, waiter))
            self._waiters = []
            self.middle = middle
            self.parts = parts
        return parts

    def _end(self) -> list[tuple[int, Waiter]]:
        waiters, self._waiters = self._waiters, []
        self.is_settled = True
        return waiters

    def _tell(self, waiters: list[tuple[int, Waiter]]) -> None:
        for index, waiter in waiters:
            waiter.settle(self, index)

    # --- the futures' side ------------------------------------------------------------------

    def locate(self, index: int) -> tuple[Receipt, int]:
        """The receipt that the record is on by now, and its index there."""
        receipt = self
        while (parts := receipt.parts) is not None:
            if index < receipt.middle:
                receipt = parts[0]
            else:
                index -= receipt.middle
                receipt = parts[1]
        return receipt, index

    def watch(self, index: int, waiter: Waiter) -> bool:
        """Have ``waiter`` told; False, and nothing done, when it is settled. The lock is held.

        The receipt must have no parts.
        """
        if self.is_settled:
            return False
        self._waiters.append((index, waiter))
        return True

    def note_read(self, count: int) -> None:
        """Somebody looks at so many of its records. The lock is held."""
        if self.period is not None:
            count = min(count, self.unread)
            self.unread -= count
            self.period.forget(count)


class _Whole(concurrent.futures.Future[RecordMetadata]):
    """What a DeliveryFuture has of a future once that is wanted."""

    was_read = False


def _of_whole(name: str) -> Any:
    """An attribute that concurrent.futures looks for in a future."""

    def get(future: DeliveryFuture) -> Any:
        return getattr(future.completed(), name)

    def put(future: DeliveryFuture, value: Any) -> None:
        setattr(future.completed(), name, value)

    return property(get, put)


class DeliveryFuture(codec.Claim[Receipt], concurrent.futures.Future[RecordMetadata]):
    """The future of ``Producer.send``. It cannot be cancelled: the record may be on its way.

    Made as a claim on a receipt. What else a future has is made when it is first wanted; from then
    on the receipt tells it. It takes no attributes of the application's.
    """

    __slots__ = ()

    _condition = _of_whole("_condition")
    _state = _of_whole("_state")
    _result = _of_whole("_result")
    _exception = _of_whole("_exception")
    _waiters = _of_whole("_waiters")
    _done_callbacks = _of_whole("_done_callbacks")
    was_read = _of_whole("was_read")

    def done(self) -> bool:
        """Whether the verdict is there."""
        return self.receipt.locate(self.index)[0].is_settled

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """The record's place; raises why there is none. Waits up to ``timeout`` seconds."""
        place: RecordMetadata | None = self.place()
        if place is not None:
            return place
        error = self.exception(timeout)
        if error is not None:
            # Otherwise each call would add its frames to those of the calls before.
            raise error.with_traceback(None)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the record was not written, or None. Waits up to ``timeout`` seconds."""
        receipt = self.receipt
        if receipt.is_settled and receipt.error is None:
            return None
        error = super().exception(timeout)
        _note_read(self)
        return error

    def add_done_callback(
        self, fn: Callable[[concurrent.futures.Future[RecordMetadata]], object]
    ) -> None:
        """Call ``fn`` with this future when the verdict is there; it may be on another thread."""
        _note_read(self)
        super().add_done_callback(contained(fn))

    def completed(self) -> _Whole:
        """All that a future has; made now, if nobody wanted it before."""
        if self.whole is None:
            with LOCK:
                if self.whole is None:
                    whole = _Whole()
                    whole.set_running_or_notify_cancel()
                    self.complete(whole)
                    receipt, index = self.receipt.locate(self.index)
                    if not receipt.watch(index, self):
                        self.settle(receipt, index)
        found: _Whole = self.whole
        return found

    def settle(self, receipt: Receipt, index: int) -> None:
        """The receipt is settled."""
        if receipt.error is None:
            self.set_result(receipt.place(index, self.timestamp_ms))
        else:
            self.set_exception(own_copy(receipt.error))

    def count_in(self, receipt: Receipt, index: int) -> int:
        """It stands for one record."""
        return 1

    def split(self) -> None:
        """Its record is on one part only."""


class AsyncDeliveryFuture(asyncio.Future[RecordMetadata]):
    """The future of ``AsyncProducer.send``."""

    was_read = False

    def __init__(
        self,
        receipt: Receipt,
        index: int,
        timestamp_ms: int,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(loop=loop)
        self.receipt = receipt
        self.index = index
        self.timestamp_ms = timestamp_ms
        with LOCK:
            there, index = receipt.locate(index)
            waits = there.watch(index, self)
        if not waits:
            self.settle(there, index)

    def settle(self, receipt: Receipt, index: int) -> None:
        """The receipt is settled."""
        if self.done():
            return
        if receipt.error is None:
            self.set_result(receipt.place(index, self.timestamp_ms))
        else:
            self.set_exception(own_copy(receipt.error))
            # flush() and close() raise what nobody read; asyncio need not log it as well.
            self._log_traceback = False

    def count_in(self, receipt: Receipt, index: int) -> int:
        """It stands for one record."""
        return 1

    def split(self) -> None:
        """Its record is on one part only."""

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


def own_copy(error: BaseException) -> BaseException:
    """A copy of a failure that many records share: raising an exception changes it.

    What Penstock did not make is passed on as it is, for nobody knows how to copy it.
    """
    if not isinstance(error, PenstockError):
        return error
    own = type(error)(error.message, leader=error.leader)
    own.__cause__ = error.__cause__
    own.reason = error.reason
    for note in getattr(error, "__notes__", ()):
        own.add_note(note)
    return own


def _note_read(future: DeliveryFuture | AsyncDeliveryFuture) -> None:
    if future.was_read:
        return
    with LOCK:
        if not future.was_read:
            future.was_read = True
            future.receipt.locate(future.index)[0].note_read(1)


class Unread:
    """The failures of one period that nobody looked at yet. Used while the lock is held.

    Counts, and pins nothing but a few samples: those who hold futures may read them at any time
    until the period ends, and those who do not must not fill the memory.
    """

    def __init__(self) -> None:
        self.count = 0
        self._samples: list[Receipt] = []
        self._latest: BaseException | None = None

    def add(self, receipt: Receipt) -> None:
        """A batch failed, and this many of its records are ``unread``."""
        self.count += receipt.unread
        self._latest = receipt.error
        if len(self._samples) >= _SAMPLES:
            self._samples = [sample for sample in self._samples if sample.unread]
        if len(self._samples) < _SAMPLES:
            self._samples.append(receipt)

    def forget(self, count: int) -> None:
        """Somebody looks at so many."""
        self.count -= count

    def first(self) -> BaseException | None:
        """Why the first unread one (or, after very many, a later one) failed."""
        for sample in self._samples:
            if sample.unread:
                return sample.error
        return self._latest


class FailureLedger:
    """The failures since the last flush, until somebody has heard of them."""

    def __init__(self) -> None:
        self._unread = Unread()
        self.delivered = 0

    def refuse(self, receipt: Receipt, error: BaseException, record_count: int) -> None:
        """So many records failed together."""
        receipt.refuse(error, record_count, self._unread)

    def forget(self) -> None:
        """What failed was told otherwise: with the end of its transaction."""
        with LOCK:
            self._unread, self.delivered = Unread(), 0

    def raise_unread(self) -> None:
        """Raise DeliveryFailedError if there are failures that nobody looked at; then forget."""
        with LOCK:
            count, first = self._unread.count, self._unread.first()
            delivered = self.delivered
            self._unread, self.delivered = Unread(), 0
        if count:
            raise DeliveryFailedError(
                f"{counted(count, 'record', 'was')} not delivered, and nobody read "
                f"{'its future' if count == 1 else 'their futures'} "
                f"({delivered} were delivered since the last flush); the first because: {first}"
            ) from first
