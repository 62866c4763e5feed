"""Who can stand in for a replica that is damaged here, and what its leader has."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.core import log_copy
from penstock.broker.core.log_copy import Leadership, LogCopy
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.fetch import next_offset_after
from penstock.broker.replication.ports import ChannelFactory
from penstock.wire.ids import TopicIdPartition


class StandIns:
    """What the metadata say of the other replicas of a partition, and reads of the one that leads.

    Used on one event loop.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        broker_epoch: Callable[[], int],
        channel_factory: ChannelFactory,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._broker_epoch = broker_epoch
        self._channel_factory = channel_factory

    def reads(self) -> LeaderReads:
        """New reads, for one task; to be closed."""
        return LeaderReads(self._node_id, self._image, self._broker_epoch, self._channel_factory)

    def copy_of(self, key: TopicIdPartition, error: DamagedLogError) -> LogCopy:
        """What is decided of a log that does not open."""
        return LogCopy(self._node_id, self._image, key, error)

    def leader_of(self, key: TopicIdPartition) -> Leadership:
        """Who leads, and in which leader epoch; -1 each while it is not known."""
        return log_copy.leader_of(self._image, key)

    def none_is_in_sync(self, key: TopicIdPartition) -> bool:
        """Whether nobody else is in sync, so that nobody can lead in this replica's stead."""
        return log_copy.none_is_in_sync(self._image, key, self._node_id)


async def read_through(
    reads: LeaderReads, key: TopicIdPartition, offset: int, end_offset: int
) -> int:
    """Read the leader's log from ``offset`` to ``end_offset``, or to where it ends: up to where.

    Raises what ``reads.read`` raises: CorruptRecordError where it is damaged there.
    """
    while offset < end_offset:
        records = await reads.read(key, offset)
        if not records:
            break
        offset = next_offset_after(records)
    return offset
