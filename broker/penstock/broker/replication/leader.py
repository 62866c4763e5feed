"""The leader's side of replication: one stream a follower, driven from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
import structlog

from penstock.broker.core.partition_events import Diverge, FollowerAcked, FollowerPositioned
from penstock.broker.replication.cold_reads import Warming
from penstock.broker.replication.fetch import next_offset_after
from penstock.broker.replication.partition import FollowerFeed, Partition
from penstock.broker.replication.ports import EOF
from penstock.broker.replication.unanswered import Unanswered
from penstock.raft_meta.authentication import PeerAuthentication
from penstock.v1 import replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationServicer as ReplicationServicerBase
from penstock.wire.errors import (
    OffsetOutOfRangeError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicId, TopicIdPartition

logger = structlog.get_logger()

MAX_IN_FLIGHT: Final = 2
"""Pushes on one stream that are not answered. What comes meanwhile gathers into the next one."""

MAX_PUSH_BYTES: Final = 1024 * 1024
"""Records in one push, but for a single batch that is larger."""

MARKS_LINGER_S: Final = 0.05
"""So long a high watermark waits for records to travel with before it goes alone."""

_MAX_MARKS: Final = 2000


class LeaderSide(Protocol):
    """What a follower's stream asks of the replica manager."""

    def hosted(self, key: TopicIdPartition) -> Partition | None:
        """The partition, if this broker has a replica of it."""
        ...

    def check_follower(self, hello: replication_pb2.FollowerHello) -> None:
        """Raise a PenstockError unless this follower may be served."""
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


