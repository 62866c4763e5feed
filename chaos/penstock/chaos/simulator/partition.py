"""The shell of one replica in the simulator: carries out what its state machine asks for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker.core.partition_events import (
    AdvanceLogStart,
    AppendRecords,
    AssignEpoch,
    Diverge,
    Effect,
    Event,
    HighWatermarkChanged,
    IsrChanged,
    LeaderLostRecords,
    LogAdvanced,
    ProposeIsr,
    Pushed,
    RefuseFollower,
    ReplicaRemoved,
    Role,
    RoleChanged,
    StartPush,
    StatePosition,
    Tick,
    TruncateFullyAndStartAt,
    TruncateTo,
)
from penstock.broker.core.replica import Replica
from penstock.broker.core.transactions import Marker
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.wire.errors import CorruptRecordError, ErrorCode, PenstockError
from penstock.wire.ids import LeaderEpoch, TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.scheduler import Timer

_UNTOLD = (AppendRecords, HighWatermarkChanged, StatePosition, StartPush)

Waiter = Callable[[ErrorCode | None], None]
"""Gets None when what it waited for has come, else why it will not."""


class Waiters:
    """Requests that wait until a mark reaches an offset."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._count = 0

    def add(self, offset: int, waiter: Waiter) -> None:
        """Wait until the mark is at ``offset``."""
        self._count += 1
        heapq.heappush(self._heap, (offset, self._count, waiter))

    def release(self, mark: int) -> None:
        """The mark is at ``mark``."""
        while self._heap and self._heap[0][0] <= mark:
            heapq.heappop(self._heap)[2](None)

    def fail(self, code: ErrorCode) -> None:
        """Nobody is to wait any longer."""
        heap, self._heap = self._heap, []
        for _, _, waiter in heap:
            waiter(code)


def _asks_again(effects: list[Effect]) -> bool:
    """Whether a push was no word of a leader that found this log to be a prefix of its own."""
    return not effects or any(isinstance(effect, StatePosition) for effect in effects)


