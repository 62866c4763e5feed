"""Has a broker's parts looked at by its metrics."""

from __future__ import annotations

from penstock.broker.controller_link import ControllerLink
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.metrics import BrokerMetrics
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.storage.manager import LogManager
from penstock.wire.ids import TopicIdPartition


def watch_broker(
    metrics: BrokerMetrics,
    replicas: ReplicaManager,
    logs: LogManager,
    image: MetadataImage,
    link: ControllerLink,
) -> None:
    """Show how these are, from now on. Once, before the replicas take their first metadata."""

    def on_leadership(topic: str, partition: int, _leader_epoch: int, leading: bool) -> None:
        if leading:
            record = image.partition(topic, partition)
            metrics.elected(uncleanly=record is not None and record.leader_recovering)

    def size_of(key: TopicIdPartition) -> int:
        found = logs.get(key)
        return 0 if found is None else found.size_bytes

    replicas.add_leadership_listener(on_leadership)
    replicas.count_isr_changes(metrics.isr_changed)
    metrics.watch_followers(replicas.followers_out_of_sync)
    metrics.watch_offline(lambda: len(logs.failed_directories), lambda: replicas.offline_count)
    metrics.watch_fenced(link.may_serve)
    metrics.watch_metadata(lambda: image.index)
    metrics.storage.watch_room(logs.homes)
    metrics.traffic.watch(lambda topic: image.topic(topic) is not None)
    metrics.partitions.watch(replicas.partitions, image, size_of)
