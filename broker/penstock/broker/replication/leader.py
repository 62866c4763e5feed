"""The leader's side of replication: one stream a follower, driven from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import grpc
import structlog

from penstock.broker.core.catch_up import CatchUpBudget
from penstock.broker.core.partition_events import Diverge, FollowerAcked, FollowerPositioned
from penstock.broker.core.ports import EpochEnd
from penstock.broker.replication.cold_reads import Warming
from penstock.broker.replication.fetch import next_offset_after
from penstock.broker.replication.follower_answers import FollowerAnswers
from penstock.broker.replication.partition import FollowerFeed, Partition
from penstock.broker.replication.ports import Push, ServedStream, StreamBrokenError
from penstock.broker.replication.shared_reads import SharedReads
from penstock.broker.replication.unanswered import Unanswered
from penstock.v1 import replication_pb2
from penstock.wire.batch import Buffer
from penstock.wire.errors import (
    OffsetOutOfRangeError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.laden import Laden

logger = structlog.get_logger()

MAX_IN_FLIGHT: Final = 2
"""Pushes on one stream that are not answered. What comes meanwhile gathers into the next one."""

MAX_PUSH_BYTES: Final = 1024 * 1024
"""Records in one push, but for a single batch that is larger."""

CATCH_UP_PUSH_BYTES: Final = 256 * 1024
"""The same of a push to replicas out of sync: it is in the way of those in sync for as long as it
takes to be sent and appended."""

MARKS_LINGER_S: Final = 0.05
"""So long a high watermark waits for records of its partition to travel with before it goes alone.

It costs both ends as much as records do, and who follows hardly needs it. So it is not put beside
those of another partition: its own are often on their way.
"""

_MARKS_EARLY_S: Final = 0.001  # By as much a timer may come too early.

RECORDS_LINGER_S: Final = 0.003
"""So long records that nobody waits for as yet wait for others."""

_MAX_MARKS: Final = 2000

_MAX_PAUSE_MS: Final = 1000
"""So long at most catching up pauses before it looks anew at the rate that it is given."""


class LeaderSide(Protocol):
    """What a follower's stream asks of the replica manager."""

    def hosted(self, key: TopicIdPartition) -> Partition | None:
        """The partition, if this broker has a replica of it."""
        ...

    def check_follower(self, hello: replication_pb2.FollowerHello) -> None:
        """Raise a PenstockError unless this follower may be served."""
        ...

    async def read_batches(
        self, key: TopicIdPartition, leader_epoch: int, offset: int, max_bytes: int
    ) -> bytes:
        """Whole, verified batches from ``offset`` on. Raises PenstockError."""
        ...

    def log_start_in(self, key: TopicIdPartition, leader_epoch: int) -> int:
        """Where the log of a partition begins. Raises PenstockError unless it is led here so."""
        ...

    def not_leader(self, key: TopicIdPartition) -> PenstockError:
        """The error for requests to a partition that is not led here."""
        ...

    def add_feed(self, node_id: int, feed: FollowerFeed) -> int:
        """A stream begins; its number. An earlier one of the same node is closed."""
        ...

    def remove_feed(self, session: int) -> None:
        """The stream is over."""
        ...

    @property
    def clock_ms(self) -> Callable[[], int]:
        """A monotonic clock."""
        ...

    @property
    def lag_max_ms(self) -> int:
        """``replica.lag.time.max.ms``: so long a follower may leave a push unanswered."""
        ...

    @property
    def catch_up_budget(self) -> CatchUpBudget:
        """What all followers out of sync share."""
        ...

    @property
    def shared_reads(self) -> SharedReads:
        """What was read for one follower, for the others."""
        ...


def follower_status(error: PenstockError) -> grpc.StatusCode:
    """What a stream ends with whose follower is refused: UNAVAILABLE when it is to come again."""
    return grpc.StatusCode.UNAVAILABLE if error.retriable else grpc.StatusCode.FAILED_PRECONDITION


