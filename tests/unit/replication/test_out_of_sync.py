"""Why a follower is not in sync: in the state machine, in the log, in the metrics."""

from __future__ import annotations

import re

import pytest
from prometheus_client import generate_latest

from penstock.broker.core.partition_events import (
    BrokersChanged,
    BrokerStatus,
    IsrChanged,
    LagMaxChanged,
    LogAdvanced,
    OutOfSync,
    PartitionChanged,
    PartitionState,
    ProposalAnswered,
    ProposeIsr,
    Tick,
)
from penstock.broker.core.replica import Replica
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.standing import REASONS
from penstock.v1 import common_pb2, metadata_pb2
from tests.support import eventually
from tests.unit.replication.brokers import KEY, running
from tests.unit.replication.model import ModelLog
from tests.unit.replication.test_replica import LAG_MS, ack, append, leader, log_of, position, state

SLOW, STUCK = OutOfSync.SLOW, OutOfSync.STUCK
BOOTSTRAPPING, OFFLINE = OutOfSync.BOOTSTRAPPING, OutOfSync.OFFLINE


def in_sync_with_two() -> tuple[Replica, ModelLog]:
    """Broker 1 leads an empty log; 2 and 3 follow, and 2 will have everything at once."""
    log = log_of()
    replica = leader(log)
    replica.handle(position(2, 0, -1))
    replica.handle(position(3, 0, -1))
    return replica, log


def without_three(replica: Replica, now_ms: int) -> IsrChanged:
    """The leader has lost patience with 3, and the controllers agree; what it makes of that."""
    [proposal] = replica.handle(Tick(now_ms))
    assert isinstance(proposal, ProposeIsr)
    assert proposal.proposal.isr == {1, 2}
    assert replica.out_of_sync(now_ms) == {}  # Not before it is committed.
    done = state(version=11, isr=(1, 2))
    answered = ProposalAnswered(proposal.proposal, None, done, now_ms)
    [change] = [e for e in replica.handle(answered) if isinstance(e, IsrChanged)]
    return change


def made_slow() -> tuple[Replica, ModelLog]:
    """3 acknowledges a record a second and gets ten."""
    replica, log = in_sync_with_two()
    for second in range(12):
        now_ms = second * 1000
        append(replica, log, 10, now_ms)
        replica.handle(ack(2, log.log_end_offset, now_ms=now_ms))
        replica.handle(ack(3, second, now_ms=now_ms))
    assert without_three(replica, 11_500).left == {3: SLOW}
    return replica, log


def made_stuck() -> tuple[Replica, ModelLog]:
    """3 acknowledges nothing of one record."""
    replica, log = in_sync_with_two()
    append(replica, log, 1, 5)
    replica.handle(ack(2, 1, now_ms=5))
    assert without_three(replica, LAG_MS + 10).left == {3: STUCK}
    return replica, log


def test_who_acknowledges_and_never_has_all_is_slow() -> None:
    replica, log = made_slow()
    assert replica.out_of_sync(11_500) == {3: SLOW}
    replica.handle(ack(3, 13, now_ms=12_000))
    assert replica.out_of_sync(12_000) == {3: SLOW}
    assert log.log_end_offset == 120


def test_who_acknowledges_nothing_is_stuck() -> None:
    replica, _ = made_stuck()
    assert replica.out_of_sync(LAG_MS + 10) == {3: STUCK}


def test_who_is_slow_and_then_acknowledges_nothing_new_is_stuck_until_it_does() -> None:
    replica, _ = made_slow()
    for now_ms in (15_000, 20_000, 25_000):
        replica.handle(ack(3, 11, now_ms=now_ms))  # It speaks, and says the same.
    assert replica.out_of_sync(20_999) == {3: SLOW}
    assert replica.out_of_sync(25_000) == {3: STUCK}
    replica.handle(ack(3, 12, now_ms=26_000))
    assert replica.out_of_sync(26_000) == {3: SLOW}


def test_who_was_stuck_and_goes_on_copies_what_it_lacks() -> None:
    replica, log = made_stuck()
    append(replica, log, 9, 20_000)
    replica.handle(ack(3, 1, now_ms=20_000))
    assert replica.out_of_sync(20_000) == {3: BOOTSTRAPPING}


@pytest.mark.parametrize("made", [made_slow, made_stuck])
def test_who_comes_back_on_a_new_stream_copies_what_it_lacks(made) -> None:
    replica, log = made()
    append(replica, log, 5, 30_000)
    replica.handle(position(3, 0, -1, session=2, now_ms=30_000))
    assert replica.out_of_sync(30_000) == {3: BOOTSTRAPPING}
    assert replica.out_of_sync(30_001 + LAG_MS) == {3: STUCK}


