"""Who is in sync, who may lead, and who leads: pure functions of one partition and its brokers.

The rules, after KIP-497 (in-sync sets are the controller's), KIP-966 (eligible leader replicas)
and Kafka's PartitionChangeBuilder:

- An in-sync set is never empty: its last member stays, without leading, when its broker goes. If
  that broker restarts uncleanly (its log may have lost its end) while there are eligible leader
  replicas, one of those takes the place of the last member: the partition waits for it.
- While the in-sync set is smaller than ``min.insync.replicas`` no high watermark advances, so
  whoever leaves it then still holds everything acknowledged: it becomes an eligible leader
  replica, until the set is large enough again or its broker restarts uncleanly.
- A leader stays as long as it may. Otherwise the first usable replica of the in-sync set leads,
  else a leader that shuts down on purpose stays while it lives, else the first usable eligible
  leader replica leads, else (unclean, where allowed) the first usable replica, else nobody.
  A replica that is only being added may be empty: it leads uncleanly by an operator's order alone.
- One that is drained leads only for want of another in that place: it gives way to any usable
  replica in sync that is not drained, and of equals it comes last.
- A replica that its live broker can't serve (``offline``: a failed disk, a damaged log) counts as
  one whose broker restarted uncleanly, and is not elected before it is online again.
- The leader epoch rises with every change of the leader, the partition epoch with every change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock.raft_meta.core.model import NO_LEADER, Partition


@dataclass(frozen=True, slots=True)
class Rules:
    """What a decision about a partition rests on besides the partition.

    ``usable(node)``: may be given leadership (unfenced, not shutting down). ``alive(node)``: may
    keep it (unfenced). ``drained(node)``: is to be spared it. ``min_isr`` and ``unclean``: the
    topic's configs in force. ``ordered``: an operator orders an election, though it be unclean.
    """

    usable: Callable[[int], bool]
    alive: Callable[[int], bool]
    min_isr: int
    unclean: bool
    ordered: bool = False
    drained: Callable[[int], bool] = lambda _: False


def in_order(partition: Partition, members: Collection[int]) -> tuple[int, ...]:
    """``members`` that are replicas, in the order of the replicas."""
    return tuple(node for node in partition.replicas if node in members)


def revise(
    partition: Partition,
    rules: Rules,
    *,
    isr: Collection[int],
    lost: Collection[int] = (),
) -> Partition:
    """The partition with ``isr`` as its in-sync set, as far as the rules above allow it.

    ``lost`` names replicas whose broker restarted uncleanly: they are no eligible leaders, and
    the last in-sync one only for want of any other. The same object comes back when nothing
    changes.
    """
    lost = {*lost, *partition.offline}
    served = [node for node in isr if node not in partition.offline]
    new_isr = in_order(partition, served) or _last_member(partition, lost)
    eligible = _eligible(partition, new_isr, lost)
    leader, clean = _elect(partition, rules, new_isr, eligible)
    recovering = partition.recovering
    if leader != NO_LEADER and leader not in new_isr:
        new_isr = (leader,)
        eligible = _eligible(partition, new_isr, lost) if clean else ()
        recovering = recovering or not clean
    if len(new_isr) >= min(rules.min_isr, len(partition.replicas)):
        eligible = ()
    return changed(partition, isr=new_isr, elr=eligible, leader=leader, recovering=recovering)


class Withdrawal:
    """One node leaves every in-sync set: ``revise`` for many partitions, each shape decided once.

    A decision does not depend on a partition's epochs, which rise by it; all else of many
    partitions is equal. Valid as long as what ``rules`` say of the brokers is. ``share`` gives
    equal lists of nodes one object. ``anew``: the node has registered anew, and what it could not
    serve before it has not tried yet.
    """

    def __init__(
        self,
        node_id: int,
        *,
        unclean: bool,
        share: Callable[[Partition], Partition],
        anew: bool = False,
    ) -> None:
        self._node_id = node_id
        self._share = share
        self._lost = (node_id,) if unclean else ()
        self._unclean = unclean
        self._anew = anew
        self._decided: dict[tuple[object, ...], tuple[Partition, Partition]] = {}

    def concerns(self, partition: Partition) -> bool:
        """Whether the node may lose anything in it."""
        node_id = self._node_id
        return (
            node_id in partition.isr
            or (self._unclean and node_id in partition.elr)
            or (self._anew and node_id in partition.offline)
        )

    def revise(self, partition: Partition, rules: Rules) -> Partition:
        """The partition without the node, as far as the rules allow it; itself if unchanged."""
        shape = (rules.min_isr, rules.unclean, partition[:4], partition[6:])
        decided = self._decided.get(shape)
        if decided is None:
            revised = self._revise(partition, rules)
            if revised is not partition:
                revised = self._share(revised)
            decided = self._decided[shape] = (partition, revised)
        before, after = decided
        if after is before:
            return partition
        epochs = (
            partition.leader_epoch + after.leader_epoch - before.leader_epoch,
            partition.partition_epoch + after.partition_epoch - before.partition_epoch,
        )
        return tuple.__new__(Partition, after[:4] + epochs + after[6:])

    def _revise(self, partition: Partition, rules: Rules) -> Partition:
        node_id = self._node_id
        rest = [node for node in partition.isr if node != node_id]
        if self._anew and node_id in partition.offline:
            offline = [node for node in partition.offline if node != node_id]
            return with_offline(partition, rules, offline, isr=rest, lost=self._lost)
        return revise(partition, rules, isr=rest, lost=self._lost)


def with_offline(
    partition: Partition,
    rules: Rules,
    offline: Collection[int],
    *,
    isr: Collection[int],
    lost: Collection[int] = (),
) -> Partition:
    """``revise``, with other replicas that can't be served than before: always a change."""
    moved = partition._replace(offline=in_order(partition, offline))
    revised = revise(moved, rules, isr=isr, lost=lost)
    return bumped(moved, led_before_by=partition.leader) if revised is moved else revised


