"""A coordinator's shell in the simulator: what it keeps of one partition, in one leadership."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from penstock.broker.core.transaction_events import (
    AbortTransaction,
    AddPartitions,
    BeginAttempt,
    Change,
    CommitGroup,
    Effect,
    EndTransaction,
    Event,
    InitProducerId,
    LastCommitted,
    Loaded,
    MarkDone,
    MarksCommitted,
    Persist,
    ProducerIdGiven,
    ProducerIdRefused,
    Respond,
    SendMarks,
    TakeProducerId,
    Tick,
    TopicsRemoved,
    TransactionSettings,
)
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.write_queue import WriteQueue, encode
from penstock.chaos.simulator.serving import ACKS_ALL, Answer
from penstock.chaos.simulator.transactions.marking import Marks
from penstock.v1 import (
    cluster_pb2,
    coordination_pb2,
    transaction_records_pb2,
    transactions_pb2,
)
from penstock.wire.errors import CoordinatorNotAvailableError, ErrorCode, PenstockError
from penstock.wire.ids import TopicId
from penstock.wire.records import decode_batch

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.memory_log import MemoryLog
    from penstock.chaos.simulator.partition import SimulatedPartition
    from penstock.chaos.simulator.scheduler import Timer

_WAIT_MS: Final = 450  # A request waits as long at the coordinator: less than who asks.
_APPEND_TIMEOUT_MS: Final = 600
_RETRY_MS: Final = (20, 120)
_NOTE_AFTER_MS: Final = 2000
_RETRY_AFTER_MS: Final = 100

KEPT_PAUSE_MS: Final = 80  # Some of the pauses of clients are longer, and some shorter.

_EVENTS: Final[dict[str, Callable[..., Event]]] = {
    "init producer id": InitProducerId,
    "end transaction": EndTransaction,
    "abort transaction": AbortTransaction,
    "begin attempt": BeginAttempt,
    "commit group": CommitGroup,
}


@dataclass(frozen=True, slots=True)
class Held:
    """``deliver`` it when what it tells is committed, or ``fail`` it."""

    deliver: Callable[[], None]
    fail: Callable[[ErrorCode], None]


def waits(effect: Respond | SendMarks) -> bool:
    """Whether an effect waits until what it tells of is committed. Tests of the checkers put bugs
    here.
    """
    return isinstance(effect, Respond | SendMarks)


def is_too_large(change: Change, share: float) -> bool:
    """Whether a record stands for one that the log refuses: of those that take partitions in, so
    many, whenever they are tried.
    """
    if change.value is None or change.is_group:
        return False
    state = transaction_records_pb2.TransactionValue.FromString(change.value).state
    opens = state == transactions_pb2.TRANSACTION_STATE_ONGOING
    return opens and crc32(change.value) < share * 2**32


def served_from(log: MemoryLog, high_watermark: int) -> int:
    """Up to where a log must be committed before what it says is served. Tests of the checkers put
    a bug here.
    """
    return max(log.log_end_offset, high_watermark)


class Topics:
    """The topics that a broker's metadata know."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker

    def knows(self, topic_id: TopicId) -> bool:
        """Whether there is a topic of this id."""
        return self._broker.image.topic_by_id(topic_id) is not None


