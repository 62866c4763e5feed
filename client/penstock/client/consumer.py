"""The synchronous consumer."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from penstock.client import arguments, arrow
from penstock.client.background import ForkGuard, LoopThread, contained
from penstock.client.cluster import now_ms
from penstock.client.config import ConsumerConfig, ConsumerSettings
from penstock.client.consumer_engine import ConsumerEngine
from penstock.client.core.subscription import Rebalance
from penstock.client.deadline import Deadline
from penstock.client.fetch_loop import MOST_ROWS
from penstock.client.model import (
    ConsumerMetrics,
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    RebalanceListener,
)
from penstock.client.one_poller import OnePoller
from penstock.wire.errors import ClientClosedError, PenstockError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
Taken = TypeVar("Taken", bound=Sized)
P = ParamSpec("P")


class Consumer:
    """Reads records from topics, alone or as a member of a group. Not thread-safe.

    ``settings`` are those of ``ConsumerConfig``. ``topics`` subscribes at once. With ``group_id``
    the partitions are shared with the group's other members; without, this consumer reads every
    partition of its topics from ``auto_offset_reset``.

    At least once: with auto commit, a record counts as processed when the next one (by
    iteration) or the next batch (by ``poll``) is asked for; before partitions are given to
    another member, what was processed is committed. Heartbeats run in the background, however
    long processing takes, up to ``max_poll_interval_ms``.

    An argument of a wrong type or value raises InvalidRequestError, which names it
    (InvalidTopicError for a name that no topic can have), and changes nothing.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        *,
        topics: str | Iterable[str] | re.Pattern[str] | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.config = ConsumerConfig.load(bootstrap_servers, settings)
        self._guard = ForkGuard("Consumer")
        self._thread = LoopThread.shared()
        self._engine = ConsumerEngine(self.config)
        self._handout = self._engine.handout
        self._listener: RebalanceListener | None = None
        self._closed = False
        self._polling = OnePoller(threading.get_ident)
        self._thread.register(self)
        if topics is not None:
            self._engine.subscribe(arguments.subscription(topics))

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
        try:
            self._close(30_000, all_processed=False)
        except Exception as closing:
            if error is not None:
                error.add_note(f"and while the consumer was closed: {closing}")

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Records one by one, for ever."""
        return self

    def __next__(self) -> ConsumerRecord:
        handout = self._handout
        while True:
            if not handout.interrupted:
                for record in handout.current:
                    return record
            with self._polling:
                if not handout.begin_run(now_ms()):
                    self._check_open()
                    self._fetch(Deadline.never(), None)

    # --- what to read -----------------------------------------------------------------------

    def subscribe(
        self,
        topics: str | Iterable[str] | re.Pattern[str],
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read these topics (names, or a compiled pattern over whole names) from now on.

        Replaces an earlier subscription; takes effect in the next ``poll``. A name that does not
        exist makes ``poll`` raise UnknownTopicOrPartitionError. Raises InvalidRequestError after
        ``assign``, and for a pattern with flags.
        """
        self._check_open()
        wanted, hearer = arguments.subscription(topics), arguments.listener(listener)
        self._engine.subscribe(wanted)
        self._listener = hearer

    def unsubscribe(self) -> None:
        """Leave the group and give back every partition.

        Commits first (with auto commit) what was processed; what the last poll handed out is not,
        as far as is known, and comes again to whoever reads on. Runs the listener's
        ``on_partitions_revoked``.
        """
        self._check_open()
        try:
            self._tell_parting()
        finally:
            self._run(self._engine.unsubscribe)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, without the group's assignment.

        With auto commit, what was processed of those that are read no longer is committed first.
        Raises InvalidRequestError after ``subscribe``.
        """
        self._check_open()
        self._run(self._engine.assign, arguments.partitions(partitions))

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions being read now."""
        return self._engine.assignment()

    def subscription(self) -> tuple[str, ...]:
        """The topics subscribed to by name."""
        return self._engine.subscription()

    # --- reading ----------------------------------------------------------------------------

    def poll(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> list[ConsumerRecord]:
        """The next records, at most ``max_records`` (default ``max_poll_records``).

        Waits up to ``timeout_ms`` (None: without bound) for the first; then returns what is
        there, maybe nothing. Records of a partition come in order. Marks what earlier polls
        returned as processed. Runs rebalance listeners. Raises NoOffsetError, OffsetOutOfRangeError
        (both only with ``auto_offset_reset="none"``), CorruptRecordError
        (naming partition and offset, after ``default_api_timeout_ms`` of asking the leader again;
        it goes on being asked, or ``seek`` past it), SerializationError,
        UnknownTopicOrPartitionError, FencedInstanceIdError, BootstrapError, and
        ConcurrentUseError while another thread reads. The first call connects and may take longer.
        What is likely to mend (a partition without a leader, a coordinator that moves) is waited
        for, and logged every 10 s; after 10 s, ConsumerStalledError says what will not mend (its
        ``reason`` is a StallReason).
        A member that did not poll for ``max_poll_interval_ms`` has left the group (a warning says
        so); polling joins again.
        """
        return self._poll(self._handout.take, timeout_ms, max_records)

    def poll_batch(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """``poll``, by partition: the same records, and cheaper where they are processed so."""
        return self._poll(self._handout.take_batches, timeout_ms, max_records)

    def fetch_arrow(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> pyarrow.Table:
        """The next records as a ``pyarrow.Table``, without a Python object for any of them.

        Columns: ``key`` and ``value`` (binary), ``topic`` (dictionary of string), ``partition``
        (int32), ``offset`` (int64), ``timestamp`` (milliseconds, UTC; -1 ms where a record has
        none) and ``headers`` (list of struct of ``key`` string and ``value`` binary). Keys and
        values are bytes, whatever the deserialisers. Rows of a partition come in order.

        Waits as ``poll`` does; then hands out what was fetched, about 8 MB (decompressed) at most,
        or ``max_records`` rows: ``max_poll_records`` does not bound it. What was handed out counts
        as processed when the next is asked for, as with ``poll``. Raises what ``poll`` raises,
        and ConfigurationError without pyarrow: ``pip install 'penstock[arrow]'``.
        """
        arrow.check()
        take = self._handout.take_columns
        return arrow.table(self._poll(take, timeout_ms, max_records, columns=True))

    def _poll(
        self,
        take: Callable[[int, float], Taken],
        timeout_ms: float | None,
        max_records: int | None,
        *,
        columns: bool = False,
    ) -> Taken:
        self._check_open()
        timeout_ms = arguments.timeout_ms(timeout_ms)
        max_records = arguments.max_records(max_records)
        limit = max_records or (MOST_ROWS if columns else self.config.max_poll_records)
        deadline = Deadline.after_ms(timeout_ms)
        with self._polling:
            self._handout.settle()
            # Taken here, not returned by the engine: what an interrupt keeps from us stays there.
            while not (taken := take(limit, now_ms())):
                if not self._fetch(deadline, max_records, columns=columns):
                    break
            return taken

    # --- positions --------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read the partition from ``offset`` on. Raises InvalidRequestError if not assigned.

        When the topic was deleted and made anew, and nothing has been said of it yet (a warning is
        logged in ``poll``, iteration, or another call about positions), the offset is one of the
        old topic: a warning says that the seek is dropped, and reading goes on by the group's
        positions or ``auto_offset_reset``; with "none" the next ``poll`` raises NoOffsetError.
        After that warning an offset is taken for one of the new topic, wherever it comes from.
        """
        self._run(
            self._engine.seek,
            arguments.partition(partition),
            arguments.whole_number("offset", offset),
        )

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Read from the log's start; none named means all assigned."""
        self._run(self._engine.seek_to, arguments.each_partition(partitions), "earliest")

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Read only what comes from now on; none named means all assigned."""
        self._run(self._engine.seek_to, arguments.each_partition(partitions), "latest")

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record to be handed out."""
        return self._run(self._engine.position, arguments.partition(partition))

    def current_lag(self, partition: TopicPartition) -> int | None:
        """How far the partition is behind; None before its leader has answered (KIP-695).

        Asks no broker; see ``ConsumerMetrics`` for what is counted.
        """
        return self._run(self._engine.current_lag, arguments.partition(partition))

    def metrics(self) -> ConsumerMetrics:
        """How far behind each assigned partition is, as far as known. Asks no broker."""
        return self._run(self._engine.metrics)

    def committed(
        self, *partitions: TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed positions; None where there is none."""
        return self._run(self._engine.committed, arguments.each_partition(partitions))

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What ``commit()`` commits: the position after all that was handed out, by partition.

        It is behind marks of transactions, and what was aborted or compacted away, where these
        follow the last record. Asks nobody, and leaves out where reading has not begun.
        """
        self._guard.check()  # Also for listeners, while the consumer is closed.
        return dict(self._engine.to_commit(None).positions)

    def commit(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None
    ) -> None:
        """Commit positions for the group, and wait; by default all that was handed out.

        Retries what is retriable for ``default_api_timeout_ms``. Raises FencedMemberEpochError or
        UnknownMemberIdError when the partitions went to another member meanwhile, and
        MaxPollExceededError when this one left because it did not poll.

        Raises UnknownTopicIdError for a position in a topic that was deleted and made anew. Records
        know their topic: commit ``{record.topic_partition: record.position_after}``. A plain offset
        is taken for one of the topic that this consumer reads there, or read last. Where it read
        the new topic after the old one, what is beyond its position in the new one is refused.
        What is not beyond it is committed there, though it may be an old one that skips records
        which are still being processed. For a partition that this consumer never read, a plain
        offset is one of the topic that has the name now.
        """
        wanted = self._engine.to_commit(arguments.optional_positions(offsets))
        self._run(self._engine.commit, wanted)

    def commit_async(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None,
        callback: Callable[[BaseException | None], object] | None = None,
    ) -> concurrent.futures.Future[None]:
        """``commit`` without waiting; commits happen in the order of the calls.

        ``callback`` is called with None or the failure, on the client's own thread.
        """
        self._check_open()
        if callback is not None and not callable(callback):
            raise arguments.refusal("callback", callback, "a callable")
        wanted = self._engine.to_commit(arguments.optional_positions(offsets))
        future = self._thread.submit(self._engine.commit, wanted)
        if callback is not None:
            notify = callback
            future.add_done_callback(contained(lambda done: notify(done.exception())))
        return future

    def group_metadata(self) -> GroupMetadata:
        """Who this consumer is in its group now, for ``Producer.send_offsets_to_transaction``.

        Ask right before that: it changes with every rebalance. Raises InvalidGroupIdError without a
        group, and like ``commit`` FencedMemberEpochError or MaxPollExceededError where others may
        have what this consumer read.
        """
        return self._run(self._engine.group_metadata)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition's log."""
        return self._run(self._engine.beginning_offsets, arguments.partitions(partitions))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last readable record of each partition."""
        return self._run(self._engine.end_offsets, arguments.partitions(partitions))

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after each time; None where no record is that late."""
        return self._run(
            self._engine.offsets_for_times,
            arguments.offsets_by_partition("timestamps_ms", timestamps_ms),
        )

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        """The topic's partitions. Raises UnknownTopicOrPartitionError."""
        return self._run(self._engine.partitions_for, arguments.topic(topic))

    # --- flow -------------------------------------------------------------------------------

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these partitions until ``resume``; the position stays."""
        self._run(self._engine.pause, arguments.each_partition(partitions))

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo ``pause``."""
        self._run(self._engine.resume, arguments.each_partition(partitions))

    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return self._engine.paused()

    def trouble(self) -> PenstockError | None:
        """Why something that is to be read is not being read now; None when all is well.

        Its ``reason`` is a StallReason. A LeaderNotAvailableError names the partitions that have no
        leader. Ask it before you take an empty ``poll`` for the end: what cannot be read now is no
        end. Of ``read_committed`` that is OPEN_TRANSACTION too, once a transaction has been open
        for a second where reading stands; the message names the partition, its last stable offset,
        and how long this consumer has seen it there.
        """
        return self._run(self._engine.trouble)

    def close(self, timeout_ms: float | None = 30_000) -> None:
        """Commit (with auto commit) what was handed out, leave the group, free everything.

        Idempotent. A static member only goes away for a while. Runs the listener's
        ``on_partitions_revoked``. When a ``with`` block ends by an exception, what was handed out
        last does not count as processed, and will come again.
        """
        self._close(arguments.timeout_ms(timeout_ms), all_processed=True)

    def close_at_exit(self, timeout_ms: float) -> None:
        """Called when the interpreter exits and nobody closed the consumer."""
        self._close(timeout_ms, all_processed=False)

    # --- inside -----------------------------------------------------------------------------

    def _close(self, timeout_ms: float | None, *, all_processed: bool) -> None:
        if self._closed or self._guard.foreign:
            return
        self._thread.check_may_wait()  # What is refused there leaves the consumer open.
        self._closed = True
        self._thread.forget(self)
        if all_processed:
            self._handout.settle()
        deadline = Deadline.after_ms(timeout_ms)
        try:
            self._tell_parting()
        finally:
            self._thread.run(self._engine.close, deadline)

    def _tell_parting(self) -> None:
        parting = self._engine.parting()
        if self._listener is not None and parting.lost:
            self._listener.on_partitions_lost(parting.lost)
        if self._listener is not None and parting.revoked:
            self._listener.on_partitions_revoked(parting.revoked)

    def _fetch(self, deadline: Deadline, max_records: int | None, *, columns: bool = False) -> bool:
        while True:
            step = self._thread.run(self._engine.step, deadline, max_records, columns=columns)
            if isinstance(step, Rebalance):
                self._rebalance(step)
                continue
            return step

    def _rebalance(self, change: Rebalance) -> None:
        listener = self._listener
        if change.lost and listener is not None:
            listener.on_partitions_lost(change.lost)
        if change.revoked:
            try:
                if listener is not None:
                    listener.on_partitions_revoked(change.revoked)
            finally:
                self._thread.run(self._engine.give_back, change)
        taken = self._thread.run(self._engine.take_over, change)
        if taken and listener is not None:
            listener.on_partitions_assigned(taken)

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the consumer is closed")

    def _run(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._guard.check()
        if self._engine.closed:
            raise ClientClosedError("the consumer is closed")
        return self._thread.run(work, *args, **kwargs)
