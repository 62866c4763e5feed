"""How a partition moves to other replicas (KIP-455): pure functions of one partition.

====================  ==========================================================================
step                  what the partition is then
====================  ==========================================================================
a move begins         ``replicas`` are the old ones in their order, then those being ``adding``;
                      ``removing`` are the old ones that leave, ``target`` is where it leads
replicas catch up     the leader asks for them in the in-sync set, as for any other follower
it has arrived        ``replicas`` are ``target``, and nothing is adding or removing
it is cancelled       ``replicas`` are the old ones in their order, as before it began
====================  ==========================================================================

- Nobody leaves before all that come are in sync, and the in-sync replicas that stay are enough for
  ``min.insync.replicas``: a move makes nothing less safe than the topic asks for.
- Nobody leaves while nobody leads: who has what is not known then.
- Whenever a replica leaves, the leader epoch rises. One that comes back later comes with an empty
  log, and what the leader knew of the old one must not count for it.
- While it lasts ``min.insync.replicas`` goes by the old number of replicas.
"""

from __future__ import annotations

from penstock.raft_meta.core import election
from penstock.raft_meta.core.model import NO_LEADER, Partition

_Nodes = tuple[int, ...]


def original(partition: Partition) -> _Nodes:
    """The replicas as they were before the move, or are when there is none."""
    return tuple(node for node in partition.replicas if node not in partition.adding)


def stays_in_sync(partition: Partition, target: _Nodes) -> bool:
    """An in-sync replica is left when only the old ones and those of ``target`` are."""
    return not {*original(partition), *target}.isdisjoint(partition.isr)


def retarget(partition: Partition, target: _Nodes, rules: election.Rules) -> Partition:
    """The partition on its way to ``target``, whatever its way was before; itself if that is it.

    The old replicas as ``target`` cancel. Only where ``stays_in_sync``. ``rules`` are those for
    the old number of replicas.
    """
    before = original(partition)
    if target == (partition.target or before):
        return partition
    adding = tuple(node for node in target if node not in before)
    return _with_replicas(
        partition,
        rules,
        replicas=(*before, *adding),
        adding=adding,
        removing=tuple(node for node in before if node not in target),
        target=() if target == before else target,
    )


def has_arrived(partition: Partition, min_isr: int) -> bool:
    """The move may end. ``min_isr`` is what holds for the target's number of replicas."""
    target = partition.target
    if not target or partition.leader == NO_LEADER:
        return False
    in_sync = set(target).intersection(partition.isr)
    return in_sync.issuperset(partition.adding) and len(in_sync) >= min(min_isr, len(target))


def arrive(before: Partition, partition: Partition, rules: election.Rules) -> Partition:
    """The partition at its target, one change away from ``before``.

    ``partition`` is what the command has made of ``before`` otherwise; it ``has_arrived``.
    """
    there = _with_replicas(
        partition, rules, replicas=partition.target, adding=(), removing=(), target=()
    )
    return there._replace(
        leader_epoch=before.leader_epoch + _starts_anew(before, there),
        partition_epoch=before.partition_epoch + 1,
    )


def _starts_anew(before: Partition, now: Partition) -> bool:
    """Another leads, or somebody left: what the leader knew of the followers counts no more."""
    return now.leader != before.leader or not set(before.replicas).issubset(now.replicas)


def _with_replicas(
    partition: Partition,
    rules: election.Rules,
    *,
    replicas: _Nodes,
    adding: _Nodes,
    removing: _Nodes,
    target: _Nodes,
) -> Partition:
    moved = partition._replace(
        replicas=replicas,
        adding=adding,
        removing=removing,
        target=target,
        # In the order of the replicas, which may be another now.
        isr=tuple(node for node in replicas if node in partition.isr),
        elr=tuple(node for node in replicas if node in partition.elr),
        offline=tuple(node for node in replicas if node in partition.offline),
    )
    revised = election.revise(moved, rules, isr=moved.isr)
    return revised._replace(
        leader_epoch=partition.leader_epoch + _starts_anew(partition, revised),
        partition_epoch=partition.partition_epoch + 1,
    )
