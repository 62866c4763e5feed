"""A led partition of an internal topic with the state it keeps: loads, serves, writes, keeps time.

What the state is, a subclass says: groups in ``hosted_groups.py``, transactions in
``hosted_transactions.py``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from penstock.broker.alarm import Alarm
from penstock.broker.coordinator import loading, refusals
from penstock.broker.coordinator.loading import Replayable
from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.core.write_queue import Change, TakenBack, Write, WriteQueue, encode
from penstock.v1 import common_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    PenstockError,
    RecordTooLargeError,
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


class Shard(Replayable, Protocol):
    """The state of one partition: a pure core that events change."""

    @property
    def next_deadline_ms(self) -> int | None:
        """When to handle the event of passing time, at the latest; None for never."""
        ...

    def handle(self, event: Any, now_ms: int) -> Sequence[Any]:
        """Take one event at a time of the monotonic clock; effects, to be carried out in order."""
        ...

    def revert(self, changes: Sequence[Any], now_ms: int) -> None:
        """Take back changes that could not be written: all of them, in the order of effects."""
        ...


S = TypeVar("S", bound=Shard)


@dataclass(frozen=True, slots=True)
class Place:
    """Which partition, in which of its leaderships."""

    topic: str
    topic_id: bytes
    partition: int
    leader_epoch: int

    def __str__(self) -> str:
        return str(TopicPartition(self.topic, self.partition))


@dataclass(frozen=True, slots=True)
class HostPorts:
    """What all partitions of a coordinator share. ``clock_ms`` never goes back."""

    replicas: ReplicaLog
    clock_ms: Callable[[], int]
    wall_clock_ms: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Held:
    """What is told: ``deliver`` it when it is committed, or ``fail`` it."""

    deliver: Callable[[], None]
    fail: Callable[[PenstockError], None]


class HostedShard(ABC, Generic[S]):
    """The state of one partition during one leadership. Used on one event loop.

    Until :meth:`start`'s load is through, every request is refused with
    COORDINATOR_LOAD_IN_PROGRESS. After :meth:`close` nothing happens any more. A write whose
    outcome is unknown is resolved by loading anew: what the log then says, and has committed, is
    what happened.
    """

    def __init__(self, place: Place, ports: HostPorts) -> None:
        self.place: Final = place
        self._ports = ports
        self._shard: S | None = None  # None while it loads.
        self._closed = False
        self._loaded = asyncio.Event()
        self._queue = WriteQueue[Held]()
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._request_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_s = 0.0  # How long to wait before loading anew; grows with each failure.
        self._failing: str | None = None  # Why writes fail, to be logged once.
        self._alarm = Alarm(self._tick)
        self._stalled = False  # A deadline was passed over late; the timer gives a grace.
        self._log = log.bind(partition=str(place), leader_epoch=place.leader_epoch)

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def _make_shard(self) -> S:
        """An empty state, to be replayed into."""

    @abstractmethod
    def _loaded_event(self) -> Any:
        """The event that all was replayed."""

    @abstractmethod
    def _tick_event(self) -> Any:
        """The event that a deadline may have passed."""

    @abstractmethod
    def _carry_out(self, effect: Any) -> None:
        """Do what the state asks for, by what is below; nothing is told before it is committed."""

    def _on_loaded(self, shard: S, record_count: int) -> None:
        """The state is served from now on."""

    def _on_halted(self) -> None:
        """The state is served no more, for good or until it is loaded anew."""

    def _on_appending(self, write: Write[Held]) -> None:
        """The write is appended now; what is refused is taken back before anything else happens."""

    def _may_revert(self, number: int) -> bool:
        """Whether what was refused can be taken back, from the write of this number on; else all is
        loaded anew.
        """
        return True

    # ------------------------------------------------------------------ the life of it

    def start(self) -> None:
        """Begin to load."""
        self._spawn(self._load(), "load coordinator state")

    def close(self, error: PenstockError) -> None:
        """Stop at once, and tell everybody who waits why."""
        self._closed = True
        self._halt(error)

    async def wait_loaded(self) -> None:
        """Return when requests are served, or the partition is closed."""
        await self._loaded.wait()

    # ------------------------------------------------------------------ requests

    async def ask(self, make_event: Callable[[int], Any]) -> Any:
        """Put an event made with a request id, and wait for its answer.

        Raises PenstockError when not serving, or when what the answer tells was not committed.
        """
        self._check_serving()
        request_id, future = self._new_request()
        try:
            self._handle(make_event(request_id))
            return await future
        finally:
            self._requests.pop(request_id, None)

    def _new_request(self) -> tuple[int, asyncio.Future[Any]]:
        self._request_count += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[self._request_count] = future
        return self._request_count, future

    def _check_serving(self) -> None:
        if self._shard is None:
            raise CoordinatorLoadInProgressError(
                f"the coordinator is still reading {self.place}; ask again soon"
            )
        if self._queue.pending_count > _MAX_PENDING_RECORDS:
            raise CoordinatorNotAvailableError(
                f"{self._queue.pending_count} records wait to be written to {self.place}; ask "
                "again later"
            )
        try:
            # A broker without a lease may have been replaced: nobody must go on believing it.
            self._ports.replicas.high_watermark(self.place.topic, self.place.partition)
        except PenstockError as error:
            raise refusals.for_coordinated(error) from None

    # ------------------------------------------------------------------ events and effects

    def _handle(self, *events: Any) -> None:
        """Take events one after the other; what they write goes into the log together."""
        for event in events:
            assert self._shard is not None
            try:
                effects = self._shard.handle(event, self._ports.clock_ms())
            except Exception:
                # The state may be half changed; the log has it whole.
                self._log.exception("coordinator event failed", event_type=type(event).__name__)
                self._reload(
                    UnknownServerError("the coordinator failed and starts anew; try again")
                )
                return
            for effect in effects:
                self._carry_out(effect)
        self._write_next()
        self._arm()

    def _persist(
        self,
        subject: str,
        changes: Sequence[Change],
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Append records about ``subject``, with a producer those of its transaction."""
        self._queue.add(subject, changes, producer)

    def _hold(self, subject: str | None, held: Held) -> None:
        """Deliver what tells of ``subject`` (None: of any) when all about it is committed."""
        if not self._queue.hold(subject, held):
            held.deliver()

    def _respond(
        self,
        subject: str | None,
        request_id: int,
        response: Any,
        refusal: Callable[[PenstockError], PenstockError] | None = None,
    ) -> None:
        """Answer a request that still waits, when what it tells is committed.

        Where that fails it is told why, or what ``refusal`` makes of it.
        """
        future = self._requests.get(request_id)
        if future is None:
            return

        def fail(error: PenstockError) -> None:
            _reject(future, error if refusal is None else refusal(error))

        self._hold(subject, Held(partial(_resolve, future, response), fail))

    # ------------------------------------------------------------------ writing

    def _write_next(self) -> None:
        write = self._queue.next()
        if write is not None:
            self._spawn(self._write(write), "write coordinator records")

    async def _write(self, write: Write[Held]) -> None:
        place = self.place
        self._on_appending(write)
        try:
            await self._ports.replicas.append(
                place.topic,
                place.topic_id,
                place.partition,
                encode(write, self._ports.wall_clock_ms()),
                acks=common_pb2.ACKS_ALL,
                timeout_ms=_APPEND_TIMEOUT_MS,
                current_leader_epoch=place.leader_epoch,
                verified=write.producer,
            )
        except PenstockError as error:
            self._write_failed(error)
        except Exception as error:
            self._log.exception("coordinator records not written")
            self._write_failed(UnknownServerError(f"records were not written: {error!r}"))
        else:
            self._retry_s, self._failing = 0.0, None
            for held in self._queue.committed():
                held.deliver()
            self._write_next()

    def _write_failed(self, error: PenstockError) -> None:
        if self._failing != error.code.name:
            self._failing = error.code.name
            self._log.warning("coordinator records not written", reason=error.message)
        told = refusals.for_coordinated(error)
        if not isinstance(error, refusals.NOTHING_APPENDED) or self._shard is None:
            self._reload(told)
            return
        taken = self._queue.refused(too_large=isinstance(error, RecordTooLargeError))
        if taken is not None:
            self._take_back(self._shard, taken, told)
        self._write_next()
        self._arm()

    def _take_back(self, shard: S, taken: TakenBack[Held], told: PenstockError) -> None:
        others_told = _try_again() if taken.for_itself else told
        if self._may_revert(taken.number):
            shard.revert(taken.changes, self._ports.clock_ms())
            _fail(taken.refused, told)
        else:
            _fail(taken.refused, told)
            self._reload(others_told)
        _fail(taken.others, others_told)

    # ------------------------------------------------------------------ loading

    def _reload(self, error: PenstockError) -> None:
        """Start over from the log."""
        self._halt(error)
        if not self._closed:
            self.start()

    def _halt(self, error: PenstockError) -> None:
        self._shard = None
        self._stalled = False
        self._loaded.clear()
        if self._closed:
            self._loaded.set()
        self._alarm.cancel()
        self._on_halted()
        running = asyncio.current_task()
        for task in list(self._tasks):
            if task is not running:
                task.cancel()
        _fail(self._queue.drop(), error)
        for future in self._requests.values():
            _reject(future, error)

    async def _load(self) -> None:
        place, replicas = self.place, self._ports.replicas
        while True:
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(max(self._retry_s * 2, _RETRY_MIN_S), _RETRY_MAX_S)
            try:
                shard = self._make_shard()
                count = await loading.load(replicas, place.topic, place.partition, shard)
                break
            except PenstockError as error:
                if replicas.leader_epoch_of(place.topic, place.partition) is None:
                    return  # The news that it is led elsewhere is on its way, or here.
                self._log.warning(
                    "coordinator state not loaded; trying again", reason=error.message
                )
            except Exception:
                # Were this the end, everybody would be refused as loading for ever.
                if replicas.leader_epoch_of(place.topic, place.partition) is None:
                    return
                self._log.exception("coordinator state not loaded; trying again")
        self._shard = shard
        self._handle(self._loaded_event())
        if self._shard is shard:
            self._loaded.set()
            self._on_loaded(shard, count)

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        """Have the shard ticked at its next deadline. A deadline that moved on is found then."""
        if self._shard is None or self._stalled:
            return
        deadline_ms = self._shard.next_deadline_ms
        if deadline_ms is None:
            return
        self._alarm.within((deadline_ms - self._ports.clock_ms()) / 1000)

    def _tick(self) -> None:
        if self._shard is None:
            return
        deadline_ms = self._shard.next_deadline_ms
        late_ms = 0 if deadline_ms is None else self._ports.clock_ms() - deadline_ms
        if late_ms > _STALL_MS and not self._stalled:
            # This process stood still. What was sent meanwhile waits in its sockets, and is to be
            # read before anybody is called silent.
            self._stalled = True
            self._alarm.within(_STALL_GRACE_S)
            self._log.warning(
                "the broker stood still; those it waits for get a grace", late_ms=late_ms
            )
            return
        self._stalled = False
        self._handle(self._tick_event())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"{name} {self.place}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("coordination failed", task=task.get_name(), reason=repr(error))


def _fail(held: Sequence[Held], error: PenstockError) -> None:
    for one in held:
        one.fail(error)


def _try_again() -> PenstockError:
    """What those are told whose write was taken back with one that was refused for itself."""
    return CoordinatorNotAvailableError(
        "a write was taken back with one before it, which was refused; try again"
    )


def _resolve(future: asyncio.Future[Any], response: Any) -> None:
    if not future.done():
        future.set_result(response)


def _reject(future: asyncio.Future[Any], error: PenstockError) -> None:
    if not future.done():
        future.set_exception(error)
