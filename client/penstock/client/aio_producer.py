"""The asyncio producer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Self, Unpack

from penstock.client import arguments
from penstock.client.arrow_sending import ArrowRecords
from penstock.client.background import LoopGuard
from penstock.client.bulk import AsyncBulkDeliveryFuture
from penstock.client.cluster import wall_ms
from penstock.client.config import ProducerConfig, ProducerSettings
from penstock.client.core.accumulator import Appended
from penstock.client.core.transaction_events import Wish
from penstock.client.delivery import AsyncDeliveryFuture, Receipt
from penstock.client.model import GroupMetadata, Header, OffsetAndMetadata, RecordMetadata
from penstock.client.producer_engine import ProducerEngine
from penstock.client.sending import Place, Plain, Prepared, SendPath, counting
from penstock.wire.codec import Places
from penstock.wire.errors import (
    BufferExhaustedError,
    ClientClosedError,
    PenstockError,
    ProducerFencedError,
    TransactionAbortableError,
)
from penstock.wire.ids import TopicPartition

_TURN_RECORDS: Final = 5_000
"""So many of many are queued before other tasks have their turn: a millisecond's work or two. One
of them is the sender, and what has been queued until it looks goes into few large batches: a
transaction of 10,000 small records takes 5.6 requests so, and took 8.6 with half as many a turn.
"""

_TURN_SLOW_RECORDS: Final = 100
"""Also after so many that were queued one by one, each of which costs ten times as much."""


class AsyncProducer:
    """``Producer`` for asyncio: the same settings, promises and errors.

    Belongs to the event loop on which it is first used; safe for any number of its tasks.
    """

    _config_type: ClassVar[type[ProducerConfig]] = ProducerConfig

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self.config = self._config_type.load(bootstrap_servers, settings)
        self._guard = LoopGuard("AsyncProducer")
        self._room = asyncio.Event()
        self._engine = ProducerEngine(
            self.config, guard=contextlib.nullcontext(), on_room=self._room.set
        )
        self._path = SendPath(self.config, self._engine)
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
            return
        # The block's own exception matters more than what closing has to say.
        try:
            await self.close()
        except Exception as closing:
            if error is not None:
                error.add_note(f"and while the producer was closed: {closing}")

    async def start(self) -> None:
        """Connect. Optional: the first ``send`` does it. Raises BootstrapError."""
        self._check_open()
        await self._engine.start()

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Queue one record; the future has its RecordMetadata. See ``Producer.send``.

        Returns without waiting unless the topic is new or ``buffer_memory`` is full.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._guard.check()  # A forked child is told what is really wrong.
            raise
        if (
            timestamp_ms is None
            and not headers
            and self._path.takes_bytes
            and loop is self._guard.loop
        ):
            taken = self._engine.intake.take(topic, value, key, partition)
            if taken is not None:
                return AsyncDeliveryFuture(
                    taken.receipt, taken.index, taken.timestamp_ms, loop=loop
                )
        deadline = await self._await_topic(topic)
        record = self._path.prepare(
            topic,
            value=value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
        )
        result = await self._queue(record, deadline)
        return AsyncDeliveryFuture(
            result.receipt, result.index, record.data.timestamp_ms, loop=loop
        )

    async def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> AsyncBulkDeliveryFuture:
        """Queue many records, in order. See ``Producer.send_many``.

        Other tasks run while it waits for room, and in between.
        """
        deadline = await self._await_topic(topic)
        if partition is not None:
            partition = arguments.whole_number("partition", partition)
        plain = self._path.prepare_many(topic, values, keys, timestamp_ms)
        places: Places[Receipt] = Places()
        with counting(places, len(plain.values)):
            await self._queue_many(topic, plain, partition, places, deadline)
        loop = asyncio.get_running_loop()
        return AsyncBulkDeliveryFuture(places, plain.times, loop=loop)

    async def send_arrow(
        self, topic: str, data: Any, *, partition: int | None = None
    ) -> AsyncBulkDeliveryFuture:
        """Queue the rows of a table, in order. See ``Producer.send_arrow``."""
        deadline = await self._await_topic(topic)
        if partition is not None:
            partition = arguments.whole_number("partition", partition)
        records = ArrowRecords(data)
        now = wall_ms()
        for plain in records.chunks(now):
            self._path.check_all(topic, plain)
        places: Places[Receipt] = Places()
        with counting(places, len(records)):
            for plain in records.chunks(now):
                await self._queue_many(topic, plain, partition, places, deadline)
                deadline = 0.0
        loop = asyncio.get_running_loop()
        return AsyncBulkDeliveryFuture(places, records.times(now), loop=loop)

    async def _queue_many(
        self,
        topic: str,
        plain: Plain,
        partition: int | None,
        places: Places[Receipt],
        deadline: float,
    ) -> None:
        before = turn = len(places)
        slow = 0
        path = self._path
        while (at := path.take_many(topic, plain, partition, before, places)) < len(plain.values):
            self._check_open()
            result = await self._queue(path.nth(topic, plain, at, partition), deadline)
            places.add(result.receipt, result.index)
            deadline = 0.0
            slow += 1
            if slow >= _TURN_SLOW_RECORDS or len(places) - turn >= _TURN_RECORDS:
                turn, slow = len(places), 0
                await asyncio.sleep(0)

    async def _await_topic(self, topic: str) -> float:
        """Know the topic; the time until which to wait for room, 0 where none passed yet."""
        self._check_open()
        self._engine.check_sending()
        if isinstance(topic, str) and topic in self._engine.metadata:
            return 0.0
        arguments.topic(topic)
        deadline = self._deadline()
        await self._engine.await_topic(topic)
        self._check_open()  # Nobody would ever send what is queued after the close.
        return deadline

    async def _queue(self, record: Prepared, deadline: float) -> Appended[Receipt]:
        """Have the accumulator take a record, as soon as it has room."""
        place: Place | None = None
        while True:
            place = self._path.ask(record, place)
            result = self._path.offer(record, place)
            if isinstance(result, Appended):
                break
            if result is None:
                continue
            place = result
            deadline = deadline or self._deadline()
            await self._wait_for_room(deadline, record.size_bound)
            self._check_open()
        if result.wake:
            self._engine.wake()
        return result

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """``send``, and await its future."""
        future = await self.send(
            topic, value, key, headers, partition=partition, timestamp_ms=timestamp_ms
        )
        return await future

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A block whose records are committed at its end, or aborted when it raises. See
        ``Producer.transaction``.
        """
        await self.begin_transaction()
        try:
            yield
            if self._engine.transactions.check_block():
                await self.commit_transaction()
        except BaseException as error:
            await self._abort_after(error)
            raise

    async def _abort_after(self, error: BaseException) -> None:
        if not self._engine.transactions.is_open:
            return
        try:
            await self.abort_transaction()
        except ProducerFencedError as fenced:
            raise fenced from error
        except PenstockError as failure:
            error.add_note(f"and the transaction could not be aborted: {failure}")
        else:
            if isinstance(error, TransactionAbortableError):
                error.add_note("the block has aborted it: begin anew with the same work")

    async def init_transactions(self, timeout_ms: float | None = None) -> None:
        """Take the transactional id over. See ``Producer.init_transactions``."""
        self._check_open()
        await self._engine.transactions.init(arguments.timeout_ms(timeout_ms))

    async def begin_transaction(self) -> None:
        """Begin a transaction. See ``Producer.begin_transaction``."""
        self._check_open()
        await self._engine.transactions.begin()

    async def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group: GroupMetadata,
        timeout_ms: float | None = None,
    ) -> None:
        """Make positions of a group part of the transaction. See
        ``Producer.send_offsets_to_transaction``.
        """
        self._check_open()
        await self._engine.transactions.send_offsets(
            arguments.positions(offsets),
            arguments.group_metadata(group),
            arguments.timeout_ms(timeout_ms),
        )

    async def commit_transaction(self, timeout_ms: float | None = None) -> None:
        """Flush, and commit. See ``Producer.commit_transaction``."""
        self._check_open()
        await self._engine.transactions.end(Wish.COMMIT, arguments.timeout_ms(timeout_ms))

    async def abort_transaction(self, timeout_ms: float | None = None) -> None:
        """Abort. See ``Producer.abort_transaction``."""
        self._check_open()
        await self._engine.transactions.end(Wish.ABORT, arguments.timeout_ms(timeout_ms))

    async def flush(self, timeout_ms: float | None = None) -> None:
        """Send everything queued so far and wait for the verdicts. See ``Producer.flush``."""
        self._check_open()
        await self._engine.flush(arguments.timeout_ms(timeout_ms))

    async def close(self, timeout_ms: float | None = None) -> None:
        """Flush, then free everything. Idempotent. See ``Producer.close``."""
        timeout_ms = arguments.timeout_ms(timeout_ms)
        if self._closed or self._guard.foreign:
            return
        self._guard.check()
        self._closed = True
        self._engine.intake.clear()
        self._room.set()
        await self._engine.close(timeout_ms)

    async def partitions_for(self, topic: str) -> int:
        """How many partitions the topic has. Raises UnknownTopicOrPartitionError."""
        self._check_open()
        return await self._engine.await_topic(arguments.topic(topic))

    async def trouble(self) -> PenstockError | None:
        """Why what was sent first is not acknowledged yet. See ``Producer.trouble``."""
        self._check_open()
        return await self._engine.trouble()

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the producer is closed")

    def _deadline(self) -> float:
        return time.monotonic() + self.config.max_block_ms / 1000

    async def _wait_for_room(self, deadline: float, wanted_bytes: int) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise BufferExhaustedError(
                f"buffer_memory={self.config.buffer_memory} bytes stayed full for "
                f"max_block_ms={self.config.max_block_ms} (a record of {wanted_bytes} bytes waits);"
                " the brokers take records more slowly than they are sent: raise buffer_memory, "
                "or send less"
            )
        self._room.clear()
        self._engine.wake()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._room.wait(), deadline - now)
