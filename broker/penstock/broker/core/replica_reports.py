"""Which replicas of a broker can't be served, and what the controllers are still to be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import cluster_pb2
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicIdPartition

MAX_BATCH: Final = 1000
"""Replicas in one report at most."""


class ReplicaReports:
    """Compares what the metadata say of this broker's replicas with what is so. Pure.

    It goes by levels, not by edges: whenever the metadata of a replica are others, or the replica
    is, or a report was answered, what differs is to be reported. The owner calls ``compare`` for
    every new record of a partition with a replica here, and asks ``next_report`` after anything
    that was called; one report is under way at a time, from ``next_report`` to ``answered``.

    An answer settles nothing but what was reported. Metadata may overtake it, and what they, or
    this broker, say otherwise meanwhile is a report of its own, due when this one is answered.
    """

    def __init__(self, node_id: int, image: MetadataImage) -> None:
        self._node_id = node_id
        self._image = image
        self._offline: dict[TopicIdPartition, PenstockError] = {}
        self._damaged: dict[TopicIdPartition, PenstockError] = {}  # And readable in part.
        self._copying: dict[TopicIdPartition, PenstockError] = {}  # And not as far yet as it was.
        self._pending: dict[TopicIdPartition, None] = {}  # What came up since it was last sent.
        self._sent: dict[TopicIdPartition, cluster_pb2.ReplicaState.ValueType] = {}  # Under way.

    @property
    def has_due(self) -> bool:
        """Whether there is something to be reported, as far as was compared."""
        return bool(self._pending)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be reported, nor is under way."""
        return not self._pending and not self._sent

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
        return key in self._damaged or key in self._copying

    def set_offline(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica can't be served, until ``set_copying``, or as long as this process lives."""
        self._offline[key] = reason
        self.compare(key)

    def set_copying(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica has a log again, with a part of what it had, until ``set_copied``.

        It may be damaged beside that, and become sound, without being copied by that.
        """
        self._offline.pop(key, None)
        self._copying[key] = reason
        self.compare(key)

    def set_copied(self, key: TopicIdPartition) -> None:
        """The log that was begun anew has gone as far as it has to."""
        self._copying.pop(key, None)
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
        self._copying.pop(key, None)
        self._pending.pop(key, None)

    def compare(self, key: TopicIdPartition) -> None:
        """The metadata of a partition with a replica here are others, or the replica is."""
        if self._due(key) is None:
            self._pending.pop(key, None)
        else:
            self._pending[key] = None

    def compare_all(self) -> None:
        """This process registered anew, which the controllers take for a mended disk."""
        for key in (*self._offline, *self._damaged, *self._copying, *self._sent):
            self.compare(key)

    def next_report(self, broker_epoch: int) -> cluster_pb2.ReportReplicasCommand | None:
        """What is due, as of now, in the order it came up; None when nothing is.

        It is under way then, until ``answered``.
        """
        assert not self._sent, "one report is under way at a time"
        command = cluster_pb2.ReportReplicasCommand(
            node_id=self._node_id, broker_epoch=broker_epoch
        )
        for key in list(self._pending):
            state = self._due(key)
            if state is not None and len(self._sent) == MAX_BATCH:
                break
            del self._pending[key]
            if state is not None:
                self._sent[key] = state
                command.replicas.add(topic_id=key.topic_id, partition=key.partition, state=state)
        return command if self._sent else None

    def answered(self, *, taken: bool) -> None:
        """The report under way was taken; or not, or nobody knows, and it is due again.

        What was taken is not said again before the metadata of the replica are others: they show
        it soon, or the controllers had a reason to take no note of it.
        """
        sent, self._sent = self._sent, {}
        for key, state in sent.items():
            due = self._due(key)
            if due is not None and not (taken and due == state):
                self._pending[key] = None

    def _due(self, key: TopicIdPartition) -> cluster_pb2.ReplicaState.ValueType | None:
        """What is to be said of the replica; None when the metadata are right."""
        record = self._image.partition_by_id(key)
        if record is None or self._node_id not in record.replicas:
            return None
        told = self._node_id in record.offline_replicas
        if key in self._offline:
            return None if told else cluster_pb2.REPLICA_STATE_OFFLINE
        if self.is_damaged(key):
            others = set(record.isr).difference(record.offline_replicas, (self._node_id,))
            return cluster_pb2.REPLICA_STATE_DAMAGED if others and not told else None
        return cluster_pb2.REPLICA_STATE_ONLINE if told else None
