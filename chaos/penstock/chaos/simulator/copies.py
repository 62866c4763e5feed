"""Logs that were dropped to be copied: on record as damaged until the copies are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.broker.core.log_copy import LogCopy
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.disk import Disk
from penstock.chaos.simulator.history import check
from penstock.raft_meta.core.model import Partition
from penstock.wire.ids import TopicIdPartition


@dataclass(frozen=True, slots=True)
class _Copied:
    """A log that was dropped, to be copied from a leader epoch by a process, up to an offset."""

    leader_epoch: int
    broker_epoch: int
    end_offset: int


class Copies:
    """Those under way. ``disks``: of every node, to look at."""

    def __init__(self, disks: Mapping[int, Disk]) -> None:
        self._disks: Final = disks
        self._copied: Final[dict[tuple[int, TopicIdPartition], _Copied]] = {}

    def begin(self, node_id: int, broker_epoch: int, copy: LogCopy) -> None:
        """A broker's process has dropped a log."""
        self._copied[node_id, copy.key] = _Copied(
            copy.leader.leader_epoch, broker_epoch, copy.end_offset
        )

    def check(
        self, partitions: Mapping[TopicIdPartition, Partition], registered: Mapping[int, int]
    ) -> None:
        """A replica is on record as damaged until its new log goes as far as the leader's went.

        So it is as long as that one leads, and the process lives. ``partitions`` are as the
        controllers have them, ``registered`` are the brokers' epochs.
        """
        for (node_id, key), copied in list(self._copied.items()):
            partition = partitions.get(key)
            if (
                partition is None
                or node_id not in partition.replicas
                or partition.leader_epoch != copied.leader_epoch
                or registered.get(node_id) != copied.broker_epoch
            ):
                del self._copied[node_id, key]
            elif node_id not in partition.offline:
                del self._copied[node_id, key]
                end = (self._disks[node_id].contents(key) or Contents()).end
                check(
                    end >= copied.end_offset,
                    f"{key.partition}: broker {node_id} is on record as sound, and the copy of its "
                    f"log goes to {end} and not yet to {copied.end_offset}",
                )