class SimulatedPartition:
    """One partition that a broker hosts."""

    def __init__(
        self, key: TopicIdPartition, log: MemoryLog, replica: Replica, broker: SimulatedBroker
    ) -> None:
        self.key = key
        self.log = log
        self.replica = replica
        self.broker = broker
        self.feeds: dict[int, int] = {}  # Followers that are pushed to, and their sessions.
        self._committed = Waiters()  # acks=all
        self._durable = Waiters()  # acks=1
        self._timer: Timer | None = None
        self._looks_at_ms = 0  # By the node's clock.
        self._proposing = False
        self.closed = False

    @property
    def is_leader(self) -> bool:
        """This broker leads the partition."""
        return self.replica.role is Role.LEADER

    def handle(self, event: Event) -> None:
        """Hand an event to the state machine and do what it asks for."""
        if not self.closed:
            self.broker.touch(self)
        touched_log = False
        effects = self.replica.handle(event)
        if isinstance(event, Pushed) and not _asks_again(effects):
            self.log.history = self.replica.leader_epoch
        for effect in effects:
            if not isinstance(effect, _UNTOLD):
                self.broker.note(f"{self.key.partition} on {self.broker.node_id}: {effect}")
            if self._change_log(effect):
                touched_log = True
            else:
                self._act(effect)
        if touched_log:
            self.log_moved()
        self._arm()

    def close(self) -> None:
        """It is hosted here no longer: nothing more happens to it."""
        self.closed = True
        self.replica.handle(ReplicaRemoved())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiters in (self._durable, self._committed):
            waiters.fail(ErrorCode.NOT_LEADER)
        feeds, self.feeds = self.feeds, {}
        for session in feeds.values():
            self.broker.feeds.refuse(session, self, ErrorCode.NOT_LEADER)
        self.broker.transactions.closed(self)

    def log_moved(self) -> None:
        """The log's start, end or durable offset moved."""
        if self.log.needs_flush:
            self.broker.disk.flush_soon(self.log, self._flushed, self._flush_failed)
        self._durable.release(self.log.durable_offset)
        self.handle(LogAdvanced(self.broker.now_ms))

    def _flushed(self) -> None:
        if self.broker.alive and not self.closed:
            self.log_moved()
            self.broker.links.durable(self)

    def _flush_failed(self) -> None:
        if self.broker.alive:
            self.broker.place.flush_failed(self.broker.node_id, self.key)

    def read_failed(self, error: PenstockError) -> None:
        """Somebody could not be given what lies in the log."""
        if isinstance(error, CorruptRecordError):
            self.broker.repairs.found(self)

    def append(
        self,
        records: bytes,
        *,
        acks: int,
        on_done: Callable[..., None],
        verified: tuple[int, int] | None = None,
    ) -> None:
        """Append; ``on_done(base_offset, None)`` or ``on_done(-1, why)``.

        Raises what Log.append_as_leader raises.
        """
        info = self.log.append_as_leader(
            records,
            LeaderEpoch(self.replica.leader_epoch),
            now_ms=self.broker.now_ms,
            verified=verified,
        )
        if not info.duplicate:
            self._has_grown()
        waiters, mark = self._durable, self.log.durable_offset
        if acks < 0:
            waiters, mark = self._committed, self.replica.high_watermark
        base_offset, end = info.base_offset, info.last_offset + 1
        if mark >= end or acks == 0:
            on_done(base_offset, None)
        elif not self.is_leader:
            on_done(-1, ErrorCode.NOT_LEADER)
        else:
            waiters.add(end, lambda why: on_done(-1 if why else base_offset, why))

    def when_committed(self, offset: int, waiter: Waiter) -> None:
        """Tell when all below an offset is committed, or that it is not here that one hears it."""
        if not self.is_leader or self.closed:
            waiter(ErrorCode.NOT_LEADER)
        elif self.replica.high_watermark >= offset:
            waiter(None)
        else:
            self._committed.add(offset, waiter)

    def append_marker(
        self, marker: Marker, on_done: Waiter, *, on_marked: Callable[[], object]
    ) -> None:
        """Append the mark of a transaction, unless it is there; tell when it is committed.

        ``on_marked`` is called when it is in the log, before anything else gets there. Raises what
        Log.append_markers raises.
        """
        info = self.log.append_markers(
            [marker], LeaderEpoch(self.replica.leader_epoch), now_ms=self.broker.now_ms
        )
        if info.base_offset >= 0:
            self._has_grown()
        # Also where it is there already: it may not be committed.
        end_offset = self.log.log_end_offset
        on_marked()
        self.when_committed(end_offset, on_done)

    def _has_grown(self) -> None:
        self.log_moved()
        for session in list(self.feeds.values()):
            self.broker.feeds.records_ready(session, self)

    def delete_below(self, offset: int) -> None:
        """Move the log's start up, and let followers know."""
        self.log.advance_log_start(offset)
        self.log_moved()
        self._each_feed(self.broker.feeds.marks_ready)

    def _change_log(self, effect: Effect) -> bool:
        log = self.log
        match effect:
            case AppendRecords(records):
                try:
                    log.append_as_follower(records)
                except CorruptRecordError:  # Nothing was written: ask the leader again later.
                    self.broker.links.state(self, pause=True)
            case AssignEpoch(leader_epoch):
                log.assign_epoch(LeaderEpoch(leader_epoch))
            case TruncateTo(offset):
                log.truncate_to(offset)
                self.broker.disk.cut_high_watermark(self.key, offset)
            case TruncateFullyAndStartAt(offset, producers):
                log.truncate_fully_and_start_at(offset, producers)
                self.broker.disk.cut_high_watermark(self.key, offset)
            case AdvanceLogStart(offset):
                log.advance_log_start(offset)
            case _:
                return False
        return True

    def _act(self, effect: Effect) -> None:
        feeds = self.broker.feeds
        match effect:
            case HighWatermarkChanged(high_watermark):
                self.log.note_committed(high_watermark)
                self._committed.release(high_watermark)
                self._each_feed(feeds.marks_ready)
                self.broker.checkpoint_now_and_then(self)
            case StartPush(node_id, session, offset):
                if feeds.start(session, self, offset):
                    self.feeds[node_id] = session
            case Diverge(node_id, session, end):
                self.feeds.pop(node_id, None)
                feeds.diverge(session, self, end)
            case RefuseFollower(node_id, session, code):
                self._refuse(node_id, session, code)
            case StatePosition(pause):
                self.broker.links.state(self, pause=pause)
            case ProposeIsr():
                self._propose()
            case IsrChanged(under_min_isr=under_min_isr):
                if under_min_isr:
                    self._committed.fail(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
            case RoleChanged():
                self._role_changed()
            case LeaderLostRecords():
                self.broker.records_lost(self)
            case _:
                raise AssertionError(f"an effect that nobody carries out: {effect}")

    def _refuse(self, node_id: int, session: int, code: ErrorCode) -> None:
        if self.feeds.get(node_id) == session:  # A later stream of the follower goes on.
            del self.feeds[node_id]
        self.broker.feeds.refuse(session, self, code)

    def _each_feed(self, tell: Callable[[int, SimulatedPartition], None]) -> None:
        for session in list(self.feeds.values()):
            tell(session, self)

    def _role_changed(self) -> None:
        if self.is_leader:
            self.log.history = self.replica.leader_epoch
        self.log.note_committed(self.replica.high_watermark)
        for waiters in (self._durable, self._committed):
            waiters.fail(ErrorCode.NOT_LEADER)
        feeds, self.feeds = self.feeds, {}
        for session in feeds.values():
            self.broker.feeds.refuse(session, self, ErrorCode.NOT_LEADER)
        self.broker.role_changed(self)

    def _propose(self) -> None:
        if not self._proposing:
            self._proposing = True
            self.broker.propose(self, self._answered)

    def _answered(self, *, again: bool) -> None:
        """A proposal was answered, or must be made again."""
        self._proposing = False
        if again and self.replica.pending is not None and not self.closed:
            self._propose()

    def _arm(self) -> None:
        """See to it that there is a tick when something is due, or a look before that.

        Nearly every event puts off what is due: then the timer stays as it is.
        """
        due_ms = self._due_ms()
        if due_ms is None or (self._timer is not None and self._looks_at_ms <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at_ms = due_ms
        self._timer = self.broker.after(due_ms - self.broker.now_ms, self._look)

    def _due_ms(self) -> int | None:
        return self.replica.next_deadline_ms() if self.is_leader else None

    def _look(self) -> None:
        self._timer = None
        due_ms = self._due_ms()
        if due_ms is not None and due_ms <= self.broker.now_ms:
            self.handle(Tick(self.broker.now_ms))
        else:
            self._arm()
