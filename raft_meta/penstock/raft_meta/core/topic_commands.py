"""What the commands about topics do: create, delete, add partitions, alter configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.raft_meta.core import election, reassignment
from penstock.raft_meta.core.model import Broker, Partition, Topic
from penstock.raft_meta.core.placement import place
from penstock.raft_meta.core.tables import Draft, Tables
from penstock.v1 import cluster_pb2
from penstock.wire.config_keys import suggest
from penstock.wire.errors import (
    AccessForbiddenError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    TopicAlreadyExistsError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import format_topic_id
from penstock.wire.names import MAX_NAME_CHARS, check_topic_name
from penstock.wire.topic_config import (
    MAX_PARTITIONS_PER_TOPIC,
    TOPIC_CONFIGS,
    effective_min_isr,
    validate_topic_configs,
)
from penstock.wire.wording import counted

_MAX_NAMES_COMPARED: Final = 500  # Suggesting compares with each: keep applying fast.

_Replicas = tuple[int, ...]


def require_topic(tables: Tables, name: str) -> Topic:
    """The topic of this name, or UnknownTopicOrPartitionError that suggests the near name."""
    topic_id = tables.topic_ids.get(name)
    if topic_id is None:
        shown = name[:MAX_NAME_CHARS]
        near = suggest(shown, _comparable(tables.topic_ids, shown))
        raise UnknownTopicOrPartitionError(f"topic {shown!r} does not exist{near}")
    return tables.topics[topic_id]


def _comparable(names: Iterable[str], name: str) -> list[str]:
    """The names worth comparing: all if they are few, else those that begin alike."""
    known = list(names)
    if len(known) > _MAX_NAMES_COMPARED:
        known = [other for other in known if other[:3] == name[:3]]
    return sorted(known)[:_MAX_NAMES_COMPARED]


def create_topic(
    draft: Draft, command: cluster_pb2.CreateTopicCommand, result: cluster_pb2.CommandResult
) -> None:
    """Make a topic with its partitions, placed by the cluster or as the command says.

    The same command again (by topic id) is answered as the first time.
    """
    if _made_already(draft.tables, command, result):
        return
    _check_new_topic(draft.tables, command)
    if command.replica_assignments:
        if command.partition_count > 0 or command.replication_factor > 0:
            raise InvalidRequestError(
                "give partition_count and replication_factor, or replica_assignments, not both"
            )
        assignments = _checked_assignments(draft.tables, command.replica_assignments)
        _check_count(len(assignments))
    else:
        _check_count(command.partition_count)
        assignments = _placed(draft.tables, command.partition_count, command.replication_factor)
    topic = Topic(command.topic_id, command.name, dict(command.configs), command.internal)
    _check_min_isr(topic.configs, len(assignments[0]))
    partitions = _new_partitions(draft, assignments)
    _answer(result.create_topic, topic.topic_id, assignments)
    if command.validate_only:
        return
    draft.put_topic(topic)
    for number, partition in enumerate(partitions):
        draft.put_partition((topic.topic_id, number), partition)


def _made_already(
    tables: Tables, command: cluster_pb2.CreateTopicCommand, result: cluster_pb2.CommandResult
) -> bool:
    known = tables.topics.get(command.topic_id)
    if known is None:
        return False
    if known.name != command.name:
        raise InvalidRequestError(
            f"topic id {format_topic_id(command.topic_id)} is that of topic {known.name!r}; "
            f"draw another"
        )
    partitions = tables.partitions[known.topic_id]
    _answer(result.create_topic, known.topic_id, [part.replicas for part in partitions])
    return True


def _answer(
    result: cluster_pb2.CreateTopicResult, topic_id: bytes, assignments: Iterable[_Replicas]
) -> None:
    result.topic_id = topic_id
    result.replica_assignments.extend(
        cluster_pb2.ReplicaAssignment(replicas=replicas) for replicas in assignments
    )


def _check_new_topic(tables: Tables, command: cluster_pb2.CreateTopicCommand) -> None:
    name = command.name
    check_topic_name(name)
    if name in tables.topic_ids:
        raise TopicAlreadyExistsError(f"topic {name!r} exists already")
    if len(command.topic_id) != 16 or not any(command.topic_id):
        raise InvalidRequestError(f"the new topic {name!r} needs a drawn id of 16 bytes")
    if command.topic_id in tables.deleted_topics:
        # A late retry. Brokers that were down still have records under this id.
        raise InvalidRequestError(
            f"a topic of id {format_topic_id(command.topic_id)} was deleted since; draw another"
        )
    validate_topic_configs(command.configs)


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitionsError(
            f"a topic has 1 to {MAX_PARTITIONS_PER_TOPIC} partitions, not {count}"
        )


def _check_min_isr(configs: Mapping[str, str], replication_factor: int) -> None:
    """Refuse more in-sync replicas than a partition has: acks=all would always fail.

    The default needs no check, since it follows the replication factor.
    """
    wanted = effective_min_isr(configs, replication_factor)
    if wanted > replication_factor:
        raise InvalidConfigError(
            f"topic config min.insync.replicas={wanted} is above the topic's replication factor "
            f"{replication_factor}: no write with acks=all would ever succeed; set it to at most "
            f"{replication_factor}"
        )


def _replication_factor(partition: Partition) -> int:
    """How many replicas it has, or those of its target where it moves."""
    return len(partition.target or partition.replicas)


def _fewest_replicas(partitions: Sequence[Partition]) -> int:
    """So many every partition has, where it moves or its move is cancelled."""
    return min(min(part.replication_factor, _replication_factor(part)) for part in partitions)


def _usable(tables: Tables) -> dict[int, Broker]:
    return {broker.node_id: broker for broker in tables.brokers.values() if broker.usable}


def _placed(
    tables: Tables, count: int, replication_factor: int, present: Sequence[_Replicas] = ()
) -> list[_Replicas]:
    usable = _usable(tables)
    if replication_factor < 1:
        raise InvalidReplicationFactorError(
            f"a partition needs at least 1 replica, not {replication_factor}"
        )
    if replication_factor > len(usable):
        names = ", ".join(str(node) for node in sorted(usable)) or "none"
        raise InvalidReplicationFactorError(
            f"replication factor {replication_factor} needs as many live brokers, but there "
            f"{'is' if len(usable) == 1 else 'are'} {len(usable)} (node ids: {names}); start "
            f"more brokers or ask for a smaller factor"
        )
    return place(
        count,
        replication_factor,
        {node: broker.rack for node, broker in usable.items()},
        topic=present,
        cluster_leaders=tables.preferred,
        cluster_replicas=tables.replicas,
    )


def _checked_assignments(
    tables: Tables,
    assignments: Iterable[cluster_pb2.ReplicaAssignment],
    replication_factor: int | None = None,
) -> list[_Replicas]:
    checked: list[_Replicas] = []
    for number, assignment in enumerate(assignments):
        replicas = tuple(assignment.replicas)
        wanted = replication_factor or (len(checked[0]) if checked else len(replicas))
        if not replicas or len(replicas) != wanted or len(set(replicas)) != len(replicas):
            raise InvalidReplicaAssignmentError(
                f"assignment {number} is {list(replicas)[:100]}: every partition needs "
                f"{wanted or 'at least 1'} different replicas"
            )
        unknown = [node for node in replicas if node not in tables.brokers]
        if unknown:
            raise InvalidReplicaAssignmentError(
                f"assignment {number} names brokers that are not registered: {unknown[:100]}"
            )
        checked.append(replicas)
    return checked


def _new_partitions(draft: Draft, assignments: Iterable[_Replicas]) -> list[Partition]:
    """Partitions with every usable replica in sync: an empty log is as good as another."""
    partitions = []
    for number, replicas in enumerate(assignments):
        isr = tuple(node for node in replicas if draft.usable(node))
        if not isr:
            raise InvalidReplicaAssignmentError(
                f"assignment {number} is {list(replicas)[:100]}, and none of these brokers is alive"
            )
        leader = next((node for node in isr if not draft.drained(node)), isr[0])
        partitions.append(Partition(replicas, isr, (), leader, 0, 0))
    return partitions


def delete_topic(
    draft: Draft, command: cluster_pb2.DeleteTopicCommand, _: cluster_pb2.CommandResult
) -> None:
    """Delete a topic and its partitions for good."""
    if command.topic_id:
        topic = draft.tables.topics.get(command.topic_id)
        if topic is None:
            raise UnknownTopicIdError(
                f"no topic has the id {format_topic_id(command.topic_id)}; it may be deleted"
            )
        if command.name and command.name != topic.name:
            raise InvalidRequestError(
                f"topic id {format_topic_id(topic.topic_id)} is that of {topic.name!r}, not of "
                f"{command.name[:MAX_NAME_CHARS]!r}"
            )
    else:
        topic = require_topic(draft.tables, command.name)
    _forbid_internal(topic, "be deleted")
    draft.remove_topic(topic.topic_id)


def _forbid_internal(topic: Topic, what: str) -> None:
    if topic.internal:
        raise AccessForbiddenError(f"{topic.name} is the cluster's own topic and cannot {what}")


def create_partitions(
    draft: Draft, command: cluster_pb2.CreatePartitionsCommand, _: cluster_pb2.CommandResult
) -> None:
    """Raise a topic's partition count; the new partitions have as many replicas as the first."""
    topic = require_topic(draft.tables, command.topic)
    _forbid_internal(topic, "get more partitions: its keys are spread over those it has")
    present = [partition.replicas for partition in draft.tables.partitions[topic.topic_id]]
    count = command.total_count
    if count <= len(present):
        raise InvalidPartitionsError(
            f"topic {topic.name!r} has {counted(len(present), 'partition')}; {count} is not more"
        )
    _check_count(count)
    added = count - len(present)
    replication_factor = _replication_factor(draft.tables.partitions[topic.topic_id][0])
    if command.replica_assignments:
        if len(command.replica_assignments) != added:
            raise InvalidReplicaAssignmentError(
                f"{counted(added, 'partition', 'is')} added, but "
                f"{counted(len(command.replica_assignments), 'assignment', 'is')} given"
            )
        assignments = _checked_assignments(
            draft.tables, command.replica_assignments, replication_factor
        )
    else:
        assignments = _placed(draft.tables, added, replication_factor, present)
    partitions = _new_partitions(draft, assignments)
    if command.validate_only:
        return
    for number, partition in enumerate(partitions, start=len(present)):
        draft.put_partition((topic.topic_id, number), partition)


