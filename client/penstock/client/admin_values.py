"""Between protocol messages and the values that administration hands out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    DirectoryDescription,
    GroupDescription,
    MemberDescription,
    NodeDescription,
    OutOfSyncReplica,
    PartitionDescription,
    PartitionProducers,
    PartitionReassignment,
    ProducerState,
    QuorumDescription,
    QuorumVoter,
    ReplicaProgress,
    TopicDescription,
    TransactionDescription,
    TransactionListing,
)
from penstock.client.model import OffsetAndMetadata
from penstock.v1 import (
    admin_pb2,
    common_pb2,
    controller_pb2,
    groups_pb2,
    metadata_pb2,
    node_pb2,
    transactions_pb2,
)
from penstock.wire.ids import TopicPartition, format_topic_id

_ROLES: Final[Mapping[int, str]] = {
    controller_pb2.QUORUM_ROLE_FOLLOWER: "follower",
    controller_pb2.QUORUM_ROLE_CANDIDATE: "candidate",
    controller_pb2.QUORUM_ROLE_LEADER: "leader",
}


_REASONS: Final[Mapping[int, str]] = {
    metadata_pb2.OUT_OF_SYNC_REASON_SLOW: "slow",
    metadata_pb2.OUT_OF_SYNC_REASON_STUCK: "stuck",
    metadata_pb2.OUT_OF_SYNC_REASON_BOOTSTRAPPING: "bootstrapping",
    metadata_pb2.OUT_OF_SYNC_REASON_OFFLINE: "offline",
    metadata_pb2.OUT_OF_SYNC_REASON_DAMAGED: "damaged",
}


_STATE_PREFIX: Final = "TRANSACTION_STATE_"
TRANSACTION_STATES: Final = ("empty", "ongoing", "prepare_commit", "prepare_abort", "kept")
"""What a transactional id can be at."""

_ENDED_BY: Final[Mapping[int, str]] = {
    transactions_pb2.TRANSACTION_CAUSE_UNSPECIFIED: "nobody",
    transactions_pb2.TRANSACTION_CAUSE_PRODUCER: "producer",
    transactions_pb2.TRANSACTION_CAUSE_COORDINATOR: "timeout_or_person",
    transactions_pb2.TRANSACTION_CAUSE_FENCED: "other_producer",
    transactions_pb2.TRANSACTION_CAUSE_GROUP: "group",
}


def topic_id_text(topic_id: bytes) -> str:
    """A topic's id as a UUID."""
    return format_topic_id(topic_id)


def partition(proto: common_pb2.TopicPartition) -> TopicPartition:
    """A partition's name."""
    return TopicPartition(proto.topic, proto.partition)


def partition_proto(entry: TopicPartition) -> common_pb2.TopicPartition:
    """A partition by name only."""
    return common_pb2.TopicPartition(topic=entry.topic, partition=entry.partition)


def topic(proto: metadata_pb2.TopicDescription, *, out_of_sync: bool = False) -> TopicDescription:
    """A topic; ``out_of_sync``: it was asked why replicas are not in sync."""
    return TopicDescription(
        name=proto.name,
        topic_id=topic_id_text(proto.topic_id),
        internal=proto.internal,
        configs=dict(proto.configs),
        partitions=tuple(
            PartitionDescription(
                partition=entry.partition,
                leader=entry.leader,
                leader_epoch=entry.leader_epoch,
                replicas=tuple(entry.replicas),
                isr=tuple(entry.isr),
                elr=tuple(entry.elr),
                offline=tuple(entry.offline_replicas),
                partition_epoch=entry.partition_epoch,
                out_of_sync=tuple(
                    OutOfSyncReplica(one.node_id, _REASONS.get(one.reason, "unknown"))
                    for one in entry.out_of_sync
                )
                if out_of_sync
                else None,
                min_insync_replicas=entry.min_insync_replicas,
            )
            for entry in proto.partitions
        ),
    )


