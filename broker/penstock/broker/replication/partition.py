"""The shell of one replica: carries out what the state machine asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

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
    LogEffect,
    LogFailed,
    OutOfSync,
    ProposeIsr,
    RefuseFollower,
    ReplicaRemoved,
    Role,
    RoleChanged,
    StartPush,
    StatePosition,
    TruncateFullyAndStartAt,
    TruncateTo,
)
from penstock.broker.core.ports import (
    AppendInfo,
    Buffer,
    DamagedLogError,
    Log,
    OlderEpochError,
)
from penstock.broker.core.replica import Replica
from penstock.broker.core.transactions import Marker
from penstock.broker.replication.answers import not_enough_replicas_after_append
from penstock.broker.replication.purgatory import OffsetWaiters
from penstock.wire.errors import (
    ERRORS,
    ErrorCode,
    PenstockError,
    RequestTimedOutError,
    StorageError,
)
from penstock.wire.ids import LeaderEpoch, TopicIdPartition, TopicPartition

logger = structlog.get_logger()

_LOG_EFFECTS = (AssignEpoch, AppendRecords, TruncateTo, TruncateFullyAndStartAt, AdvanceLogStart)


class FollowerFeed(Protocol):
    """A follower's stream, as a partition that is led here uses it."""

    def start(self, partition: Partition, offset: int) -> None:
        """Push from ``offset`` on."""
        ...

    def diverge(self, partition: Partition, effect: Diverge) -> None:
        """Tell the follower to cut."""
        ...

    def refuse(self, partition: Partition, error: PenstockError) -> None:
        """Tell the follower that it is not served, and forget it."""
        ...

    def records_ready(
        self, partition: Partition, size_bytes: int, *, may_wait: bool = False
    ) -> None:
        """The log has grown by so much. ``may_wait``: for what comes next, or some milliseconds."""
        ...

    def membership_changed(self, partition: Partition) -> None:
        """The in-sync set, or what may be in it, is another."""
        ...

    def marks_ready(self, partition: Partition) -> None:
        """The high watermark or the log start moved."""
        ...

    def close(self) -> None:
        """End the stream."""
        ...


class Host(Protocol):
    """What a partition asks of its manager."""

    def feed(self, session: int) -> FollowerFeed | None:
        """The follower's stream of this number, while it lives."""
        ...

    def flush_soon(self, log: Log) -> None:
        """Make appended records durable."""
        ...

    def appended(self, partition: Partition, info: AppendInfo) -> None:
        """A producer's records are in the log of a partition led here."""
        ...

    def propose(self, partition: Partition) -> None:
        """Send the replica's pending proposal to the controllers."""
        ...

    def isr_changed(self, change: IsrChanged) -> None:
        """The in-sync set of a partition that is led here is another."""
        ...

    def role_changed(self, partition: Partition, was_leader_in: int) -> None:
        """The replica has another role or epoch; ``was_leader_in``: the epoch it led in, or -1."""
        ...

    def state_position(self, partition: Partition, *, pause: bool) -> None:
        """State the position to the leader."""
        ...

    def high_watermark_changed(self, partition: Partition) -> None:
        """There is a new high watermark to keep."""
        ...

    def arm(self, partition: Partition) -> None:
        """The replica has a deadline."""
        ...

    def not_leader(self, key: TopicIdPartition) -> PenstockError:
        """The error for requests to a partition that is not led here."""
        ...

    def offline(self, key: TopicIdPartition, reason: PenstockError) -> PenstockError:
        """The error for requests to a partition whose replica here can't be served."""
        ...

    def log_failed(self, partition: Partition, error: StorageError) -> None:
        """The replica can't be served, for as long as this process lives."""
        ...

    def log_is_shut(
        self, key: TopicIdPartition, name: TopicPartition, error: DamagedLogError
    ) -> None:
        """The replica's log can't be used, and there is no partition of it here."""
        ...

    def records_lost(self) -> None:
        """A disk of this broker lost records that it had confirmed."""
        ...

    @property
    def clock_ms(self) -> Callable[[], int]:
        """A monotonic clock."""
        ...


