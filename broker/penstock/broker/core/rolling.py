"""Whether a node may be stopped now, with nothing refused and nothing at risk: a pure function.

====================================  ===========================================================
what would happen                     when it is so
====================================  ===========================================================
a partition loses its only replica    the node is in sync, and no other in sync is on a broker
in sync                               that serves
a partition falls under min ISR       the node is in sync, and the others in sync are fewer than
                                      ``min.insync.replicas``: acks=all would be refused
no majority of the controllers is     the node votes, and the voters left that answer and are
left that is caught up                caught up are no majority; or nobody leads for certain now
====================================  ===========================================================

Other brokers that are fenced, stopping or drained count as absent: they are on their way down, or
somebody is about to take them down; so do the controllers of drained ones. Of nodes that are all
drained the first counts the others as there: it leaves, and they wait for it. So of nodes that are
drained first and ask then, as preStop does, no two are told yes at once. A replica of the node that
is not in sync keeps nothing up, so that stopping the node changes nothing there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.wire.wording import SHOWN, some

CAUGHT_UP_ENTRIES: Final = 1_000
"""A voter that lacks no more of the leader's log has it in a moment, and can be elected."""

DRAINED: Final = "drained"
DOWN: Final = "down"


@dataclass(frozen=True, slots=True)
class PartitionStanding:
    """A partition: ``min_isr`` is its ``min.insync.replicas`` in force."""

    name: str
    replicas: Sequence[int]
    isr: Collection[int]
    min_isr: int
    leader: int


@dataclass(frozen=True, slots=True)
class BrokerStanding:
    """A registered broker; it ``serves`` when it is not fenced and does not stop.

    ``drained_since_ms`` puts those that are drained in order, and is 0 of others.
    """

    node_id: int
    serves: bool
    drained_since_ms: int = 0


@dataclass(frozen=True, slots=True)
class VoterStanding:
    """A controller that votes, as the leader knows it.

    ``behind`` is how many entries of the leader's log it lacks; -1 where that is not known.
    """

    node_id: int
    behind: int
    answers: bool


@dataclass(frozen=True, slots=True)
class QuorumStanding:
    """The controllers. ``doubt`` says why it is not certain who leads; empty when it is."""

    voters: Sequence[VoterStanding]
    doubt: str = ""


class RollVerdict(NamedTuple):
    """What a node says of itself: ``reasons`` is of a picture in which it is ``drained``, or not.

    Only of a node that knows itself to be drained it is certain that it knows of all drains before.
    ``passes``: some of the reasons may be over by themselves, and it is worth to wait for that.
    """

    reasons: list[str]
    drained: bool = False
    passes: bool = True


class _Reason(NamedTuple):
    text: str
    passes: bool = True


def why_not_roll(
    node_id: int,
    partitions: Iterable[PartitionStanding],
    brokers: Iterable[BrokerStanding],
    quorum: QuorumStanding,
) -> list[str]:
    """Why the node should not be stopped now, each with what to do next; empty: it may be."""
    return judge(node_id, partitions, brokers, quorum).reasons


def judge(
    node_id: int,
    partitions: Iterable[PartitionStanding],
    brokers: Iterable[BrokerStanding],
    quorum: QuorumStanding,
) -> RollVerdict:
    """The same with what else is to be known of it."""
    known = {broker.node_id: broker for broker in brokers}
    asked = known.get(node_id)
    own_ms = 0 if asked is None else asked.drained_since_ms
    leaving = {
        other.node_id
        for other in known.values()
        if other.node_id != node_id
        and other.drained_since_ms
        and not 0 < own_ms < other.drained_since_ms
    }
    absent = dict.fromkeys(leaving, DRAINED)
    absent |= {other.node_id: DOWN for other in known.values() if not other.serves}
    reasons: list[_Reason] = []
    if absent.get(node_id) != DOWN:
        reasons += _about_partitions(node_id, partitions, absent)
    reasons += _about_controllers(node_id, quorum, leaving)
    return RollVerdict(
        [reason.text for reason in reasons],
        drained=own_ms > 0,
        passes=any(reason.passes for reason in reasons),
    )


