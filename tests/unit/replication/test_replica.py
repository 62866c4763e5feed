"""The replica state machine, transition by transition."""

from __future__ import annotations

import pytest

from penstock.broker.core.partition_events import (
    AdvanceLogStart,
    AppendRecords,
    AssignEpoch,
    BrokersChanged,
    BrokerStatus,
    Diverge,
    FollowerAcked,
    FollowerPositioned,
    HighWatermarkChanged,
    LeaderLostRecords,
    LogAdvanced,
    LogFailed,
    OutOfSync,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    ProposeIsr,
    Pushed,
    RefuseFollower,
    Role,
    RoleChanged,
    StartPush,
    StatePosition,
    Tick,
    TruncateFullyAndStartAt,
    TruncateTo,
)
from penstock.broker.core.partition_leader import REFUSAL_PAUSE_MS
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.replica import Replica
from penstock.wire.errors import ErrorCode
from tests.unit.replication.model import ModelLog, isr_changed

LAG_MS = 10_000


def state(
    leader: int = 1,
    *,
    epoch: int = 5,
    version: int = 10,
    isr: tuple[int, ...] = (1, 2, 3),
    min_isr: int = 2,
) -> PartitionState:
    return PartitionState(leader, epoch, version, (1, 2, 3), frozenset(isr), min_isr=min_isr)


def log_of(*runs: tuple[int, int], start: int = 0) -> ModelLog:
    """A durable log of (epoch, how many records) runs."""
    log = ModelLog()
    for epoch, count in runs:
        log.append([(epoch, 0)] * count)
    log.flush()
    log.advance_start(start)
    return log


def brokers(**epochs: int) -> dict[int, BrokerStatus]:
    return {
        node_id: BrokerStatus(epochs.get(f"n{node_id}", node_id), eligible=True)
        for node_id in (1, 2, 3)
    }


def leader(
    log: ModelLog,
    *,
    high_watermark: int = 0,
    min_isr: int = 2,
    isr: tuple[int, ...] = (1, 2, 3),
    now_ms: int = 0,
) -> Replica:
    replica = Replica(1, log, high_watermark=high_watermark, lag_max_ms=LAG_MS)
    replica.handle(BrokersChanged(brokers(), now_ms))
    effects = replica.handle(PartitionChanged(state(isr=isr, min_isr=min_isr), min_isr, now_ms))
    assert effects[0] == AssignEpoch(5)
    log.epochs.assign(5, log.log_end_offset)
    return replica


def follower(log: ModelLog, *, high_watermark: int = 0) -> Replica:
    replica = Replica(2, log, high_watermark=high_watermark, lag_max_ms=LAG_MS)
    assert replica.handle(PartitionChanged(state(), 2, 0)) == [
        RoleChanged(Role.FOLLOWER, 1, 5),
        StatePosition(),
    ]
    return replica


def position(
    node_id: int,
    end: int,
    last_epoch: int,
    *,
    session: int = 1,
    epoch: int = 5,
    broker_epoch: int | None = None,
    now_ms: int = 0,
) -> FollowerPositioned:
    return FollowerPositioned(
        node_id,
        session,
        node_id if broker_epoch is None else broker_epoch,
        epoch,
        end,
        last_epoch,
        0,
        now_ms,
    )


def ack(
    node_id: int, end: int, *, session: int = 1, epoch: int = 5, now_ms: int = 0
) -> FollowerAcked:
    return FollowerAcked(node_id, session, epoch, end, 0, now_ms)


def append(replica: Replica, log: ModelLog, count: int, now_ms: int = 0) -> None:
    log.append([(replica.leader_epoch, 0)] * count)
    replica.handle(LogAdvanced(now_ms))


# --- High watermark ------------------------------------------------------------------------------


def test_a_new_leader_shows_only_what_it_knew_to_be_committed() -> None:
    replica = leader(log_of((4, 10)), high_watermark=7)
    assert replica.high_watermark == 7
    assert replica.epoch_start_offset == 10


def test_it_advances_over_old_epochs_once_the_in_sync_set_has_them_without_a_new_append() -> None:
    replica = leader(log_of((4, 10)), high_watermark=7)
    assert replica.handle(position(2, 10, 4)) == [StartPush(2, 1, 10)]
    assert replica.handle(position(3, 9, 4)) == [StartPush(3, 1, 9), HighWatermarkChanged(9)]
    assert replica.handle(ack(3, 10)) == [HighWatermarkChanged(10)]


