"""Prometheus metrics of the replicas of a broker, looked at when they are asked for."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.broker.core.metadata_image import MetadataImage, replication_factor
from penstock.broker.core.partition_events import Role
from penstock.broker.replication.partition import Partition
from penstock.broker.topic_labels import TopicLabels
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicIdPartition

_COUNTS: Final = {
    "replica_partitions": "Replicas that this broker has",
    "leader_partitions": "Partitions that this broker leads",
    "under_replicated_partitions": (
        "Partitions led here of which a replica is not in sync (those being added aside)"
    ),
    "under_min_isr_partitions": (
        "Partitions led here that refuse acks=all: fewer are in sync than min.insync.replicas"
    ),
    "at_min_isr_partitions": (
        "Partitions led here that are refused acks=all if one more replica falls out of sync"
    ),
    "reassigning_partitions": "Partitions led here that are on their way to other replicas",
}

_WAITS: Final = {
    "commit": "commit_waiters",
    "durable": "durable_waiters",
    "high_watermark": "high_watermark_waiters",
    "records": "fetch_waiters",
}
"""What requests wait for, and where they do in a partition."""


class PartitionMetrics(Collector):
    """Shows what :meth:`watch` gives it to look at; nothing before that.

    It looks in the metrics' own thread, once over all partitions, and takes no lock: each of them
    is counted as it is at the moment when it is looked at.
    """

    def __init__(self, registry: CollectorRegistry, labels: TopicLabels) -> None:
        self._labels = labels
        self._hosted: Callable[[], Iterable[Partition]] = tuple
        self._image: MetadataImage | None = None
        self._size_of: Callable[[TopicIdPartition], int] = lambda _: 0
        registry.register(self)

    def watch(
        self,
        hosted: Callable[[], Iterable[Partition]],
        image: MetadataImage,
        size_of: Callable[[TopicIdPartition], int],
    ) -> None:
        """Look at these: ``hosted`` gives what does not change any more, ``size_of`` the bytes of a
        partition's segments here.
        """
        self._image = image
        self._size_of = size_of
        self._hosted = hosted

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        """The families as things are now."""
        families = self._families()
        counts: Tally[str] = Tally()
        sizes: Tally[str] = Tally()
        waits: Tally[str] = Tally()
        lags: Tally[int] = Tally()
        image = self._image
        if image is not None:
            self._labels.keep(lambda topic: image.topic(topic) is not None)
        for partition in self._hosted():
            counts["replica_partitions"] += 1
            sizes[self._labels.label(partition.name.topic)] += self._size_of(partition.key)
            if partition.replica.role is Role.LEADER:
                counts.update(self._of_led(partition))
                for kind, name in _WAITS.items():
                    waits[kind] += len(getattr(partition, name))
                lags.update(_lags(partition))
        for name in _COUNTS:
            families[f"penstock_{name}"].add_metric((), counts[name])
        for kind in _WAITS:
            families["penstock_waiting_requests"].add_metric((kind,), waits[kind])
        for node_id in sorted(lags):
            families["penstock_replica_lag_records"].add_metric((str(node_id),), lags[node_id])
        for label in sorted(sizes):
            families["penstock_log_size_bytes"].add_metric((label,), sizes[label])
        yield from families.values()

    def _of_led(self, partition: Partition) -> Iterator[str]:
        yield "leader_partitions"
        replica = partition.replica
        in_sync, least = replica.isr, replica.min_isr
        record = None if self._image is None else self._image.partition_by_id(partition.key)
        if record is None:
            return  # It goes just now.
        factor = replication_factor(record)
        if len(in_sync - set(record.adding_replicas)) < factor:
            yield "under_replicated_partitions"
        if len(in_sync) < least:
            yield "under_min_isr_partitions"
        elif len(in_sync) == least < factor:
            yield "at_min_isr_partitions"
        if _is_moving(record):
            yield "reassigning_partitions"

    def _families(self) -> dict[str, GaugeMetricFamily]:
        every = [
            *(GaugeMetricFamily(f"penstock_{name}", text) for name, text in _COUNTS.items()),
            GaugeMetricFamily(
                "penstock_waiting_requests",
                "Requests to partitions led here that wait, by what they wait for",
                labels=["kind"],
            ),
            GaugeMetricFamily(
                "penstock_replica_lag_records",
                "Records that a follower has not acknowledged yet, of all partitions led here",
                labels=["follower"],
            ),
            GaugeMetricFamily(
                "penstock_log_size_bytes",
                "Bytes of the segments of this broker's replicas, by topic",
                labels=["topic"],
            ),
        ]
        return {family.name: family for family in every}


def _is_moving(record: cluster_pb2.PartitionRecord) -> bool:
    return bool(record.adding_replicas or record.removing_replicas or record.target_replicas)


def _lags(partition: Partition) -> dict[int, int]:
    """By follower what it lacks; all of the log, where it has not said yet what it has."""
    start, end = partition.log.log_start_offset, partition.log.log_end_offset
    return {
        node_id: max(0, end - max(follower.log_end_offset, start))
        for node_id, follower in dict(partition.replica.followers()).items()
    }
