"""One leadership of a partition: its followers, its in-sync set, its high watermark.

The state of penstock.broker.core.replica.Replica while it leads; made anew for every leader epoch.

Why a follower is not in sync (OutOfSync):

=============  ===============================================================  =============
from           when                                                             to
=============  ===============================================================  =============
in sync        it lags for too long, and acknowledged something meanwhile       slow
in sync        it lags for too long, and acknowledged nothing new meanwhile     stuck
in sync        the controllers take it out without the leader's wish            offline
a new replica  it is known                                                      bootstrapping
not slow       it acknowledges something new                                    bootstrapping
any            it states its position: its broker or its stream is back         bootstrapping
any            the in-sync set that is committed has it                         in sync
=============  ===============================================================  =============

Before all that it is offline while its broker or its disk is, and then stuck while it lacks
something and has acknowledged nothing new for too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.broker.core.partition_events import (
    BrokerStatus,
    IsrProposal,
    LogView,
    OutOfSync,
    PartitionState,
)

REFUSAL_PAUSE_MS = 500
"""So long a leader waits after the controllers refused a change before it wishes again."""


@dataclass(slots=True)
class Follower:
    """What the leader knows of one follower.

    ``log_end_offset`` is -1 until, in this leadership, the follower's log was found to be a prefix
    of the leader's; from then on it is what the follower says is durable.
    """

    caught_up_ms: int
    """The last time at which the follower had all that the leader had."""
    session: int = -1
    broker_epoch: int = -1
    matched: bool = False
    log_end_offset: int = -1
    log_start_offset: int = -1
    last_ack_ms: int = -1
    leader_end_at_last_ack: int = -1
    spoke_since_out: bool = True
    """False from when it is taken out of the in-sync set until it acknowledges something."""
    progressed_ms: int = -1
    """When it acknowledged something new, or stated its position."""
    standing: OutOfSync = OutOfSync.BOOTSTRAPPING
    """While it is out of sync: why. See Leadership.out_of_sync for what time makes of it."""

    def forget(self, leader_end: int, now_ms: int) -> None:
        """The follower's log is no longer known to be a prefix of the leader's."""
        if self.log_end_offset >= leader_end:
            self.caught_up_ms = now_ms  # It had all until now, however long nothing was said.
        self.matched = False
        self.log_end_offset = -1
        self.leader_end_at_last_ack = -1
        self.standing = OutOfSync.BOOTSTRAPPING

    def acked(
        self, log_end_offset: int, log_start_offset: int, leader_end: int, now_ms: int
    ) -> None:
        """Take over a position, and since when the follower has all (as KIP-16 defines it)."""
        self.spoke_since_out = True
        if log_end_offset > self.log_end_offset:
            self.progressed_ms = now_ms
            if self.standing is not OutOfSync.SLOW:
                self.standing = OutOfSync.BOOTSTRAPPING
        self.log_end_offset = log_end_offset
        self.log_start_offset = log_start_offset
        if log_end_offset >= leader_end:
            self.caught_up_ms = now_ms
        elif self.leader_end_at_last_ack >= 0 and log_end_offset >= self.leader_end_at_last_ack:
            # It has all that there was when it last spoke.
            self.caught_up_ms = max(self.caught_up_ms, self.last_ack_ms)
        self.leader_end_at_last_ack = leader_end
        self.last_ack_ms = now_ms


class Leadership:
    """The leader's books in one leader epoch. Mutated by Replica alone."""

    def __init__(
        self,
        node_id: int,
        log: LogView,
        state: PartitionState,
        *,
        high_watermark: int,
        lag_max_ms: int,
        now_ms: int,
    ) -> None:
        self.node_id = node_id
        self.leader_epoch = state.leader_epoch
        self.epoch_start_offset = log.log_end_offset
        self.high_watermark = high_watermark
        self.pending: IsrProposal | None = None
        self.retry_at_ms = -1
        self.followers: dict[int, Follower] = {}
        self._log = log
        self._log_end = log.log_end_offset
        self.lag_max_ms = lag_max_ms
        self.isr: frozenset[int] = frozenset()
        self.offline: frozenset[int] = frozenset()
        self.partition_epoch = -1
        self.commit(state, now_ms)

    @property
    def maximal_isr(self) -> frozenset[int]:
        """The in-sync set and all that may be in it, as far as is known (KIP-497)."""
        return self.isr if self.pending is None else self.isr | self.pending.isr

    def commit(self, state: PartitionState, now_ms: int) -> None:
        """Act on what the controllers committed. Any proposal made on an older state is settled:
        either it is in this one, or it will be refused for its partition epoch.
        """
        self.partition_epoch = state.partition_epoch
        was_in = self.isr
        self.isr = state.isr | {self.node_id}
        self.offline = state.offline
        wanted_out = frozenset() if self.pending is None else was_in - self.pending.isr
        self.pending = None
        for out in (was_in - self.isr) & self.followers.keys():
            self.followers[out].spoke_since_out = False
            if out not in wanted_out:
                self.followers[out].standing = OutOfSync.OFFLINE
        others = set(state.replicas) - {self.node_id}
        for gone in self.followers.keys() - others:
            del self.followers[gone]
        for node_id in sorted(others - self.followers.keys()):
            self.followers[node_id] = Follower(caught_up_ms=now_ms, progressed_ms=now_ms)

    def observe_log_end(self, now_ms: int) -> None:
        """The log may have grown: who had all of it until now, was caught up until now."""
        log_end = self._log.log_end_offset
        if log_end == self._log_end:
            return
        for follower in self.followers.values():
            if follower.log_end_offset >= self._log_end:
                follower.caught_up_ms = now_ms
        self._log_end = log_end

    def advance_high_watermark(self, min_isr: int) -> bool:
        """Raise the high watermark as far as the maximal in-sync set allows; whether it rose.

        The leader's own records count as far as they are durable. It rests while the committed
        in-sync set is too small, so that eligible leaders outside of it miss nothing (KIP-966).
        """
        if len(self.isr) < min_isr:
            return False
        lowest = self._log.durable_offset
        for node_id in self.maximal_isr:
            if node_id != self.node_id:
                follower = self.followers.get(node_id)
                lowest = min(lowest, -1 if follower is None else follower.log_end_offset)
        if lowest <= self.high_watermark:
            return False
        self.high_watermark = lowest
        return True

    def is_caught_up(self, follower: Follower) -> bool:
        """Whether the follower has all that the leader has."""
        return follower.log_end_offset >= self._log.log_end_offset

    def next_deadline_ms(self) -> int | None:
        """When a follower will have lagged for too long, or a refused wish may be repeated."""
        if self.pending is not None:
            return None
        deadlines = [
            max(follower.caught_up_ms + self.lag_max_ms + 1, self.retry_at_ms)
            for node_id, follower in self.followers.items()
            if node_id in self.isr and not self.is_caught_up(follower)
        ]
        if self.retry_at_ms >= 0:
            deadlines.append(self.retry_at_ms)
        return min(deadlines, default=None)

    def propose(
        self, brokers: Mapping[int, BrokerStatus], now_ms: int, *, shrink: bool
    ) -> IsrProposal | None:
        """The change of the in-sync set that is due, if any; it is pending from now on."""
        if self.pending is not None or now_ms < self.retry_at_ms:
            return None
        self.retry_at_ms = -1
        wanted = self.isr | self._joining(brokers)
        if shrink:
            lagging = self._lagging(now_ms)
            for node_id in lagging:
                follower = self.followers[node_id]
                follower.standing = self._why_lagging(follower, now_ms)
            wanted -= lagging
        if wanted == self.isr:
            return None
        self.pending = IsrProposal(
            leader_epoch=self.leader_epoch,
            partition_epoch=self.partition_epoch,
            members=tuple(
                (node_id, self._epoch_of(node_id, brokers)) for node_id in sorted(wanted)
            ),
        )
        return self.pending

    def _joining(self, brokers: Mapping[int, BrokerStatus]) -> set[int]:
        """Followers that caught up, under the registration that the metadata knows (KIP-903).

        One that was taken out must show that it still follows, or want nothing: what it said
        before may be the last that it ever says, and acks=all would wait for it in vain. One that
        is offline has said that it does not.
        """
        if len(self.isr) > len(self.followers):
            return set()
        floor = max(self.high_watermark, self.epoch_start_offset)
        return {
            node_id
            for node_id, follower in self.followers.items()
            if node_id not in self.isr
            and node_id not in self.offline
            and follower.log_end_offset >= floor
            and (follower.spoke_since_out or self.is_caught_up(follower))
            and (status := brokers.get(node_id)) is not None
            and status.eligible
            and status.broker_epoch == follower.broker_epoch
        }

    def _lagging(self, now_ms: int) -> set[int]:
        return {
            node_id
            for node_id, follower in self.followers.items()
            if node_id in self.isr
            and not self.is_caught_up(follower)
            and now_ms - follower.caught_up_ms > self.lag_max_ms
        }

    def out_of_sync(
        self, node_id: int, brokers: Mapping[int, BrokerStatus], now_ms: int
    ) -> OutOfSync | None:
        """Why the follower is not in sync, as things stand now; None when it is, or is none."""
        follower = self.followers.get(node_id)
        if follower is None or node_id in self.isr:
            return None
        status = brokers.get(node_id)
        if status is None or not status.eligible or node_id in self.offline:
            return OutOfSync.OFFLINE
        if self.is_caught_up(follower):  # It lacks nothing but the controllers' word.
            return OutOfSync.BOOTSTRAPPING if follower.spoke_since_out else follower.standing
        stuck = self._why_lagging(follower, now_ms) is OutOfSync.STUCK
        return OutOfSync.STUCK if stuck else follower.standing

    def _why_lagging(self, follower: Follower, now_ms: int) -> OutOfSync:
        silent = now_ms - follower.progressed_ms > self.lag_max_ms
        return OutOfSync.STUCK if silent else OutOfSync.SLOW

    def _epoch_of(self, node_id: int, brokers: Mapping[int, BrokerStatus]) -> int:
        follower = self.followers.get(node_id)
        if follower is not None and follower.broker_epoch >= 0:
            return follower.broker_epoch
        # A member that has not spoken in this leadership is in sync under the registration that
        # the metadata has: one that registered anew would have been taken out.
        status = brokers.get(node_id)
        return -1 if status is None else status.broker_epoch
