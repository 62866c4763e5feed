"""What the commands about partitions do: in-sync sets (KIP-497, KIP-903) and elections."""

from __future__ import annotations

from typing import Final

from penstock.raft_meta.core import election
from penstock.raft_meta.core.broker_commands import require_registration
from penstock.raft_meta.core.model import NO_LEADER, Broker, Partition
from penstock.raft_meta.core.tables import Draft, PartitionKey
from penstock.raft_meta.core.versions import REFUSALS_USE_UP_EPOCHS_SINCE
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    NotLeaderError,
    PenstockError,
    PreferredLeaderNotAvailableError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import format_topic_id


def require_partition(draft: Draft, topic_id: bytes, number: int) -> tuple[str, Partition]:
    """The partition and its name for people."""
    topic = draft.tables.topics.get(topic_id)
    if topic is None:
        raise UnknownTopicIdError(f"no topic has the id {format_topic_id(topic_id)}")
    partition = draft.partition((topic_id, number))
    if partition is None:
        raise UnknownTopicOrPartitionError(f"topic {topic.name!r} has no partition {number}")
    return f"{topic.name}-{number}", partition


def alter_partition(
    draft: Draft,
    command: cluster_pb2.AlterPartitionCommand,
    result: cluster_pb2.CommandResult,
) -> None:
    """Change in-sync sets as their leader wishes, each partition for itself.

    A leader may send a wish again and again, and give it up once it is answered: what is judged by
    the registrations of its members is judged once, for its partition epoch is over then.
    NEW_LEADER_ELECTED says that the change took effect and that it ended the leadership: the
    leader shuts down or is drained, or the replicas have moved, and now another in-sync replica
    can lead.
    """
    leader = require_registration(draft, command.node_id, command.broker_epoch)
    for entry in command.partitions:
        answer = result.alter_partition.partitions.add()
        try:
            _alter_one(draft, leader, entry)
        except PenstockError as error:
            answer.error.CopyFrom(error.to_proto())
        now = draft.partition((entry.topic_id, entry.partition))
        if now is not None:
            topic = draft.tables.topics[entry.topic_id]
            answer.partition.CopyFrom(now.to_proto(topic, entry.partition))


def _alter_one(draft: Draft, leader: Broker, entry: cluster_pb2.AlterPartitionEntry) -> None:
    key = (entry.topic_id, entry.partition)
    name, partition = require_partition(draft, *key)
    _check_authority(name, partition, leader, entry)
    wanted = _checked_members(name, partition, leader, entry)
    why_not = _why_ineligible(draft, partition, leader, entry)
    if why_not:
        _use_up(draft, key, partition)
        raise IneligibleReplicaError(f"{why_not}: not in sync for {name}")
    if leader.in_controlled_shutdown and any(draft.usable(node) for node in wanted):
        wanted.discard(leader.node_id)
    rules = draft.rules_of(key, partition.replication_factor)
    recovered = partition._replace(recovering=False)
    revised = election.revise(recovered, rules, isr=wanted)
    if revised is recovered and partition.recovering:
        revised = election.bumped(recovered, led_before_by=partition.leader)
    if revised != partition:
        draft.put_partition(key, revised)
    now = draft.partition(key) or revised
    if now.leader != leader.node_id:
        why = _why_replaced(leader, now)
        raise NewLeaderElectedError(
            f"broker {leader.node_id} {why}, and broker {now.leader} now leads {name}"
        )


def _why_replaced(leader: Broker, now: Partition) -> str:
    if leader.node_id not in now.replicas:
        return "has handed its replica over"
    return "shuts down" if leader.in_controlled_shutdown else "is drained"


def _check_authority(
    name: str, partition: Partition, leader: Broker, entry: cluster_pb2.AlterPartitionEntry
) -> None:
    if entry.leader_epoch < partition.leader_epoch:
        raise FencedLeaderEpochError(
            f"{name} is in leader epoch {partition.leader_epoch}, led by {partition.leader}; "
            f"leader epoch {entry.leader_epoch} of broker {leader.node_id} is over"
        )
    if entry.leader_epoch > partition.leader_epoch:
        raise UnknownLeaderEpochError(
            f"{name} is in leader epoch {partition.leader_epoch}; {entry.leader_epoch} is unknown"
        )
    if partition.leader != leader.node_id:
        raise NotLeaderError(
            f"broker {leader.node_id} does not lead {name}: {partition.leader} does"
        )
    if entry.partition_epoch != partition.partition_epoch:
        raise InvalidUpdateVersionError(
            f"{name} is in partition epoch {partition.partition_epoch}, and the change is based "
            f"on {entry.partition_epoch}; apply the newer metadata and ask again"
        )