def alter_configs(
    draft: Draft, command: cluster_pb2.AlterTopicConfigsCommand, _: cluster_pb2.CommandResult
) -> None:
    """Set and reset configs of a topic, all or none."""
    topic = require_topic(draft.tables, command.topic)
    validate_topic_configs(command.set)
    # Only what is set: a topic that asks for too many already can have its other configs altered.
    _check_min_isr(command.set, _fewest_replicas(draft.tables.partitions[topic.topic_id]))
    for key in command.remove:
        if key not in TOPIC_CONFIGS:
            near = suggest(key[:MAX_NAME_CHARS], list(TOPIC_CONFIGS))
            raise InvalidConfigError(f"unknown topic config {key[:MAX_NAME_CHARS]!r}{near}")
        if key in command.set:
            raise InvalidConfigError(f"topic config {key} is both set and removed")
    configs = {key: text for key, text in topic.configs.items() if key not in command.remove}
    configs.update(command.set)
    if command.validate_only or configs == topic.configs:
        return
    altered = Topic(topic.topic_id, topic.name, configs, topic.internal)
    draft.put_topic(altered)
    _reconsider(draft, topic, altered)


def _reconsider(draft: Draft, before: Topic, after: Topic) -> None:
    """Apply changed rules to the topic's partitions.

    Where ``min.insync.replicas`` changes, the partition epoch rises: an in-sync set that its
    leader asked for under the old value is then refused, so that the leader never acts on a new
    set with the old value, advancing a high watermark which eligible leaders do not hold.
    """
    for number, partition in enumerate(draft.tables.partitions[after.topic_id]):
        replication_factor = partition.replication_factor
        rules = draft.rules(after, replication_factor)
        revised = election.revise(partition, rules, isr=partition.isr)
        if revised is partition and rules.min_isr != before.min_isr(replication_factor):
            revised = election.bumped(partition, led_before_by=partition.leader)
        arrives = reassignment.has_arrived(revised, after.min_isr(len(revised.target)))
        if revised is not partition or arrives:
            draft.put_partition((after.topic_id, number), revised)
