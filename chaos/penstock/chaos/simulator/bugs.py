"""Known bugs, put into the cores on purpose: each checker is proven by those it must catch.

Most are mistakes that real systems have made. Each is one rule of the protocol left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.last_run import FoundDirectory, epoch_to_report
from penstock.broker.core.partition_events import Effect, ProposalAnswered, Role, TruncateTo
from penstock.broker.core.partition_leader import Leadership
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.producer_state import Append, Duplicate, ProducerState
from penstock.broker.core.replica import Replica
from penstock.chaos.simulator import contents, disk, links, memory_log, runs
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.simulation import Report, Simulation
from penstock.raft_meta.core import broker_commands, election, partition_commands, reassignment
from penstock.raft_meta.core.model import Broker, Partition
from penstock.v1 import cluster_pb2
from penstock.wire.errors import OutOfOrderSequenceError
from penstock.wire.records import BatchHeader

_NO_LOSS: Final[Mapping[str, object]] = {"flush_policy": "commit", "unclean": False}


@dataclass(frozen=True, slots=True)
class Bug:
    """``target.name`` is replaced by ``replacement``.

    ``shown_by``: the kinds of faults under which it does harm soon, or whatever the seed draws;
    ``given``: fields of the Plan without which it does none; ``faults``: a schedule for what chance
    brings about too seldom.
    """

    description: str
    target: object
    name: str
    replacement: object
    shown_by: tuple[str, ...] | None = None
    given: Mapping[str, object] = field(default_factory=lambda: _NO_LOSS)
    faults: Sequence[Fault] | None = None

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the cores inside of the ``with`` block."""
        kept = vars(self.target)[self.name]
        setattr(self.target, self.name, self.replacement)
        try:
            yield
        finally:
            setattr(self.target, self.name, kept)

    def hunt(self, first: int, seeds: int) -> Report | None:
        """Run seeds with the bug in the cores until one shows it; that one's report.

        Raises TypeError when the replacement does not fit the code any more: that shows nothing.
        """
        with self.planted():
            for seed in range(first, first + seeds):
                run = Simulation(seed, self.faults, only=self.shown_by, given=self.given)
                report = run.run()
                if "TypeError" in (report.violation or ""):
                    raise TypeError(f"{self.description}: {report.violation}")
                if report.violation is not None:
                    return report
        return None


# --- The leader ------------------------------------------------------------------------------


def _ignoring_one_member(self: Leadership, min_isr: int) -> bool:
    if len(self.isr) < min_isr:
        return False
    counted = sorted(self.maximal_isr - {self.node_id})[:-1]
    lowest = min([self._log.durable_offset, *(_end(self, node) for node in counted)])
    return _raise_to(self, lowest)


def _ignoring_min_isr(self: Leadership, _: int) -> bool:
    counted = self.maximal_isr - {self.node_id}
    return _raise_to(self, min([self._log.durable_offset, *(_end(self, node) for node in counted)]))


def _counting_what_is_not_durable(self: Leadership, min_isr: int) -> bool:
    if len(self.isr) < min_isr:
        return False
    counted = self.maximal_isr - {self.node_id}
    return _raise_to(self, min([self._log.log_end_offset, *(_end(self, node) for node in counted)]))


def _end(leadership: Leadership, node_id: int) -> int:
    follower = leadership.followers.get(node_id)
    return -1 if follower is None else follower.log_end_offset


def _raise_to(leadership: Leadership, lowest: int) -> bool:
    if lowest <= leadership.high_watermark:
        return False
    leadership.high_watermark = lowest
    return True


def _proposed_isr(self: Leadership) -> frozenset[int]:
    return self.isr if self.pending is None else self.pending.isr


def _committed_isr(self: Leadership) -> frozenset[int]:
    return self.isr


def _always_joining(self: Leadership, brokers: Mapping[int, Any]) -> set[int]:
    return {
        node_id
        for node_id, follower in self.followers.items()
        if node_id not in self.isr
        and follower.matched
        and (status := brokers.get(node_id)) is not None
        and status.eligible
        and status.broker_epoch == follower.broker_epoch
    }