class Partition:
    """One partition hosted here. Everything happens on the event loop.

    ``log`` is changed through this class alone, so that the state machine and whoever waits
    always learn of it.
    """

    def __init__(
        self, key: TopicIdPartition, name: TopicPartition, log: Log, replica: Replica, host: Host
    ) -> None:
        self.key = key
        self.name = name
        self.log = log
        self.replica = replica
        self.durable_waiters = OffsetWaiters()  # acks=1
        self.commit_waiters = OffsetWaiters()  # acks=all: failed when the in-sync set is too small
        self.high_watermark_waiters = OffsetWaiters()  # Readers: they wait that out.
        self.log_start_waiters: set[Callable[[], None]] = set()
        self.fetch_waiters: set[Callable[[Partition], None]] = set()
        self.feeds: dict[int, FollowerFeed] = {}
        self.armed_ms: int | None = None
        self.failed: StorageError | None = None
        self.closed = False  # For good: it is no longer hosted here.
        self._cannot_follow: type[PenstockError] | None = None  # Reported, and not over yet.
        self._led_in = -1
        self._host = host

    @property
    def is_leader(self) -> bool:
        """Whether this broker leads the partition."""
        return self.replica.role is Role.LEADER and not self.closed

    def check_leading(self) -> None:
        """Raise what a request is to be answered with unless this broker leads the partition."""
        if self.is_leader:
            return
        if self.failed is not None:
            raise self._host.offline(self.key, self.failed)
        raise self._host.not_leader(self.key)

    def handle(self, event: Event) -> None:
        """Hand one event to the state machine and carry out what it asks for."""
        self._carry_out(self.replica.handle(event))
        if self.replica.role is Role.LEADER:
            self._arm()

    def append_as_leader(
        self, records: Buffer, *, wall_ms: int, verified: tuple[int, int] | None = None
    ) -> AppendInfo:
        """Append a producer's batches; the caller has checked that this broker leads.

        ``verified`` is the producer id and epoch whose transaction may write here, as its
        coordinator said. Raises what Log.append_as_leader raises. A StorageError takes the replica
        offline.
        """
        try:
            info = self.log.append_as_leader(
                records,
                LeaderEpoch(self.replica.leader_epoch),
                now_ms=wall_ms,
                verified=verified,
            )
        except StorageError as error:
            self._fail(error)
            raise
        if not info.duplicate:
            self._appended(info)
        return info

    def append_markers(
        self, markers: Sequence[Marker], *, wall_ms: int, may_wait: bool = False
    ) -> AppendInfo:
        """End transactions with marks, those that are there already left out.

        As ``append_as_leader`` otherwise. ``may_wait``: followers are sent them with what is
        appended next, or a few milliseconds later.
        """
        try:
            info = self.log.append_markers(
                markers, LeaderEpoch(self.replica.leader_epoch), now_ms=wall_ms
            )
        except StorageError as error:
            self._fail(error)
            raise
        if info.size_bytes:
            self._appended(info, may_wait=may_wait)
        return info

    def _appended(self, info: AppendInfo, *, may_wait: bool = False) -> None:
        self.log_moved()
        self._host.appended(self, info)
        for feed in self.feeds.values():
            feed.records_ready(self, info.size_bytes, may_wait=may_wait)

    def advance_log_start(self, offset: int) -> None:
        """Delete what lies before ``offset``, and let the followers know."""
        self.log.advance_log_start(offset)
        self.log_moved()
        self._marks_ready()

    def log_moved(self) -> None:
        """The log's start, end or durable offset moved."""
        log = self.log
        if log.durable_offset < log.log_end_offset:
            self._host.flush_soon(log)
        self.durable_waiters.release(log.durable_offset)
        self.handle(LogAdvanced(self._host.clock_ms()))

    def log_start_moved(self) -> None:
        """The log start, here or of a follower, may be durable further on."""
        for wake in tuple(self.log_start_waiters):
            wake()

    def close(self) -> None:
        """The replica is no longer hosted here: everybody who waits is answered."""
        self.closed = True
        self.replica.handle(ReplicaRemoved())
        self._release_all()
        self._refuse_feeds()

    def _arm(self) -> None:
        deadline = None
        if self.armed_ms is None or self.replica.pending is None:
            deadline = self.replica.next_deadline_ms()
        if deadline is not None and (self.armed_ms is None or deadline < self.armed_ms):
            self.armed_ms = deadline
            self._host.arm(self)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        touched_log = False
        for effect in effects:
            if isinstance(effect, _LOG_EFFECTS):
                if not self._change_log(effect):
                    return
                touched_log = True
            else:
                self._act(effect)
        if touched_log:
            self.log_moved()

    def _change_log(self, effect: LogEffect) -> bool:
        """Carry out an effect on the log; False when the rest of the effects is void."""
        log = self.log
        try:
            match effect:
                case AppendRecords(records):
                    log.append_as_follower(records)
                    self._follows_again()
                case AssignEpoch(leader_epoch):
                    log.assign_epoch(LeaderEpoch(leader_epoch))
                case TruncateTo(offset):
                    logger.info("log cut", partition=str(self.name), offset=offset)
                    log.truncate_to(offset)
                case TruncateFullyAndStartAt(offset, producers):
                    logger.info("log restarted", partition=str(self.name), offset=offset)
                    log.truncate_fully_and_start_at(offset, producers)
                case AdvanceLogStart(offset):
                    log.advance_log_start(offset)
        except StorageError as error:
            self._fail(error)
            return False
        except PenstockError as error:
            if isinstance(effect, AssignEpoch):
                self._fail(self._cannot_lead(effect, error))
                return False
            if isinstance(error, OlderEpochError) and self._cannot_follow is OlderEpochError:
                self._fail(self._contradicts(error))  # The leader sent the same again.
                return False
            # A corrupt push or a full disk: nothing was written; ask the leader again later.
            if type(error) is not self._cannot_follow:  # Once, not for each attempt.
                self._cannot_follow = type(error)
                # What only takes its time goes on by itself, within a second as a rule.
                if isinstance(error, RequestTimedOutError):
                    logger.info("replica waits", partition=str(self.name), reason=error.message)
                else:
                    logger.warning(
                        "replica cannot follow", partition=str(self.name), error=error.message
                    )
            self._host.state_position(self, pause=True)
            return False
        return True

    def _follows_again(self) -> None:
        if self._cannot_follow is not None:
            self._cannot_follow = None
            logger.info("replica follows again", partition=str(self.name))

    def _cannot_lead(self, effect: AssignEpoch, error: PenstockError) -> StorageError:
        """The log is ahead of the epoch that the controllers have come to."""
        return StorageError(
            f"{self.name}: cannot lead in epoch {effect.leader_epoch}: {error.message}. Either the "
            "controllers have lost metadata, or the log is of other metadata: bring back the right "
            "metadata; or move the partition's directory away and restart the broker, and it is "
            "copied anew from its leader"
        )

    def _contradicts(self, error: OlderEpochError) -> DamagedLogError:
        """The leader has another epoch where the log here ends, and no cut brings them together."""
        return DamagedLogError(
            f"{error.message}. No leader has gone back in its epochs, so it is the log here that "
            "says what was not written (no checksum covers a batch's leader epoch); it is copied "
            "anew from the leader",
            self.log.log_end_offset,
            self.replica.high_watermark,
        )

    def _fail(self, error: StorageError) -> None:
        if self.failed is None:
            logger.error("replica is offline", partition=str(self.name), error=error.message)
        self.fail(error)

    def fail(self, error: StorageError) -> None:
        """The log can't be used any more: the replica is offline for as long as this process lives.

        Whoever calls says so in the log.
        """
        if self.failed is not None or self.closed:
            return
        self.failed = error
        self._carry_out(self.replica.handle(LogFailed()))
        self._host.log_failed(self, error)

    def _act(self, effect: Effect) -> None:
        match effect:
            case HighWatermarkChanged(high_watermark):
                self.log.note_committed(high_watermark)
                self.commit_waiters.release(high_watermark)
                self.high_watermark_waiters.release(high_watermark)
                self._marks_ready()
                self._host.high_watermark_changed(self)
                self._wake_fetches()
            case StartPush(node_id, session, offset):
                feed = self._host.feed(session)
                if feed is not None:
                    self.feeds[node_id] = feed
                    feed.start(self, offset)
            case StatePosition(pause):
                self._host.state_position(self, pause=pause)
            case ProposeIsr():
                self._membership_changed()
                self._host.propose(self)
            case IsrChanged():
                self._isr_changed(effect)
            case RoleChanged():
                self._role_changed()
            case _:
                self._answer_follower(effect)

    def _answer_follower(self, effect: Effect) -> None:
        match effect:
            case Diverge(node_id, session):
                self.feeds.pop(node_id, None)
                feed = self._host.feed(session)
                if feed is not None:
                    feed.diverge(self, effect)
            case RefuseFollower(node_id, session, code):
                feed = self._host.feed(session)
                if self.feeds.get(node_id) is feed:  # A later stream of the follower goes on.
                    self.feeds.pop(node_id, None)
                if feed is not None:
                    feed.refuse(self, self._refusal(node_id, code))
            case LeaderLostRecords():
                self._lost_records(effect)

    def _lost_records(self, effect: LeaderLostRecords) -> None:
        """What is here is less than was promised, and nobody knows what else is missing.

        So the replica is given up for as long as this process lives: the controllers are told, and
        have another one lead. They learn at the next start too that not all is here.
        """
        self._host.records_lost()
        epoch = self.replica.leader_epoch
        logger.error(
            "leader lost records and leads no more",
            partition=str(self.name),
            leader_epoch=epoch,
            own_end_offset=effect.own_end_offset,
            follower=effect.node_id,
            follower_end_offset=effect.follower_end_offset,
            next_step="another replica in sync leads; if there is none, do not restart this broker "
            f"before one that has more was elected (`penstock partitions elect {self.name.topic}:"
            f"{self.name.partition} --unclean`), and look after the disk",
        )
        self.fail(
            StorageError(
                f"{self.name}: the log here ends at offset {effect.own_end_offset} and lacks "
                f"records that it had in leader epoch {epoch}: broker {effect.node_id} has them up "
                f"to offset {effect.follower_end_offset}. Its disk lost what it had confirmed; the "
                "replica is offline here until the broker is restarted"
            )
        )

    def _refusal(self, node_id: int, code: ErrorCode) -> PenstockError:
        if code is ErrorCode.NOT_LEADER:
            return self._host.not_leader(self.key)
        return ERRORS[code](
            f"{self.name}: broker {node_id} cannot follow in the epoch it stated; here the leader "
            f"epoch is {self.replica.leader_epoch}, the replicas are {self.replica.replicas}"
        )

    def _isr_changed(self, effect: IsrChanged) -> None:
        say = logger.warning if effect.left else logger.info
        say(
            "in-sync set",
            partition=str(self.name),
            leader_epoch=self.replica.leader_epoch,
            isr=sorted(effect.isr),
            under_min_isr=effect.under_min_isr,
            **({"left": _listed(effect.left)} if effect.left else {}),
            **({"joined": sorted(effect.joined)} if effect.joined else {}),
        )
        self._host.isr_changed(effect)
        if effect.under_min_isr:
            replica = self.replica
            self.commit_waiters.fail(
                lambda: not_enough_replicas_after_append(
                    self.name, effect.isr, replica.min_isr, replica.replicas
                )
            )
        self._membership_changed()
        self.log_start_moved()

    def _role_changed(self) -> None:
        replica = self.replica
        logger.info(
            "replica state",
            partition=str(self.name),
            role=replica.role.value,
            leader=replica.leader,
            leader_epoch=replica.leader_epoch,
            high_watermark=replica.high_watermark,
            log_end_offset=self.log.log_end_offset,
        )
        was_leader_in, self._led_in = self._led_in, -1
        if self.is_leader:
            self._led_in = replica.leader_epoch
        self.log.note_committed(replica.high_watermark)
        self._release_all()
        self._refuse_feeds()
        self._host.role_changed(self, was_leader_in)

    def _release_all(self) -> None:
        """Whoever waits under the former leadership is answered."""
        for waiters in (self.durable_waiters, self.commit_waiters, self.high_watermark_waiters):
            waiters.fail(lambda: self._host.not_leader(self.key))
        self._wake_fetches()
        self.log_start_moved()

    def _refuse_feeds(self) -> None:
        feeds, self.feeds = self.feeds, {}
        for feed in feeds.values():
            feed.refuse(self, self._host.not_leader(self.key))

    def _membership_changed(self) -> None:
        for feed in self.feeds.values():
            feed.membership_changed(self)

    def _marks_ready(self) -> None:
        for feed in self.feeds.values():
            feed.marks_ready(self)

    def _wake_fetches(self) -> None:
        for wake in tuple(self.fetch_waiters):
            wake(self)


def _listed(left: Mapping[int, OutOfSync]) -> str:
    return ", ".join(f"{node_id} ({why.value})" for node_id, why in left.items())
