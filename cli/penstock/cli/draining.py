"""How the replicas of a broker are spread over others: the plan of a drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from penstock.wire.errors import InvalidReplicaAssignmentError
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import SHOWN, some

Assignments = dict[TopicPartition, tuple[int, ...]]


def drain(
    leaving: int,
    replicas: Mapping[TopicPartition, Sequence[int]],
    candidates: Mapping[int, str],
    racks: Mapping[int, str],
    only: Collection[TopicPartition] | None = None,
) -> Assignments:
    """The new replicas of each partition that broker ``leaving`` has one of.

    ``replicas`` are those of every partition of the cluster, which say how full a broker is;
    ``only`` restricts what moves. ``candidates`` are the racks of the brokers that may take
    replicas, ``racks`` those of all. The broker that takes a replica takes its place in the list,
    and so preferred leaderships too: one in a rack of which the partition has no replica goes
    first, then one with the fewest replicas. Raises InvalidReplicaAssignmentError where none is
    left.
    """
    load = Counter(node for nodes in replicas.values() for node in nodes)
    plan: Assignments = {}
    stuck: list[TopicPartition] = []
    for where in sorted(replicas):
        nodes = tuple(replicas[where])
        if leaving not in nodes or (only is not None and where not in only):
            continue
        free = [node for node in candidates if node not in nodes]
        if not free:
            stuck.append(where)
            continue
        taken = {racks.get(node, "") for node in nodes if node != leaving} - {""}
        target = min(free, key=lambda node: (candidates[node] in taken, load[node], node))
        load[target] += 1
        plan[where] = tuple(target if node == leaving else node for node in nodes)
    if stuck:
        raise _nowhere(leaving, stuck, replicas, candidates)
    return plan


def _nowhere(
    leaving: int,
    stuck: Sequence[TopicPartition],
    replicas: Mapping[TopicPartition, Sequence[int]],
    candidates: Mapping[int, str],
) -> InvalidReplicaAssignmentError:
    if not candidates:
        return InvalidReplicaAssignmentError(
            f"no other broker is live that could take the replicas of broker {leaving}; next: "
            "start or add one; `penstock cluster describe` lists the brokers"
        )
    named = some([str(where) for where in stuck[:SHOWN]], len(stuck))
    step = "next: add a broker"
    first = stuck[0]
    rest = ",".join(str(node) for node in replicas[first] if node != leaving)
    if rest:
        step += (
            ", or keep fewer copies of them first, as with `penstock partitions reassign "
            f"{first.topic}:{first.partition} --replicas {rest}`"
        )
    have = "has" if len(stuck) == 1 else "have"
    return InvalidReplicaAssignmentError(
        f"{named} {have} replicas on every broker that could take one "
        f"({', '.join(str(node) for node in sorted(candidates))}); {step}"
    )
