"""The synchronous producer."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack

from penstock.client import arguments
from penstock.client.arrow_sending import ArrowRecords
from penstock.client.background import ForkGuard, LoopThread
from penstock.client.bulk import BulkDeliveryFuture
from penstock.client.cluster import wall_ms
from penstock.client.config import ProducerConfig, ProducerSettings
from penstock.client.core.accumulator import Appended
from penstock.client.core.transaction_events import Wish
from penstock.client.delivery import DeliveryFuture, Receipt
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


class Producer:
    """Writes records to topics. Thread-safe: one producer serves a whole process.

    ``settings`` are those of ``ProducerConfig``; an unknown one raises ConfigurationError. The
    constructor connects to nothing; the first ``send`` does. Close it, or use it as a context
    manager, or records still in memory may be lost with the process.

    Defaults: acks="all", idempotent, linger_ms=5. Idempotence is KIP-98's: no retry makes a
    duplicate or changes the order within a partition.

    With a ``transactional_id`` it is transactional (KIP-98, with KIP-890's epoch for each
    transaction), and everything is sent in transactions, one at a time: see ``transaction``. Any
    thread may begin and end them, and what is sent by any thread in between belongs to it.
    """

    _config_type: ClassVar[type[ProducerConfig]] = ProducerConfig

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self.config = self._config_type.load(bootstrap_servers, settings)
        self._guard = ForkGuard("Producer")
        self._thread = LoopThread.shared()
        # Taken by itself, not through the condition, whose ``with`` an interrupt (Ctrl-C) can leave
        # with the lock held.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._engine = ProducerEngine(self.config, guard=self._lock, on_room=self._on_room)
        self._path = SendPath(self.config, self._engine)
        self._waking = False
        self._closed = False
        self._thread.register(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # The block's own exception matters more than what closing has to say.
        try:
            self.close()
        except Exception as closing:
            if error is not None:
                error.add_note(f"and while the producer was closed: {closing}")

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> concurrent.futures.Future[RecordMetadata]:
        """Queue one record; the future has its RecordMetadata or the reason why not.

        Blocks for at most ``max_block_ms`` in all: for a new topic's metadata, and while
        ``buffer_memory`` is full (in a callback of a future, which runs on the client's own
        thread, not at all: a new topic raises InvalidRequestError there, and full memory
        BufferExhaustedError). Records of one partition are written in the order of ``send``.
        With ``key`` the partition is murmur2's as in Java clients; without, batch by batch.

        A record is sent to the topic that has the name then: one deleted and made anew meanwhile
        gets what the deleted one surely did not, and a ``send`` that waited for room has its
        partition chosen among the new one's. What that may have had, and everything queued when
        the number of partitions is another one now, fails with UnknownTopicIdError.

        Raises at once, with nothing queued: SerializationError, RecordTooLargeError (above
        ``max_request_size``), BufferExhaustedError, UnknownTopicOrPartitionError,
        InvalidPartitionsError, InvalidTopicError, InvalidRequestError (an argument of a wrong type
        or value, which it names), BootstrapError, ClientClosedError. The future fails with
        DeliveryTimeoutError after ``delivery_timeout_ms``, or with what the broker refused it for.
        A failure whose future nobody looked at raises at the next ``flush`` or ``close``.

        In a transaction a future says that the record is written, not that it is committed, and
        one failure makes an end of the transaction: from then on ``send`` raises
        TransactionAbortableError, and ProducerFencedError where another producer has the
        transactional id. Outside of a transaction a transactional producer raises
        InvalidTxnStateError.
        """
        if timestamp_ms is None and not headers and self._path.takes_bytes:
            taken = self._engine.intake.take(topic, value, key, partition)
            if taken is not None:
                return taken
        deadline = self._await_topic(topic)
        record = self._path.prepare(
            topic,
            value=value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
        )
        result = self._queue(record, deadline)
        return DeliveryFuture(result.receipt, result.index, record.data.timestamp_ms)

    def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> BulkDeliveryFuture:
        """Queue many records, in order, at a fraction of what as many calls of ``send`` cost.

        The future's result has each record's RecordMetadata, in the order of ``values``; where some
        were not delivered it raises DeliveryFailedError, and its ``outcomes()`` tell of each.
        ``keys`` are as many as the values. A list is not copied: leave it alone until the call
        returns. All get the same time.

        Blocks like ``send``, for at most ``max_block_ms`` at a time. What is wrong with any record
        is raised before anything is queued. What goes wrong later (memory that stays full, a topic
        that is deleted, a custom partitioner) is raised with a note that says how many had been
        queued; these are sent, and nobody but ``flush`` and ``close`` tells of their failures.
        """
        deadline = self._await_topic(topic)
        if partition is not None:
            partition = arguments.whole_number("partition", partition)
        plain = self._path.prepare_many(topic, values, keys, timestamp_ms)
        places: Places[Receipt] = Places()
        with counting(places, len(plain.values)):
            self._queue_many(topic, plain, partition, places, deadline)
        return BulkDeliveryFuture(places, plain.times)

    def send_arrow(
        self, topic: str, data: Any, *, partition: int | None = None
    ) -> BulkDeliveryFuture:
        """Queue the rows of a table, in order. See ``send_many`` for what it returns and raises.

        ``data`` is a pyarrow Table or RecordBatch, or any object with Arrow's stream interface. Its
        columns are those of ``Consumer.fetch_arrow``: ``value`` (binary or string), and if wanted
        ``key`` (the same), ``timestamp`` (a timestamp, or milliseconds as integers), ``headers``
        (lists of structs of a ``key`` and a ``value``) and ``partition`` (where it is null, that is
        chosen as without). Serialisers are not asked. Of no row an object is made.

        Raises ConfigurationError without pyarrow, InvalidRequestError for other columns or types.
        """
        deadline = self._await_topic(topic)
        if partition is not None:
            partition = arguments.whole_number("partition", partition)
        records = ArrowRecords(data)
        now = wall_ms()
        for plain in records.chunks(now):
            self._path.check_all(topic, plain)
        places: Places[Receipt] = Places()
        with counting(places, len(records)):
            for plain in records.chunks(now):
                self._queue_many(topic, plain, partition, places, deadline)
                deadline = 0.0
        return BulkDeliveryFuture(places, records.times(now))

    def _queue_many(
        self,
        topic: str,
        plain: Plain,
        partition: int | None,
        places: Places[Receipt],
        deadline: float,
    ) -> None:
        before, path = len(places), self._path
        while (at := path.take_many(topic, plain, partition, before, places)) < len(plain.values):
            self._check_open()
            result = self._queue(path.nth(topic, plain, at, partition), deadline)
            places.add(result.receipt, result.index)
            deadline = 0.0

    def _await_topic(self, topic: str) -> float:
        """Know the topic; the time until which to wait for room, 0 where none passed yet."""
        self._check_open()
        self._engine.check_sending()
        if isinstance(topic, str) and topic in self._engine.metadata:
            return 0.0
        arguments.topic(topic)
        deadline = self._deadline()
        self._thread.run(self._engine.await_topic, topic)
        return deadline

    def _queue(self, record: Prepared, deadline: float) -> Appended[Receipt]:
        """Have the accumulator take a record, as soon as it has room."""
        place: Place | None = None
        try:
            while True:
                place = self._path.ask(record, place)
                with self._lock:
                    if self._closed:
                        raise ClientClosedError("the producer is closed; nothing was sent")
                    result = self._path.offer(record, place)
                    if result is None:
                        continue
                    if isinstance(result, Place):
                        place = result
                        deadline = deadline or self._deadline()
                        self._wait_for_room(deadline, record.size_bound)
                        continue
                    wake = result.wake and not self._waking
                    if wake:
                        self._waking = True
                if wake:
                    self._thread.call(self._wake)
                return result
        except BaseException:
            # An interrupt (Ctrl-C) may come when the record is there already, and nothing else
            # would have the sender look at it.
            self._thread.call(self._wake)
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block whose records are committed at its end, or aborted when it raises.

        The block's exception is raised again; ProducerFencedError instead where another producer
        has the transactional id. Raises what ``begin_transaction`` and ``commit_transaction`` do,
        and ClientClosedError where the producer was closed in the block. After
        TransactionAbortableError the transaction is aborted, and another may be begun with the same
        work. After RequestTimedOutError of the commit its outcome is not known: call
        ``commit_transaction`` again.

        A producer has one transaction at a time, of all threads and tasks, and a block has none of
        its own: its end commits, or aborts, what is open then. A block may end its transaction
        itself, and so may another thread: then the block's end does nothing, and where nothing is
        raised it was committed, or aborted by whoever ended it. Where another one was begun since
        by whomever, it is that one that is ended. So only where nobody else ends or begins any does
        a block that raises nothing mean that what was sent in it is committed.
        """
        self.begin_transaction()
        try:
            yield
            if self._engine.transactions.check_block():
                self.commit_transaction()
        except BaseException as error:
            self._abort_after(error)
            raise

    def _abort_after(self, error: BaseException) -> None:
        if not self._engine.transactions.is_open:
            return
        try:
            self.abort_transaction()
        except ProducerFencedError as fenced:
            raise fenced from error
        except PenstockError as failure:
            error.add_note(f"and the transaction could not be aborted: {failure}")
        else:
            if isinstance(error, TransactionAbortableError):
                error.add_note("the block has aborted it: begin anew with the same work")

    def init_transactions(self, timeout_ms: float | None = None) -> None:
        """Take the transactional id over: fence other producers that have it, and abort what is
        open of them. Optional: the first ``begin_transaction`` does it.

        Waits for at most ``timeout_ms`` (None: ``max_block_ms``), then raises the last retriable
        reason; it may be called again. Raises InvalidTransactionTimeoutError for a
        ``transaction_timeout_ms`` that brokers do not allow, InvalidTxnStateError without a
        ``transactional_id``, ProducerFencedError, AccessForbiddenError, BootstrapError.
        """
        self._check_open()
        self._thread.run(self._engine.transactions.init, arguments.timeout_ms(timeout_ms))

    def begin_transaction(self) -> None:
        """Begin a transaction. Raises InvalidTxnStateError while one is open, or the outcome of the
        last one is not known; and what ``init_transactions`` raises.
        """
        self._check_open()
        self._thread.run(self._engine.transactions.begin)

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group: GroupMetadata,
        timeout_ms: float | None = None,
    ) -> None:
        """Make positions of a consumer group part of the transaction: they become the group's when
        it is committed, and never if it is aborted.

        ``offsets`` are those of the next records (``record.position_after``), and ``group`` is the
        consumer's ``group_metadata()``; the consumer commits nothing itself
        (``enable_auto_commit=False``). Waits until the group's coordinator has them, for at most
        ``timeout_ms`` (None: ``max_block_ms``). Raises TransactionAbortableError where it has not,
        with the cause: FencedMemberEpochError, StaleMemberEpochError or UnknownMemberIdError where
        others may have the partitions. Raises InvalidTxnStateError outside of a transaction,
        ProducerFencedError, InvalidRequestError.
        """
        self._check_open()
        self._thread.run(
            self._engine.transactions.send_offsets,
            arguments.positions(offsets),
            arguments.group_metadata(group),
            arguments.timeout_ms(timeout_ms),
        )

    def commit_transaction(self, timeout_ms: float | None = None) -> None:
        """Flush, and commit: when it returns, all of the transaction is committed for ever.

        Raises TransactionAbortableError when a record of it failed, or the cluster has aborted it
        since it took longer than ``transaction_timeout_ms``: nothing of it is committed, and
        ``abort_transaction`` is next. Raises RequestTimedOutError after ``timeout_ms`` in all
        (None: as long as ``delivery_timeout_ms`` lets records live, and as long again for the
        answer): its message says whether nothing was decided, or the outcome is unknown. Call it
        again then; that decides nothing twice. Raises InvalidTxnStateError when none is open,
        ProducerFencedError.
        """
        self._check_open()
        timeout_ms = arguments.timeout_ms(timeout_ms)
        self._thread.run(self._engine.transactions.end, Wish.COMMIT, timeout_ms)

    def abort_transaction(self, timeout_ms: float | None = None) -> None:
        """Abort: what was sent is given up, and no reader of committed records will see it.

        Futures without a verdict fail with TransactionAbortableError. Raises RequestTimedOutError
        after ``timeout_ms`` (None: ``delivery_timeout_ms``): call it again. Raises
        InvalidTxnStateError when none is open, or it turns out that a commit whose answer was lost
        has committed it; ProducerFencedError.
        """
        self._check_open()
        timeout_ms = arguments.timeout_ms(timeout_ms)
        self._thread.run(self._engine.transactions.end, Wish.ABORT, timeout_ms)

    def flush(self, timeout_ms: float | None = None) -> None:
        """Send everything queued so far without lingering, and wait for the verdicts.

        Raises DeliveryFailedError (with counts; its cause is the first failure) when records
        failed and nobody read their futures. Raises RequestTimedOutError after ``timeout_ms``,
        with the records still queued; None waits as long as ``delivery_timeout_ms`` lets records
        live.
        """
        self._check_open()
        self._thread.run(self._engine.flush, arguments.timeout_ms(timeout_ms))

    def close(self, timeout_ms: float | None = None) -> None:
        """Flush, then free everything. Idempotent.

        What is not delivered within ``timeout_ms`` (None: no bound but ``delivery_timeout_ms``)
        fails with ClientClosedError. A transaction that is open is aborted, with a warning in the
        log. Raises DeliveryFailedError like ``flush``.
        """
        timeout_ms = arguments.timeout_ms(timeout_ms)
        if self._guard.foreign:
            return  # The parent's; nothing of it lives here.
        self._thread.check_may_wait()  # What is refused there leaves the producer open.
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._engine.intake.clear()
            self._room.notify_all()
        self._thread.forget(self)
        self._thread.run(self._engine.close, timeout_ms)

    def close_at_exit(self, timeout_ms: float) -> None:
        """Called when the interpreter exits and nobody closed the producer."""
        self.close(timeout_ms)

    def partitions_for(self, topic: str) -> int:
        """How many partitions the topic has. Raises UnknownTopicOrPartitionError."""
        self._check_open()
        return self._thread.run(self._engine.await_topic, arguments.topic(topic))

    def trouble(self) -> PenstockError | None:
        """Why what was sent first is not acknowledged yet, or a transaction does not begin or end
        (to be asked from another thread); None when nothing is in the way.

        Its ``reason`` is a StallReason. The records wait on, until ``delivery_timeout_ms``, and who
        began or ended a transaction for the time of that call; after 10 s, and every 10 s from
        then on, a warning is logged as well.
        """
        self._check_open()
        return self._thread.run(self._engine.trouble)

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the producer is closed")

    def _wake(self) -> None:
        self._waking = False
        self._engine.wake()

    def _deadline(self) -> float:
        return time.monotonic() + self.config.max_block_ms / 1000

    def _wait_for_room(self, deadline: float, wanted_bytes: int) -> None:
        """Wait until memory was freed. Holds the lock before and after."""
        if self._thread.is_current:
            raise BufferExhaustedError(
                f"buffer_memory={self.config.buffer_memory} bytes are full (a record of "
                f"{wanted_bytes} bytes waits), and a callback on the client's own thread cannot "
                "wait for room, which only that thread can make: send from another thread, or "
                "raise buffer_memory"
            )
        now = time.monotonic()
        if now >= deadline:
            raise BufferExhaustedError(
                f"buffer_memory={self.config.buffer_memory} bytes stayed full for "
                f"max_block_ms={self.config.max_block_ms} (a record of {wanted_bytes} bytes waits);"
                " the brokers take records more slowly than they are sent: raise buffer_memory, "
                "or send less"
            )
        self._thread.call(self._engine.wake)
        self._room.wait(deadline - now)

    def _on_room(self) -> None:
        with self._lock:
            self._room.notify_all()
