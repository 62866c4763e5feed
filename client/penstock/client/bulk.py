"""What became of many records that were sent by one call: one future for them all."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextvars import Context
from typing import Any, Self, overload

from penstock.client.background import contained
from penstock.client.delivery import LOCK, Receipt, own_copy
from penstock.client.model import RecordMetadata
from penstock.wire.codec import Places
from penstock.wire.errors import DeliveryFailedError
from penstock.wire.wording import counted


class DeliveredRecords(Sequence[RecordMetadata]):
    """Where the records of one call are, in the order of its values. Made when looked at."""

    def __init__(self, bulk: Bulk) -> None:
        self._bulk = bulk

    def __len__(self) -> int:
        return len(self._bulk)

    @overload
    def __getitem__(self, number: int) -> RecordMetadata: ...

    @overload
    def __getitem__(self, number: slice) -> list[RecordMetadata]: ...

    def __getitem__(self, number: int | slice) -> RecordMetadata | list[RecordMetadata]:
        if isinstance(number, slice):
            return [self._bulk.metadata(one) for one in range(*number.indices(len(self)))]
        return self._bulk.metadata(number if number >= 0 else number + len(self))

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'record', 'was')} delivered>"


class Bulk:
    """The records of one call, and how many of their batches are still without a verdict.

    ``times`` are in milliseconds: that of all, or of each. ``on_end`` is called once, when all have
    their verdict. Thread-safe.
    """

    def __init__(
        self, places: Places[Receipt], times: int | Sequence[int], on_end: Callable[[], object]
    ) -> None:
        self.was_read = False
        self._places = places
        self._times = times
        self._on_end: Callable[[], object] | None = on_end
        self._failed: list[Receipt] = []
        self._counts: Counter[Receipt] | None = None
        self._left = 1

    def __len__(self) -> int:
        return len(self._places)

    def begin(self) -> None:
        """Wait for the receipts."""
        for receipt in self._places.receipts:
            self._await(receipt)
        self._count_down()

    def _await(self, receipt: Receipt) -> None:
        with LOCK:
            parts = receipt.parts
            if parts is None:
                self._left += 1
                if receipt.watch(-1, self):
                    return
        if parts is None:
            self.settle(receipt, -1)
        else:
            for part in parts:
                self._await(part)

    def settle(self, receipt: Receipt, index: int) -> None:
        """One receipt has its verdict."""
        if receipt.error is not None:
            self._failed.append(receipt)
        self._count_down()

    def split(self) -> None:
        """One more is waited for."""
        self._left += 1

    def _count_down(self) -> None:
        with LOCK:
            self._left -= 1
            ended = self._left == 0
        if ended and (on_end := self._on_end) is not None:
            self._on_end = None  # It is the future's, which has this: they go without a collector.
            on_end()

    def count_in(self, receipt: Receipt, index: int) -> int:
        """How many of the records are on that receipt."""
        if self._counts is None or receipt not in self._counts:
            self._counts = Counter(self._located(number)[0] for number in range(len(self)))
        return self._counts[receipt]

    def note_read(self) -> None:
        """Somebody looks at what became of them."""
        if self.was_read:
            return
        with LOCK:
            if not self.was_read:
                self.was_read = True
                for receipt in set(self._failed):
                    receipt.note_read(self.count_in(receipt, -1))

    def _located(self, number: int) -> tuple[Receipt, int]:
        receipt, index = self._places.place(number)
        return self._places.receipts[receipt].locate(index)

    def metadata(self, number: int) -> RecordMetadata:
        """Where a record is that was delivered. Raises IndexError."""
        receipt, index = self._located(number)
        place: RecordMetadata = receipt.place(index, self._time_of(number))
        return place

    def _time_of(self, number: int) -> int:
        return self._times if isinstance(self._times, int) else self._times[number]

    def outcomes(self) -> list[RecordMetadata | BaseException]:
        """Where each is, or why it is not there, once all have their verdict."""
        found: list[RecordMetadata | BaseException] = []
        for number in range(len(self)):
            receipt, index = self._located(number)
            error = receipt.error
            found.append(
                receipt.place(index, self._time_of(number)) if error is None else own_copy(error)
            )
        return found

    def failure(self) -> DeliveryFailedError | None:
        """What to raise where some were not delivered, once all have their verdict."""
        failed = [
            number
            for number in (range(len(self)) if self._failed else ())
            if self._located(number)[0].error is not None
        ]
        if not failed:  # What failed may have been other records of the same batches.
            return None
        cause = self._located(failed[0])[0].error
        error = DeliveryFailedError(
            f"{len(failed)} of {counted(len(self), 'record', 'was')} not delivered (outcomes() "
            f"has each); the first, number {failed[0]}, because: {cause}"
        )
        error.__cause__ = cause
        return error


class BulkDeliveryFuture(concurrent.futures.Future[Sequence[RecordMetadata]]):
    """The future of ``Producer.send_many``. It cannot be cancelled: records may be on their way.

    Its result is as long as the values and in their order. Where some records were not delivered
    it raises DeliveryFailedError; ``outcomes`` tells of each.
    """

    def __init__(self, places: Places[Receipt], times: int | Sequence[int]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._bulk = Bulk(places, times, self._on_end)
        self._bulk.begin()

    def outcomes(self, timeout: float | None = None) -> list[RecordMetadata | BaseException]:
        """Where each record is, or why it is not there. Waits up to ``timeout`` seconds."""
        self.exception(timeout)
        return self._bulk.outcomes()

    def result(self, timeout: float | None = None) -> Sequence[RecordMetadata]:
        """The records' places. Waits up to ``timeout`` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why not all records were written, or None. Waits up to ``timeout`` seconds."""
        error = super().exception(timeout)
        self._bulk.note_read()
        return error

    def add_done_callback(
        self, fn: Callable[[concurrent.futures.Future[Sequence[RecordMetadata]]], object]
    ) -> None:
        """Call ``fn`` with this future when all have their verdict; maybe on another thread."""
        self._bulk.note_read()
        super().add_done_callback(contained(fn))

    def _on_end(self) -> None:
        error = self._bulk.failure()
        if error is None:
            self.set_result(DeliveredRecords(self._bulk))
        else:
            self.set_exception(error)


