"""One replica of one partition: a pure state machine that leads, follows, or is offline.

========  =====================  ==============================================================
role      event                  what follows
========  =====================  ==============================================================
any       PartitionChanged       by leader: AssignEpoch and lead; follow and StatePosition; or
                                 OFFLINE. Same leader epoch: only in-sync set and min ISR are taken
any       LogFailed              OFFLINE for good
any       ReplicaRemoved         nothing any more, whatever comes
leader    LogAdvanced            high watermark; the lag clocks of followers
leader    FollowerPositioned     StartPush, Diverge or RefuseFollower
leader    FollowerAcked          high watermark; ProposeIsr when the follower caught up
leader    Tick                   ProposeIsr without those that lag for too long
leader    ProposalAnswered       act on the committed state; wish again later when refused;
                                 OFFLINE when deposed, until the metadata say what comes
leader    BrokersChanged         ProposeIsr with those that caught up and may join now
leader    LagMaxChanged          ProposeIsr without those that lag for too long
follower  Pushed                 AppendRecords, TruncateTo..., StatePosition, high watermark
follower  LogAdvanced            high watermark, log start
follower  CopyAnew               TruncateFullyAndStartAt, StatePosition; not while in sync
========  =====================  ==============================================================

What it holds to:

- The high watermark is the smallest durable end over the in-sync set and all that may be in it
  (KIP-497); it rests while the in-sync set is smaller than ``min.insync.replicas`` (KIP-966) and
  never goes back within a leadership. A new leader starts from the one it knew as a follower, as
  far as its own log is durable: one elected uncleanly may not have flushed what it copied.
- A leader acts on a change of the in-sync set only once it is committed, and only together with
  the ``min.insync.replicas`` of the same partition epoch.
- Logs are reconciled by leader epochs alone (KIP-101, KIP-279, KIP-595), never by high watermarks.
- Only positions of the follower's newest stream, in this leader epoch, whose log was found to be a
  prefix of the leader's, count.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.broker.core.partition_events import (
    AdvanceLogStart,
    AppendRecords,
    AssignEpoch,
    BrokersChanged,
    BrokerStatus,
    CopyAnew,
    Diverge,
    Effect,
    Event,
    FollowerAcked,
    FollowerPositioned,
    HighWatermarkChanged,
    IsrChanged,
    IsrProposal,
    LagMaxChanged,
    LeaderLostRecords,
    LogAdvanced,
    LogFailed,
    LogView,
    MinIsrChanged,
    OutOfSync,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
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
from penstock.broker.core.partition_leader import REFUSAL_PAUSE_MS, Follower, Leadership
from penstock.broker.core.ports import EpochEnd
from penstock.wire.errors import ErrorCode


class Replica:
    """The state machine. ``handle`` alone changes it; effects are to be carried out in order.

    ``log`` is read, never changed. ``high_watermark`` is the one checkpointed (any value: it is
    brought into the log's bounds). ``lag_max_ms`` is ``replica.lag.time.max.ms``.
    """

    def __init__(self, node_id: int, log: LogView, *, high_watermark: int, lag_max_ms: int) -> None:
        self.node_id = node_id
        self.role = Role.OFFLINE
        self.leader = -1
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.min_isr = 1
        self._min_isr_was_told = False  # By the state that is known: then it is of its epoch.
        self._log = log
        self._lag_max_ms = lag_max_ms
        self._failed = False
        self._removed = False
        self._isr: frozenset[int] = frozenset()
        self._replicas: tuple[int, ...] = ()
        self._brokers: Mapping[int, BrokerStatus] = {}
        self._high_watermark = max(log.log_start_offset, min(high_watermark, log.log_end_offset))
        self._leadership: Leadership | None = None
        # As a follower: what the leader said last, and whether an answer to a stated position is
        # still to come (pushes that do not fit were sent before the leader read it).
        self._leader_high_watermark = -1
        self._leader_log_start = -1
        self._awaiting_start = False
        self._last_cut: tuple[int, int, EpochEnd] | None = None

    @property
    def high_watermark(self) -> int:
        """Everything below is committed."""
        return self._high_watermark

    @property
    def isr(self) -> frozenset[int]:
        """The in-sync set as the controllers committed it."""
        return self._isr

    @property
    def replicas(self) -> tuple[int, ...]:
        """The assigned replicas, the preferred leader first."""
        return self._replicas

    @property
    def maximal_isr(self) -> frozenset[int]:
        """As the leader: the in-sync set and all that may be in it (KIP-497)."""
        return self._isr if self._leadership is None else self._leadership.maximal_isr

    @property
    def under_min_isr(self) -> bool:
        """Whether acks=all is to be refused."""
        return len(self._isr) < self.min_isr

    @property
    def pending(self) -> IsrProposal | None:
        """As the leader: the proposal whose outcome is unknown."""
        return None if self._leadership is None else self._leadership.pending

    @property
    def epoch_start_offset(self) -> int:
        """As the leader: the log's end when this leadership began; -1 otherwise."""
        return -1 if self._leadership is None else self._leadership.epoch_start_offset

    def followers(self) -> Mapping[int, Follower]:
        """As the leader: what is known of each follower (read only)."""
        return {} if self._leadership is None else self._leadership.followers

    def out_of_sync(self, now_ms: int) -> dict[int, OutOfSync]:
        """As the leader: the followers that are not in sync, and why."""
        leadership = self._leadership
        if leadership is None or len(self._isr) > len(leadership.followers):
            return {}
        return {
            node_id: why
            for node_id in sorted(leadership.followers)
            if (why := leadership.out_of_sync(node_id, self._brokers, now_ms)) is not None
        }

    def next_deadline_ms(self) -> int | None:
        """When a Tick is wanted; it may move earlier or later with any event."""
        return None if self._leadership is None else self._leadership.next_deadline_ms()

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each event.
        """Take one event; the effects are in the order in which they are to be carried out."""
        if self._removed:
            return []
        match event:
            case LogAdvanced():
                return self._log_advanced(event)
            case FollowerAcked():
                return self._follower_acked(event)
            case Pushed():
                return self._pushed(event)
            case FollowerPositioned():
                return self._follower_positioned(event)
            case PartitionChanged():
                return self._partition_told(event)
            case MinIsrChanged():
                return self._min_isr_changed(event.min_isr)
            case LagMaxChanged():
                return self._lag_max_changed(event)
            case BrokersChanged():
                self._brokers = event.brokers
                return self._propose(event.now_ms)
            case ProposalAnswered():
                return self._proposal_answered(event)
            case Tick():
                return self._propose(event.now_ms, shrink=True)
            case LogFailed():
                return self._log_failed()
            case ReplicaRemoved():
                return self._remove()
            case CopyAnew():
                return self._copy_anew()

    # --- Roles ----------------------------------------------------------------------------

    def _partition_told(self, event: PartitionChanged) -> list[Effect]:
        if self._is_news(event.state):
            return self._partition_changed(event.state, event.min_isr, event.now_ms)
        return self._min_isr_changed(event.min_isr)

    def _is_news(self, state: PartitionState) -> bool:
        return state.partition_epoch > self.partition_epoch

    def _partition_changed(self, state: PartitionState, min_isr: int, now_ms: int) -> list[Effect]:
        """Act on a newer state and on the min ISR that belongs to it, on both at once.

        ``min_isr`` stands in where the state says none. An in-sync set under the min ISR of another
        epoch would commit what eligible leaders do not have; the end of a leadership must not be
        preceded by what that leadership can't decide any more.
        """
        if self._failed:
            return []
        same_leadership = state.leader_epoch == self.leader_epoch and self.partition_epoch >= 0
        self.partition_epoch = state.partition_epoch
        self.min_isr = state.min_isr or min_isr
        self._min_isr_was_told = state.min_isr > 0
        self._replicas = state.replicas
        self._isr = state.isr
        if same_leadership:
            return self._in_sync_changed(state, now_ms)
        self.leader, self.leader_epoch = state.leader, state.leader_epoch
        self._leadership = None
        if state.leader == self.node_id:
            return self._become_leader(state, now_ms)
        return self._become_follower()

    def _in_sync_changed(self, state: PartitionState, now_ms: int) -> list[Effect]:
        leadership = self._leadership
        if leadership is None:
            return []
        was_in = leadership.isr
        leadership.commit(state, now_ms)
        self._isr = leadership.isr
        return [
            self._isr_changed(was_in, now_ms),
            *self._advance_high_watermark(),
            *self._propose(now_ms),
        ]

    def _isr_changed(self, was_in: frozenset[int], now_ms: int) -> IsrChanged:
        reasons = self.out_of_sync(now_ms) if was_in - self._isr else {}
        left = {node_id: why for node_id, why in reasons.items() if node_id in was_in}
        return IsrChanged(self._isr, self.under_min_isr, left, self._isr - was_in)

    def _become_leader(self, state: PartitionState, now_ms: int) -> list[Effect]:
        self.role = Role.LEADER
        known = self._high_watermark
        durable = min(known, self._log.durable_offset)
        self._high_watermark = max(durable, self._log.log_start_offset)
        self._leadership = Leadership(
            self.node_id,
            self._log,
            state,
            high_watermark=self._high_watermark,
            lag_max_ms=self._lag_max_ms,
            now_ms=now_ms,
        )
        self._isr = self._leadership.isr
        return [
            AssignEpoch(self.leader_epoch),
            RoleChanged(self.role, self.leader, self.leader_epoch),
            self._isr_changed(self._isr, now_ms),
            *([HighWatermarkChanged(self._high_watermark)] if durable < known else []),
            *self._advance_high_watermark(),
        ]

    def _become_follower(self) -> list[Effect]:
        self.role = Role.FOLLOWER if self.leader >= 0 else Role.OFFLINE
        self._leader_high_watermark = -1
        self._leader_log_start = -1
        self._awaiting_start = True
        self._last_cut = None
        effects: list[Effect] = [RoleChanged(self.role, self.leader, self.leader_epoch)]
        if self.role is Role.FOLLOWER:
            effects.append(StatePosition())
        return effects

    def _log_failed(self) -> list[Effect]:
        if self._failed:
            return []
        self._failed = True
        # It may have stepped down before, since it lost records.
        return [] if self.role is Role.OFFLINE else self._step_down()

    def _remove(self) -> list[Effect]:
        self._removed = True
        return []

    def _step_down(self) -> list[Effect]:
        self.role = Role.OFFLINE
        self._leadership = None
        return [RoleChanged(self.role, self.leader, self.leader_epoch)]

    # --- Leader ---------------------------------------------------------------------------

    def _log_advanced(self, event: LogAdvanced) -> list[Effect]:
        if self._leadership is not None:
            self._leadership.observe_log_end(event.now_ms)
            return self._advance_high_watermark()
        if self._high_watermark > self._log.log_end_offset:
            # A cut takes whole batches, so it may have gone below where it was asked to.
            self._high_watermark = self._log.log_end_offset
            return [HighWatermarkChanged(self._high_watermark)]
        if self.role is Role.FOLLOWER and not self._awaiting_start:
            return self._take_over_leader_marks()
        return []

    def _advance_high_watermark(self) -> list[Effect]:
        leadership = self._leadership
        if leadership is None:
            return []
        rose = leadership.advance_high_watermark(self.min_isr)
        if leadership.high_watermark < self._log.log_start_offset:
            leadership.high_watermark = self._log.log_start_offset
            rose = True
        if not rose:
            return []
        self._high_watermark = leadership.high_watermark
        return [HighWatermarkChanged(self._high_watermark)]

    def _min_isr_changed(self, min_isr: int) -> list[Effect]:
        """Other configs, without a newer state: news only where no state tells its min ISR."""
        if self._min_isr_was_told or min_isr == self.min_isr:
            return []
        self.min_isr = min_isr
        if self._leadership is None:
            return []
        changed = IsrChanged(self._isr, self.under_min_isr, {}, frozenset())
        return [changed, *self._advance_high_watermark()]

    def _lag_max_changed(self, event: LagMaxChanged) -> list[Effect]:
        self._lag_max_ms = event.lag_max_ms
        if self._leadership is None:
            return []
        self._leadership.lag_max_ms = event.lag_max_ms
        return self._propose(event.now_ms, shrink=True)

    def _follower_positioned(self, event: FollowerPositioned) -> list[Effect]:
        leadership = self._leadership
        follower = None if leadership is None else leadership.followers.get(event.node_id)
        error = self._position_error(event, follower)
        if error is not None:
            return [RefuseFollower(event.node_id, event.session, error)]
        assert leadership is not None
        assert follower is not None
        if event.session < follower.session:
            return []  # It has opened a newer stream since.
        follower.session = event.session
        follower.broker_epoch = event.broker_epoch
        follower.forget(self._log.log_end_offset, event.now_ms)
        end = self._divergence(event)
        if end is not None:
            if event.last_epoch == self.leader_epoch and event.log_end_offset > end.end_offset >= 0:
                lost = LeaderLostRecords(event.node_id, event.log_end_offset, end.end_offset)
                return [lost, *self._step_down()]
            return [Diverge(event.node_id, event.session, end)]
        follower.matched = True
        follower.acked(
            event.log_end_offset, event.log_start_offset, self._log.log_end_offset, event.now_ms
        )
        return [
            StartPush(event.node_id, event.session, event.log_end_offset),
            *self._advance_high_watermark(),
            *self._propose(event.now_ms),
        ]

    def _position_error(
        self, event: FollowerPositioned, follower: Follower | None
    ) -> ErrorCode | None:
        if event.leader_epoch < self.leader_epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        if event.leader_epoch > self.leader_epoch or event.last_epoch > self.leader_epoch:
            return ErrorCode.UNKNOWN_LEADER_EPOCH
        if self._leadership is None:
            return ErrorCode.NOT_LEADER
        if follower is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION  # It is no replica, as far as known here.
        status = self._brokers.get(event.node_id)
        if status is not None and event.broker_epoch < status.broker_epoch:
            return ErrorCode.STALE_BROKER_EPOCH
        return None

    def _divergence(self, event: FollowerPositioned) -> EpochEnd | None:
        """None when the follower's log is a prefix of this one, else where it is to cut."""
        log = self._log
        restart = EpochEnd(-1, log.log_start_offset)
        if event.log_end_offset < log.log_start_offset:
            return restart  # What it needs next is deleted.
        if event.last_epoch < 0:  # An empty log diverges in nothing.
            if event.log_end_offset > log.log_end_offset:
                return restart
            # But where it is not told what producers wrote below, it would append that again.
            return EpochEnd(-1, event.log_end_offset) if event.knows_no_producers else None
        end = log.end_of_epoch(event.last_epoch)
        if end.leader_epoch < 0:
            # All of its epochs are deleted here; it may only begin where this log begins.
            return None if event.log_end_offset == log.log_start_offset else restart
        if end.leader_epoch == event.last_epoch and event.log_end_offset <= end.end_offset:
            return None
        return end

    def _follower_acked(self, event: FollowerAcked) -> list[Effect]:
        leadership = self._leadership
        if leadership is None or event.leader_epoch != self.leader_epoch:
            return []
        follower = leadership.followers.get(event.node_id)
        if (
            follower is None
            or not follower.matched
            or event.session != follower.session
            or event.log_end_offset > self._log.log_end_offset
        ):
            return []
        follower.acked(
            event.log_end_offset, event.log_start_offset, self._log.log_end_offset, event.now_ms
        )
        return [*self._advance_high_watermark(), *self._propose(event.now_ms)]

    def _propose(self, now_ms: int, *, shrink: bool = False) -> list[Effect]:
        if self._leadership is None:
            return []
        proposal = self._leadership.propose(self._brokers, now_ms, shrink=shrink)
        return [] if proposal is None else [ProposeIsr(proposal)]

    def _proposal_answered(self, event: ProposalAnswered) -> list[Effect]:
        leadership = self._leadership
        if (
            leadership is not None
            and leadership.pending == event.proposal
            and event.error is ErrorCode.INELIGIBLE_REPLICA
        ):  # Until the metadata say why, it would wish for the same, in each new partition epoch.
            leadership.retry_at_ms = event.now_ms + REFUSAL_PAUSE_MS
        if event.state is not None and self._is_news(event.state):
            if event.state.leader_epoch != self.leader_epoch:
                return self._deposed(event)
            if not event.state.min_isr:
                return []  # The metadata will bring the state, and the min ISR to go with it.
            return self._partition_changed(event.state, event.state.min_isr, event.now_ms)
        if leadership is None or leadership.pending != event.proposal or event.state is None:
            return []  # Settled by the metadata, or a matter for the metadata (topic deleted).
        if event.state.partition_epoch < self.partition_epoch:
            return []  # Said before what is known here: the outcome is still open.
        # Settled on the very state it was based on: it has changed nothing and never will. (Below
        # metadata.version 4 no refusal for a member raises the epoch: see replication.md.)
        leadership.pending = None
        leadership.retry_at_ms = event.now_ms + REFUSAL_PAUSE_MS
        return self._advance_high_watermark()

    def _deposed(self, answer: ProposalAnswered) -> list[Effect]:
        """Lead no longer, and wait for the metadata to say what comes instead.

        They come in order, an answer may be ahead of them. In between the replica may have been
        moved away and given back: whoever followed by the answer would come into the in-sync set
        with the log that the metadata then have deleted.
        """
        assert answer.state is not None
        assert answer.state.leader_epoch > self.leader_epoch, "a newer state of an older leadership"
        return [] if self._leadership is None else self._step_down()

    # --- Follower -------------------------------------------------------------------------

    def _pushed(self, event: Pushed) -> list[Effect]:
        if self.role is not Role.FOLLOWER or event.leader_epoch != self.leader_epoch:
            return []
        if event.diverging is not None:
            return self._cut(event.diverging, event.producers)
        log_end = self._log.log_end_offset
        if event.base_offset != log_end:
            if event.base_offset < log_end or self._awaiting_start:
                return []  # Sent before the leader read the position that was stated last.
            self._awaiting_start = True
            return [StatePosition()]
        self._awaiting_start = False
        self._last_cut = None
        self._leader_high_watermark = event.high_watermark
        self._leader_log_start = event.log_start_offset
        if len(event.records) > 0:
            return [AppendRecords(event.records)]
        return self._take_over_leader_marks()

    def _take_over_leader_marks(self) -> list[Effect]:
        effects: list[Effect] = []
        log_end = self._log.log_end_offset
        log_start = min(self._leader_log_start, log_end)
        if log_start > self._log.log_start_offset:
            effects.append(AdvanceLogStart(log_start))
        reached = max(log_start, min(self._leader_high_watermark, log_end))
        if reached > self._high_watermark:
            self._high_watermark = reached
            effects.append(HighWatermarkChanged(reached))
        return effects

    def _cut(self, end: EpochEnd, producers: bytes = b"") -> list[Effect]:
        """Cut what the leader does not have, one epoch at a time (KIP-279), and ask again."""
        log = self._log
        self._awaiting_start = True
        cut = (log.log_end_offset, log.last_epoch, end)
        # The same answer to the same position would spin: pause instead.
        pause = cut == self._last_cut
        self._last_cut = cut
        if end.leader_epoch < 0:
            offset = end.end_offset
            effects: list[Effect] = [TruncateFullyAndStartAt(offset, producers)]
        else:
            own = log.end_of_epoch(end.leader_epoch)  # At -1 where nothing here is that old.
            offset = max(min(end.end_offset, own.end_offset), log.log_start_offset)
            effects = [TruncateTo(offset)]
        bounded = offset if end.leader_epoch < 0 else min(self._high_watermark, offset)
        if bounded != self._high_watermark:
            self._high_watermark = bounded
            effects.append(HighWatermarkChanged(bounded))
        effects.append(StatePosition(pause=pause))
        return effects

    def _copy_anew(self) -> list[Effect]:
        if self.role is not Role.FOLLOWER or self.node_id in self._isr:
            return []
        return self._cut(EpochEnd(-1, self._log.log_start_offset))

    def validate(self) -> None:
        """Assert what must hold between events. For tests."""
        log, leadership = self._log, self._leadership
        assert log.log_start_offset <= log.durable_offset <= log.log_end_offset
        assert self._high_watermark <= log.log_end_offset
        assert (leadership is not None) == (self.role is Role.LEADER)
        if leadership is None:
            return
        assert self.leader == self.node_id
        assert leadership.leader_epoch == self.leader_epoch
        assert leadership.partition_epoch == self.partition_epoch
        assert leadership.high_watermark == self._high_watermark
        assert self.node_id in self._isr
        assert self.node_id not in leadership.followers
        assert leadership.isr == self._isr
        if leadership.pending is not None:
            assert leadership.pending.partition_epoch == self.partition_epoch
            assert leadership.pending.leader_epoch == self.leader_epoch
            assert self.node_id in leadership.pending.isr
        for follower in leadership.followers.values():
            assert follower.log_end_offset <= log.log_end_offset
            assert follower.matched == (follower.log_end_offset >= 0)
