"""What a replica must not take for known: marks of before a cut, and whom the metadata name."""

from __future__ import annotations

import pytest

from penstock.broker.core.partition_events import (
    AdvanceLogStart,
    AppendRecords,
    BrokersChanged,
    CopyAnew,
    Diverge,
    HighWatermarkChanged,
    LogAdvanced,
    LogFailed,
    PartitionChanged,
    ProposeIsr,
    Pushed,
    Role,
    StatePosition,
    TruncateTo,
)
from penstock.broker.core.ports import EpochEnd
from tests.unit.replication.test_replica import (
    ack,
    brokers,
    follower,
    leader,
    log_of,
    position,
    push,
    state,
)


def test_the_leaders_marks_of_before_a_cut_count_no_more_until_the_logs_agree_again() -> None:
    log = log_of((4, 5))
    replica = follower(log)
    # Its disk was full: the records came to nothing, what the leader said with them is known.
    assert replica.handle(push(5, records=b"x", high_watermark=9)) == [AppendRecords(b"x")]
    cut = Pushed(5, 9, 0, 0, b"", EpochEnd(4, 3))
    assert replica.handle(cut) == [TruncateTo(3), StatePosition()]
    log.truncate_to(3)
    assert replica.handle(LogAdvanced(0)) == []
    assert replica.high_watermark == 0, "what is left may have to be cut further"
    assert replica.handle(push(3, high_watermark=9)) == [HighWatermarkChanged(3)]


@pytest.mark.parametrize("role", [Role.LEADER, Role.OFFLINE])
def test_whoever_does_not_follow_takes_nothing_and_cuts_nothing(role: Role) -> None:
    log = log_of((4, 5))
    replica = leader(log, isr=(1, 3))
    if role is Role.OFFLINE:
        replica = follower(log)
        replica.handle(PartitionChanged(state(version=11, isr=(1, 3)), 2, 0))
        replica.handle(LogFailed())
    assert replica.role is role
    for event in (
        push(5, records=b"x"),
        push(5, high_watermark=5),
        Pushed(5, 9, 0, 0, b"", EpochEnd(4, 3)),
        Pushed(5, 9, 0, 0, b"", EpochEnd(-1, 2)),
        CopyAnew(),
    ):
        assert replica.handle(event) == []


@pytest.mark.parametrize("end", [EpochEnd(3, 4), EpochEnd(2, 4)])
def test_no_cut_goes_below_the_logs_start(end: EpochEnd) -> None:
    log = log_of((3, 9), (4, 2), start=6)
    replica = follower(log, high_watermark=6)
    effects = replica.handle(Pushed(5, -1, -1, -1, b"", end))
    assert effects == [TruncateTo(6), StatePosition()]
    assert replica.high_watermark == 6


def test_what_a_follower_has_is_not_known_from_the_stream_before() -> None:
    """It came back with another log, and is told to cut: until then no offset of it counts."""
    replica = leader(log_of((4, 5)), isr=(1, 2))
    replica.handle(position(2, 3, 4))
    assert replica.followers()[2].matched
    effects = replica.handle(position(2, 9, 4, session=2))
    assert effects == [Diverge(2, 2, EpochEnd(4, 5))]
    assert replica.handle(ack(2, 5, session=2)) == []
    assert replica.high_watermark == 3


def test_no_log_begins_behind_its_end() -> None:
    replica = follower(log_of((4, 5)))
    effects = replica.handle(push(5, high_watermark=9, start=9))
    assert effects == [AdvanceLogStart(5), HighWatermarkChanged(5)]


def test_a_member_that_is_no_replica_is_waited_for() -> None:
    """The controllers make no such in-sync set; nothing is committed on the strength of one."""
    log = log_of((4, 2))
    replica = leader(log, isr=(1, 2, 3, 4))
    for node_id in (2, 3):
        replica.handle(position(node_id, 2, 4))
    assert replica.high_watermark == 0
    replica.handle(PartitionChanged(state(version=11), 2, 0))
    assert replica.high_watermark == 2


@pytest.mark.parametrize("known", [9, 7, 3])
def test_a_wish_names_the_registration_under_which_a_member_spoke(known: int) -> None:
    """One that registered anew may have lost what it said it had (KIP-903): the controllers must
    see whom the leader means, whichever of the two the metadata here know of.
    """
    replica = leader(log_of((4, 2)), high_watermark=2, isr=(1, 3))
    replica.handle(position(3, 2, 4, broker_epoch=7))
    replica.handle(BrokersChanged(brokers(n3=known), 0))
    effect = replica.handle(position(2, 2, 4))[-1]
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.members == ((1, 1), (2, 2), (3, 7))