def _everything_is_a_prefix(_: Replica, __: object) -> EpochEnd | None:
    return None


_proposal_answered = Replica._proposal_answered


def _under_the_min_isr_of_before(self: Replica, event: ProposalAnswered) -> list[Effect]:
    if event.state is not None:
        state = replace(event.state, min_isr=self.min_isr)
        event = replace(event, state=state)
    effects = _proposal_answered(self, event)
    self._min_isr_was_told = False  # The metadata bring the right one, in time or late.
    return effects


def _late_while_min_isr_rises() -> tuple[Fault, ...]:
    """A leader acts late on the change, and its followers' disks are slow meanwhile."""
    faults: list[Fault] = []
    for number, leader in enumerate((1, 2, 3)):
        at_ms = 1500 + 3500 * number
        slow = [node for node in (1, 2, 3) if node != leader]
        faults += [
            Fault(at_ms, "late metadata", (leader,), 3000),
            Fault(at_ms + 50, "min isr"),
            *(Fault(at_ms + 60, "slow disk", (node,), 2700) for node in slow),
        ]
    return tuple(faults)


# --- The follower ----------------------------------------------------------------------------

_become_follower = Replica._become_follower


def _cutting_at_the_high_watermark(self: Replica) -> list[Effect]:
    effects = _become_follower(self)
    if self.role is Role.FOLLOWER:
        effects.insert(0, TruncateTo(self.high_watermark))
    return effects


def _end_without_flush(log: Any) -> int:
    end: int = log.log_end_offset
    return end


def _no_epochs(_: EpochHistory, leader_epoch: int, log_end_offset: int) -> EpochEnd:
    return EpochEnd(leader_epoch, log_end_offset)


# --- Producers -------------------------------------------------------------------------------


def _never_a_duplicate(_: ProducerState, __: BatchHeader, ___: object) -> Append:
    return Append()


_check_sequence = vars(ProducerState)["_check"]


def _gaps_are_taken(self: ProducerState, header: BatchHeader, *rest: Any) -> Append | Duplicate:
    try:
        found: Append | Duplicate = _check_sequence(self, header, *rest)
    except OutOfOrderSequenceError:
        return Append()
    return found


# --- The disk --------------------------------------------------------------------------------


def _everything_is_sound(_: object) -> bool:
    return True


def _failures_are_not_heeded() -> bool:
    return False


def _only_of_clean_stops(found: Collection[FoundDirectory]) -> int:
    return epoch_to_report([directory._replace(durable=None) for directory in found])


def _marked_whatever_the_policy(self: runs.Runs, broker_epoch: int, *, failed: bool) -> None:
    self._durable = self._mark(broker_epoch)
    self.heard_epoch, self.was_doubted = broker_epoch, failed


def _emptied_while_the_last_one_restarts() -> tuple[Fault, ...]:
    """All but one replica go, the second with its disk; then the last one restarts at once."""
    faults: list[Fault] = []
    for number, (first, second, last) in enumerate(((4, 5, 1), (5, 4, 2), (4, 5, 3))):
        at_ms = 1500 + 3500 * number
        faults += [
            Fault(at_ms, "kill", (first,), 2500),
            Fault(at_ms + 300, "lost disk", (second,), 2500),
            Fault(at_ms + 600, "power loss", (last,), 60),
        ]
    return tuple(faults)


# --- The controllers -------------------------------------------------------------------------


def _any_live_replica(
    partition: Partition, rules: election.Rules, isr: tuple[int, ...], _: tuple[int, ...]
) -> tuple[int, bool]:
    if partition.leader in isr and rules.usable(partition.leader):
        return partition.leader, True
    return next((node for node in partition.replicas if rules.usable(node)), -1), True


def _leader_epoch_stays(partition: Partition, *, led_before_by: int) -> Partition:
    del led_before_by
    return partition._replace(partition_epoch=partition.partition_epoch + 1)