def _use_up(draft: Draft, key: PartitionKey, partition: Partition) -> None:
    """Raise the partition epoch, and nothing else: the leader gives the refused wish up.

    Who may be in sync is no matter of the partition epoch. Another sending of the same wish, that
    comes once the member is let in again, would put it in sync with what it had when it was wished
    for, and the leader has gone on without it since.
    """
    if draft.metadata_version >= REFUSALS_USE_UP_EPOCHS_SINCE:
        draft.put_partition(key, election.bumped(partition, led_before_by=partition.leader))


def _checked_members(
    name: str,
    partition: Partition,
    leader: Broker,
    entry: cluster_pb2.AlterPartitionEntry,
) -> set[int]:
    members = [member.node_id for member in entry.new_isr]
    wanted = set(members)
    if len(members) != len(wanted) or not wanted.issubset(partition.replicas):
        raise InvalidRequestError(
            f"the in-sync set {members[:100]} of {name} must name each member once, and only "
            f"its replicas {list(partition.replicas)}"
        )
    if leader.node_id not in wanted:
        raise InvalidRequestError(f"the in-sync set {members[:100]} of {name} lacks its leader")
    return wanted


def _why_ineligible(
    draft: Draft, partition: Partition, leader: Broker, entry: cluster_pb2.AlterPartitionEntry
) -> str:
    """Which of the members may not be in sync, and why; or nothing."""
    for member in entry.new_isr:
        why = _ineligible(draft, member, leader)
        if member.node_id in partition.offline:
            why = "has said that its replica is offline"
        if why:
            return f"broker {member.node_id} {why}"
    return ""


def _ineligible(draft: Draft, member: cluster_pb2.IsrMember, leader: Broker) -> str:
    """Why the replica may not be in sync, or nothing (KIP-903)."""
    broker = draft.broker(member.node_id)
    if broker is None:
        return "is not registered"
    if broker.broker_epoch != member.broker_epoch:
        return f"is registered with broker epoch {broker.broker_epoch}, not {member.broker_epoch}"
    if broker.fenced:
        return "is fenced"
    if broker.in_controlled_shutdown and broker.node_id != leader.node_id:
        return "shuts down"
    return ""


def report_replicas(
    draft: Draft, command: cluster_pb2.ReportReplicasCommand, _: cluster_pb2.CommandResult
) -> None:
    """Take note of which replicas a live broker can serve (KIP-112); all of them or none.

    What the broker may not know yet, that a topic was deleted or a replica moved away, is no error.
    """
    broker = require_registration(draft, command.node_id, command.broker_epoch)
    named: set[PartitionKey] = set()
    for entry in command.replicas:
        key = (entry.topic_id, entry.partition)
        if entry.state not in _REPORTED or key in named:
            raise InvalidRequestError(
                f"broker {broker.node_id} says of partition {entry.partition} of topic "
                f"{format_topic_id(entry.topic_id)} that it is in state {entry.state}; of each "
                f"replica one of {sorted(_REPORTED)} is wanted, once"
            )
        named.add(key)
        partition = draft.partition(key)
        if partition is None or broker.node_id not in partition.replicas:
            continue
        rules = draft.rules_of(key, partition.replication_factor)
        revised = _REPORTED[entry.state](partition, rules, broker.node_id)
        if revised is not partition:
            draft.put_partition(key, revised)


def _online(partition: Partition, rules: election.Rules, node_id: int) -> Partition:
    """It comes in sync as any other does; only the last in-sync one may lead at once."""
    if node_id not in partition.offline:
        return partition
    offline = [node for node in partition.offline if node != node_id]
    return election.with_offline(partition, rules, offline, isr=partition.isr)


