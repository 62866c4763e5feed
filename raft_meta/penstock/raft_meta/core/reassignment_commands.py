"""What the command about reassignments does: begin, change, cancel."""

from __future__ import annotations

from penstock.raft_meta.core import reassignment
from penstock.raft_meta.core.model import Partition, Topic
from penstock.raft_meta.core.partition_commands import require_partition
from penstock.raft_meta.core.tables import Draft, PartitionKey
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    InvalidReplicaAssignmentError,
    InvalidRequestError,
    NoReassignmentInProgressError,
    PenstockError,
)
from penstock.wire.topic_config import effective_min_isr
from penstock.wire.wording import counted


def alter_reassignments(
    draft: Draft,
    command: cluster_pb2.AlterReassignmentsCommand,
    result: cluster_pb2.CommandResult,
) -> None:
    """Begin, change or cancel reassignments, each partition for itself.

    The same replicas again change nothing, so that a command may be repeated. What a command says
    of a partition for the second time is refused: one command is one change of it.
    """
    named: set[PartitionKey] = set()
    for entry in command.partitions:
        key = (entry.topic_id, entry.partition)
        answer = result.alter_reassignments.partitions.add()
        try:
            name, partition = require_partition(draft, *key)
            if key in named:
                raise InvalidRequestError(f"{name} is named twice; say once where it is to go")
            named.add(key)
            revised = _revised(draft, name, partition, entry)
        except PenstockError as error:
            answer.error.CopyFrom(error.to_proto())
        else:
            if revised is not partition and not command.validate_only:
                draft.put_partition(key, revised)
        now = draft.partition(key)
        if now is not None:
            answer.partition.CopyFrom(
                now.to_proto(draft.tables.topics[entry.topic_id], entry.partition)
            )


def _revised(
    draft: Draft, name: str, partition: Partition, entry: cluster_pb2.ReassignmentEntry
) -> Partition:
    topic = draft.tables.topics[entry.topic_id]
    target = tuple(entry.replicas)
    if target:
        _check_target(draft, name, topic, target)
    elif not partition.target:
        raise NoReassignmentInProgressError(f"{name} is not being moved: nothing to cancel")
    else:
        target = reassignment.original(partition)
    if not reassignment.stays_in_sync(partition, target):
        raise InvalidReplicaAssignmentError(
            f"{name} cannot leave its way now: only {list(partition.isr)} are in sync, and none of "
            f"them would stay; wait until one of {list(reassignment.original(partition))} is"
        )
    rules = draft.rules_of((entry.topic_id, entry.partition), partition.replication_factor)
    return reassignment.retarget(partition, target, rules)


def _check_target(draft: Draft, name: str, topic: Topic, target: tuple[int, ...]) -> None:
    shown = list(target)[:100]
    if len(set(target)) != len(target):
        raise InvalidReplicaAssignmentError(f"{name} cannot have a replica twice: {shown}")
    unknown = [node for node in target if draft.broker(node) is None]
    if unknown:
        raise InvalidReplicaAssignmentError(
            f"{name} cannot move to brokers that are not registered: {unknown[:100]}"
        )
    min_isr = effective_min_isr(topic.configs, len(target))
    if min_isr > len(target):
        raise InvalidReplicaAssignmentError(
            f"{name} needs min.insync.replicas={min_isr}, and {shown} is only "
            f"{counted(len(target), 'replica')}: no write with acks=all would ever succeed"
        )