def _everybody_is_eligible(
    partition: Partition, isr: tuple[int, ...], lost: Collection[int]
) -> tuple[int, ...]:
    return tuple(node for node in partition.replicas if node not in isr and node not in lost)


_with_replicas = vars(reassignment)["_with_replicas"]


def _newcomers_are_in_sync(
    partition: Partition, rules: election.Rules, *, replicas: tuple[int, ...], **rest: Any
) -> Partition:
    moved: Partition = _with_replicas(partition, rules, replicas=replicas, **rest)
    isr = tuple(node for node in replicas if node in moved.isr or rules.usable(node))
    return moved._replace(isr=isr, elr=())


_ineligible = vars(partition_commands)["_ineligible"]


def _any_epoch_of_a_member(draft: Any, member: cluster_pb2.IsrMember, leader: Broker) -> str:
    broker = draft.broker(member.node_id)
    epoch = member.broker_epoch if broker is None else broker.broker_epoch
    why: str = _ineligible(
        draft, cluster_pb2.IsrMember(node_id=member.node_id, broker_epoch=epoch), leader
    )
    return why


_check_authority = vars(partition_commands)["_check_authority"]


def _based_on_any_partition_epoch(
    name: str, partition: Partition, leader: Broker, entry: cluster_pb2.AlterPartitionEntry
) -> None:
    newest = cluster_pb2.AlterPartitionEntry()
    newest.CopyFrom(entry)
    newest.partition_epoch = partition.partition_epoch
    _check_authority(name, partition, leader, newest)


def _fenced_again_and_again() -> tuple[Fault, ...]:
    """Members with slow disks leave and join, and are fenced, while wishes are on their way."""
    faults = [
        Fault(at_ms, "reset", pair)
        for at_ms, pair in zip(range(1500, 12_000, 700), ((1, 2), (2, 3), (3, 1)) * 5, strict=True)
    ]
    for number in range(4):
        slow = {1, 2, 3} - {number % 3 + 1}
        faults += [Fault(1500 + 2600 * number, "slow disk", (node,), 2400) for node in slow]
    return tuple(sorted(faults, key=lambda fault: fault.at_ms))


def _used_up_by_nothing(*_: object) -> None:
    return None


def _follows_by_the_answer(replica: Replica, answer: ProposalAnswered) -> list[Effect]:
    assert answer.state is not None
    return replica._partition_changed(answer.state, answer.state.min_isr, answer.now_ms)


def _caught_up_while_fenced() -> tuple[Fault, ...]:
    """A member catches up while it is fenced, and is behind again once it is let in.

    It stays fenced while it acts late on the metadata; the others learn of all that later still.
    """
    faults: list[Fault] = []
    for number, member in enumerate((1, 2, 3)):
        at_ms = 500 + 4000 * number
        others = [node for node in (1, 2, 3) if node != member]
        faults += [
            Fault(at_ms, "slow disk", (member,), 2100),
            Fault(at_ms + 1000, "late metadata", (member,), 1400),
            *(Fault(at_ms + 1000, "late metadata", (node,), 1800) for node in others),
            *(
                Fault(at_ms + reset_ms, "reset", (member, node))
                for reset_ms in (1020, 1110, 1200)
                for node in others
            ),
            Fault(at_ms + 2300, "slow disk", (member,), 3200),
        ]
    return tuple(sorted(faults, key=lambda fault: fault.at_ms))


_REPORTED: Final = vars(partition_commands)["_REPORTED"]


def _emptied_while_it_joins() -> tuple[Fault, ...]:
    """Nodes that lose their disks when they come back in sync, and a leader that hears nothing."""
    faults: list[Fault] = []
    for number, (node, leader) in enumerate(((4, 1), (5, 2), (4, 3), (5, 1), (4, 5), (5, 4)) * 2):
        at_ms = 1500 + 750 * number
        faults += [
            Fault(at_ms, "power loss", (node,), 60),
            Fault(at_ms + 420, "lost disk", (node,), 60),
            Fault(at_ms + 430, "one way", (leader, node), 900),
        ]
    return tuple(faults)


def _whoever_comes_last(*_: object) -> None:
    return None


