"""Rules left out of the controllers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.known_bug import NO_LOSS, Bug
from penstock.raft_meta.core import broker_commands, election, partition_commands, reassignment
from penstock.raft_meta.core.model import Broker, Partition
from penstock.v1 import cluster_pb2


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
    """Nodes that lose their disks when they come back in sync, and copy all anew slowly."""
    faults: list[Fault] = []
    for number, (node, leader) in enumerate(((4, 1), (5, 2), (4, 3), (5, 1), (4, 5), (5, 4)) * 2):
        at_ms = 1500 + 750 * number
        faults += [
            Fault(at_ms, "power loss", (node,), 60),
            Fault(at_ms + 420, "lost disk", (node,), 60),
            Fault(at_ms + 430, "one way", (leader, node), 900),
            Fault(at_ms + 430, "slow disk", (node,), 900),
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


CONTROLLER_BUGS: Final[dict[str, Bug]] = {
    "member-epochs-are-not-checked": Bug(
        "a replica may be in sync on the word of its former process (KIP-903)",
        partition_commands,
        "_ineligible",
        _any_epoch_of_a_member,
        ("power loss", "lost disk", "one way"),
        {**NO_LOSS, "nodes": (1, 2, 3, 4, 5), "partitions": 3, "min_isr": 1, "late": 0.5},
        _emptied_while_it_joins(),
    ),
    "partition-epochs-are-not-compared": Bug(
        "an in-sync set may be based on another state of the partition than the newest",
        partition_commands,
        "_check_authority",
        _based_on_any_partition_epoch,
        (),
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1, "late": 0.5},
        _fenced_again_and_again(),
    ),
    "refused-wishes-use-up-nothing": Bug(
        "an in-sync set that was refused for a member may be asked for in the same partition epoch",
        partition_commands,
        "_use_up",
        _used_up_by_nothing,
        (),
        {**NO_LOSS, "nodes": (1, 2, 3), "partitions": 3, "min_isr": 1, "left_over": 0.9},
        _caught_up_while_fenced(),
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
        {**NO_LOSS, "late": 0.5},
    ),
    "any-replica-is-elected": Bug(
        "the controllers elect a replica that is not in sync",
        election,
        "_elect",
        _any_live_replica,
        ("kill leader", "kill", "slow network", "one way", "split"),
        {**NO_LOSS, "min_isr": 1},
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
        {**NO_LOSS, "nodes": (1, 2, 3, 4), "partitions": 1, "min_isr": 1},
    ),
}