def test_the_leaders_own_unflushed_records_do_not_count() -> None:
    log = log_of()
    replica = leader(log)
    replica.handle(position(2, 0, -1))
    replica.handle(position(3, 0, -1))
    append(replica, log, 3)
    replica.handle(ack(2, 3))
    assert replica.handle(ack(3, 3)) == []
    log.durable_offset = 2
    assert replica.handle(LogAdvanced(0)) == [HighWatermarkChanged(2)]
    log.flush()
    assert replica.handle(LogAdvanced(0)) == [HighWatermarkChanged(3)]


def test_it_rests_while_the_in_sync_set_is_too_small() -> None:
    log = log_of()
    replica = leader(log, isr=(1,))
    assert replica.under_min_isr
    append(replica, log, 3)
    log.flush()
    assert replica.handle(LogAdvanced(0)) == []
    changed = state(version=11, isr=(1,), min_isr=1)
    assert replica.handle(PartitionChanged(changed, 1, 0)) == [
        isr_changed(1),
        HighWatermarkChanged(3),
    ]


def test_a_replica_that_is_being_added_counts_before_it_is_in() -> None:
    log = log_of((4, 4))
    replica = leader(log, high_watermark=4, isr=(1, 2))
    replica.handle(position(2, 4, 4))
    effects = replica.handle(position(3, 4, 4))
    assert [type(effect) for effect in effects] == [StartPush, ProposeIsr]
    assert replica.isr == {1, 2}
    assert replica.maximal_isr == {1, 2, 3}
    append(replica, log, 2)
    log.flush()
    assert replica.handle(ack(2, 6)) == []  # Were 3 elected now, the two would be lost.
    assert replica.handle(ack(3, 5)) == [HighWatermarkChanged(5)]


def test_a_replica_that_was_taken_out_is_not_taken_in_for_what_it_said_before() -> None:
    log = log_of()
    replica = leader(log)
    replica.handle(position(2, 0, -1))
    replica.handle(position(3, 0, -1))
    append(replica, log, 1)
    log.flush()
    # The controllers took it out, because its disk failed: it said nothing since, and never will.
    effects = replica.handle(PartitionChanged(state(version=11, isr=(1, 2)), 2, 0))
    assert effects == [isr_changed(1, 2, left={3: OutOfSync.OFFLINE})]
    assert replica.handle(ack(2, 1)) == [HighWatermarkChanged(1)]
    [proposal] = replica.handle(ack(3, 1))
    assert isinstance(proposal, ProposeIsr)
    assert proposal.proposal.isr == {1, 2, 3}


def test_a_replica_that_has_all_need_not_speak_to_come_back() -> None:
    log = log_of((4, 3))
    replica = leader(log, high_watermark=3)
    replica.handle(position(2, 3, 4))
    replica.handle(position(3, 3, 4))
    # Fenced for a moment, with its stream unharmed. There is nothing to acknowledge.
    _, proposal = replica.handle(PartitionChanged(state(version=11, isr=(1, 2)), 2, 0))
    assert isinstance(proposal, ProposeIsr)
    assert proposal.proposal.isr == {1, 2, 3}


def test_a_replica_that_is_being_removed_counts_until_it_is_out() -> None:
    log = log_of()
    replica = leader(log)
    replica.handle(position(2, 0, -1))
    append(replica, log, 2)
    log.flush()
    replica.handle(ack(2, 2))
    [proposal] = replica.handle(Tick(LAG_MS + 1))
    assert isinstance(proposal, ProposeIsr)
    assert proposal.proposal.isr == {1, 2}
    assert replica.high_watermark == 0
    done = state(version=11, isr=(1, 2))
    assert replica.handle(ProposalAnswered(proposal.proposal, None, done, 0)) == [
        isr_changed(1, 2, left={3: OutOfSync.STUCK}),
        HighWatermarkChanged(2),
    ]


def test_it_does_not_go_back_when_a_follower_comes_back_with_less() -> None:
    replica = leader(log_of((4, 10)), high_watermark=10)
    replica.handle(position(2, 10, 4))
    replica.handle(position(3, 10, 4))
    assert replica.handle(position(3, 2, 4, session=2, broker_epoch=9)) == [StartPush(3, 2, 2)]
    assert replica.high_watermark == 10
    replica.validate()


# --- Whose word counts ---------------------------------------------------------------------------


