"""Tells the controllers which replicas of this broker can't be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.ports import ReportReplicas
from penstock.broker.replication.sending import SendLoop
from penstock.v1 import cluster_pb2
from penstock.wire.errors import PenstockError, error_from_proto
from penstock.wire.ids import TopicId, TopicIdPartition

logger = structlog.get_logger()

REPORTS_SINCE: Final = 3
"""The metadata.version from which on the controllers take reports."""

MAX_BATCH: Final = 1000
"""Replicas in one report at most."""


class ReplicaReporter:
    """Compares what the metadata say of this broker's replicas with what is so, and reports it.

    Nothing is remembered of what was sent: a report that was lost, or taken after a later one,
    shows as a difference in the metadata, and is made again. One report is in flight at a time.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        broker_epoch: Callable[[], int],
        report: ReportReplicas,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._broker_epoch = broker_epoch
        self._report = report
        self._offline: dict[TopicIdPartition, PenstockError] = {}
        self._damaged: dict[TopicIdPartition, PenstockError] = {}  # And readable in part.
        self._pending: dict[TopicIdPartition, None] = {}
        self._sending = SendLoop(self._next, self._send)
        self._stopped = False

    @property
    def is_settled(self) -> bool:
        """Whether the controllers know how every replica is, or can't be told."""
        return not self._pending or not self._can_report

    @property
    def _can_report(self) -> bool:
        return self._image.metadata_version >= REPORTS_SINCE and self._broker_epoch() >= 0

    @property
    def offline_count(self) -> int:
        """How many replicas can't be served. Safe on any thread."""
        return len(self._offline)

    def offline(self) -> Iterator[TopicIdPartition]:
        """The replicas that can't be served."""
        return iter(self._offline)

    def why_offline(self, key: TopicIdPartition) -> PenstockError | None:
        """Why a replica can't be served; None when it can, or is none of this broker's."""
        return self._offline.get(key)

    def is_damaged(self, key: TopicIdPartition) -> bool:
        """Whether a replica can be served in part only."""
        return key in self._damaged

    def set_offline(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica can't be served, for as long as this process lives."""
        self._offline[key] = reason
        self.compare(key)

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica can be served in part only, until ``set_sound``."""
        self._damaged[key] = reason
        self.compare(key)

    def set_sound(self, key: TopicIdPartition) -> None:
        """The replica's log was mended, or is here no more."""
        self._damaged.pop(key, None)
        self.compare(key)

    def forget(self, key: TopicIdPartition) -> None:
        """The replica is no longer this broker's."""
        self._offline.pop(key, None)
        self._damaged.pop(key, None)
        self._pending.pop(key, None)

    def compare(self, key: TopicIdPartition) -> None:
        """The metadata of a partition with a replica here are others, or the replica is."""
        if self._due(key) is None:
            self._pending.pop(key, None)
        else:
            self._pending[key] = None
            self.resume()

    def compare_all(self) -> None:
        """This process registered anew, which the controllers take for a mended disk."""
        for key in (*self._offline, *self._damaged):
            self.compare(key)

    def resume(self) -> None:
        """Report what there is, if reports are taken now."""
        if self._pending and self._can_report and not self._stopped:
            self._sending.wake()

    async def stop(self) -> None:
        """Report nothing more."""
        self._stopped = True
        await self._sending.stop()

    def _due(self, key: TopicIdPartition) -> cluster_pb2.ReplicaState.ValueType | None:
        """What is to be said of the replica; None when the metadata are right."""
        record = self._image.partition_by_id(key)
        if record is None or self._node_id not in record.replicas:
            return None
        told = self._node_id in record.offline_replicas
        if key in self._offline:
            return None if told else cluster_pb2.REPLICA_STATE_OFFLINE
        if key in self._damaged:
            others = set(record.isr).difference(record.offline_replicas, (self._node_id,))
            return cluster_pb2.REPLICA_STATE_DAMAGED if others and not told else None
        return cluster_pb2.REPLICA_STATE_ONLINE if told else None

    def _next(self) -> cluster_pb2.ReportReplicasCommand | None:
        if not self._can_report:
            return None
        command = cluster_pb2.ReportReplicasCommand(
            node_id=self._node_id, broker_epoch=self._broker_epoch()
        )
        for key in list(self._pending):
            state = self._due(key)
            if state is None:
                del self._pending[key]
            elif len(command.replicas) < MAX_BATCH:
                command.replicas.add(topic_id=key.topic_id, partition=key.partition, state=state)
        return command if command.replicas else None

    async def _send(self, command: cluster_pb2.ReportReplicasCommand) -> bool:
        """Send one report; whether it was taken."""
        try:
            response = await self._report(command)
            if response.HasField("error"):
                raise error_from_proto(response.error)
        except PenstockError as error:
            logger.warning(
                "report of replicas not taken", replicas=len(command.replicas), error=error.message
            )
            return False
        except Exception:
            # Whatever it was, what is to be said must not be forgotten with it.
            logger.exception("report of replicas failed", replicas=len(command.replicas))
            return False
        logger.info("replicas reported", replicas=len(command.replicas))
        for entry in command.replicas:
            # Until the metadata show it nothing is due; should they show otherwise, it is again.
            self._pending.pop(TopicIdPartition(TopicId(entry.topic_id), entry.partition), None)
        return True