def _about_partitions(
    node_id: int, partitions: Iterable[PartitionStanding], absent: Mapping[int, str]
) -> list[_Reason]:
    involved: set[int] = set()  # Who has replicas of those that would suffer by who is absent.
    single: list[str] = []
    last: list[str] = []
    short: list[str] = []
    unmeetable: list[str] = []
    for partition in partitions:
        if node_id not in partition.isr:
            continue
        left = sum(node != node_id and node not in absent for node in partition.isr)
        if len(partition.replicas) == 1:
            single.append(partition.name)
        elif not left:
            last.append(partition.name)
            involved.update(partition.replicas)
        elif left < partition.min_isr:
            never = partition.min_isr >= len(partition.replicas)
            (unmeetable if never else short).append(partition.name)
            if not never:
                involved.update(partition.replicas)
    involved.discard(node_id)
    missing = {node: how for node, how in sorted(absent.items()) if node in involved}
    others = [f"broker {node} is {how}" for node, how in missing.items()]
    beside = f" ({some(others[:SHOWN], len(others))})" if others else ""
    back = _bring_back(
        [node for node, how in missing.items() if how == DOWN],
        [node for node, how in missing.items() if how == DRAINED],
    )
    reasons = []
    if last:
        text = (
            f"node {node_id} has the only replica in sync of {_named(last)}{beside}; next: "
            f"{back}wait until another is in sync, as `penstock doctor` says"
        )
        reasons.append(_Reason(text))
    if single:
        text = (
            f"node {node_id} has the only replica of {_named(single)}, which nobody serves without "
            "it; next: add a replica (`penstock partitions reassign`), or stop it all the same"
        )
        reasons.append(_Reason(text, passes=False))
    if short:
        text = (
            f"without node {node_id} fewer replicas of {_named(short)} are in sync than "
            f"min.insync.replicas{beside}, and acks=all would be refused; next: {back}wait until "
            "the others are in sync, as `penstock doctor` says"
        )
        reasons.append(_Reason(text))
    if unmeetable:
        text = (
            f"min.insync.replicas of {_named(unmeetable)} is as large as the number of replicas, "
            "so that acks=all is refused whenever one of their brokers is down; next: lower it "
            "(`penstock topics alter NAME --config min.insync.replicas=N`), or add a replica"
        )
        reasons.append(_Reason(text, passes=False))
    return reasons


def _bring_back(down: Sequence[int], drained: Sequence[int]) -> str:
    """What to do about these nodes, before another step; empty where there are none."""
    steps = []
    if down:
        steps.append(f"start node {_named([str(node) for node in down])}")
    if drained:
        commands = _named([f"`penstock drain {node} --undo`" for node in drained])
        steps.append(f"{commands}, or restart what is drained")
    return "".join(f"{step}; " for step in steps)


def _named(names: Sequence[str]) -> str:
    return some(names[:SHOWN], len(names))


def _about_controllers(
    node_id: int, quorum: QuorumStanding, leaving: Collection[int]
) -> list[_Reason]:
    if quorum.doubt:
        return [_Reason(f"{quorum.doubt}; next: see `penstock quorum status`")]
    voters = {voter.node_id: voter for voter in quorum.voters}
    if node_id not in voters:
        return []
    if len(voters) == 1:
        alone = (
            f"controller {node_id} is the only one: without it no leader can be elected; next: "
            "stop it all the same if that is meant, or add controllers with `penstock quorum add`"
        )
        return [_Reason(alone, passes=False)]
    left = [voter for voter in quorum.voters if voter.node_id != node_id]
    able = [
        voter
        for voter in left
        if voter.answers and 0 <= voter.behind <= CAUGHT_UP_ENTRIES and voter.node_id not in leaving
    ]
    needed = len(voters) // 2 + 1
    if len(able) >= needed:
        return []
    lacking = ", ".join(
        f"{voter.node_id} {_lack(voter, leaving)}" for voter in left if voter not in able
    )
    short = (
        f"without controller {node_id} only {len(able)} of {len(voters)} controllers would be "
        f"there and caught up, and {needed} are a majority"
    )
    if not lacking:
        return [_Reason(f"{short}; next: add controllers with `penstock quorum add`", passes=False)]
    # In the order in which _lack names what is so.
    silent = [voter.node_id for voter in left if not voter.answers]
    drained = [voter.node_id for voter in left if voter.node_id in leaving and voter.answers]
    back = _bring_back(silent, drained)
    step = f"{back}wait until they have caught up, as `penstock quorum status` shows"
    # Of two, the other that comes back is no majority either.
    return [_Reason(f"{short} (controller {lacking}); next: {step}", passes=len(left) >= needed)]


def _lack(voter: VoterStanding, leaving: Collection[int]) -> str:
    if not voter.answers:
        return "does not answer"
    if voter.behind < 0:
        return "has not been heard yet"
    if voter.node_id in leaving:
        return "is drained"
    return f"is {voter.behind} entries behind"