def _offline(partition: Partition, rules: election.Rules, node_id: int) -> Partition:
    if node_id in partition.offline:
        return partition
    offline = {*partition.offline, node_id}
    return election.with_offline(partition, rules, offline, isr=partition.isr)


def _damaged(partition: Partition, rules: election.Rules, node_id: int) -> Partition:
    """Offline, but where it would leave nobody in sync to lead: what it has is all there is."""
    others = (node for node in partition.isr if node != node_id and node not in partition.offline)
    return _offline(partition, rules, node_id) if any(map(rules.usable, others)) else partition


_REPORTED: Final = {
    cluster_pb2.REPLICA_STATE_ONLINE: _online,
    cluster_pb2.REPLICA_STATE_OFFLINE: _offline,
    cluster_pb2.REPLICA_STATE_DAMAGED: _damaged,
}


def elect_leaders(
    draft: Draft, command: cluster_pb2.ElectLeadersCommand, result: cluster_pb2.CommandResult
) -> None:
    """Elect leaders anew, each partition for itself."""
    choices = {
        cluster_pb2.ELECTION_TYPE_PREFERRED: _elect_preferred,
        cluster_pb2.ELECTION_TYPE_UNCLEAN: _elect_unclean,
    }
    choose = choices.get(command.type)
    if choose is None:
        raise InvalidRequestError("an election needs a type: preferred or unclean")
    for entry in command.partitions:
        answer = result.elect_leaders.partitions.add(leader=NO_LEADER)
        key = (entry.topic_id, entry.partition)
        try:
            name, partition = require_partition(draft, *key)
            answer.leader = partition.leader
            revised = choose(draft, name, key, partition)
        except PenstockError as error:
            answer.error.CopyFrom(error.to_proto())
            continue
        draft.put_partition(key, revised)
        answer.leader = revised.leader


def _elect_preferred(draft: Draft, name: str, _: PartitionKey, partition: Partition) -> Partition:
    preferred = partition.replicas[0]
    if partition.leader == preferred:
        raise ElectionNotNeededError(f"{name} is led by its preferred leader {preferred} already")
    offline = preferred in partition.offline
    able = preferred in partition.isr and not offline and draft.usable(preferred)
    if not able or draft.drained(preferred):
        raise PreferredLeaderNotAvailableError(
            f"broker {preferred}, the preferred leader of {name}, "
            f"{_why_not_leading(draft, preferred, partition)}"
        )
    return election.changed(
        partition,
        isr=partition.isr,
        elr=partition.elr,
        leader=preferred,
        recovering=partition.recovering,
    )


def _why_not_leading(draft: Draft, preferred: int, partition: Partition) -> str:
    """Why the preferred leader cannot lead now, and what would change that."""
    if not draft.alive(preferred):
        return "is not alive; next: start it, and it leads again once it is in sync"
    if preferred in partition.offline:
        return (
            "can't serve its replica; next: look for data_directory_failed and `replica is "
            "offline` in its log, mend that, and it leads again once it is in sync"
        )
    if preferred not in partition.isr:
        return (
            "is not in sync; next: wait until it is among `Isr` in `penstock topics describe`, "
            "and it leads again"
        )
    if draft.usable(preferred):
        return (
            f"is drained; next: `penstock drain {preferred} --undo`, or start it anew, and it "
            "leads again"
        )
    return "is shutting down; next: start it again, and it leads once it is in sync"


def _elect_unclean(draft: Draft, name: str, key: PartitionKey, partition: Partition) -> Partition:
    if partition.leader != NO_LEADER:
        raise ElectionNotNeededError(f"{name} is led by broker {partition.leader}")
    topic = draft.tables.topics[key[0]]
    rules = election.Rules(
        usable=draft.usable,
        alive=draft.alive,
        min_isr=topic.min_isr(partition.replication_factor),
        unclean=topic.unclean_election,
        ordered=True,
        drained=draft.drained,
    )
    revised = election.revise(partition, rules, isr=partition.isr)
    if revised.leader == NO_LEADER:
        raise EligibleLeadersNotAvailableError(
            f"none of the replicas {list(partition.replicas)} of {name} is alive; next: start one "
            f"of these brokers, then try again"
        )
    return revised
