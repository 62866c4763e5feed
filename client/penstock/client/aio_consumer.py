"""The asyncio consumer."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from penstock.client import arguments, arrow
from penstock.client.background import LoopGuard
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

Taken = TypeVar("Taken", bound=Sized)

_YIELD_MS: Final = 10.0


class AsyncConsumer:
    """``Consumer`` for asyncio: the same settings, promises and errors.

    Belongs to the event loop on which it is first used, and to one task at a time. Heartbeats are
    sent on that loop as well: they go on while a coroutine of yours waits, but not while one blocks
    the loop. What blocks or computes for long belongs in a thread (``asyncio.to_thread``); else
    the group gives this member's partitions to others once ``session_timeout_ms`` are over. A
    heartbeat that is late by more than half of that is logged as a warning.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        *,
        topics: str | Iterable[str] | re.Pattern[str] | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.config = ConsumerConfig.load(bootstrap_servers, settings)
        self._guard = LoopGuard("AsyncConsumer")
        self._engine = ConsumerEngine(self.config)
        self._handout = self._engine.handout
        self._listener: RebalanceListener | None = None
        self._closed = False
        self._polling = OnePoller(asyncio.current_task)
        self._yield_at_ms = float("-inf")
        if topics is not None:
            self._engine.subscribe(arguments.subscription(topics))

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
        try:
            await self._close(30_000, all_processed=False)
        except Exception as closing:
            if error is not None:
                error.add_note(f"and while the consumer was closed: {closing}")

    async def start(self) -> None:
        """Connect. Optional: the first ``poll`` does it. Raises BootstrapError."""
        self._check_open()
        await self._engine.start()

    def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        """Records one by one, for ever."""
        return self

    async def __anext__(self) -> ConsumerRecord:
        handout = self._handout
        while True:
            if not handout.interrupted:
                for record in handout.current:
                    return record
            now = now_ms()
            if now >= self._yield_at_ms:
                # Whoever iterates may never wait for anything: heartbeats must run all the same.
                self._yield_at_ms = now + _YIELD_MS
                await asyncio.sleep(0)
            with self._polling:
                if not handout.begin_run(now, self.config.max_poll_records):
                    self._check_open()
                    await self._fetch(Deadline.never(), None)

    def subscribe(
        self,
        topics: str | Iterable[str] | re.Pattern[str],
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read these topics from now on. See ``Consumer.subscribe``."""
        self._check_open()
        wanted, hearer = arguments.subscription(topics), arguments.listener(listener)
        self._engine.subscribe(wanted)
        self._listener = hearer

    async def unsubscribe(self) -> None:
        """Leave the group and give back every partition. See ``Consumer.unsubscribe``."""
        self._check_open()
        try:
            await self._tell_parting()
        finally:
            await self._engine.unsubscribe()

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions, without the group's assignment."""
        self._check_open()
        await self._engine.assign(arguments.partitions(partitions))

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions being read now."""
        return self._engine.assignment()

    def subscription(self) -> tuple[str, ...]:
        """The topics subscribed to by name."""
        return self._engine.subscription()

    async def poll(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> list[ConsumerRecord]:
        """The next records. See ``Consumer.poll``."""
        return await self._poll(self._handout.take, timeout_ms, max_records)

    async def poll_batch(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """``poll``, by partition: the same records, and cheaper where they are processed so."""
        return await self._poll(self._handout.take_batches, timeout_ms, max_records)

    async def fetch_arrow(
        self, timeout_ms: float | None = 1_000, max_records: int | None = None
    ) -> pyarrow.Table:
        """The next records as a ``pyarrow.Table``. See ``Consumer.fetch_arrow``."""
        arrow.check()
        take = self._handout.take_columns
        return arrow.table(await self._poll(take, timeout_ms, max_records, columns=True))

    async def _poll(
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
            await asyncio.sleep(0)  # Heartbeats must run even where records never end.
            # Taken here, not returned by the engine: what an interrupt keeps from us stays there.
            while not (taken := take(limit, now_ms())):
                if not await self._fetch(deadline, max_records, columns=columns):
                    break
            return taken

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read the partition from ``offset`` on. Raises InvalidRequestError if not assigned."""
        self._check_open()
        await self._engine.seek(
            arguments.partition(partition),
            arguments.whole_number("offset", offset),
        )

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Read from the log's start; none named means all assigned."""
        self._check_open()
        await self._engine.seek_to(arguments.each_partition(partitions), "earliest")

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Read only what comes from now on; none named means all assigned."""
        self._check_open()
        await self._engine.seek_to(arguments.each_partition(partitions), "latest")

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record to be handed out."""
        self._check_open()
        return await self._engine.position(arguments.partition(partition))

    async def current_lag(self, partition: TopicPartition) -> int | None:
        """How far the partition is behind. See ``Consumer.current_lag``."""
        self._check_open()
        return await self._engine.current_lag(arguments.partition(partition))

    async def metrics(self) -> ConsumerMetrics:
        """How far behind each assigned partition is. See ``Consumer.metrics``."""
        self._check_open()
        return await self._engine.metrics()

    async def committed(
        self, *partitions: TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed positions; None where there is none."""
        self._check_open()
        return await self._engine.committed(arguments.each_partition(partitions))

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What ``commit()`` commits. See ``Consumer.positions``."""
        self._guard.check()  # Also for listeners, while the consumer is closed.
        return dict(self._engine.to_commit(None).positions)

    async def commit(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None
    ) -> None:
        """Commit positions for the group. See ``Consumer.commit``."""
        self._check_open()
        await self._engine.commit(self._engine.to_commit(arguments.optional_positions(offsets)))

    async def group_metadata(self) -> GroupMetadata:
        """Who this consumer is in its group now. See ``Consumer.group_metadata``."""
        self._check_open()
        return await self._engine.group_metadata()

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """The first offset of each partition's log."""
        self._check_open()
        return await self._engine.beginning_offsets(arguments.partitions(partitions))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last readable record of each partition."""
        self._check_open()
        return await self._engine.end_offsets(arguments.partitions(partitions))

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after each time; None where no record is that late."""
        self._check_open()
        return await self._engine.offsets_for_times(
            arguments.offsets_by_partition("timestamps_ms", timestamps_ms)
        )

    async def partitions_for(self, topic: str) -> tuple[int, ...]:
        """The topic's partitions. Raises UnknownTopicOrPartitionError."""
        self._check_open()
        return await self._engine.partitions_for(arguments.topic(topic))

    async def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these partitions until ``resume``; the position stays."""
        self._check_open()
        await self._engine.pause(arguments.each_partition(partitions))

    async def resume(self, *partitions: TopicPartition) -> None:
        """Undo ``pause``."""
        self._check_open()
        await self._engine.resume(arguments.each_partition(partitions))

    def paused(self) -> frozenset[TopicPartition]:
        """What is paused."""
        return self._engine.paused()

    async def trouble(self) -> PenstockError | None:
        """Why something that is to be read is not being read now; None when all is well.

        Its ``reason`` is a StallReason. A LeaderNotAvailableError names the partitions that have no
        leader. Ask it before you take an empty ``poll`` for the end: what cannot be read now is no
        end. Of ``read_committed`` that is OPEN_TRANSACTION too, once a transaction has been open
        for a second where reading stands; the message names the partition, its last stable offset,
        and how long this consumer has seen it there.
        """
        self._check_open()
        return await self._engine.trouble()

    async def close(self, timeout_ms: float | None = 30_000) -> None:
        """Commit, leave the group, free everything. See ``Consumer.close``."""
        await self._close(arguments.timeout_ms(timeout_ms), all_processed=True)

    async def _close(self, timeout_ms: float | None, *, all_processed: bool) -> None:
        if self._closed or self._guard.foreign:
            return
        self._guard.check()
        self._closed = True
        if all_processed:
            self._handout.settle()
        deadline = Deadline.after_ms(timeout_ms)
        try:
            await self._tell_parting()
        finally:
            await self._engine.close(deadline)

    async def _tell_parting(self) -> None:
        parting = self._engine.parting()
        await self._tell("on_partitions_lost", parting.lost)
        await self._tell("on_partitions_revoked", parting.revoked)

    async def _fetch(
        self, deadline: Deadline, max_records: int | None, *, columns: bool = False
    ) -> bool:
        while True:
            step = await self._engine.step(deadline, max_records, columns=columns)
            if isinstance(step, Rebalance):
                await self._rebalance(step)
                continue
            return step

    async def _rebalance(self, change: Rebalance) -> None:
        await self._tell("on_partitions_lost", change.lost)
        if change.revoked:
            try:
                await self._tell("on_partitions_revoked", change.revoked)
            finally:
                await self._engine.give_back(change)
        taken = await self._engine.take_over(change)
        await self._tell("on_partitions_assigned", taken)

    async def _tell(self, method: str, partitions: Sequence[TopicPartition]) -> None:
        if self._listener is None or not partitions:
            return
        result: Any = getattr(self._listener, method)(partitions)
        if inspect.isawaitable(result):
            await result

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClientClosedError("the consumer is closed")