def cluster(proto: metadata_pb2.DescribeClusterResponse) -> ClusterDescription:
    """The cluster."""
    brokers = [
        BrokerDescription(
            node_id=entry.node_id,
            host=entry.host,
            port=entry.port,
            rack=entry.rack,
            fenced=entry.fenced,
            in_controlled_shutdown=entry.in_controlled_shutdown,
            broker_epoch=entry.broker_epoch,
            min_metadata_version=max(entry.min_metadata_version, 1),
            max_metadata_version=max(entry.max_metadata_version, 1),
            offline_replicas=entry.offline_replica_count,
            drained_since_ms=entry.drained_since_ms,
            leaderships=entry.leader_count if entry.HasField("leader_count") else -1,
            external_host=entry.external_host,
            external_port=entry.external_port,
        )
        for entry in proto.brokers
    ]
    return ClusterDescription(
        cluster_id=proto.cluster_id,
        controller_id=proto.controller_id,
        controller_epoch=proto.controller_epoch,
        metadata_index=proto.metadata_index,
        brokers=tuple(sorted(brokers, key=lambda broker: broker.node_id)),
        answered_by=proto.answered_by,
        metadata_version=max(proto.metadata_version, 1),
    )


def node(proto: node_pb2.DescribeNodeResponse) -> NodeDescription:
    """A node as it tells of itself."""
    return NodeDescription(
        node_id=proto.node_id,
        version=proto.version,
        min_metadata_version=proto.min_metadata_version,
        max_metadata_version=proto.max_metadata_version,
        codec_compiled=proto.codec_compiled,
        roles=tuple(proto.roles),
        clock_ms=proto.clock_ms,
        started_ms=proto.started_ms,
        directories=tuple(
            DirectoryDescription(
                one.path, one.total_bytes, one.free_bytes, one.failure, one.fsync_us
            )
            for one in proto.directories
        ),
        open_descriptors=proto.open_descriptors,
        max_descriptors=proto.max_descriptors,
        resident_bytes=proto.resident_bytes,
        http_address=proto.http_address,
    )


def config(proto: admin_pb2.ConfigEntry) -> ConfigEntry:
    """A config with its origin."""
    return ConfigEntry(proto.key, proto.value, proto.source, proto.documentation, proto.dynamic)


def reassignment(proto: admin_pb2.PartitionReassignment) -> PartitionReassignment:
    """A partition that moves."""
    return PartitionReassignment(
        partition=partition(proto.partition),
        target=tuple(proto.replicas),
        adding=tuple(proto.adding_replicas),
        removing=tuple(proto.removing_replicas),
        leader=proto.leader,
        replicas=tuple(
            ReplicaProgress(entry.node_id, entry.in_sync, entry.log_end_offset, entry.lag)
            for entry in proto.progress
        ),
    )


def broker_protos(described: ClusterDescription) -> list[metadata_pb2.BrokerDescription]:
    """The brokers back as messages, for the metadata cache."""
    return [
        metadata_pb2.BrokerDescription(
            node_id=broker.node_id, host=broker.host, port=broker.port, fenced=broker.fenced
        )
        for broker in described.brokers
    ]


def quorum(proto: controller_pb2.DescribeQuorumResponse) -> QuorumDescription:
    """The controllers."""
    return QuorumDescription(
        leader_id=proto.leader_id,
        term=proto.term,
        commit_index=proto.commit_index,
        applied_index=proto.applied_index,
        voters=tuple(quorum_voter(entry) for entry in proto.voters),
        answered_by=proto.answered_by,
        voters_index=proto.voters_index,
        confirmed=proto.confirmed,
        role=_ROLES.get(proto.role, ""),
        last_index=proto.last_index or -1,
        catching_up=quorum_voter(proto.catching_up) if proto.HasField("catching_up") else None,
        metadata_index=proto.metadata_index,
    )


def quorum_voter(proto: controller_pb2.QuorumVoter) -> QuorumVoter:
    """A controller that votes, or is on its way to."""
    return QuorumVoter(
        proto.node_id,
        proto.host,
        proto.port,
        proto.match_index,
        proto.directory_id.hex(),
        is_wiped=bool(proto.found_directory_id and proto.directory_id)
        and proto.found_directory_id != proto.directory_id,
        silent_ms=proto.silent_ms if proto.HasField("silent_ms") else -1,
        is_unreachable=proto.unreachable,
    )


