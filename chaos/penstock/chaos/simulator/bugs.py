"""Known bugs, put into the cores on purpose: each checker is proven by those it must catch.

Most are mistakes that real systems have made. Each is one rule of the protocol left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.partition_events import Effect, Role, TruncateTo
from penstock.broker.core.partition_leader import Leadership
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.producer_state import Append, ProducerState
from penstock.broker.core.replica import Replica
from penstock.chaos.simulator import links
from penstock.chaos.simulator.faults import KINDS
from penstock.raft_meta.core import election, reassignment
from penstock.raft_meta.core.model import Partition
from penstock.wire.records import BatchHeader


@dataclass(frozen=True, slots=True)
class Bug:
    """``target.name`` is replaced by ``replacement``.

    ``shown_by``: the kinds of faults under which it does harm soon.
    """

    description: str
    target: object
    name: str
    replacement: object
    shown_by: tuple[str, ...] = KINDS

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the cores inside of the ``with`` block."""
        kept = vars(self.target)[self.name]
        setattr(self.target, self.name, self.replacement)
        try:
            yield
        finally:
            setattr(self.target, self.name, kept)


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
    "joins-before-caught-up": Bug(
        "the leader lets a follower join before it has what is committed",
        Leadership,
        "_joining",
        _always_joining,
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
    ),
}
