"""Each checker says so when its promise is broken: on histories made by hand."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.core.partition_events import Role
from penstock.chaos.simulator.checkers import Checkers, Violation
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.history import CommittedLog
from penstock.chaos.simulator.inbox import Inbox
from penstock.chaos.simulator.links import Applied
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.raft_meta.core.cluster_state import ClusterState
from penstock.raft_meta.core.model import Partition
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
    process = process or SimpleNamespace(node_id=node_id, alive=True, note=lambda _: None)
    role = Role.LEADER if leads else Role.FOLLOWER
    log.history = epoch
    state = Replica(role=role, leader_epoch=epoch, high_watermark=high_watermark)
    return SimpleNamespace(key=KEY, log=log, replica=state, broker=process, closed=False)


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


def test_a_leader_whose_log_gets_shorter() -> None:
    checkers, log = Checkers(), log_of(b"a", b"b")
    leader = replica(1, log, high_watermark=1)
    checkers.after_step([leader])
    log.truncate_to(1)
    with pytest.raises(Violation, match="the log of a leader ended at 2 and ends at 1"):
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


def test_a_history_goes_on_behind_what_was_deleted_and_only_there() -> None:
    """An unclean leader of few records is followed by an older one that had deleted the next."""
    batches = list(log_of(b"a", b"b", b"c", b"d").batches_from(0))
    history = CommittedLog()
    for batch in batches:
        history.extend(batch, "broker 1")
    history.delete_below(2)
    rest = history.fork(1, leader_epoch=1)
    with pytest.raises(Violation, match="a gap at 1"):
        rest.extend(batches[3], "broker 1")
    rest.extend(batches[2], "broker 1")
    again = rest.fork(2, leader_epoch=2)
    assert (again.batch_at(0), again.batch_at(2)) == (batches[0].data, None)


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


def append(log: MemoryLog, *values: bytes, epoch: int = 0) -> None:
    for value in values:
        records = encode_batch([RecordData(0, None, value)])
        log.append_as_leader(records, LeaderEpoch(epoch), now_ms=0)


def test_an_ack_waits_for_no_replica_that_is_gone() -> None:
    log = log_of(b"a")  # Not flushed.
    follower = replica(2, log, high_watermark=0, leads=False)
    applied = Applied(follower, 0, 1)
    assert not applied.is_settled
    follower.closed = True
    assert applied.is_settled


# --- Who is in sync --------------------------------------------------------------------------


class Kept(SimpleNamespace):
    """A disk as the checkers see it, with one log."""

    def durable_end(self, _: Any) -> int:
        end: int = self.log.durable_offset
        return end

    def contents(self, _: Any) -> Contents:
        contents: Contents = self.log.contents
        return contents


def checkers_of(isr: tuple[int, ...], elr: tuple[int, ...] = (), **logs: MemoryLog) -> Checkers:
    """Checkers of nodes 1, 2, 3 with logs ``n1``, ``n2``, ``n3``, flushed."""
    checkers = Checkers({int(name[1:]): Kept(log=log) for name, log in logs.items()})  # type: ignore[misc]
    checkers.partitions[KEY] = Partition((1, 2, 3), isr, elr, 1, 0, 0)
    return checkers


def flushed(*values: bytes, epoch: int = 0) -> MemoryLog:
    log = log_of(*values, epoch=epoch)
    flush(log)
    return log


def test_who_is_in_sync_has_what_is_committed_though_it_does_not_run() -> None:
    full, short = flushed(b"a", b"b"), flushed(b"a")
    checkers_of((1, 2), n1=full, n2=full, n3=short).after_step([replica(1, full, high_watermark=2)])
    with pytest.raises(Violation, match="broker 3 is in sync and has 1 records durably, but 2"):
        checkers_of((1, 2, 3), n1=full, n2=full, n3=short).after_step(
            [replica(1, full, high_watermark=2)]
        )
    unflushed = log_of(b"a", b"b")
    with pytest.raises(Violation, match="broker 2 is in sync and has 0 records durably, but 2"):
        checkers_of((1, 2), n1=full, n2=unflushed, n3=short).after_step(
            [replica(1, full, high_watermark=2)]
        )


def test_an_eligible_leader_has_what_is_committed_too() -> None:
    full, short = flushed(b"a", b"b"), flushed(b"a")
    checkers_of((1,), (2,), n1=full, n2=full).after_step([replica(1, full, high_watermark=2)])
    lacking = checkers_of((1,), (3,), n1=full, n3=short)
    with pytest.raises(Violation, match="broker 3 is an eligible leader and has 1 records durably"):
        lacking.after_step([replica(1, full, high_watermark=2)])
    lacking = checkers_of((1,), (3,), n1=full, n3=short)
    lacking.records_lost(3, 3, [KEY])
    lacking.after_step([replica(1, full, high_watermark=2)])


def test_an_inbox_is_acted_on_in_its_order_once_nobody_is_busy() -> None:
    scheduler = Scheduler(Random(1))
    told: list[str] = []
    inbox = Inbox(scheduler, told.append)
    inbox.take("at once")
    inbox.be_busy(100)
    inbox.be_busy(40)
    inbox.take("late")
    inbox.take("later")
    scheduler.run_until(99, lambda: False)
    assert told == ["at once"]
    scheduler.run_until(101, lambda: False)
    assert told == ["at once", "late", "later"]


def elected(checkers: Checkers, leader: int, *, recovering: bool = False, epoch: int = 1) -> None:
    """Node ``leader`` is elected."""
    now = Partition((1, 2, 3), (leader,), (), leader, epoch, 1, recovering=recovering)
    before = checkers.partitions[KEY]
    checkers.partitions[KEY] = now
    checkers._partition_changed(KEY, before, now, registered(1, 2, 3), unclean=recovering)


def registered(*epochs: int) -> dict[int, Any]:
    """Nodes 1, 2, ... with these broker epochs."""
    return {node: SimpleNamespace(broker_epoch=epoch) for node, epoch in enumerate(epochs, 1)}


def test_a_loss_that_nobody_had_promised_to_prevent() -> None:
    full, short = flushed(b"p-1", b"p-2"), flushed(b"p-1")
    checkers = checkers_of((1, 2), n1=full, n2=full, n3=short)
    checkers.after_step([replica(1, full, high_watermark=2)])
    elected(checkers, 3, recovering=True)
    leader = replica(3, short, high_watermark=1, epoch=1)
    checkers.after_step([leader])
    assert checkers.losses == 1
    assert checkers.log_of(KEY).end == 1
    checkers.acknowledged_all(KEY, 1, [b"p-2"])  # It was, before it was lost.
    append(short, b"p-3", epoch=1)
    flush(short)
    leader.replica.high_watermark = 2
    checkers.after_step([leader])
    append(full, b"p-4", epoch=1)
    uncut = replica(2, full, high_watermark=3, leads=False, epoch=1)
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([uncut])


def test_who_copies_from_an_unclean_leader_is_held_to_its_history_though_all_is_of_an_old_epoch():
    full, short = flushed(b"p-1", b"p-2"), flushed(b"p-1", b"p-3")
    checkers = checkers_of((1, 2), n1=full, n2=full, n3=short)
    old = log_of(b"p-1", epoch=0)
    append(old, b"p-4", epoch=1)
    flush(old)
    checkers.after_step([replica(1, old, high_watermark=2, epoch=1)])
    elected(checkers, 3, recovering=True, epoch=2)
    checkers.after_step([replica(3, short, high_watermark=2, epoch=2)])
    copied = replica(2, flushed(b"p-1", b"p-3"), high_watermark=2, leads=False, epoch=2)
    checkers.after_step([copied])
    copied.log.history = 1  # It has not heard that the leader's log is its own.
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([copied])


@pytest.mark.parametrize("in_sync", [False, True])
def test_a_power_loss_may_bring_back_what_was_cut_below_the_high_watermark_that_was_kept(
    *, in_sync: bool
) -> None:
    full = flushed(b"a")
    append(full, b"b", epoch=1)
    flush(full)
    back = replica(3, flushed(b"a", b"x"), high_watermark=2, leads=False, epoch=1)
    checkers = checkers_of((1, 2, 3) if in_sync else (1, 2), n1=full, n2=full, n3=back.log)
    checkers.after_step([replica(1, full, high_watermark=2, epoch=1)])
    back.log.history = 1
    with pytest.raises(Violation, match="another batch at 1"):
        checkers.after_step([back])
    back.log.history = -1  # As after a power loss.
    with pytest.raises(Violation, match="another batch at 1") if in_sync else nullcontext():
        checkers.after_step([back])


def test_what_a_former_leader_shows_after_an_unclean_election_is_lost_though_nothing_was_yet():
    former, other = flushed(b"p-1"), flushed(b"p-1")
    checkers = checkers_of((1,), n1=former, n2=other, n3=other)
    leads = replica(1, former, high_watermark=1)
    checkers.after_step([leads])
    elected(checkers, 2, recovering=True)
    checkers.after_step([replica(2, other, high_watermark=1, epoch=1)])
    assert checkers.losses == 0
    append(former, b"p-2")
    flush(former)
    leads.replica.high_watermark = 2  # It has not heard of the election.
    checkers.after_step([leads])
    checkers.acknowledged_all(KEY, 1, [b"p-2"])
    assert checkers.log_of(KEY).end == 1


def test_of_a_damaged_batch_what_was_written_is_what_an_unclean_leader_commits() -> None:
    full, short = flushed(b"a", b"b"), flushed(b"a")
    checkers = checkers_of((1,), n1=full, n2=short, n3=full)
    checkers.after_step([replica(1, full, high_watermark=2)])
    elected(checkers, 2, recovering=True)
    checkers.after_step([replica(2, short, high_watermark=1, epoch=1)])
    assert checkers.log_of(KEY).end == 1
    damaged = full.contents.batches[1]
    full.contents.batches[1] = damaged._replace(data=damaged.data[:-1] + b"?")
    full.contents.flipped.add(1)
    elected(checkers, 3, recovering=True, epoch=2)
    checkers.after_step([replica(3, full, high_watermark=2, epoch=2)])
    assert checkers.log_of(KEY).batch_at(1) == damaged.data


def test_what_an_unclean_leader_has_not_flushed_is_not_committed_again() -> None:
    full, copied = flushed(b"a", b"b"), flushed(b"a")
    append(copied, b"b")
    checkers = checkers_of((1,), n1=full, n2=full, n3=copied)
    checkers.after_step([replica(1, full, high_watermark=2)])
    elected(checkers, 3, recovering=True)
    leads = replica(3, copied, high_watermark=1, epoch=1)
    checkers.after_step([leads])
    assert checkers.log_of(KEY).end == 1
    leads.replica.high_watermark = 2
    with pytest.raises(Violation, match="broker 3 is in sync and has 1 records durably, but 2"):
        checkers.after_step([leads])


def test_what_a_leader_showed_in_the_step_in_which_it_ended_is_committed() -> None:
    checkers = Checkers()
    ended = replica(1, log_of(b"a", b"b"), high_watermark=2)
    ended.closed = True
    checkers.after_step([ended])
    checkers.acknowledged_all(KEY, 1, [b"b"])
    follower = replica(2, log_of(b"a", b"x"), high_watermark=2, leads=False)
    follower.closed = True
    checkers.after_step([follower])  # Nobody looks at what is gone.


def test_a_disk_that_is_lost_before_its_process_registers_is_that_of_the_one_before() -> None:
    full, empty = flushed(b"a"), flushed()
    checkers = checkers_of((1, 3), n1=full, n2=full, n3=empty)
    checkers._registered = {1: 1, 2: 2, 3: 3}
    checkers.records_lost(3, -1, [KEY])
    leader = replica(1, full, high_watermark=1)
    checkers.after_step([leader])
    for isr in ((1,), (1, 3)):  # It comes in on the word of the process before.
        now = Partition((1, 2, 3), isr, (), 1, 0, 1)
        before, checkers.partitions[KEY] = checkers.partitions[KEY], now
        checkers._partition_changed(KEY, before, now, registered(1, 2, 3), unclean=False)
        checkers.after_step([leader])
    elected(checkers, 3)
    with pytest.raises(Violation, match=r"whose disk has lost records that \[1\] have"):
        checkers.after_step([replica(3, empty, high_watermark=0, epoch=1)])


@pytest.mark.parametrize(("waits", "heard"), [(False, True), (True, True), (True, False)])
def test_a_clean_election_that_passes_over_who_has_everything(waits: bool, heard: bool) -> None:
    full, empty = flushed(b"a"), flushed()
    checkers = checkers_of((1,), n1=full, n2=full, n3=empty)
    runs = SimpleNamespace(waits=waits, was_doubted=False, heard_epoch=1 if heard else 0)
    checkers._disks[1].runs = runs  # type: ignore[assignment]
    checkers._registered = {1: 1}
    checkers.records_lost(3, 3, [KEY])
    checkers.after_step([replica(1, full, high_watermark=1)])
    # Broker 1 registers anew, uncleanly, and the eligible one takes its place.
    before = checkers.partitions[KEY]._replace(elr=(3,))
    now = checkers.partitions[KEY] = Partition((1, 2, 3), (3,), (), -1, 1, 1)
    checkers._note_set_back(KEY, before, now, 1, 2)
    elected(checkers, 3, epoch=2)
    leads = replica(3, empty, high_watermark=0, epoch=2)
    if waits and heard:
        with pytest.raises(Violation, match="which no harm came to; it was set back"):
            checkers.after_step([leads])
    else:
        checkers.after_step([leads])
        assert (checkers.losses, checkers.passed_over) == (1, int(heard))


def test_a_replica_whose_disk_lost_records_is_elected_before_one_that_has_them() -> None:
    full, short = flushed(b"a", b"b"), flushed(b"a")
    for isr, message in (((1, 2, 3), r"broker 3 leads, whose disk has lost.*\[1, 2\]"), ((3,), "")):
        checkers = checkers_of(isr, n1=full, n2=full, n3=full)
        checkers.after_step([replica(1, full, high_watermark=2)])
        checkers.records_lost(3, 3, [KEY])
        checkers._disks[3].log = short  # type: ignore[index, attr-defined]
        elected(checkers, 3)
        leads = replica(3, short, high_watermark=1, epoch=1)
        if message:
            with pytest.raises(Violation, match=message):
                checkers.after_step([leads])
        else:
            checkers.after_step([leads])
            assert checkers.losses == 1


def test_an_unclean_election_that_nobody_allowed() -> None:
    checkers = checkers_of((1,), n1=flushed(b"a"), n2=flushed(), n3=flushed())
    now = Partition((1, 2, 3), (2,), (), 2, 1, 1, recovering=True)
    with pytest.raises(Violation, match="unclean election that nobody allowed"):
        checkers._partition_changed(
            KEY, checkers.partitions[KEY], now, registered(1, 2, 3), unclean=False
        )


@pytest.mark.parametrize(("epoch_now", "counts"), [(3, False), (4, True)])
def test_who_joins_anew_after_its_disk_came_to_harm_has_everything(
    epoch_now: int, *, counts: bool
) -> None:
    full, short = flushed(b"a", b"b"), flushed(b"a")
    checkers = checkers_of((1, 2), n1=full, n2=full, n3=short)
    leader = replica(1, full, high_watermark=2)
    checkers.after_step([leader])
    checkers.records_lost(3, 3, [KEY])
    now = Partition((1, 2, 3), (1, 2, 3), (), 1, 0, 1)
    before, checkers.partitions[KEY] = checkers.partitions[KEY], now
    checkers._partition_changed(KEY, before, now, registered(1, 2, epoch_now), unclean=False)
    outcome = pytest.raises(Violation, match="broker 3 is in sync") if counts else nullcontext()
    with outcome:
        checkers.after_step([leader])


def test_records_of_a_producer_that_are_committed_in_another_order() -> None:
    with pytest.raises(Violation, match="'p-1' is committed at 2, but number 2"):
        Checkers().after_step([replica(1, log_of(b"q-9", b"p-2", b"p-1"), high_watermark=3)])


def test_two_batches_that_one_leader_epoch_wrote_at_an_offset() -> None:
    checkers = Checkers()
    checkers.after_step([replica(1, log_of(b"a"), high_watermark=0)])
    with pytest.raises(Violation, match="another batch at 0 than others have of leader epoch 0"):
        checkers.after_step([replica(2, log_of(b"x"), high_watermark=0, leads=False)])