def test_a_new_replica_copies_what_it_lacks_until_it_is_in() -> None:
    log = log_of((4, 20))
    replica = leader(log, high_watermark=20, isr=(1, 2), now_ms=100)
    assert replica.out_of_sync(100) == {3: BOOTSTRAPPING}
    replica.handle(position(3, 0, -1, now_ms=9_000))
    replica.handle(ack(3, 7, now_ms=18_000))
    assert replica.out_of_sync(28_000) == {3: BOOTSTRAPPING}
    assert replica.out_of_sync(28_001) == {3: STUCK}
    effects = replica.handle(ack(3, 20, now_ms=28_100))
    [wish] = [effect for effect in effects if isinstance(effect, ProposeIsr)]
    assert replica.out_of_sync(60_000) == {3: BOOTSTRAPPING}  # It lacks nothing: it is to join.
    done = ProposalAnswered(wish.proposal, None, state(version=11), 60_000)
    [change] = [e for e in replica.handle(done) if isinstance(e, IsrChanged)]
    assert (change.joined, change.left) == ({3}, {})
    assert replica.out_of_sync(90_000) == {}


def test_who_the_controllers_take_out_is_offline_until_it_is_heard() -> None:
    replica, log = in_sync_with_two()
    down = {node_id: BrokerStatus(node_id, eligible=node_id != 3) for node_id in (1, 2, 3)}
    replica.handle(BrokersChanged(down, 50))
    [change, *_] = replica.handle(PartitionChanged(state(version=11, isr=(1, 2)), 2, 50))
    assert isinstance(change, IsrChanged)
    assert change.left == {3: OFFLINE}
    assert replica.out_of_sync(1_000_000) == {3: OFFLINE}
    append(replica, log, 4, 1_000_000)
    up = {node_id: BrokerStatus(9 if node_id == 3 else node_id, eligible=True) for node_id in down}
    replica.handle(BrokersChanged(up, 1_000_000))
    replica.handle(position(3, 0, -1, session=2, broker_epoch=9, now_ms=1_000_000))
    assert replica.out_of_sync(1_000_000) == {3: BOOTSTRAPPING}


def test_only_a_leader_says_who_is_out_of_sync() -> None:
    replica, _ = made_stuck()
    elected = PartitionState(2, 6, 12, (1, 2, 3), frozenset({1, 2}))
    replica.handle(PartitionChanged(elected, 2, 0))
    assert replica.out_of_sync(0) == {}


def test_a_shorter_patience_counts_at_once() -> None:
    replica, log = in_sync_with_two()
    append(replica, log, 1, 0)
    replica.handle(ack(2, 1, now_ms=0))
    replica.handle(LogAdvanced(600))
    [proposal] = replica.handle(LagMaxChanged(500, 600))
    assert isinstance(proposal, ProposeIsr)


async def test_the_log_and_the_metrics_say_who_left_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = BrokerMetrics()
    async with running(lag_max_ms=1000) as brokers:
        brokers[1].manager.count_isr_changes(metrics.isr_changed)
        metrics.watch_followers(brokers[1].manager.followers_out_of_sync)
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[3].logs.hold = True
        await brokers[1].append(b"b")
        shown = capsys.readouterr().out
        assert re.search(r"in-sync set .*left='3 \(stuck\)'", re.sub(r"\x1b\[\d*m", "", shown))
        counted = generate_latest(metrics.registry).decode().splitlines()
        assert 'penstock_isr_left_total{reason="stuck"} 1.0' in counted
        assert 'penstock_isr_left_total{reason="slow"} 0.0' in counted
        assert 'penstock_out_of_sync_followers{reason="stuck"} 1.0' in counted
        told = brokers[1].manager.why_out_of_sync(KEY)
        assert told == {3: metadata_pb2.OUT_OF_SYNC_REASON_STUCK}
        brokers[3].logs.release()
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        await brokers[1].append(b"c", acks=common_pb2.ACKS_ALL)
        counted = generate_latest(metrics.registry).decode().splitlines()
        assert "penstock_isr_joined_total 1.0" in counted
        assert 'penstock_out_of_sync_followers{reason="stuck"} 0.0' in counted
        assert "joined=[3]" in re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)


def test_every_reason_has_a_name_that_tools_are_told() -> None:
    assert set(REASONS) == set(OutOfSync)