def group(proto: groups_pb2.GroupDescription, coordinator: int) -> GroupDescription:
    """A group."""
    return GroupDescription(
        group_id=proto.group_id,
        state=proto.state,
        group_epoch=proto.group_epoch,
        assignment_epoch=proto.assignment_epoch,
        assignor=proto.assignor,
        coordinator=coordinator,
        members=tuple(
            MemberDescription(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_epoch=member.member_epoch,
                assigned=partitions(member.assigned),
                target=partitions(member.target),
                topics=tuple(member.subscription.topics),
                topic_pattern=member.subscription.topic_pattern,
                state=member.state,
                rack_id=member.rack_id,
            )
            for member in proto.members
        ),
        offsets=offsets(proto.offsets),
    )


def partitions(protos: Iterable[groups_pb2.TopicPartitions]) -> tuple[TopicPartition, ...]:
    """Partitions grouped by topic, flat and sorted."""
    return tuple(
        sorted(
            TopicPartition(entry.topic, number) for entry in protos for number in entry.partitions
        )
    )


def offsets(
    protos: Iterable[groups_pb2.OffsetCommit],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Committed offsets; partitions without one are left out."""
    return {
        partition(entry.partition): OffsetAndMetadata(
            entry.offset, entry.leader_epoch, entry.metadata
        )
        for entry in protos
        if entry.offset >= 0
    }


def offset_proto(
    entry: TopicPartition, offset: int | OffsetAndMetadata, topic_id: bytes = b""
) -> groups_pb2.OffsetCommit:
    """A position as a commit names it."""
    position = offset if isinstance(offset, OffsetAndMetadata) else OffsetAndMetadata(offset)
    named = common_pb2.TopicPartition(
        topic=entry.topic, partition=entry.partition, topic_id=topic_id or position.topic_id
    )
    return groups_pb2.OffsetCommit(
        partition=named,
        offset=position.offset,
        leader_epoch=position.leader_epoch,
        metadata=position.metadata,
    )


def transaction_state_proto(name: str) -> transactions_pb2.TransactionState.ValueType:
    """A state of a transaction as requests name it."""
    return transactions_pb2.TransactionState.Value(_STATE_PREFIX + name.upper())


def _transaction_state(value: transactions_pb2.TransactionState.ValueType) -> str:
    if value not in transactions_pb2.TransactionState.values():
        return "unknown"  # Of a newer broker.
    name = transactions_pb2.TransactionState.Name(value)
    return name.removeprefix(_STATE_PREFIX).lower()


def transaction_listing(
    proto: transactions_pb2.TransactionListing, coordinator: int
) -> TransactionListing:
    """A transactional id in brief."""
    state = _transaction_state(proto.state)
    return TransactionListing(
        proto.transactional_id, proto.producer_id, state, coordinator, proto.since_ms
    )


def transaction(proto: transactions_pb2.TransactionDescription) -> TransactionDescription:
    """A transactional id."""
    return TransactionDescription(
        transactional_id=proto.transactional_id,
        state=_transaction_state(proto.state),
        producer_id=proto.producer_id,
        producer_epoch=proto.producer_epoch,
        transaction_timeout_ms=proto.transaction_timeout_ms,
        start_ms=proto.start_ms,
        partitions=tuple(sorted(partition(entry) for entry in proto.partitions)),
        last_committed=proto.last_committed,
        last_ended_by=_ENDED_BY.get(proto.last_cause, "unknown"),
    )


def partition_producers(proto: transactions_pb2.PartitionProducers) -> PartitionProducers:
    """The producers of a partition."""
    return PartitionProducers(
        proto.last_stable_offset,
        tuple(
            ProducerState(
                entry.producer_id,
                entry.producer_epoch,
                entry.last_sequence,
                entry.last_timestamp_ms,
                entry.transaction_start_offset,
            )
            for entry in proto.producers
        ),
    )
