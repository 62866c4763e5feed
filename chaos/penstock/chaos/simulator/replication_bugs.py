"""Rules left out of leaders and followers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.partition_events import (
    Effect,
    FollowerPositioned,
    ProposalAnswered,
    Role,
    TruncateTo,
)
from penstock.broker.core.partition_leader import Leadership
from penstock.broker.core.ports import EpochEnd
from penstock.broker.core.replica import Replica
from penstock.chaos.simulator import links
from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.known_bug import NO_LOSS, Bug


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


_divergence = Replica._divergence


def _nobody_has_more(self: Replica, event: FollowerPositioned) -> EpochEnd | None:
    return None if event.last_epoch == self.leader_epoch else _divergence(self, event)


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


def _follows_by_the_answer(replica: Replica, answer: ProposalAnswered) -> list[Effect]:
    assert answer.state is not None
    return replica._partition_changed(answer.state, answer.state.min_isr, answer.now_ms)


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


REPLICATION_BUGS: Final[dict[str, Bug]] = {
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
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1},
        _late_while_min_isr_rises(),
    ),
    "answers-make-followers": Bug(
        "a leader follows the next one by the answer to its wish, ahead of its metadata",
        Replica,
        "_deposed",
        _follows_by_the_answer,
        ("move", "late metadata"),
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1},
    ),
    "diverging-log-is-taken-for-a-prefix": Bug(
        "the leader pushes to a follower without comparing their logs (KIP-101)",
        Replica,
        "_divergence",
        _everything_is_a_prefix,
    ),
    "leaders-that-lost-records-go-on": Bug(
        "a leader goes on to lead whose follower has more of its leadership than itself",
        Replica,
        "_divergence",
        _nobody_has_more,
        ("lost tail",),
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
}