class _Cursor:
    """How far one partition was pushed on one stream."""

    __slots__ = ("high_watermark", "leader_epoch", "log_start_offset", "next_offset", "warmed")

    def __init__(self, next_offset: int, leader_epoch: int) -> None:
        self.next_offset = next_offset
        self.leader_epoch = leader_epoch
        self.high_watermark = -1
        self.log_start_offset = -1
        self.warmed = -1  # From this offset on records were brought into memory, or soon are.


class FollowerStream:
    """One follower's stream.

    Records go at once while fewer than MAX_IN_FLIGHT pushes are unanswered; partitions take turns.
    High watermarks travel with records of their partitions, or alone after MARKS_LINGER_S. Nothing
    is sent when there is nothing to say. A partition whose next records must be fetched from the
    disk misses its turns until they are there.

    Partitions that the follower is not in sync of have messages of their own: small ones, one
    unanswered at a time, only when there is nothing to say of the others, and as the budget that
    all streams share lets them. So writes wait for one of them to be sent, and for no more.

    A push left unanswered for replica.lag.time.max.ms, and a while longer if it is large, ends the
    stream: on a new one the follower states all of its positions again, so that nothing it failed
    to answer holds the rest up for longer than it takes to leave the in-sync set.
    """

    def __init__(self, manager: LeaderSide, hello: replication_pb2.FollowerHello) -> None:
        self.node_id = hello.node_id
        self._broker_epoch = hello.broker_epoch
        self._manager = manager
        self._cursors: dict[Partition, _Cursor] = {}
        self._stated_epochs: dict[TopicIdPartition, int] = {}
        # In the order of their turns, those of which the follower holds up the high watermark
        # and those that it catches up on. What has changed sides moves at its turn at the latest.
        self._growing: dict[Partition, None] = {}
        self._behind: dict[Partition, None] = {}
        self._budget = manager.catch_up_budget
        self._ticket = 0
        self._catching_up: int | None = None  # The sequence of what is unanswered of that.
        self._pause: asyncio.TimerHandle | None = None
        self._warming = Warming(self._warmed)
        self._marks: dict[Partition, float] = {}  # Since when each waits, the oldest first.
        self._marks_timer: asyncio.TimerHandle | None = None
        self._marks_due = False
        self._records_timer: asyncio.TimerHandle | None = None
        self._answers = FollowerAnswers(manager.not_leader)
        self.sequence = 0  # Pushes sent so far.
        self._unanswered = Unanswered(manager.clock_ms, manager.lag_max_ms, self._overdue)
        self._work = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.session = manager.add_feed(self.node_id, self)

    # --- What partitions ask for (FollowerFeed) -----------------------------------------

    def start(self, partition: Partition, offset: int) -> None:
        """Push from ``offset`` on. The first push says so even if there are no records."""
        self._cursors[partition] = _Cursor(offset, partition.replica.leader_epoch)
        self._give_turn(partition)

    def diverge(self, partition: Partition, effect: Diverge) -> None:
        """Tell the follower to cut."""
        self._diverge(partition, effect.end)

    def _diverge(self, partition: Partition, end: EpochEnd) -> None:
        stated_epoch = self._stated_epochs.get(partition.key, -1)
        self._answers.diverge(partition, stated_epoch, end)
        self._drop(partition)
        self._work.set()

    def refuse(self, partition: Partition, error: PenstockError) -> None:
        """Tell the follower that it is not served, and forget it."""
        self._refuse(partition.key, error)
        self._drop(partition)

    def _refuse(self, key: TopicIdPartition, error: PenstockError) -> None:
        self._answers.refuse(key, self._stated_epochs.get(key, -1), error)
        self._work.set()

    def records_ready(
        self, partition: Partition, size_bytes: int, *, may_wait: bool = False
    ) -> None:
        """The log has grown."""
        if partition not in self._cursors:
            return
        if self._is_behind(partition):
            self._budget.grew(size_bytes, self._manager.clock_ms())
        elif may_wait and partition not in self._behind and not self._work.is_set():
            # Its turn comes with the next message, whatever that is about.
            self._growing.setdefault(partition)
            if self._records_timer is None:
                loop = asyncio.get_running_loop()
                self._records_timer = loop.call_later(RECORDS_LINGER_S, self._records_fall_due)
            return
        self._give_turn(partition)

    def membership_changed(self, partition: Partition) -> None:
        """Whose acknowledgements the high watermark waits for may be another."""
        if partition in self._behind:
            self._give_turn(partition)

    def marks_ready(self, partition: Partition) -> None:
        """The high watermark or the log start moved."""
        if partition in self._cursors and partition not in self._marks:
            loop = asyncio.get_running_loop()
            self._marks[partition] = loop.time()
            if self._marks_timer is None and not self._marks_due:
                self._marks_timer = loop.call_later(MARKS_LINGER_S, self._marks_fall_due)

    def close(self) -> None:
        """End the stream."""
        for task in self._tasks:
            task.cancel()

    # --- The stream -----------------------------------------------------------------------

    async def run(self, stream: ServedStream) -> None:
        """Serve until the follower goes or ``close`` is called. Raises StreamBrokenError."""
        self._tasks = (
            asyncio.create_task(stream.read_all(self._heard)),
            asyncio.create_task(self._write(stream)),
        )
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._end()
            await asyncio.wait(self._tasks)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _end(self) -> None:
        self.close()
        for timer in (self._marks_timer, self._records_timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._unanswered.clear()
        for partition in self._cursors:
            if partition.feeds.get(self.node_id) is self:
                del partition.feeds[self.node_id]
        self._cursors.clear()
        self._manager.remove_feed(self.session)

    def _heard(self, request: replication_pb2.ReplicationFetchRequest) -> None:
        match request.WhichOneof("message"):
            case "ack":
                self._acked(request.ack)
            case "positions":
                self._positioned(request.positions)
            case other:
                raise StreamBrokenError(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"message {other!r} is out of place",
                    cause="malformed",
                )

    async def _write(self, stream: ServedStream) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while (message := self._next_message()) is not None:
                self.sequence = message.message.sequence
                producers_bytes = sum(len(push.producers) for push in message.message.pushes)
                self._unanswered.sent(self.sequence, message.records_bytes + producers_bytes)
                await stream.write(message)
                if self._answers:
                    # It need not have waited, and the next ones take long to make.
                    await asyncio.sleep(0)

    def _overdue(self, sequence: int, age_ms: int) -> None:
        logger.warning(
            "replication stream ended: a push is unanswered",
            follower=self.node_id,
            sequence=sequence,
            unanswered_ms=age_ms,
        )
        self.close()

    def _positioned(self, positions: replication_pb2.FollowerPositions) -> None:
        for stop in positions.stop:
            key = _key(stop)
            self._stated_epochs.pop(key, None)
            self._answers.withdraw(key)
            partition = self._manager.hosted(key)
            if partition is not None:
                self._drop(partition)
        now_ms = self._manager.clock_ms()
        for position in positions.start:
            key = _key(position.partition)
            self._stated_epochs[key] = position.leader_epoch
            self._answers.withdraw(key)
            partition = self._manager.hosted(key)
            if partition is None:
                unknown = UnknownTopicOrPartitionError(f"no replica of {key} is here (yet)")
                self._refuse(key, unknown)
                continue
            partition.handle(
                FollowerPositioned(
                    node_id=self.node_id,
                    session=self.session,
                    broker_epoch=self._broker_epoch,
                    leader_epoch=position.leader_epoch,
                    log_end_offset=position.log_end_offset,
                    last_epoch=position.last_epoch,
                    log_start_offset=position.log_start_offset,
                    now_ms=now_ms,
                    knows_no_producers=position.knows_no_producers,
                )
            )
            partition.log_start_moved()

    def _acked(self, ack: replication_pb2.FollowerAck) -> None:
        self._unanswered.answered(ack.sequence)
        if ack.sequence == self._catching_up:
            self._catching_up = None
        if self._growing or self._behind or self._answers or self._marks_due:
            self._work.set()
        now_ms = self._manager.clock_ms()
        for entry in ack.partitions:
            partition = self._manager.hosted(_key(entry.partition))
            if partition is None:
                continue
            partition.handle(
                FollowerAcked(
                    node_id=self.node_id,
                    session=self.session,
                    leader_epoch=entry.leader_epoch,
                    log_end_offset=entry.log_end_offset,
                    log_start_offset=entry.log_start_offset,
                    now_ms=now_ms,
                )
            )
            partition.log_start_moved()

    # --- Messages ---------------------------------------------------------------------------

    def _drop(self, partition: Partition) -> None:
        self._cursors.pop(partition, None)
        self._growing.pop(partition, None)
        self._behind.pop(partition, None)
        self._marks.pop(partition, None)
        if partition.feeds.get(self.node_id) is self:
            del partition.feeds[self.node_id]

    def _records_fall_due(self) -> None:
        self._records_timer = None
        if self._growing:
            self._work.set()

    def _marks_fall_due(self) -> None:
        self._marks_timer = None
        if not self._marks:
            return
        loop = asyncio.get_running_loop()
        due_s = next(iter(self._marks.values())) + MARKS_LINGER_S
        if due_s - loop.time() > _MARKS_EARLY_S:  # What it was set for went with records.
            self._marks_timer = loop.call_at(due_s, self._marks_fall_due)
            return
        self._marks_due = True
        self._work.set()

    def _is_behind(self, partition: Partition) -> bool:
        return self.node_id not in partition.replica.maximal_isr

    def _give_turn(self, partition: Partition) -> None:
        """There is something to push: the partition's turn comes, if it was not to come anyway."""
        mine, other = self._growing, self._behind
        if self._is_behind(partition):
            mine, other = other, mine
        other.pop(partition, None)
        mine.setdefault(partition)
        self._work.set()

    def _next_message(self) -> Push | None:
        """What is to be sent now, those in sync first."""
        catching_up = self._catching_up is not None
        if len(self._unanswered) - catching_up < MAX_IN_FLIGHT and (
            self._growing or self._answers or self._marks_due
        ):
            message = self._in_sync_message()
            if message.records:
                return message
        if self._behind and not catching_up and self._may_catch_up():
            message = self._catch_up_message()
            if message.records:
                self._catching_up = message.message.sequence
                return message
        return None

    def _empty_message(self) -> Push:
        return Laden(replication_pb2.ReplicationFetchResponse(sequence=self.sequence + 1), [])

    def _in_sync_message(self) -> Push:
        message = self._empty_message()
        # Not all of a hundred thousand at once: there must be room for the largest batch.
        self._answers.take(message, MAX_PUSH_BYTES)
        self._push_turns(message, self._growing, MAX_PUSH_BYTES)
        if self._marks_due:
            self._push_marks(message)
        return message

    def _catch_up_message(self) -> Push:
        message = self._empty_message()
        size_bytes = self._push_turns(message, self._behind, CATCH_UP_PUSH_BYTES)
        self._ticket = self._budget.take(size_bytes, self._manager.clock_ms())
        return message

    def _may_catch_up(self) -> bool:
        """Whether it is this stream's turn; if not, it looks again in time."""
        wait_ms = self._budget.wait_ms(self._ticket, self._manager.clock_ms())
        if wait_ms and self._pause is None:
            loop = asyncio.get_running_loop()
            delay_s = min(wait_ms, _MAX_PAUSE_MS) / 1000
            self._pause = loop.call_later(delay_s, self._end_pause)
        return not wait_ms

    def _end_pause(self) -> None:
        self._pause = None
        self._work.set()

    def _push_turns(
        self,
        message: Push,
        queue: dict[Partition, None],
        limit: int,
    ) -> int:
        """Give each partition of the queue its turn until the message is full; its records' size.

        At most ``limit``, but for a single batch that is larger.
        """
        budget = limit
        for partition in list(queue):
            if budget < limit // 16:
                break  # Full enough: do not ask every log for a batch that small.
            if partition not in queue:
                continue  # It was dropped by what happened at an earlier turn.
            del queue[partition]
            if self._is_behind(partition) != (queue is self._behind):
                self._give_turn(partition)
            elif partition not in self._warming:  # Else it gets its turn when it is warm.
                budget -= self._push_records(message, partition, budget, limit)
        return limit - budget

    def _push_records(
        self,
        message: Push,
        partition: Partition,
        budget: int,
        limit: int,
    ) -> int:
        cursor = self._cursors[partition]
        log = partition.log
        end = log.log_end_offset
        try:
            found = self._manager.shared_reads.find(partition, cursor.next_offset, budget)
            if found is None:
                if cursor.warmed != cursor.next_offset and (
                    job := log.cold_read(cursor.next_offset, limit)
                ):
                    cursor.warmed = cursor.next_offset
                    self._warming.start(partition, job)
                    return 0
                found = self._read_records(
                    partition, cursor.next_offset, budget, min_one=budget == limit
                )
            records, next_offset = found
        except OffsetOutOfRangeError:
            # Deleted here before it was pushed: the follower begins anew at the log's start.
            self._diverge(partition, EpochEnd(-1, log.log_start_offset))
            return 0
        except PenstockError as error:
            logger.error(
                "cannot push to follower",
                partition=str(partition.name),
                follower=self.node_id,
                error=error.message,
            )
            self.refuse(partition, error)
            return 0
        if next_offset < end:
            self._give_turn(partition)  # Its next turn comes after the others'.
        if records or cursor.high_watermark < 0 or self._tells_late(partition, cursor):
            self._add_push(message, partition, cursor, records)
            cursor.next_offset = next_offset
        return len(records)

    def _read_records(
        self, partition: Partition, offset: int, max_bytes: int, *, min_one: bool
    ) -> tuple[Buffer, int]:
        log = partition.log
        records = log.read(offset, max_bytes, below=log.log_end_offset, min_one=min_one)
        if not records:
            return records, offset
        next_offset = next_offset_after(records)
        self._manager.shared_reads.was_read(partition, offset, records, next_offset)
        return records, next_offset

    def _tells_late(self, partition: Partition, cursor: _Cursor) -> bool:
        """Whether a follower out of sync is to be told marks that no records came to carry."""
        return self._is_behind(partition) and _has_new_marks(partition, cursor)

    def _warmed(self, partition: Partition) -> None:
        if partition in self._cursors:  # Else it is not pushed here any more.
            self._give_turn(partition)

    def _push_marks(self, message: Push) -> None:
        for partition in list(self._marks)[:_MAX_MARKS]:
            del self._marks[partition]
            cursor = self._cursors[partition]
            if not _has_new_marks(partition, cursor):
                continue
            if self._is_behind(partition):
                # Not here: the answer to what the others wait for would wait for its disk.
                self._give_turn(partition)
            else:
                self._add_push(message, partition, cursor)
        self._marks_due = bool(self._marks)
        if self._marks_due:
            self._work.set()

    def _add_push(
        self,
        message: Push,
        partition: Partition,
        cursor: _Cursor,
        records: Buffer = b"",
    ) -> None:
        cursor.high_watermark = partition.replica.high_watermark
        cursor.log_start_offset = partition.log.log_start_offset
        self._marks.pop(partition, None)
        message.records.append(records)
        push = message.message.pushes.add(
            leader_epoch=cursor.leader_epoch,
            high_watermark=cursor.high_watermark,
            log_start_offset=cursor.log_start_offset,
            base_offset=cursor.next_offset,
        )
        push.partition.topic_id = partition.key.topic_id
        push.partition.partition = partition.key.partition


def _has_new_marks(partition: Partition, cursor: _Cursor) -> bool:
    return (
        cursor.high_watermark != partition.replica.high_watermark
        or cursor.log_start_offset != partition.log.log_start_offset
    )


def _key(partition: replication_pb2.ReplicaPartition) -> TopicIdPartition:
    return TopicIdPartition(TopicId(partition.topic_id), partition.partition)