class AsyncBulkDeliveryFuture(asyncio.Future[Sequence[RecordMetadata]]):
    """The future of ``AsyncProducer.send_many``. See ``BulkDeliveryFuture``."""

    def __init__(
        self,
        places: Places[Receipt],
        times: int | Sequence[int],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(loop=loop)
        self._bulk = Bulk(places, times, self._on_end)
        self._bulk.begin()

    async def outcomes(self) -> list[RecordMetadata | BaseException]:
        """Where each record is, or why it is not there, when all have their verdict."""
        await asyncio.wait([self])
        return self._bulk.outcomes()

    def result(self) -> Sequence[RecordMetadata]:
        """The records' places; raises where not all were written."""
        self._bulk.note_read()
        return super().result()

    def exception(self) -> BaseException | None:
        """Why not all records were written, or None."""
        self._bulk.note_read()
        return super().exception()

    def add_done_callback(
        self, fn: Callable[[Self], object], /, *, context: Context | None = None
    ) -> None:
        """Call ``fn`` with this future when all have their verdict."""
        self._bulk.note_read()
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Generator[Any, None, Sequence[RecordMetadata]]:
        """The records' places; raises where not all were written."""
        self._bulk.note_read()
        return super().__await__()

    def _on_end(self) -> None:
        if self.done():
            return
        error = self._bulk.failure()
        if error is None:
            self.set_result(DeliveredRecords(self._bulk))
        else:
            self.set_exception(error)
            # flush() and close() raise what nobody read; asyncio need not log it as well.
            self._log_traceback = False
