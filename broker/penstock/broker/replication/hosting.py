"""Which replicas are here: follows the metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import structlog

from penstock.broker.core.metadata_image import ImageChange, MetadataImage, replication_factor
from penstock.broker.core.partition_events import (
    BrokersChanged,
    BrokerStatus,
    LagMaxChanged,
    MinIsrChanged,
    PartitionChanged,
    PartitionState,
)
from penstock.broker.core.ports import DamagedLogError, Log
from penstock.broker.core.replica import Replica
from penstock.broker.replication.partition import Host, Partition
from penstock.broker.replication.ports import LogStore, Step
from penstock.broker.replication.reporting import ReplicaReporter
from penstock.v1 import cluster_pb2
from penstock.wire.errors import DiskFullError, PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from penstock.wire.topic_config import effective_min_isr

logger = structlog.get_logger()

MIN_RETRY_S = 1.0
"""So long after a full disk had no room for a replica it is tried again; longer each time."""

MAX_RETRY_S = 30.0

_MADE_TOGETHER = 100
"""So many new replicas share what the disk has to do for them."""

_AT_ONCE_MAX = 4
"""So few are made without that, as soon as the metadata name them: a client that sends to the only
partition of a topic it has just made is not told to try again."""


class Hosting:
    """Makes, changes and drops the replicas of this broker as the metadata says.

    Files are deleted on an order alone: a delta that removes the topic, or moves the replica away.
    What a picture of all the metadata merely lacks (at the start, or in a snapshot) may be deleted,
    or may be what a damaged, emptied or older quorum has forgotten; the files are all that is left
    of it then. So they are set aside, for a person to judge. A picture is as good as an order where
    it remembers that the topic was deleted, or shows that the replica was moved away: every leaving
    raises the partition's leader epoch, so that it is above all that the files know.
    """

    def __init__(
        self,
        node_id: int,
        logs: LogStore,
        image: MetadataImage,
        host: Host,
        *,
        reporter: ReplicaReporter,
        lag_max_ms: int,
        on_dropped: Callable[[Partition], None],
    ) -> None:
        self._node_id = node_id
        self._logs = logs
        self._image = image
        self._host = host
        self._reporter = reporter
        self._lag_max_ms = lag_max_ms
        self._on_dropped = on_dropped
        self._partitions: dict[TopicIdPartition, Partition] = {}
        self._by_log: dict[int, Partition] = {}  # By id() of their logs, which live as long.
        # In the order of their turns, and whether they are new on this broker.
        self._without_room: dict[TopicIdPartition, bool] = {}
        self._retry_s = MIN_RETRY_S
        self._retry_timer: asyncio.TimerHandle | None = None  # While one is without room.
        self._brokers: dict[int, BrokerStatus] = {}
        self._has_begun = False  # To host, since the image reached the registration.
        self._caught_up = False  # All that the image had then is hosted.

    @property
    def has_caught_up(self) -> bool:
        """Whether all is hosted that the metadata named when they reached the registration."""
        return self._caught_up

    def get(self, key: TopicIdPartition) -> Partition | None:
        """The partition, if a replica of it is here."""
        return self._partitions.get(key)

    def of_log(self, log: Log) -> Partition | None:
        """The partition whose log this is."""
        return self._by_log.get(id(log))

    def partitions(self) -> Iterator[Partition]:
        """Every partition hosted here."""
        return iter(tuple(self._partitions.values()))

    def on_metadata(self, change: ImageChange, broker_epoch: int) -> Iterator[Step]:
        """Act on a change of the image, once that has reached the registration.

        In steps, each of which is all that happens to one partition; other work may pass between
        them, but no other change of the image. Some yield what should be awaited: the disk.
        """
        if not self._has_begun:
            yield from self.catch_up(broker_epoch)
            return
        if change.brokers or change.snapshot:
            yield from self._brokers_changed()
        if change.snapshot:
            yield from self._take_all()
            return
        for topic in change.removed_topics:
            for number in topic.partitions:
                self._drop(TopicIdPartition(topic.topic_id, number), ordered=True)
                yield None
        yield from self._partitions_changed(change.partitions, ordered=True)
        for topic_id in change.topics:
            # Last: another min ISR comes with other states, and must not be acted on before them.
            yield from self._configs_changed(topic_id)

    def _partitions_changed(
        self, records: Iterable[cluster_pb2.PartitionRecord], *, ordered: bool
    ) -> Iterator[Step]:
        pending = list(records)
        for start in range(0, len(pending), _MADE_TOGETHER):
            group = pending[start : start + _MADE_TOGETHER]
            wanted = {key: name for record in group for key, name in self._lacking(record)}
            if len(wanted) > _AT_ONCE_MAX:
                yield partial(self._logs.make_ahead, wanted, is_new=ordered)
            for record in group:
                self._partition_changed(record, ordered=ordered)
                yield None

    def _lacking(
        self, record: cluster_pb2.PartitionRecord
    ) -> Iterator[tuple[TopicIdPartition, TopicPartition]]:
        """The replica that is to be hosted here by the record, if it is not."""
        key = TopicIdPartition(TopicId(record.topic_id), record.partition)
        topic = self._image.topic_by_id(key.topic_id)
        tried = key in self._partitions or key in self._without_room
        if topic is None or self._node_id not in record.replicas or tried:
            return
        if self._reporter.why_offline(key) is None:
            yield key, TopicPartition(topic.record.name, key.partition)

    def catch_up(self, broker_epoch: int) -> Iterator[Step]:
        """Begin to host when the image has reached the registration, in steps as above."""
        if self._has_begun or not 0 <= broker_epoch <= self._image.index:
            return
        self._has_begun = True
        yield from self._brokers_changed()
        yield from self._take_all()
        yield from self._set_strays_aside()
        self._caught_up = True

    def _set_strays_aside(self) -> Iterator[None]:
        """What is on disk of topics deleted, moved, or forgotten while this node was down."""
        for log in list(self._logs.logs()):
            key = log.key
            if not self._is_named(key):  # Else it is hosted, or offline and to be left alone.
                deleted = self._image.was_deleted(key.topic_id)
                self._remove_log(key, ordered=deleted or self._was_moved_away(key, log))
            yield

    def _is_named(self, key: TopicIdPartition) -> bool:
        """Whether the metadata say that a replica is here."""
        record = self._image.partition_by_id(key)
        return record is not None and self._node_id in record.replicas

    def _was_moved_away(self, key: TopicIdPartition, log: Log) -> bool:
        """Of one that the metadata do not name: whether that is as good as an order."""
        record = self._image.partition_by_id(key)
        return record is not None and record.leader_epoch > log.last_epoch

    def set_lag_max_ms(self, lag_max_ms: int) -> None:
        """A follower may lag for so long from now on."""
        self._lag_max_ms = lag_max_ms
        event = LagMaxChanged(lag_max_ms, self._host.clock_ms())
        for partition in self.partitions():
            partition.handle(event)

    def begin_anew(self, key: TopicIdPartition, error: DamagedLogError) -> Path:
        """Host the replica with an empty log in place of one that can't be used, which is kept.

        It stays damaged to the controllers, until it ``was_copied``. Says where the files of the
        old one are. Raises PenstockError where they can't be kept there now; it stays offline then.
        """
        record = self._image.partition_by_id(key)
        assert record is not None, "it is a replica that others lead"
        partition = self._partitions.pop(key, None)
        if partition is not None:
            self._close(partition)
        kept = self._logs.keep_damaged(key)
        self._reporter.set_copying(key, error)
        self._partition_changed(record, ordered=True)  # What was here is known, and kept.
        return kept

    def stop(self) -> None:
        """Try no more to make what there was no room for."""
        self._without_room.clear()
        self._set_retry_timer()

    def _take_all(self) -> Iterator[Step]:
        for key in [*self._partitions, *self._without_room, *self._reporter.offline()]:
            if self._image.partition_by_id(key) is None:
                self._drop(key, ordered=self._image.was_deleted(key.topic_id))
            yield None
        for topic in self._image.topics():
            yield from self._partitions_changed(topic.partitions.values(), ordered=False)
            yield from self._configs_changed(topic.topic_id)

    def _brokers_changed(self) -> Iterator[None]:
        self._brokers = {
            node_id: BrokerStatus(
                broker.broker_epoch, not (broker.fenced or broker.in_controlled_shutdown)
            )
            for node_id, broker in self._image.brokers.items()
        }
        for partition in self.partitions():  # Those made meanwhile are told as they are made.
            if not partition.closed:
                partition.handle(BrokersChanged(self._brokers, self._host.clock_ms()))
            yield

    def _configs_changed(self, topic_id: TopicId) -> Iterator[None]:
        topic = self._image.topic_by_id(topic_id)
        if topic is None:
            return
        here = [
            (self._partitions[key], record)
            for number, record in topic.partitions.items()
            if (key := TopicIdPartition(topic_id, number)) in self._partitions
        ]
        if here:
            self._logs.update_configs(topic_id, dict(topic.record.configs))
        for partition, record in here:
            min_isr = effective_min_isr(topic.record.configs, replication_factor(record))
            partition.handle(MinIsrChanged(min_isr))
            yield

    def _partition_changed(self, record: cluster_pb2.PartitionRecord, *, ordered: bool) -> None:
        key = TopicIdPartition(TopicId(record.topic_id), record.partition)
        topic = self._image.topic_by_id(key.topic_id)
        if topic is None or self._node_id not in record.replicas:
            hosted = self._partitions.get(key)
            if hosted is not None:
                ordered = ordered or self._was_moved_away(key, hosted.log)
            self._drop(key, ordered=ordered)
            return
        partition = self._partitions.get(key)
        if partition is None and self._reporter.why_offline(key) is None:
            # Any other delta would be about a replica that was looked for already.
            is_new = self._without_room.get(key, ordered)
            partition = self._make(key, topic.record, record.leader_epoch, is_new=is_new)
        self._reporter.compare(key)
        if partition is not None:
            partition.handle(
                PartitionChanged(
                    state=PartitionState.from_record(record),
                    min_isr=effective_min_isr(topic.record.configs, replication_factor(record)),
                    now_ms=self._host.clock_ms(),
                )
            )

    def _make(
        self,
        key: TopicIdPartition,
        topic: cluster_pb2.TopicRecord,
        leader_epoch: int,
        *,
        is_new: bool,
    ) -> Partition | None:
        name = TopicPartition(topic.name, key.partition)
        try:
            log = self._logs.get_or_create(
                name.topic,
                name.partition,
                key.topic_id,
                dict(topic.configs),
                internal=topic.internal,
                is_new=is_new,
            )
            high_watermark = self._logs.high_watermark(key)
        except DiskFullError as error:
            if key not in self._without_room:
                logger.error("no room for the replica", partition=str(name), error=error.message)
            self._without_room.pop(key, None)
            self._without_room[key] = is_new
            if self._retry_timer is None:
                self._set_retry_timer()
            return None
        except PenstockError as error:
            # Its disk has failed, which lasts until the broker is restarted, or the log is damaged.
            self._wait_no_longer(key)
            logger.error("replica cannot be opened", partition=str(name), error=error.message)
            self._reporter.set_offline(key, error)
            if isinstance(error, DamagedLogError):
                self._host.log_is_shut(key, name, error)
            return None
        self._wait_no_longer(key)
        replica = Replica(
            self._node_id, log, high_watermark=high_watermark, lag_max_ms=self._lag_max_ms
        )
        partition = Partition(key, name, log, replica, self._host)
        self._partitions[key] = partition
        self._by_log[id(log)] = partition
        partition.handle(BrokersChanged(self._brokers, self._host.clock_ms()))
        damage = _later_epoch(name, log, leader_epoch, high_watermark)
        if damage is not None:
            logger.error("replica is offline", partition=str(name), error=damage.message)
            partition.fail(damage)
        return partition

    def _retry(self) -> None:
        """Make what there was no room for, as far as there is room now."""
        self._retry_timer = None
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        try:
            for key in list(self._without_room):
                record = self._image.partition_by_id(key)
                if record is None:
                    self._drop(key, ordered=False)
                    continue
                self._partition_changed(record, ordered=False)
                if key in self._without_room:
                    break  # It had its turn, and what comes next fares no better.
                self._retry_s = MIN_RETRY_S
        finally:  # One partition's fault must not leave the others unmade.
            self._set_retry_timer()

    def _wait_no_longer(self, key: TopicIdPartition) -> None:
        """It is made, cannot be, or is wanted no more."""
        if key in self._without_room:
            del self._without_room[key]
            if not self._without_room:
                self._retry_s = MIN_RETRY_S
                self._set_retry_timer()

    def _set_retry_timer(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if self._without_room:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(self._retry_s, self._retry)

    def _drop(self, key: TopicIdPartition, *, ordered: bool) -> None:
        self._wait_no_longer(key)
        is_shut = isinstance(self._reporter.why_offline(key), DamagedLogError)
        self._reporter.forget(key)
        partition = self._partitions.pop(key, None)
        if is_shut:  # Nobody may have all that it has: only a deletion is an order.
            ordered = self._image.was_deleted(key.topic_id)
        if partition is not None:
            logger.info("replica removed", partition=str(partition.name))
            self._close(partition)
        elif not is_shut:
            return
        self._remove_log(key, ordered=ordered)

    def _close(self, partition: Partition) -> None:
        """Of one that is hosted no more."""
        del self._by_log[id(partition.log)]
        self._on_dropped(partition)
        partition.close()

    def _remove_log(self, key: TopicIdPartition, *, ordered: bool) -> None:
        try:
            if ordered:
                self._logs.delete(key)
                return
            logger.warning(
                "replica set aside: the metadata does not name it",
                topic_partition_id=str(key),
                next_step="if its topic was deleted or moved, remove its .stray directory; if not, "
                "see 'Losing the metadata' in docs/operating/failures.md",
            )
            self._logs.set_aside(key)
        except PenstockError as error:
            logger.error(
                "replica not removed from disk", topic_partition_id=str(key), error=error.message
            )


def _later_epoch(
    name: TopicPartition, log: Log, leader_epoch: int, high_watermark: int
) -> DamagedLogError | None:
    """What is wrong with a log that has a later leader epoch than there has ever been.

    Nobody writes in an epoch before it is in the metadata, and these have come to this process'
    registration, which is later than all that is in the log.
    """
    if log.last_epoch <= leader_epoch:
        return None
    return DamagedLogError(
        f"{name}: the log here says that leader epoch {log.last_epoch} wrote its end, but the "
        f"metadata have come to epoch {leader_epoch}. Either a bit has flipped (no checksum covers "
        "a batch's leader epoch), or the controllers have lost metadata. The log is kept as it is "
        "until all of it is copied anew from another replica that is in sync and leads",
        log.log_end_offset,
        high_watermark,
    )