class ReplicationServicer(ReplicationServicerBase):
    """Serves the followers of what this broker leads.

    ``authentication`` says who a follower is by its certificate. ``port`` is where followers are
    served, 0 for where they ask.
    """

    def __init__(
        self, manager: LeaderSide, authentication: PeerAuthentication, port: int = 0
    ) -> None:
        self._manager = manager
        self._authentication = authentication
        self._port = port

    async def Locate(  # noqa: N802 - the protocol's name for it.
        self, request: replication_pb2.LocateRequest, context: Any
    ) -> replication_pb2.LocateResponse:
        """Say where followers are served."""
        return replication_pb2.LocateResponse(port=self._port)

    async def Fetch(  # type: ignore[override]  # noqa: N802 - the protocol's name for it.
        self, request_iterator: Any, context: Any
    ) -> None:
        """Serve one follower until it goes; see penstock.v1.Replication."""
        first = await context.read()
        if first is EOF:
            return
        if first.WhichOneof("message") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be the hello"
            )
        await self._authentication.require(context, first.hello.node_id)
        try:
            self._manager.check_follower(first.hello)
        except PenstockError as error:
            passing = error.retriable
            status = grpc.StatusCode.UNAVAILABLE if passing else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(status, error.message)
        await FollowerStream(self._manager, first.hello).run(context)


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
    High watermarks travel with records, or alone after MARKS_LINGER_S. Nothing is sent when there
    is nothing to say. A partition whose next records must be fetched from the disk misses its turns
    until they are there.

    A push left unanswered for replica.lag.time.max.ms ends the stream: on a new one the follower
    states all of its positions again, so that nothing it failed to answer holds the rest up for
    longer than it takes to leave the in-sync set.
    """

    def __init__(self, manager: LeaderSide, hello: replication_pb2.FollowerHello) -> None:
        self.node_id = hello.node_id
        self._broker_epoch = hello.broker_epoch
        self._manager = manager
        self._cursors: dict[Partition, _Cursor] = {}
        self._stated_epochs: dict[TopicIdPartition, int] = {}
        self._growing: dict[Partition, None] = {}  # In the order of their turns.
        self._warming = Warming(self._warmed)
        self._marks: dict[Partition, None] = {}
        self._marks_timer: asyncio.TimerHandle | None = None
        self._marks_due = False
        self._answers: list[replication_pb2.ReplicaPush] = []
        self.sequence = 0  # Pushes sent so far.
        self._unanswered = Unanswered(manager.clock_ms, manager.lag_max_ms, self._overdue)
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.session = manager.add_feed(self.node_id, self)

    # --- What partitions ask for (FollowerFeed) -----------------------------------------

    def start(self, partition: Partition, offset: int) -> None:
        """Push from ``offset`` on. The first push says so even if there are no records."""
        self._cursors[partition] = _Cursor(offset, partition.replica.leader_epoch)
        self._growing[partition] = None
        self._work.set()

    def diverge(self, partition: Partition, effect: Diverge) -> None:
        """Tell the follower to cut."""
        push = self._answer_for(partition.key)
        push.diverging_epoch.leader_epoch = effect.end.leader_epoch
        push.diverging_epoch.end_offset = effect.end.end_offset
        self._drop(partition)

    def refuse(self, partition: Partition, error: PenstockError) -> None:
        """Tell the follower that it is not served, and forget it."""
        self._answer_for(partition.key).error.CopyFrom(error.to_proto())
        self._drop(partition)

    def records_ready(self, partition: Partition) -> None:
        """The log has grown."""
        if partition in self._cursors:
            self._growing.setdefault(partition)
            self._work.set()

    def marks_ready(self, partition: Partition) -> None:
        """The high watermark or the log start moved."""
        if partition in self._cursors:
            self._marks[partition] = None
            if self._marks_timer is None and not self._marks_due:
                loop = asyncio.get_running_loop()
                self._marks_timer = loop.call_later(MARKS_LINGER_S, self._marks_fall_due)

    def close(self) -> None:
        """End the stream."""
        for task in self._tasks:
            task.cancel()

    # --- The stream -----------------------------------------------------------------------

    async def run(self, context: Any) -> None:
        """Serve until the follower goes or ``close`` is called."""
        self._tasks = (
            asyncio.create_task(self._read(context)),
            asyncio.create_task(self._write(context)),
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
        if self._marks_timer is not None:
            self._marks_timer.cancel()
        self._unanswered.clear()
        for partition in self._cursors:
            if partition.feeds.get(self.node_id) is self:
                del partition.feeds[self.node_id]
        self._cursors.clear()
        self._manager.remove_feed(self.session)

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not EOF:
            match request.WhichOneof("message"):
                case "ack":
                    self._acked(request.ack)
                case "positions":
                    self._positioned(request.positions)
                case other:
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, f"message {other!r} is out of place"
                    )

    async def _write(self, context: Any) -> None:
        while True:
            await self._work.wait()
            while len(self._unanswered) >= MAX_IN_FLIGHT:
                self._room.clear()
                await self._room.wait()
            self._work.clear()
            message = self._next_message()
            if self._answers or self._growing:
                self._work.set()
            if message is not None:
                self._unanswered.sent(message.sequence)
                await context.write(message)

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
            partition = self._manager.hosted(key)
            if partition is not None:
                self._drop(partition)
        now_ms = self._manager.clock_ms()
        for position in positions.start:
            key = _key(position.partition)
            self._stated_epochs[key] = position.leader_epoch
            partition = self._manager.hosted(key)
            if partition is None:
                unknown = UnknownTopicOrPartitionError(f"no replica of {key} is here (yet)")
                self._answer_for(key).error.CopyFrom(unknown.to_proto())
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
                )
            )
            partition.follower_log_start_moved()

    def _acked(self, ack: replication_pb2.FollowerAck) -> None:
        self._unanswered.answered(ack.sequence)
        self._room.set()
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
            if partition.log_start_waiters:
                partition.follower_log_start_moved()

    # --- Messages ---------------------------------------------------------------------------

    def _answer_for(self, key: TopicIdPartition) -> replication_pb2.ReplicaPush:
        # In the epoch that the follower stated: it ignores any other.
        push = replication_pb2.ReplicaPush(leader_epoch=self._stated_epochs.get(key, -1))
        push.partition.topic_id = key.topic_id
        push.partition.partition = key.partition
        self._answers.append(push)
        self._work.set()
        return push

    def _drop(self, partition: Partition) -> None:
        self._cursors.pop(partition, None)
        self._growing.pop(partition, None)
        self._marks.pop(partition, None)
        if partition.feeds.get(self.node_id) is self:
            del partition.feeds[self.node_id]

    def _marks_fall_due(self) -> None:
        self._marks_timer = None
        if self._marks:
            self._marks_due = True
            self._work.set()

    def _next_message(self) -> replication_pb2.ReplicationFetchResponse | None:
        message = replication_pb2.ReplicationFetchResponse(sequence=self.sequence + 1)
        answers, self._answers = self._answers, []
        message.pushes.extend(answers)
        budget = MAX_PUSH_BYTES
        for partition in list(self._growing):
            if budget < MAX_PUSH_BYTES // 16:
                break  # Full enough: do not ask every log for a batch that small.
            del self._growing[partition]
            if partition not in self._warming:  # Else it gets its turn when it is warm.
                budget -= self._push_records(message, partition, budget)
        if message.pushes or self._marks_due:
            self._push_marks(message)
        if not message.pushes:
            return None
        self.sequence += 1
        return message

    def _push_records(
        self,
        message: replication_pb2.ReplicationFetchResponse,
        partition: Partition,
        budget: int,
    ) -> int:
        cursor = self._cursors[partition]
        log = partition.log
        end = log.log_end_offset
        try:
            if cursor.warmed != cursor.next_offset and (
                job := log.cold_read(cursor.next_offset, MAX_PUSH_BYTES)
            ):
                cursor.warmed = cursor.next_offset
                self._warming.start(partition, job)
                return 0
            records = log.read(
                cursor.next_offset, budget, below=end, min_one=budget == MAX_PUSH_BYTES
            )
            next_offset = next_offset_after(records) if records else cursor.next_offset
        except OffsetOutOfRangeError:
            # Deleted here before it was pushed: the follower begins anew at the log's start.
            push = self._answer_for(partition.key)
            push.diverging_epoch.leader_epoch = -1
            push.diverging_epoch.end_offset = log.log_start_offset
            self._drop(partition)
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
            self._growing[partition] = None  # Its next turn comes after the others'.
        if records or cursor.high_watermark < 0:
            self._add_push(message, partition, cursor).records = records
            cursor.next_offset = next_offset
        return len(records)

    def _warmed(self, partition: Partition) -> None:
        if partition in self._cursors:  # Else it is not pushed here any more.
            self._growing.setdefault(partition)
            self._work.set()

    def _push_marks(self, message: replication_pb2.ReplicationFetchResponse) -> None:
        for partition in list(self._marks)[:_MAX_MARKS]:
            del self._marks[partition]
            cursor = self._cursors[partition]
            if (
                cursor.high_watermark != partition.replica.high_watermark
                or cursor.log_start_offset != partition.log.log_start_offset
            ):
                self._add_push(message, partition, cursor)
        self._marks_due = bool(self._marks)
        if self._marks_due:
            self._work.set()
        elif self._marks_timer is not None:
            self._marks_timer.cancel()
            self._marks_timer = None

    def _add_push(
        self,
        message: replication_pb2.ReplicationFetchResponse,
        partition: Partition,
        cursor: _Cursor,
    ) -> replication_pb2.ReplicaPush:
        cursor.high_watermark = partition.replica.high_watermark
        cursor.log_start_offset = partition.log.log_start_offset
        push = message.pushes.add(
            leader_epoch=cursor.leader_epoch,
            high_watermark=cursor.high_watermark,
            log_start_offset=cursor.log_start_offset,
            base_offset=cursor.next_offset,
        )
        push.partition.topic_id = partition.key.topic_id
        push.partition.partition = partition.key.partition
        return push


def _key(partition: replication_pb2.ReplicaPartition) -> TopicIdPartition:
    return TopicIdPartition(TopicId(partition.topic_id), partition.partition)