def test_acks_count_only_in_this_epoch_on_the_newest_stream_after_a_position_that_fits() -> None:
    log = log_of((4, 10))
    replica = leader(log, high_watermark=0, min_isr=1, isr=(1, 2))
    assert replica.handle(ack(2, 10)) == []  # No position stated yet.
    replica.handle(position(2, 3, 4, session=7))
    assert replica.high_watermark == 3
    assert replica.handle(ack(2, 10, session=6)) == []  # A stream of before.
    assert replica.handle(ack(2, 10, session=7, epoch=4)) == []  # A leadership of before.
    assert replica.handle(ack(2, 11, session=7)) == []  # More than there is.
    assert replica.handle(position(2, 10, 4, session=6)) == []  # Late, of the stream of before.
    assert replica.handle(ack(2, 9, session=7)) == [HighWatermarkChanged(9)]


def test_acks_do_not_count_while_the_follower_has_to_cut() -> None:
    replica = leader(log_of((1, 5), (4, 5)), min_isr=1, isr=(1, 2))
    assert replica.handle(position(2, 10, 3)) == [Diverge(2, 1, EpochEnd(1, 5))]
    assert replica.handle(ack(2, 10)) == []
    assert replica.handle(position(2, 5, 1)) == [StartPush(2, 1, 5), HighWatermarkChanged(5)]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (position(2, 0, -1, epoch=4), ErrorCode.FENCED_LEADER_EPOCH),
        (position(2, 0, -1, epoch=6), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (position(2, 3, 6), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (position(9, 0, -1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (position(2, 0, -1, broker_epoch=1), ErrorCode.STALE_BROKER_EPOCH),
    ],
)
def test_positions_that_are_refused(event: FollowerPositioned, error: ErrorCode) -> None:
    replica = leader(log_of())
    assert replica.handle(event) == [RefuseFollower(event.node_id, 1, error)]


def test_a_follower_refuses_to_be_followed() -> None:
    replica = follower(log_of())
    assert replica.handle(position(3, 0, -1)) == [RefuseFollower(3, 1, ErrorCode.NOT_LEADER)]


@pytest.mark.parametrize(
    ("end", "last_epoch", "diverging"),
    [
        (12, 4, None),  # The same log.
        (7, 3, None),  # A prefix.
        (12, 3, EpochEnd(3, 8)),  # A longer log of an epoch that ended sooner.
        (6, 2, EpochEnd(1, 5)),  # An epoch that this log never had.
        (0, -1, EpochEnd(-1, 3)),  # Empty, but what it needs first is deleted.
        (3, -1, None),  # Empty, and begins where this log begins.
        (13, -1, EpochEnd(-1, 3)),  # Empty, and begins after this log ends.
        (2, 1, EpochEnd(-1, 3)),  # What it needs next is deleted.
        (9, 0, EpochEnd(-1, 3)),  # Of an epoch of which nothing is left here.
        (3, 0, None),  # The same, but it ends where this log begins.
    ],
)
def test_where_logs_part(end: int, last_epoch: int, diverging: EpochEnd | None) -> None:
    log = log_of((1, 5), (3, 3), (4, 4), start=3)
    replica = leader(log)
    first = replica.handle(position(2, end, last_epoch))[0]
    assert first == (StartPush(2, 1, end) if diverging is None else Diverge(2, 1, diverging))


def test_a_leader_whose_disk_lost_records_of_its_own_epoch_steps_down() -> None:
    log = log_of()
    replica = leader(log)
    append(replica, log, 4)
    # The follower has five: what is on this disk is not all that this leadership has written.
    assert replica.handle(position(2, 5, 5)) == [
        LeaderLostRecords(2, 5, 4),
        RoleChanged(Role.OFFLINE, 1, 5),
    ]
    assert replica.handle(position(3, 4, 5)) == [RefuseFollower(3, 1, ErrorCode.NOT_LEADER)]
    # Another election is needed, even if it elects the same.
    assert replica.handle(PartitionChanged(state(version=11, isr=(1, 2)), 2, 0)) == []
    assert replica.role is Role.OFFLINE
    effects = replica.handle(PartitionChanged(state(epoch=6, version=12), 2, 0))
    assert RoleChanged(Role.LEADER, 1, 6) in effects


# --- In-sync set ---------------------------------------------------------------------------------


def test_who_lags_for_too_long_is_to_go() -> None:
    log = log_of()
    replica = leader(log)
    for node_id in (2, 3):
        replica.handle(position(node_id, 0, -1))
    assert replica.next_deadline_ms() is None  # Who has everything cannot lag, however long.
    append(replica, log, 1, now_ms=50_000)
    assert replica.next_deadline_ms() == 50_000 + LAG_MS + 1
    replica.handle(ack(2, 1, now_ms=50_100))
    assert replica.handle(Tick(50_000 + LAG_MS)) == []
    [effect] = replica.handle(Tick(50_000 + LAG_MS + 1))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.members == ((1, 1), (2, 2))
    assert (effect.proposal.leader_epoch, effect.proposal.partition_epoch) == (5, 10)
    assert replica.next_deadline_ms() is None  # Nothing else can be wished for meanwhile.
    assert replica.handle(Tick(70_000)) == []


def test_who_keeps_pace_stays_though_it_never_has_everything() -> None:
    log = log_of()
    replica = leader(log)
    replica.handle(position(2, 0, -1))
    replica.handle(position(3, 0, -1))
    for second in range(1, 30):
        append(replica, log, 10, now_ms=second * 1000)
        for node_id in (2, 3):
            replica.handle(ack(node_id, second * 10 - 5, now_ms=second * 1000 + 500))
        assert replica.handle(Tick(second * 1000 + 999)) == []


def test_a_follower_that_never_spoke_lags_from_the_election_on() -> None:
    replica = leader(log_of((4, 1)), now_ms=1000)
    replica.handle(position(2, 1, 4, now_ms=1000))
    [effect] = replica.handle(Tick(1000 + LAG_MS + 1))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.isr == {1, 2}


def test_who_caught_up_is_to_join_but_not_before_the_epochs_start() -> None:
    log = log_of((4, 10))
    replica = leader(log, high_watermark=5, isr=(1, 2))
    replica.handle(position(2, 6, 4))
    assert replica.high_watermark == 6
    # Past the high watermark, but earlier leaders may have committed up to 10.
    assert replica.handle(position(3, 8, 4)) == [StartPush(3, 1, 8)]
    assert replica.handle(ack(3, 9)) == []
    [effect] = replica.handle(ack(3, 10))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.members == ((1, 1), (2, 2), (3, 3))


@pytest.mark.parametrize(
    "status",
    [
        None,
        BrokerStatus(3, eligible=False),  # Fenced, or about to stop.
        BrokerStatus(8, eligible=True),  # Registered anew since it caught up.
    ],
)
def test_who_may_not_join(status: BrokerStatus | None) -> None:
    replica = leader(log_of((4, 2)), high_watermark=2, isr=(1, 2))
    known = {1: BrokerStatus(1, eligible=True), 2: BrokerStatus(2, eligible=True)}
    replica.handle(BrokersChanged(known if status is None else {**known, 3: status}, 0))
    # It comes with an epoch that the metadata does not know yet, or with the one it does.
    replica.handle(position(3, 2, 4, broker_epoch=9 if status and status.eligible else 3))
    assert replica.pending is None
    replica.handle(ack(3, 2))
    assert replica.pending is None
    epoch = 9 if status and status.eligible else 3
    [effect] = replica.handle(BrokersChanged({**known, 3: BrokerStatus(epoch, eligible=True)}, 0))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.members[-1] == (3, epoch)


def joining() -> tuple[Replica, ProposeIsr]:
    replica = leader(log_of((4, 2)), high_watermark=2, isr=(1, 2))
    replica.handle(position(2, 2, 4))
    effect = replica.handle(position(3, 2, 4))[-1]
    assert isinstance(effect, ProposeIsr)
    return replica, effect


def test_a_change_counts_once_it_is_committed_whoever_says_so_first() -> None:
    done = state(version=11)
    replica, wish = joining()
    assert replica.handle(PartitionChanged(done, 2, 0)) == [isr_changed(1, 2, 3, joined=(3,))]
    assert replica.pending is None
    assert replica.handle(ProposalAnswered(wish.proposal, None, done, 0)) == []

    replica, wish = joining()
    assert replica.handle(ProposalAnswered(wish.proposal, None, done, 0)) == [
        isr_changed(1, 2, 3, joined=(3,))
    ]
    assert replica.handle(PartitionChanged(done, 2, 0)) == []


def test_a_refusal_on_the_same_state_ends_the_wish_for_a_while() -> None:
    replica, wish = joining()
    refusal = ProposalAnswered(wish.proposal, ErrorCode.INELIGIBLE_REPLICA, state(isr=(1, 2)), 100)
    assert replica.handle(refusal) == []
    assert replica.maximal_isr == {1, 2}
    assert replica.handle(ack(3, 2, now_ms=101)) == []
    assert replica.next_deadline_ms() == 100 + REFUSAL_PAUSE_MS
    [effect] = replica.handle(Tick(100 + REFUSAL_PAUSE_MS))
    assert effect == wish


def test_a_refusal_for_an_old_version_leaves_the_wish_open_until_the_newer_state_is_known() -> None:
    replica, wish = joining()
    # The answer was made of an older state than the wish: nothing is known by it.
    older = ProposalAnswered(wish.proposal, ErrorCode.INVALID_UPDATE_VERSION, state(version=9), 0)
    assert replica.handle(older) == []
    assert replica.maximal_isr == {1, 2, 3}
    unknown = ProposalAnswered(wish.proposal, ErrorCode.UNKNOWN_TOPIC_ID, None, 0)
    assert replica.handle(unknown) == []
    assert replica.pending == wish.proposal
    # An earlier attempt had been taken after all: the state in the answer says so.
    newer = ProposalAnswered(wish.proposal, ErrorCode.INVALID_UPDATE_VERSION, state(version=11), 0)
    assert replica.handle(newer) == [isr_changed(1, 2, 3, joined=(3,))]


# --- Roles ---------------------------------------------------------------------------------------


def test_roles_follow_the_metadata_by_partition_epoch() -> None:
    log = log_of((4, 3))
    replica = leader(log, high_watermark=3)
    assert replica.handle(PartitionChanged(state(leader=3, epoch=4, version=9), 2, 0)) == []
    assert replica.handle(PartitionChanged(state(leader=3, epoch=6, version=11), 2, 0)) == [
        RoleChanged(Role.FOLLOWER, 3, 6),
        StatePosition(),
    ]
    assert replica.handle(PartitionChanged(state(leader=-1, epoch=7, version=12), 2, 0)) == [
        RoleChanged(Role.OFFLINE, -1, 7)
    ]
    effects = replica.handle(PartitionChanged(state(epoch=8, version=13), 2, 0))
    assert effects[:2] == [AssignEpoch(8), RoleChanged(Role.LEADER, 1, 8)]
    assert replica.high_watermark == 3
    replica.validate()


def test_reelected_at_once_it_starts_its_books_anew() -> None:
    log = log_of((4, 3))
    replica = leader(log, high_watermark=3)
    replica.handle(position(2, 3, 4))
    replica.handle(position(3, 3, 4))
    replica.handle(PartitionChanged(state(epoch=6, version=11), 2, 0))
    assert {entry.log_end_offset for entry in replica.followers().values()} == {-1}


def test_a_failed_disk_ends_it_for_good() -> None:
    replica = leader(log_of())
    assert replica.handle(LogFailed()) == [RoleChanged(Role.OFFLINE, 1, 5)]
    assert replica.handle(PartitionChanged(state(epoch=6, version=11), 2, 0)) == []
    assert replica.role is Role.OFFLINE


def test_a_kept_high_watermark_is_brought_into_the_logs_bounds() -> None:
    assert Replica(1, log_of((1, 5)), high_watermark=9, lag_max_ms=1).high_watermark == 5
    log = log_of((1, 5), start=3)
    assert Replica(1, log, high_watermark=1, lag_max_ms=1).high_watermark == 3


# --- Following -----------------------------------------------------------------------------------


def push(
    base: int, *, records: bytes = b"", epoch: int = 5, high_watermark: int = 0, start: int = 0
) -> Pushed:
    return Pushed(epoch, high_watermark, start, base, records)


def test_pushes_are_appended_where_they_fit_and_dropped_where_they_do_not() -> None:
    log = log_of((4, 5))
    replica = follower(log)
    assert replica.handle(push(9)) == []  # The answer to the position is still to come.
    assert replica.handle(push(5, records=b"x")) == [AppendRecords(b"x")]
    assert replica.handle(push(4, records=b"x")) == []  # It has that.
    assert replica.handle(push(5, records=b"x", epoch=4)) == []  # Of a leader deposed.
    assert replica.handle(push(5, records=b"x", epoch=6)) == []  # Of one not known yet.
    assert replica.handle(push(8, records=b"x")) == [StatePosition()]  # A gap: ask once,
    assert replica.handle(push(9, records=b"x")) == []  # not for each that was under way.


def test_its_high_watermark_is_the_leaders_as_far_as_its_log_goes() -> None:
    log = log_of((4, 5))
    replica = follower(log, high_watermark=2)
    assert replica.handle(push(5, records=b"x", high_watermark=8)) == [AppendRecords(b"x")]
    log.append([(5, 0)])
    assert replica.handle(LogAdvanced(0)) == [HighWatermarkChanged(6)]
    assert replica.handle(push(6, high_watermark=5)) == []
    assert replica.high_watermark == 6


def test_a_high_watermark_is_not_believed_before_the_logs_are_known_to_agree() -> None:
    replica = follower(log_of((4, 5)), high_watermark=2)
    assert replica.handle(push(9, high_watermark=5)) == []
    assert replica.handle(LogAdvanced(0)) == []
    assert replica.high_watermark == 2


def test_its_log_start_follows_the_leaders() -> None:
    log = log_of((4, 5))
    replica = follower(log)
    assert replica.handle(push(5, high_watermark=4, start=4)) == [
        AdvanceLogStart(4),
        HighWatermarkChanged(4),
    ]


@pytest.mark.parametrize(
    ("diverging", "cut"),
    [
        (EpochEnd(3, 8), TruncateTo(8)),  # The leader's epoch 3 ended sooner.
        (EpochEnd(3, 20), TruncateTo(9)),  # The own epoch 3 ended sooner: no further down.
        (EpochEnd(2, 7), TruncateTo(5)),  # No epoch 2 here: what follows epoch 1 goes.
        (EpochEnd(2, 3), TruncateTo(3)),  # Not even all of epoch 1 is the leader's.
        (EpochEnd(0, 2), TruncateTo(0)),  # Nothing here is that old.
        (EpochEnd(-1, 40), TruncateFullyAndStartAt(40)),
    ],
)
def test_where_a_follower_cuts(
    diverging: EpochEnd, cut: TruncateTo | TruncateFullyAndStartAt
) -> None:
    log = log_of((1, 5), (3, 4), (4, 6))
    replica = follower(log, high_watermark=6)
    effects = replica.handle(Pushed(5, -1, -1, -1, b"", diverging))
    assert effects[0] == cut
    assert effects[-1] == StatePosition()
    expected = cut.offset if diverging.leader_epoch < 0 else min(6, cut.offset)
    assert replica.high_watermark == expected
    assert (HighWatermarkChanged(expected) in effects) == (expected != 6)


def test_the_same_answer_to_the_same_position_does_not_spin() -> None:
    log = log_of((3, 5))
    replica = follower(log)
    diverging = Pushed(5, -1, -1, -1, b"", EpochEnd(3, 9))
    assert replica.handle(diverging) == [TruncateTo(5), StatePosition()]
    assert replica.handle(diverging) == [TruncateTo(5), StatePosition(pause=True)]


def test_a_cut_that_took_a_whole_batch_takes_the_high_watermark_with_it() -> None:
    log = log_of((3, 9))
    replica = follower(log, high_watermark=9)
    replica.handle(Pushed(5, -1, -1, -1, b"", EpochEnd(3, 8)))
    log.truncate_to(6)  # Offsets 6 to 8 are one batch.
    assert replica.handle(LogAdvanced(0)) == [HighWatermarkChanged(6)]
    replica.validate()


def test_two_quick_changes_of_leader_meet_at_the_last_common_record() -> None:
    # 1 led in epoch 1; 2 led in 2 and wrote what nobody copied; 1 leads in 3.
    leading, following = log_of((1, 5)), log_of((1, 4), (2, 3))
    replica = Replica(1, leading, high_watermark=0, lag_max_ms=LAG_MS)
    replica.handle(PartitionChanged(state(epoch=3), 1, 0))
    leading.epochs.assign(3, 5)
    append(replica, leading, 1)
    other = Replica(2, following, high_watermark=0, lag_max_ms=LAG_MS)
    other.handle(PartitionChanged(state(epoch=3), 1, 0))
    [answer] = replica.handle(position(2, 7, 2, epoch=3))
    assert answer == Diverge(2, 1, EpochEnd(1, 5))
    assert other.handle(Pushed(3, -1, -1, -1, b"", EpochEnd(1, 5)))[0] == TruncateTo(4)
    following.truncate_to(4)
    assert replica.handle(position(2, 4, 1, epoch=3))[0] == StartPush(2, 1, 4)
