"""Each checker says so when its promise is broken: on histories made by hand."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.core.partition_events import Role
from penstock.chaos.simulator.checkers import Checkers, Violation
from penstock.chaos.simulator.disk import Contents, MemoryLog
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.v1 import cluster_pb2
from penstock.wire.ids import LeaderEpoch, TopicId, TopicIdPartition
from penstock.wire.records import RecordData, encode_batch

KEY = TopicIdPartition(TopicId(b"t" * 16), 0)


class Replica(SimpleNamespace):
    """What the checkers look at of a replica, set by hand."""

    def validate(self) -> None:
        pass


def log_of(*values: bytes, epoch: int = 0) -> MemoryLog:
    log = MemoryLog(Contents())
    for value in values:
        records = encode_batch([RecordData(0, None, value)])
        log.append_as_leader(records, LeaderEpoch(epoch), now_ms=0)
    return log


def replica(
    node_id: int,
    log: MemoryLog,
    *,
    high_watermark: int,
    leads: bool = True,
    epoch: int = 0,
    process: Any = None,
) -> Any:
    process = process or SimpleNamespace(node_id=node_id, alive=True)
    role = Role.LEADER if leads else Role.FOLLOWER
    state = Replica(role=role, leader_epoch=epoch, high_watermark=high_watermark)
    return SimpleNamespace(key=KEY, log=log, replica=state, broker=process)


def test_a_leader_shows_what_is_committed_and_others_agree() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a", b"b", b"c"), high_watermark=2)])
    assert checkers.log_of(KEY).end == 2
    checkers.after_step([replica(2, log_of(b"a", b"b"), high_watermark=2, leads=False)])
    checkers.acknowledged_all(KEY, 1, [b"b"])
    checkers.after_step([replica(2, log_of(b"a", b"b"), high_watermark=2, epoch=1)])
    assert checkers.leaderships == 2


def test_a_leader_that_lacks_what_was_committed() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a", b"b"), high_watermark=2)])
    with pytest.raises(Violation, match="but 2 were committed"):
        checkers.after_step([replica(2, log_of(b"a"), high_watermark=1, epoch=1)])


def test_a_former_leader_may_lack_what_was_committed_since() -> None:
    checkers = Checkers()
    former = replica(1, log_of(b"a", b"x"), high_watermark=1)
    checkers.after_step([former])
    newer = log_of(b"a")
    newer.append_as_leader(encode_batch([RecordData(0, None, b"b")]), LeaderEpoch(1), now_ms=0)
    checkers.after_step([replica(2, newer, high_watermark=2, epoch=1)])
    checkers.after_step([former])
    former.replica.high_watermark = 2
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([former])


def test_replicas_that_disagree_below_the_high_watermark() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a", b"b"), high_watermark=2)])
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([replica(2, log_of(b"a", b"x"), high_watermark=2, leads=False)])


def test_a_log_that_was_cut_is_compared_again() -> None:
    checkers = Checkers()
    log = log_of(b"a", b"b")
    checkers.after_step([replica(1, log, high_watermark=2)])
    log.truncate_to(1)
    log.append_as_leader(encode_batch([RecordData(0, None, b"x")]), LeaderEpoch(0), now_ms=0)
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([replica(1, log, high_watermark=2, leads=False)])


def test_two_leaders_in_one_epoch() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a"), high_watermark=1)])
    with pytest.raises(Violation, match="leader epoch 0 was led by broker 1"):
        checkers.after_step([replica(2, log_of(b"a"), high_watermark=1)])


def test_a_high_watermark_that_goes_back() -> None:
    checkers = Checkers()
    leader = replica(1, log_of(b"a", b"b"), high_watermark=2)
    checkers.after_step([leader])
    leader.replica.high_watermark = 1
    with pytest.raises(Violation, match="went from 2 to 1"):
        checkers.after_step([leader])


def test_a_value_that_is_committed_twice() -> None:
    with pytest.raises(Violation, match="committed twice, at 0 and 1"):
        Checkers().after_step([replica(1, log_of(b"a", b"a"), high_watermark=2)])


@pytest.mark.parametrize(("offset", "value"), [(0, b"b"), (1, b"a"), (5, b"nothing")])
def test_an_acknowledged_batch_that_is_not_there(offset: int, value: bytes) -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a", b"b"), high_watermark=2)])
    with pytest.raises(Violation, match="acknowledged by all"):
        checkers.acknowledged_all(KEY, offset, [value])


def test_a_reader_that_sees_what_is_not_committed() -> None:
    checkers = Checkers()
    log = log_of(b"a", b"b")
    checkers.after_step([replica(1, log, high_watermark=1)])
    first, second = log.batches_from(0)
    checkers.consumed(KEY, 0, first.data)
    with pytest.raises(Violation, match="at 1 that was not committed"):
        checkers.consumed(KEY, 1, second.data)


def test_controllers_that_differ() -> None:
    body = cluster_pb2.BecomeControllerCommand(controller_id=1, cluster_id="c")
    command = cluster_pb2.Command(controller_epoch=1, become_controller=body)
    states = [ClusterState(), ClusterState(), ClusterState()]
    states[0].apply(1, command.SerializeToString())
    states[1].apply(1, command.SerializeToString())
    states[2].apply(1, b"")
    checkers = Checkers()
    assert checkers.entry_applied(states[0])
    assert not checkers.entry_applied(states[1])
    with pytest.raises(Violation, match="different states at index 1"):
        checkers.entry_applied(states[2])


def test_a_replica_that_is_behind_at_the_end() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a", b"b"), high_watermark=2)])
    checkers.at_rest([replica(2, log_of(b"a", b"b"), high_watermark=2, leads=False)])
    with pytest.raises(Violation, match="not up to date"):
        checkers.at_rest([replica(2, log_of(b"a"), high_watermark=1, leads=False)])
    with pytest.raises(Violation, match="late watermark"):
        checkers.at_rest([replica(2, log_of(b"a", b"b"), high_watermark=1, leads=False)])


def flush(log: MemoryLog) -> None:
    log.begin_flush()()


def test_a_power_loss_takes_only_what_was_not_flushed() -> None:
    log = log_of(b"a", b"b")
    flush(log)
    assert log.durable_offset == 2
    log.append_as_leader(encode_batch([RecordData(0, None, b"c")]), LeaderEpoch(0), now_ms=0)
    log.append_as_leader(encode_batch([RecordData(0, None, b"d")]), LeaderEpoch(0), now_ms=0)
    assert (log.durable_offset, log.log_end_offset, log.unflushed) == (2, 4, 2)
    assert MemoryLog(log.after_crash(1)).log_end_offset == 3


def test_a_cut_during_a_flush_is_not_taken_for_durable() -> None:
    log = log_of(b"a", b"b")
    finish = log.begin_flush()
    log.truncate_to(1)
    log.append_as_leader(encode_batch([RecordData(0, None, b"x")]), LeaderEpoch(1), now_ms=0)
    finish()
    assert log.durable_offset == 0
    flush(log)
    assert log.durable_offset == 2
    again = MemoryLog(log.after_crash(0))
    assert again.last_epoch == 1
    assert again.end_of_epoch(0).end_offset == 1


def test_virtual_time_runs_in_the_order_of_its_events() -> None:
    scheduler = Scheduler(Random(1))
    seen: list[tuple[int, str]] = []
    scheduler.after(5, lambda: seen.append((scheduler.now_ms, "late")))
    scheduler.after(2, lambda: seen.append((scheduler.now_ms, "early")))
    scheduler.after(3, lambda: seen.append((scheduler.now_ms, "never"))).cancel()
    assert not scheduler.run_until(10, lambda: False)
    assert seen == [(2, "early"), (5, "late")]
    assert scheduler.now_ms == 10
