"""What this broker coordinates: groups and transactions, with the topics that keep their state."""

from __future__ import annotations

import time

from penstock.broker.config import NodeConfig
from penstock.broker.controller_link import ControllerLink
from penstock.broker.coordinator.coordinator import GroupCoordinator
from penstock.broker.coordinator.hanging import HangingJudge
from penstock.broker.coordinator.mark_streams import MarkStreams
from penstock.broker.coordinator.producer_ids import ProducerIds
from penstock.broker.coordinator.transaction_coordinator import TransactionCoordinator
from penstock.broker.coordinator_metrics import CoordinatorMetrics
from penstock.broker.core.group_events import GroupSettings
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.core.transaction_events import TransactionSettings
from penstock.broker.peers import Peers
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.ports import MarkersOpener
from penstock.broker.topics import (
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    InternalTopic,
    InternalTopics,
)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Coordinators:
    """Made before the replicas take their first metadata, stopped before they stop."""

    def __init__(
        self,
        config: NodeConfig,
        image: MetadataImage,
        link: ControllerLink,
        replicas: ReplicaManager,
        peers: Peers,
        *,
        open_markers: MarkersOpener,
        metrics: CoordinatorMetrics,
    ) -> None:
        offsets = InternalTopic(
            OFFSETS_TOPIC,
            image,
            link,
            partition_count=config.offsets_topic_num_partitions,
            replication_factor=config.offsets_topic_replication_factor,
            replication_setting="offsets.topic.replication.factor",
        )
        transactions = InternalTopic(
            TRANSACTIONS_TOPIC,
            image,
            link,
            partition_count=config.transaction_state_topic_num_partitions,
            replication_factor=config.transaction_state_topic_replication_factor,
            replication_setting="transaction.state.topic.replication.factor",
        )
        self.topics = InternalTopics(offsets, transactions)
        self.producer_ids = ProducerIds(link.allocate_producer_ids)
        self.groups = GroupCoordinator(
            replicas,
            image,
            ensure_offsets_topic=offsets.ensure,
            settings=GroupSettings(
                heartbeat_interval_ms=config.group_heartbeat_interval_ms,
                min_session_timeout_ms=config.group_min_session_timeout_ms,
                max_session_timeout_ms=config.group_max_session_timeout_ms,
                offsets_retention_ms=config.offsets_retention_minutes * 60_000,
                offsets_retention_check_interval_ms=config.offsets_retention_check_interval_ms,
            ),
            on_rebalance=metrics.rebalanced,
        )
        self.transactions = TransactionCoordinator(
            config.node_id,
            replicas,
            image,
            peers,
            ensure_topic=transactions.ensure,
            take_producer_id=self.producer_ids.take,
            write_markers=replicas.transactions.write_markers,
            mark_streams=MarkStreams(
                config.node_id,
                image,
                open_markers,
                broker_epoch=lambda: link.broker_epoch,
                clock_ms=_monotonic_ms,
            ),
            settings=TransactionSettings(
                max_timeout_ms=config.transaction_max_timeout_ms,
                id_expiration_ms=config.transactional_id_expiration_ms,
            ),
            on_ended=metrics.transaction_ended,
        )
        metrics.watch(self.groups, self.transactions)
        self.hanging = HangingJudge(
            config.node_id,
            image,
            peers,
            self.transactions.find_transactions,
            session_timeout_ms=config.broker_session_timeout_ms,
            clock_ms=_monotonic_ms,
        )

    async def stop(self) -> None:
        """Coordinate no more: everybody who waits is told."""
        await self.groups.stop()
        await self.transactions.stop()

    def on_metadata(self, change: ImageChange) -> None:
        """Act on what has just been applied to the image."""
        self.groups.on_metadata(change)
        self.transactions.on_metadata(change)
