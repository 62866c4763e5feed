"""What was just appended, or read for one follower, kept for those that lack the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from penstock.broker.core.ports import AppendInfo
from penstock.broker.replication.partition import Partition
from penstock.wire.batch import Buffer

MAX_BYTES: Final = 8 * 1024 * 1024
"""All that is kept, on one broker: what followers in sync still lack while producers write in
batches of half a megabyte, to some partitions at a time."""


class _Kept(NamedTuple):
    records: Buffer
    next_offset: int
    end_offset: int
    leader_epoch: int


class SharedReads:
    """The last reads and appends: followers in sync ask for the same bytes one after the
    other, and what was verified once need not be read and verified again. Used on one event loop.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[Partition, int], _Kept] = OrderedDict()
        self._offsets: dict[Partition, set[int]] = {}  # Of what is kept, by whose it is.
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The size of what is kept."""
        return self._size_bytes

    def find(self, partition: Partition, offset: int, max_bytes: int) -> tuple[Buffer, int] | None:
        """What is kept from ``offset`` on, and the offset after it, if a read would give no more.

        That is one read, or appends that follow one another up to the log's end, or as many of
        them as go into ``max_bytes``. Nothing when one of them is missing or of another epoch, or
        was deleted: in one epoch a leader's log is never cut.
        """
        end_offset = partition.log.log_end_offset
        leader_epoch = partition.replica.leader_epoch
        kept = self._kept.get((partition, offset))
        if (
            kept is None
            or len(kept.records) > max_bytes
            or kept.leader_epoch != leader_epoch
            or offset < partition.log.log_start_offset
        ):
            return None
        if kept.end_offset == end_offset:
            return kept.records, kept.next_offset
        parts, size_bytes = [kept.records], len(kept.records)
        while kept.next_offset < end_offset:
            following = self._kept.get((partition, kept.next_offset))
            if following is None or following.leader_epoch != leader_epoch:
                return None
            size_bytes += len(following.records)
            if size_bytes > max_bytes:
                break
            kept = following
            parts.append(kept.records)
        return b"".join(parts), kept.next_offset

    def appended(self, partition: Partition, info: AppendInfo) -> None:
        """The partition's log ends with this now."""
        if info.records and partition.feeds:
            self._keep(partition, info.base_offset, info.records, info.last_offset + 1)

    def was_read(
        self, partition: Partition, offset: int, records: Buffer, next_offset: int
    ) -> None:
        """``records``, up to ``next_offset``, were read just now for one of the followers."""
        if len(records) <= self._max_bytes and len(partition.feeds) > 1:
            self._keep(partition, offset, records, next_offset)

    def forget(self, partition: Partition) -> None:
        """The partition is here no more."""
        for offset in self._offsets.pop(partition, ()):
            self._size_bytes -= len(self._kept.pop((partition, offset)).records)

    def _keep(self, partition: Partition, offset: int, records: Buffer, next_offset: int) -> None:
        former = self._kept.pop((partition, offset), None)
        if former is not None:
            self._size_bytes -= len(former.records)
        self._offsets.setdefault(partition, set()).add(offset)
        self._kept[partition, offset] = _Kept(
            records, next_offset, partition.log.log_end_offset, partition.replica.leader_epoch
        )
        self._size_bytes += len(records)
        while self._size_bytes > self._max_bytes:
            (owner, at), oldest = self._kept.popitem(last=False)
            self._size_bytes -= len(oldest.records)
            offsets = self._offsets[owner]
            offsets.remove(at)
            if not offsets:
                del self._offsets[owner]
