"""Who can stand in for a replica that is damaged here, and what its leader has."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.core import log_copy
from penstock.broker.core.log_copy import Leadership, LogCopy
from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.fetch import next_offset_after
from penstock.wire.ids import TopicIdPartition


class StandIns:
    """What the metadata say of the other replicas of a partition, and reads of the one that leads.

    ``reads()`` gives new ones, for one task, which are to be closed. Used on one event loop.
    """

    def __init__(
        self, node_id: int, image: MetadataImage, *, reads: Callable[[], LeaderReads]
    ) -> None:
        self.reads = reads
        self._node_id = node_id
        self._image = image

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
