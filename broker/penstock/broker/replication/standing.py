"""Why replicas are not in sync, as people and tools are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.broker.core.partition_events import OutOfSync
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.reporting import ReplicaReporter
from penstock.v1 import metadata_pb2
from penstock.wire.ids import TopicIdPartition

REASONS: Final[Mapping[OutOfSync, metadata_pb2.OutOfSyncReason.ValueType]] = {
    OutOfSync.SLOW: metadata_pb2.OUT_OF_SYNC_REASON_SLOW,
    OutOfSync.STUCK: metadata_pb2.OUT_OF_SYNC_REASON_STUCK,
    OutOfSync.BOOTSTRAPPING: metadata_pb2.OUT_OF_SYNC_REASON_BOOTSTRAPPING,
    OutOfSync.OFFLINE: metadata_pb2.OUT_OF_SYNC_REASON_OFFLINE,
}


def of_followers(
    partition: Partition, now_ms: int
) -> Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]:
    """Of a partition led here, every follower that is not in sync, and why."""
    return {node_id: REASONS[why] for node_id, why in partition.replica.out_of_sync(now_ms).items()}


def of_own(
    node_id: int, key: TopicIdPartition, reporter: ReplicaReporter
) -> Mapping[int, metadata_pb2.OutOfSyncReason.ValueType]:
    """Of this broker's own replica, that and why it can't be served; nothing where it can."""
    reason = reporter.why_offline(key)
    if isinstance(reason, DamagedLogError) or (reason is None and reporter.is_damaged(key)):
        return {node_id: metadata_pb2.OUT_OF_SYNC_REASON_DAMAGED}
    if reason is not None:
        return {node_id: metadata_pb2.OUT_OF_SYNC_REASON_OFFLINE}
    return {}
