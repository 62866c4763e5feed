"""A group coordinator's shell in the simulator: what it keeps of one partition, in one leadership.

As penstock.broker.coordinator.hosted_groups has it in production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.core.group_events import (
    CommitTransactionOffsets,
    Effect,
    FetchOffsets,
    GroupSettings,
    Heartbeat,
    Loaded,
    Marked,
    Persist,
    Respond,
    Send,
    ShardEvent,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.core.group_values import Producer
from penstock.broker.core.image_topics import ImageTopics
from penstock.broker.core.transactions import Marker
from penstock.broker.core.write_queue import WriteQueue, encode
from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.network import End
from penstock.chaos.simulator.serving import ACKS_ALL, Answer
from penstock.chaos.simulator.transactions.coordinating import Held
from penstock.chaos.simulator.transactions.leading import Leading
from penstock.v1 import common_pb2, groups_pb2
from penstock.wire.errors import ErrorCode, PenstockError
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import decode_batch

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.memory_log import MemoryLog
    from penstock.chaos.simulator.partition import SimulatedPartition
    from penstock.chaos.simulator.scheduler import Timer

_APPEND_TIMEOUT_MS: Final = 600
_RETRY_MS: Final = (20, 120)
_READING_MS: Final = (5, 30, 30, 300)  # As long a load may take, while marks may come.
_SETTINGS: Final = GroupSettings(min_session_timeout_ms=100, retry_ms=100)


@dataclass(slots=True)
class Marks:
    """Marks of one append, after which the log ended at ``end_offset``.

    They came after what was written in transactions up to number ``up_to``.
    """

    markers: Sequence[Marker]
    end_offset: int
    up_to: int


def kept_over_a_load(marks: deque[Marks]) -> deque[Marks]:
    """The marks that came while the partition was loaded, which a load that began before has not
    read. Tests of the checkers put a bug here.
    """
    return marks


def replay(shard: GroupShard, log: MemoryLog) -> None:
    """Read a log back into the state that it keeps."""
    for header, data in log.batches_from(log.log_start_offset):
        producer = Producer(header.producer_id, header.producer_epoch)
        if header.is_control:
            shard.replay_marker(producer, commit=marker_type(data) is MarkerType.COMMIT)
            continue
        for record in decode_batch(data):
            assert record.key is not None
            key, value = bytes(record.key), None if record.value is None else bytes(record.value)
            if header.is_transactional:
                shard.replay_transactional(producer, key, value)
            else:
                shard.replay(key, value)


class HostedGroups:
    """One led partition of ``__consumer_offsets``. It serves once it has loaded."""

    def __init__(
        self,
        broker: SimulatedBroker,
        partition: SimulatedPartition,
        topics: ImageTopics,
        leading: Leading,
    ) -> None:
        self._broker = broker
        self._partition = partition
        self._topics = topics
        self._leading = leading
        self._shard: GroupShard | None = None
        self._loads = 0  # What belongs to an earlier one counts for nothing.
        self._closed = False
        self._queue = WriteQueue[Held]()
        self._streams: dict[int, End] = {}
        self._requests: dict[int, tuple[Callable[[Any], None], Callable[[ErrorCode], None]]] = {}
        self._request_count = 0
        self._marks: deque[Marks] = deque()  # In the log, and not known to be committed.
        self._following = False
        self._marked_at = 0  # The write that was made last when a mark was taken over.
        self._timer: Timer | None = None
        partition.log.internal = True
        self._load()

    def close(self) -> None:
        """Another one leads, or this one anew."""
        self._closed = True
        self._halt(ErrorCode.NOT_COORDINATOR)
        streams, self._streams = self._streams, {}
        for end in streams.values():
            end.send(_refusal(ErrorCode.NOT_COORDINATOR))

    # Loading.

    def _load(self) -> None:
        """Replay the log, and wait until all of it is committed."""
        self._loads += 1
        shard = GroupShard(self._topics, _SETTINGS)
        replay(shard, self._partition.log)
        end, load = self._partition.log.log_end_offset, self._loads
        committed = partial(self._committed_all, load, shard)
        self._broker.after(
            self._broker.rng.randint(0, self._broker.rng.choice(_READING_MS)),
            lambda: None if self._closed else self._partition.when_committed(end, committed),
        )

    def _committed_all(self, load: int, shard: GroupShard, why: ErrorCode | None) -> None:
        # Not in the step that committed it, which may be one of the shard's own.
        if why is None:
            self._broker.after(0, partial(self._loaded, load, shard))
        else:
            self._broker.after(self._broker.rng.randint(*_RETRY_MS), partial(self._reload, load))

    def _loaded(self, load: int, shard: GroupShard) -> None:
        if self._closed or load != self._loads:
            return
        self._shard = shard
        self._broker.note(f"{self._partition.key.partition} on {self._broker.node_id}: has groups")
        self._handle(Loaded())
        self._marks = kept_over_a_load(self._marks)
        for marks in self._marks:
            marks.up_to = shard.appended
        self._follow_marks()

    def _reload(self, load: int) -> None:
        if not self._closed and load == self._loads:
            self._halt(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            self._load()

    def _halt(self, code: ErrorCode) -> None:
        self._shard = None
        self._following = False
        self._loads += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for held in self._queue.drop():
            held.fail(code)
        requests, self._requests = self._requests, {}
        for _, fail in requests.values():
            fail(code)

    # Requests.

    def heartbeat(
        self, stream_id: int, end: End, request: groups_pb2.GroupHeartbeatRequest
    ) -> None:
        """Take a member's message; the answer goes to the stream."""
        if self._shard is None:
            end.send(_refusal(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, request.member_id))
            return
        self._streams[stream_id] = end
        self._handle(Heartbeat(request.group_id, stream_id, request, "simulated"))

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a member, or an onlooker, once what the answer tells is committed."""
        if method == "fetch offsets":
            self._ask(lambda number: FetchOffsets(request.group_id, number, request), reply)
        else:
            assert method == "commit transaction offsets"
            self._commit(request, reply)

    def _commit(
        self,
        request: groups_pb2.CommitTransactionOffsetsRequest,
        reply: Callable[[Any], None],
    ) -> None:
        if self._shard is None:
            reply(Answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
            return
        try:
            self._shard.check_commit(request.commit)
        except PenstockError as error:
            reply(Answer(error.code))
            return

        def verified(why: ErrorCode | None) -> None:
            if why is None:
                self._ask(event, lambda response: reply(response.commit), reply)
            else:
                reply(Answer(why))

        def event(number: int) -> CommitTransactionOffsets:
            group_id, now_ms = request.commit.group_id, self._broker.now_ms
            return CommitTransactionOffsets(group_id, number, request, now_ms)

        self._broker.transactions.passes("positions come")
        producer = request.producer_id, request.producer_epoch
        self._leading.verify(self._partition, request.transactional_id, producer, verified)

    def _ask(
        self,
        make: Callable[[int], ShardEvent],
        told: Callable[[Any], None],
        refused: Callable[[Any], None] | None = None,
    ) -> None:
        refuse = refused or told
        if self._closed:
            refuse(Answer(ErrorCode.NOT_COORDINATOR))
        elif self._shard is None:
            refuse(Answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        elif not self._broker.may_serve():
            refuse(Answer(ErrorCode.BROKER_FENCED))
        else:
            self._request_count += 1
            self._requests[self._request_count] = told, lambda code: refuse(Answer(code))
            self._handle(make(self._request_count))

    def topics_changed(self, event: TopicsChanged) -> None:
        """Topics came or went. What happens while it loads is seen at its end."""
        if self._shard is not None:
            self._handle(event)

    # Marks.

    def marked(self, markers: Sequence[Marker], end_offset: int) -> None:
        """Marks were appended, after which the log ended there. They count once committed."""
        up_to = 0 if self._shard is None else self._shard.appended
        self._marks.append(Marks(markers, end_offset, up_to))
        self._follow_marks()

    def _follow_marks(self) -> None:
        if self._following or not self._marks or self._shard is None:
            return
        self._following = True
        load = self._loads

        def later(why: ErrorCode | None) -> None:
            # Not in the step that committed them, which may be one of the shard's own.
            self._broker.after(0, partial(self._committed_marks, load, why))

        self._partition.when_committed(self._marks[0].end_offset, later)

    def _committed_marks(self, load: int, why: ErrorCode | None) -> None:
        if self._closed or load != self._loads:
            return
        self._following = False
        if why is not None:
            self._broker.after(self._broker.rng.randint(*_RETRY_MS), self._follow_marks)
            return
        marks = self._marks.popleft()
        self._marked_at = self._queue.last_number
        for marker in marks.markers:
            if self._shard is None:
                return  # It is loaded anew, with what the log has.
            ended = Producer(marker.producer_id, marker.producer_epoch)
            self._handle(Marked(ended, marker.commit, marks.up_to))
        self._broker.transactions.passes("positions ended")
        self._follow_marks()

    # Events and effects.

    def _handle(self, event: ShardEvent) -> None:
        assert self._shard is not None
        effects = self._shard.handle(event, self._broker.now_ms)
        self._shard.validate()
        for effect in effects:
            self._carry_out(effect)
        self._write_next()
        self._arm()
        self._check_pending()

    def _check_pending(self) -> None:
        """When nothing is on its way, in whichever direction, what is pending is open in the log:
        else nothing will ever end it.
        """
        if self._shard is None or self._marks or self._queue.in_flight is not None:
            return
        is_open = {one.producer_id for one in self._partition.log.open_transactions()}
        for group_id, group in self._shard.groups.items():
            left = group.state.pending.producer_ids() - is_open
            check(
                not left,
                f"group {group_id}: positions of producers {sorted(left)} are pending, but their "
                "transactions have ended in the log, and the coordinator waits for no mark",
            )

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(group_id, changes, producer):
                self._queue.add(group_id, changes, producer)
            case Send():
                self._send(effect)
            case Respond(group_id, request_id, response):
                reply, fail = self._requests.pop(request_id)
                if not effect.in_transaction:
                    fail = partial(_fail_others, fail)
                self._hold(group_id, Held(partial(self._reply, reply, response), fail))

    def _hold(self, subject: str | None, held: Held) -> None:
        if not self._queue.hold(subject, held):
            held.deliver()

    def _send(self, effect: Send) -> None:
        end, response = self._streams.get(effect.stream_id), effect.response
        if end is None:
            return

        def refuse(code: ErrorCode) -> None:
            if effect.is_reply:  # A push that tells what did not happen is not sent.
                end.send(_refusal(told_to_others(code), response.member_id))

        self._hold(effect.group_id, Held(lambda: end.send(response), refuse))

    def _reply(self, reply: Callable[[Any], None], response: Any) -> None:
        self._broker.transactions.passes("positions answered")
        reply(response)

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
        is_over = False

        def done(_: int, why: ErrorCode | None) -> None:
            nonlocal is_over
            if is_over or self._closed or load != self._loads:
                return
            is_over = True
            if why is None:
                broker.transactions.passes("positions committed")
                for held in self._queue.committed():
                    held.deliver()
                self._write_next()
            else:
                self._reload(load)  # What the log says, once it is committed, is what happened.

        def later(base_offset: int, why: ErrorCode | None) -> None:
            broker.after(0, lambda: done(base_offset, why))

        try:
            records = encode(write, broker.now_ms)
            if write.producer is not None:
                assert self._shard is not None
                self._shard.note_appended(write.changes)
            partition.append(records, acks=ACKS_ALL, on_done=later, verified=write.producer)
        except PenstockError as error:
            self._nothing_written(error.code)
            return
        broker.transactions.passes("positions appended")
        broker.after(_APPEND_TIMEOUT_MS, lambda: done(-1, ErrorCode.REQUEST_TIMED_OUT))

    def _nothing_written(self, code: ErrorCode) -> None:
        """Take back all that waits, unless a mark was taken over since: what was before that is not
        what is to be gone back to.
        """
        assert self._shard is not None
        taken = self._queue.refused()
        assert taken is not None
        if may_revert(taken.number, self._marked_at):
            self._shard.revert(taken.changes, self._broker.now_ms)
            self._shard.validate()
            self._arm()
        else:
            self._reload(self._loads)
        for held in taken.refused:
            held.fail(code)
        for held in taken.others:
            held.fail(ErrorCode.COORDINATOR_NOT_AVAILABLE if taken.for_itself else code)

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
            self._handle(Tick())


def may_revert(write: int, marked_at: int) -> bool:
    """Whether what a refused write changed can be taken back. Tests of the checkers put a bug
    here.
    """
    return write > marked_at


def told_to_others(code: ErrorCode) -> ErrorCode:
    """What those are told who waited behind a write that was refused: that a producer is fenced is
    for its own ears. Tests of the checkers put a bug here.
    """
    fenced = code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE)
    return ErrorCode.COORDINATOR_NOT_AVAILABLE if fenced else code


def _fail_others(fail: Callable[[ErrorCode], None], code: ErrorCode) -> None:
    fail(told_to_others(code))


def _refusal(code: ErrorCode, member_id: str = "") -> groups_pb2.GroupHeartbeatResponse:
    error = common_pb2.Error(code=code.value, message="simulated")
    return groups_pb2.GroupHeartbeatResponse(error=error, member_id=member_id)