class HostedTransactions:
    """One led partition of the coordinators' topic. It serves once it has loaded."""

    def __init__(self, broker: SimulatedBroker, partition: SimulatedPartition) -> None:
        self._broker = broker
        self._partition = partition
        self._leader_epoch = partition.replica.leader_epoch
        self._shard: TransactionShard | None = None
        self._loads = 0  # What belongs to an earlier one counts for nothing.
        self._closed = False
        self._queue = WriteQueue[Held]()
        self._marks = Marks(broker, self._leader_epoch, self._mark_done)
        self._requests: dict[int, tuple[Callable[[Any], None], Callable[[ErrorCode], None]]] = {}
        self._request_count = 0
        self._timer: Timer | None = None
        self._load()

    def close(self) -> None:
        """Another one leads, or this one anew."""
        self._closed = True
        self._halt(ErrorCode.NOT_COORDINATOR)

    # Loading.

    def _load(self) -> None:
        """Replay the log, and wait until all of it is committed."""
        self._loads += 1
        log = self._partition.log
        settings = TransactionSettings(
            note_after_ms=_NOTE_AFTER_MS,
            kept_pause_ms=KEPT_PAUSE_MS,
            retry_ms=_RETRY_AFTER_MS,
            settled_at_once=1,
            last_epoch=self._broker.place.last_epoch,
        )
        shard = TransactionShard(Topics(self._broker), settings)
        for _, data in log.batches_from(log.log_start_offset):
            for record in decode_batch(data):
                assert record.key is not None
                shard.replay(
                    bytes(record.key), None if record.value is None else bytes(record.value)
                )
        self._partition.when_committed(
            served_from(log, self._partition.replica.high_watermark),
            partial(self._committed_all, self._loads, shard),
        )

    def _committed_all(self, load: int, shard: TransactionShard, why: ErrorCode | None) -> None:
        if self._closed or load != self._loads:
            return
        if why is not None:
            self._broker.after(self._broker.rng.randint(*_RETRY_MS), partial(self._reload, load))
            return
        self._shard = shard
        self._broker.note(f"{self._partition.key.partition} on {self._broker.node_id}: coordinates")
        self._handle(Loaded(self._broker.now_ms))

    def _reload(self, load: int) -> None:
        if not self._closed and load == self._loads:
            self._halt(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            self._load()

    def _halt(self, code: ErrorCode) -> None:
        self._shard = None
        self._marks.close()
        self._marks = Marks(self._broker, self._leader_epoch, self._mark_done)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _fail(self._queue.drop(), code)
        requests, self._requests = self._requests, {}
        for _, fail in requests.values():
            fail(code)

    # Requests.

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a client or a leader, once what the answer tells is committed."""
        if self._shard is None:
            reply(Answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
            return

        def fail(code: ErrorCode) -> None:
            reply(Answer(code))

        self._request_count += 1
        request_id = self._request_count
        give_up_ms = self._broker.now_ms + _WAIT_MS
        event: Event
        if method == "add partitions":
            [entry] = request.entries

            def one(result: Any) -> None:
                reply(coordination_pb2.AddPartitionsResponse(results=[result]))

            self._requests[request_id] = one, fail
            event = AddPartitions(request_id, entry, give_up_ms)
        else:
            self._requests[request_id] = reply, fail
            if method == "last committed":
                event = LastCommitted(request_id, request.group)
            else:
                event = _EVENTS[method](request_id, request, give_up_ms)
        self._handle(event)

    def topics_removed(self, topic_ids: frozenset[TopicId]) -> None:
        """Nothing is written to these topics any more."""
        if self._shard is not None:
            self._handle(TopicsRemoved(topic_ids))

    # Events and effects.

    def _handle(self, event: Event) -> None:
        assert self._shard is not None
        effects = self._shard.handle(event, self._broker.now_ms)
        self._shard.validate()
        for effect in effects:
            self._carry_out(effect)
        self._write_next()
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(subject, change):
                self._queue.add(subject, (change,))
            case Respond(_, request_id, response):
                reply, fail = self._requests.pop(request_id)
                self._hold(effect, Held(partial(self._reply, reply, response), fail))
            case SendMarks(_, marks):
                for mark in marks:
                    self._hold(effect, Held(partial(self._marks.send, mark), _nothing))
            case TakeProducerId():
                self._take_producer_id(self._loads)

    def _hold(self, effect: Respond | SendMarks, held: Held) -> None:
        if not (waits(effect) and self._queue.hold(effect.subject, held)):
            held.deliver()

    def _reply(self, reply: Callable[[Any], None], response: Any) -> None:
        self._broker.transactions.passes("coordinator answers")
        reply(response)

    def _mark_done(self, done: MarkDone) -> None:
        if self._shard is not None:
            self._handle(MarksCommitted((done,)))

    def _take_producer_id(self, load: int) -> None:
        def answered(result: cluster_pb2.CommandResult | None) -> None:
            if self._closed or load != self._loads or self._shard is None:
                return
            if result is None or result.HasField("error"):
                error = CoordinatorNotAvailableError("no producer id was given")
                self._handle(ProducerIdRefused(error))
            else:
                self._handle(ProducerIdGiven(result.allocate_producer_ids.first_producer_id))

        self._broker.take_producer_id(answered)

    # Writing.

    def _write_next(self) -> None:
        write = self._queue.next()
        if write is None:
            return
        load = self._loads
        broker, partition = self._broker, self._partition
        if partition.replica.under_min_isr or not broker.may_serve():
            self._nothing_written(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            return
        if any(is_too_large(change, broker.place.too_large) for change in write.changes):
            self._nothing_written(ErrorCode.MESSAGE_TOO_LARGE)
            return
        is_over = False

        def done(_: int, why: ErrorCode | None) -> None:
            nonlocal is_over
            if is_over or self._closed or load != self._loads:
                return
            is_over = True
            if why is None:
                broker.transactions.passes("record committed")
                for held in self._queue.committed():
                    held.deliver()
                self._write_next()
            else:
                self._outcome_unknown(load)

        def later(base_offset: int, why: ErrorCode | None) -> None:
            broker.after(0, lambda: done(base_offset, why))

        try:
            records = encode(write, broker.now_ms)
            # Not in the step of the event: what it does to the log may come back to the shard.
            partition.append(records, acks=ACKS_ALL, on_done=later)
        except PenstockError:
            self._nothing_written(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            return
        broker.transactions.passes("record appended")
        broker.after(_APPEND_TIMEOUT_MS, lambda: done(-1, ErrorCode.REQUEST_TIMED_OUT))

    def _outcome_unknown(self, load: int) -> None:
        """What the log says, once it is committed, is what has happened."""
        self._reload(load)

    def _nothing_written(self, code: ErrorCode) -> None:
        assert self._shard is not None
        taken = self._queue.refused(too_large=code is ErrorCode.MESSAGE_TOO_LARGE)
        if taken is not None:
            self._shard.revert(taken.changes, self._broker.now_ms)
            self._shard.validate()
            _fail(taken.refused, code)
            _fail(taken.others, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._write_next()
        self._arm()

    # Time.

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = None if self._shard is None else self._shard.next_deadline_ms
        if due_ms is not None:
            self._timer = self._broker.after(due_ms - self._broker.now_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._shard is not None:
            self._handle(Tick(self._broker.now_ms))


def _fail(held: Iterable[Held], code: ErrorCode) -> None:
    for one in held:
        one.fail(code)


def _nothing(_: ErrorCode) -> None:
    """A mark whose decision was not written is not sent."""