def changed(
    partition: Partition,
    *,
    isr: tuple[int, ...],
    elr: tuple[int, ...],
    leader: int,
    recovering: bool,
) -> Partition:
    """The partition with these values and the epochs that go with them; itself if none differs."""
    new = partition._replace(isr=isr, elr=elr, leader=leader, recovering=recovering)
    return partition if new == partition else bumped(new, led_before_by=partition.leader)


def bumped(partition: Partition, *, led_before_by: int) -> Partition:
    """The partition with its epochs raised."""
    return partition._replace(
        leader_epoch=partition.leader_epoch + (partition.leader != led_before_by),
        partition_epoch=partition.partition_epoch + 1,
    )


def _last_member(partition: Partition, lost: Collection[int]) -> tuple[int, ...]:
    """Who stays when all would leave.

    An eligible replica has everything acknowledged for certain; one that is lost has it only if
    its disk had. Where all are lost the last one to say so is as good as any.
    """
    keep = partition.leader if partition.leader in partition.isr else partition.isr[0]
    if keep in lost:
        complete = (*partition.isr, *partition.elr)
        keep = next((node for node in complete if node not in lost), keep)
    return (keep,)


def _eligible(partition: Partition, isr: tuple[int, ...], lost: Collection[int]) -> tuple[int, ...]:
    members = {*partition.elr, *partition.isr}.difference(isr, lost)
    return in_order(partition, members)


def _first(nodes: Iterable[int], accept: Callable[[int], bool]) -> int:
    return next((node for node in nodes if accept(node)), NO_LEADER)


def _first_spared(
    nodes: Sequence[int], usable: Callable[[int], bool], rules: Rules, current: int = NO_LEADER
) -> int:
    """The first usable one that is not drained, else ``current`` if usable, else the first."""
    leader = _first(nodes, lambda node: usable(node) and not rules.drained(node))
    if leader != NO_LEADER:
        return leader
    return current if current in nodes and usable(current) else _first(nodes, usable)


def _elect(
    partition: Partition, rules: Rules, isr: tuple[int, ...], eligible: tuple[int, ...]
) -> tuple[int, bool]:
    """The leader (or NO_LEADER), and whether it surely has all that was acknowledged."""
    current, offline = partition.leader, partition.offline

    def usable(node: int) -> bool:
        return node not in offline and rules.usable(node)

    if current in isr and usable(current) and not rules.drained(current):
        return current, True
    leader = _first_spared(isr, usable, rules, current)
    if leader == NO_LEADER and current in isr and current not in offline and rules.alive(current):
        leader = current
    if leader == NO_LEADER:
        leader = _first_spared(eligible, usable, rules)
    if leader == NO_LEADER and (rules.unclean or rules.ordered):
        old = [node for node in partition.replicas if node not in partition.adding]
        leader = _first_spared(old, usable, rules)
        if leader == NO_LEADER and rules.ordered:
            leader = _first_spared(partition.adding, usable, rules)
        return leader, leader == NO_LEADER
    return leader, True