_withdraw = vars(broker_commands)["_withdraw"]


def _all_restarts_are_clean(draft: Any, node_id: int, *, unclean: bool, **rest: Any) -> int:
    del unclean
    still_led: int = _withdraw(draft, node_id, unclean=False, **rest)
    return still_led


def _as_it_was(partition: Partition, _: object, __: int) -> Partition:
    return partition


def _anew_for_another_leader_alone(before: Partition, now: Partition) -> bool:
    return now.leader != before.leader


BUGS: Final[dict[str, Bug]] = {
    "hw-ignores-a-member": Bug(
        "the high watermark waits for all members of the in-sync set but one",
        Leadership,
        "advance_high_watermark",
        _ignoring_one_member,
    ),
    "hw-ignores-min-isr": Bug(
        "the high watermark advances while the in-sync set is too small (KIP-966)",
        Leadership,
        "advance_high_watermark",
        _ignoring_min_isr,
        ("restart", "kill leader", "split"),
    ),
    "hw-before-own-flush": Bug(
        "the leader counts its own records before they are durable",
        Leadership,
        "advance_high_watermark",
        _counting_what_is_not_durable,
        ("slow disk", "power loss everywhere"),
    ),
    "acts-on-proposed-isr": Bug(
        "the leader acts on a proposed in-sync set before it is committed (KIP-497)",
        Leadership,
        "maximal_isr",
        property(_proposed_isr),
    ),
    "hw-of-committed-isr-only": Bug(
        "the high watermark does not wait for those that may be in sync already (KIP-497)",
        Leadership,
        "maximal_isr",
        property(_committed_isr),
        ("slow network", "kill leader", "split", "one way", "another controller", "kill"),
    ),
    "joins-before-caught-up": Bug(
        "the leader lets a follower join before it has what is committed",
        Leadership,
        "_joining",
        _always_joining,
    ),
    "min-isr-of-another-epoch": Bug(
        "the leader acts on an answer's in-sync set under the min ISR that it knew before",
        Replica,
        "_proposal_answered",
        _under_the_min_isr_of_before,
        (),
        {**_NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1},
        _late_while_min_isr_rises(),
    ),
    "diverging-log-is-taken-for-a-prefix": Bug(
        "the leader pushes to a follower without comparing their logs (KIP-101)",
        Replica,
        "_divergence",
        _everything_is_a_prefix,
    ),
    "epochs-are-not-compared": Bug(
        "every epoch is said to end where the log ends, so that no log ever diverges",
        EpochHistory,
        "end_of_epoch",
        _no_epochs,
    ),
    "truncates-to-high-watermark": Bug(
        "a follower cuts its log at its high watermark (before KIP-101)",
        Replica,
        "_become_follower",
        _cutting_at_the_high_watermark,
        ("kill leader", "slow network", "restart"),
    ),
    "acks-before-flush": Bug(
        "a follower acknowledges what is not durable yet",
        links,
        "acknowledged_end",
        _end_without_flush,
        ("slow disk", "power loss everywhere"),
    ),
    "retries-are-appended-again": Bug(
        "a retried batch is appended a second time",
        ProducerState,
        "_check",
        _never_a_duplicate,
    ),
    "sequence-gaps-are-taken": Bug(
        "a batch is appended though the one before it has not come",
        ProducerState,
        "_check",
        _gaps_are_taken,
    ),
    "unsound-tail-is-kept": Bug(
        "a log is opened without a look at the checksums of its tail",
        contents,
        "is_sound",
        _everything_is_sound,
        ("power loss", "power loss everywhere", "kill leader", "slow disk"),
    ),
    "flipped-bits-are-served": Bug(
        "what is read is not compared with its checksum",
        memory_log,
        "is_served",
        _everything_is_sound,
        ("bit flip", "kill", "slow network"),
    ),
    "failed-flush-is-taken-for-done": Bug(
        "a flush that failed is tried again, and goes well: what it was for is gone",
        disk,
        "is_failure_heeded",
        _failures_are_not_heeded,
        ("failed flush", "power loss", "power loss everywhere"),
    ),
    "member-epochs-are-not-checked": Bug(
        "a replica may be in sync on the word of its former process (KIP-903)",
        partition_commands,
        "_ineligible",
        _any_epoch_of_a_member,
        ("power loss", "lost disk", "one way"),
        {**_NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 1, "late": 0.5},
        _emptied_while_it_joins(),
    ),
    "partition-epochs-are-not-compared": Bug(
        "an in-sync set may be based on another state of the partition than the newest",
        partition_commands,
        "_check_authority",
        _based_on_any_partition_epoch,
        (),
        {**_NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1, "late": 0.5},
        _fenced_again_and_again(),
    ),
    "refused-wishes-use-up-nothing": Bug(
        "an in-sync set that was refused for a member may be asked for in the same partition epoch",
        partition_commands,
        "_use_up",
        _used_up_by_nothing,
        (),
        {**_NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1, "left_over": 0.9},
        _caught_up_while_fenced(),
    ),
    "answers-make-followers": Bug(
        "a leader follows the next one by the answer to its wish, ahead of its metadata",
        Replica,
        "_deposed",
        _follows_by_the_answer,
        ("move", "late metadata"),
        {**_NO_LOSS, "nodes": (1, 2, 3), "partitions": 1, "min_isr": 1},
    ),
    "unclean-restart-is-forgotten": Bug(
        "who restarted uncleanly stays an eligible leader (KIP-966)",
        broker_commands,
        "_withdraw",
        _all_restarts_are_clean,
        ("power loss", "kill", "kill leader", "slow network"),
        {"flush_policy": "os", "unclean": False},
    ),
    "late-registrations-count": Bug(
        "the late request of an earlier process takes the place of the one that registered since",
        broker_commands,
        "_require_newest",
        _whoever_comes_last,
        ("kill", "power loss", "restart"),
        {**_NO_LOSS, "late": 0.5},
    ),
    "crashes-without-loss-are-unclean": Bug(
        "a crash that cost nothing counts as one that may have, under flush.policy=commit as well",
        runs,
        "epoch_to_report",
        _only_of_clean_stops,
        ("kill", "lost disk", "power loss"),
        {**_NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 2},
        _emptied_while_the_last_one_restarts(),
    ),
    "any-run-counts-as-durable": Bug(
        "a run under flush.policy os counts as one that acknowledged only what was on the disk",
        runs.Runs,
        "registered",
        _marked_whatever_the_policy,
        ("power loss", "kill", "kill leader", "slow network"),
        {"flush_policy": "os", "unclean": False},
    ),
    "any-replica-is-elected": Bug(
        "the controllers elect a replica that is not in sync",
        election,
        "_elect",
        _any_live_replica,
    ),
    "everybody-is-eligible": Bug(
        "every replica outside of a small in-sync set counts as an eligible leader",
        election,
        "_eligible",
        _everybody_is_eligible,
        ("kill leader", "one way", "split"),
    ),
    "damaged-replicas-stay-in-sync": Bug(
        "the controllers leave a replica in sync, and leading, that says it is damaged",
        partition_commands,
        "_REPORTED",
        {**_REPORTED, cluster_pb2.REPLICA_STATE_DAMAGED: _as_it_was},
        ("bit flip",),
    ),
    "leader-epoch-stays": Bug(
        "a new leader gets the leader epoch of the one before",
        election,
        "bumped",
        _leader_epoch_stays,
    ),
    "newcomers-are-in-sync": Bug(
        "the replicas that a partition moves to count as in sync before they have anything",
        reassignment,
        "_with_replicas",
        _newcomers_are_in_sync,
        ("move", "kill leader", "restart"),
    ),
    "leader-epoch-stays-when-replicas-leave": Bug(
        "a replica that left and comes back empty is taken for the one that it was",
        reassignment,
        "_starts_anew",
        _anew_for_another_leader_alone,
        ("move", "slow network", "split", "one way"),
        {**_NO_LOSS, "nodes": (1, 2, 3, 4), "partitions": 1, "min_isr": 1},
    ),
}
