"""A led partition of ``__consumer_offsets`` with its groups: loads, serves, writes, keeps time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from google.protobuf.message import Message

from penstock.broker.coordinator import loading, refusals, writing
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.coordinator.streams import MemberStream
from penstock.broker.coordinator.writing import Held, WriteQueue
from penstock.broker.core.group_events import (
    Effect,
    ExpireOffsets,
    GroupSettings,
    Heartbeat,
    Loaded,
    Persist,
    Respond,
    Send,
    ShardEvent,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_topics import TopicView
from penstock.broker.topics import OFFSETS_TOPIC
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    PenstockError,
    UnknownServerError,
)
from penstock.wire.ids import TopicPartition

_APPEND_TIMEOUT_MS: Final = 5_000
_MAX_PENDING_RECORDS: Final = 200_000
_STALL_MS: Final = 1_000
_STALL_GRACE_S: Final = 0.25
_RETRY_MIN_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostContext:
    """What all partitions of a coordinator share. ``clock_ms`` never goes back."""

    replicas: ReplicaLog
    topics: TopicView
    settings: GroupSettings
    clock_ms: Callable[[], int]
    wall_clock_ms: Callable[[], int]


class HostedShard:
    """The groups of one partition during one leadership. Used on one event loop.

    Until :meth:`start`'s load is through, every request is refused with
    COORDINATOR_LOAD_IN_PROGRESS. After :meth:`close` nothing happens any more. A write whose
    outcome is unknown is resolved by loading anew: what the log then says, and has committed, is
    what happened.
    """

    def __init__(
        self, partition: int, leader_epoch: int, topic_id: bytes, context: HostContext
    ) -> None:
        self.partition: Final = partition
        self.leader_epoch: Final = leader_epoch
        self._topic_id = topic_id
        self._context = context
        self._shard: GroupShard | None = None  # None while it loads.
        self._closed = False
        self._loaded = asyncio.Event()
        self._queue = WriteQueue()
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._request_count = 0
        self._streams: dict[int, MemberStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_s = 0.0  # How long to wait before loading anew; grows with each failure.
        self._failing: str | None = None  # Why writes fail, to be logged once.
        self._timer: asyncio.TimerHandle | None = None
        self._stalled = False  # A deadline was passed over late; the timer gives members grace.
        self._expiry: asyncio.TimerHandle | None = None  # When to look for offsets to forget.
        self._log = log.bind(partition=f"{OFFSETS_TOPIC}-{partition}", leader_epoch=leader_epoch)

    def start(self) -> None:
        """Begin to load."""
        self._spawn(self._load(), "load groups")

    def close(self, error: PenstockError) -> None:
        """Stop at once, and tell everybody who waits, and every stream, why."""
        self._closed = True
        self._halt(error)
        for stream in list(self._streams.values()):
            stream.end(error)
        self._streams.clear()

    async def wait_loaded(self) -> None:
        """Return when requests are served, or the partition is closed."""
        await self._loaded.wait()

    # ------------------------------------------------------------------ requests

    def heartbeat(self, stream: MemberStream, request: groups_pb2.GroupHeartbeatRequest) -> None:
        """Take a member's message; the answer goes to the stream. Raises when not serving."""
        self._check_serving()
        self._streams[stream.stream_id] = stream
        self._handle(Heartbeat(request.group_id, stream.stream_id, request, stream.client_host))

    async def ask(self, make_event: Callable[[int], ShardEvent]) -> Any:
        """Put an event made with a request id, and wait for its answer.

        Raises PenstockError when not serving, or when what the answer tells was not committed.
        """
        self._check_serving()
        self._request_count += 1
        request_id = self._request_count
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[request_id] = future
        try:
            self._handle(make_event(request_id))
            return await future
        finally:
            self._requests.pop(request_id, None)

    def committed(self) -> dict[str, dict[TopicPartition, int]]:
        """By group the positions of partitions whose topic exists; nothing while it loads."""
        topics = self._context.topics
        groups = {} if self._shard is None else self._shard.groups
        return {
            group_id: {
                partition: entry.offset
                for partition, entry in group.state.offsets.items()
                if topics.find_id(entry.topic_id) is not None
            }
            for group_id, group in groups.items()
        }

    def topics_changed(self, event: TopicsChanged) -> None:
        """Topics came or went. What happens while loading is seen at its end."""
        if self._shard is not None:
            self._handle(event)

    def forget_stream(self, stream: MemberStream) -> None:
        """The stream is over."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    def _check_serving(self) -> None:
        if self._shard is None:
            raise CoordinatorLoadInProgressError(
                f"the coordinator is still reading {OFFSETS_TOPIC}-{self.partition}; ask again soon"
            )
        if self._queue.pending_count > _MAX_PENDING_RECORDS:
            raise CoordinatorNotAvailableError(
                f"{self._queue.pending_count} group records wait to be written to "
                f"{OFFSETS_TOPIC}-{self.partition}; ask again later"
            )
        try:
            # A broker without a lease may have been replaced: it must not keep members believing.
            self._context.replicas.high_watermark(OFFSETS_TOPIC, self.partition)
        except PenstockError as error:
            raise refusals.for_group(error) from None

    # ------------------------------------------------------------------ events and effects

    def _handle(self, event: ShardEvent) -> None:
        assert self._shard is not None
        try:
            effects = self._shard.handle(event, self._context.clock_ms())
        except Exception:
            # The state may be half changed; the log has it whole.
            self._log.exception("group event failed", event_type=type(event).__name__)
            self._reload(UnknownServerError("the coordinator failed and starts anew; try again"))
            return
        for effect in effects:
            self._carry_out(effect)
        self._write_next()
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist():
                self._queue.add(effect.changes)
            case Send():
                self._send(effect)
            case Respond():
                future = self._requests.get(effect.request_id)
                if future is not None:
                    held = Held(
                        partial(_resolve, future, effect.response), partial(_reject, future)
                    )
                    self._queue.hold(effect.group_id, held)

    def _send(self, effect: Send) -> None:
        stream = self._streams.get(effect.stream_id)
        if not effect.is_reply:
            # Also with nobody there to hear it: that a dead member was removed is to be logged.
            self._queue.hold(effect.group_id, Held(partial(self._push, stream, effect), _nothing))
        elif stream is not None:
            held = Held(
                partial(stream.reply, effect.response),
                partial(_refuse, stream, effect.response.member_id),
            )
            self._queue.hold(effect.group_id, held)

    def _push(self, stream: MemberStream | None, effect: Send) -> None:
        if effect.response.HasField("error"):
            self._log.info(
                "member removed",
                group=effect.group_id,
                member=effect.response.member_id,
                reason=effect.response.error.message,
            )
        if stream is not None:
            stream.push(effect.response)

    # ------------------------------------------------------------------ writing

    def _write_next(self) -> None:
        write = self._queue.next()
        if write is not None:
            self._spawn(self._write(write), "write group records")

    async def _write(self, write: writing.Write) -> None:
        context = self._context
        try:
            await context.replicas.append(
                OFFSETS_TOPIC,
                self._topic_id,
                self.partition,
                writing.encode(write.changes, context.wall_clock_ms()),
                acks=common_pb2.ACKS_ALL,
                timeout_ms=_APPEND_TIMEOUT_MS,
                current_leader_epoch=self.leader_epoch,
            )
        except PenstockError as error:
            self._write_failed(error)
        except Exception as error:
            self._log.exception("group records not written")
            self._write_failed(UnknownServerError(f"group records were not written: {error!r}"))
        else:
            self._retry_s, self._failing = 0.0, None
            self._queue.committed()
            self._write_next()

    def _write_failed(self, error: PenstockError) -> None:
        if self._failing != error.code.name:
            self._failing = error.code.name
            self._log.warning("group records not written", reason=error.message)
        told = refusals.for_group(error)
        if not isinstance(error, refusals.NOTHING_APPENDED) or self._shard is None:
            self._reload(told)
            return
        changes, held = self._queue.drop()
        self._shard.revert(changes, self._context.clock_ms())
        for answer in held:
            answer.fail(told)
        self._arm()

    # ------------------------------------------------------------------ loading

    def _reload(self, error: PenstockError) -> None:
        """Start over from the log. Streams stay: their members are heard again once loaded."""
        self._halt(error)
        if not self._closed:
            self.start()

    def _halt(self, error: PenstockError) -> None:
        self._shard = None
        self._stalled = False
        self._loaded.clear()
        if self._closed:
            self._loaded.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        running = asyncio.current_task()
        for task in list(self._tasks):
            if task is not running:
                task.cancel()
        _, held = self._queue.drop()
        for answer in held:
            answer.fail(error)
        for future in self._requests.values():
            _reject(future, error)

    async def _load(self) -> None:
        context = self._context
        while True:
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(max(self._retry_s * 2, _RETRY_MIN_S), _RETRY_MAX_S)
            try:
                shard = GroupShard(context.topics, context.settings)
                count = await loading.load(context.replicas, self.partition, shard)
                break
            except PenstockError as error:
                if context.replicas.leader_epoch_of(OFFSETS_TOPIC, self.partition) is None:
                    return  # The news that it is led elsewhere is on its way, or here.
                self._log.warning("groups not loaded; trying again", reason=error.message)
            except Exception:
                # Were this the end, the groups would be refused as loading for ever.
                if context.replicas.leader_epoch_of(OFFSETS_TOPIC, self.partition) is None:
                    return
                self._log.exception("groups not loaded; trying again")
        self._shard = shard
        self._log.info("groups loaded", groups=len(shard.groups), records=count)
        self._handle(Loaded())
        if self._shard is shard:
            self._loaded.set()
            self._arm_expiry()

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        """Have the shard ticked at its next deadline. A deadline that moved on is found then."""
        if self._shard is None or self._stalled:
            return
        deadline_ms = self._shard.next_deadline_ms
        if deadline_ms is None:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(deadline_ms - self._context.clock_ms(), 0) / 1000
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._shard is None:
            return
        deadline_ms = self._shard.next_deadline_ms
        late_ms = 0 if deadline_ms is None else self._context.clock_ms() - deadline_ms
        if late_ms > _STALL_MS and not self._stalled:
            # This process stood still. What members sent meanwhile waits in its sockets, and is
            # to be read before anybody is called silent.
            self._stalled = True
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_STALL_GRACE_S, self._tick)
            self._log.warning("the broker stood still; members get a grace", late_ms=late_ms)
            return
        self._stalled = False
        self._handle(Tick())

    def _arm_expiry(self) -> None:
        interval_s = self._context.settings.offsets_retention_check_interval_ms / 1000
        self._expiry = asyncio.get_running_loop().call_later(interval_s, self._expire)

    def _expire(self) -> None:
        """Have groups forget offsets; a broker that may not serve leaves it to who may."""
        try:
            self._check_serving()
        except PenstockError:
            pass
        else:
            self._handle(ExpireOffsets(self._context.wall_clock_ms()))
        if self._shard is not None:
            self._arm_expiry()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{name} {self.partition}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("group coordination failed", task=task.get_name(), reason=repr(error))


def _resolve(future: asyncio.Future[Any], response: Message) -> None:
    if not future.done():
        future.set_result(response)


def _reject(future: asyncio.Future[Any], error: PenstockError) -> None:
    if not future.done():
        future.set_exception(error)


def _refuse(stream: MemberStream, member_id: str, error: PenstockError) -> None:
    stream.reply(groups_pb2.GroupHeartbeatResponse(error=error.to_proto(), member_id=member_id))


def _nothing(_error: PenstockError) -> None:
    """A push that tells what did not happen is simply not sent."""
