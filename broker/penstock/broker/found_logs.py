"""What is wrong with the logs that a broker finds at its start: said, or handed on to be mended."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.wire.errors import DiskFullError

log = structlog.get_logger()


def tell_of_damage(logs: LogManager, found: Callable[[PartitionLog, int], None]) -> None:
    """Have the logs mended of what is missing at the start, or was known to be damaged before."""
    for partition_log in logs.logs():
        for offset in (*partition_log.holes, *partition_log.noted_damage):
            found(partition_log, offset)


def report_unopened(logs: LogManager) -> None:
    """Say in the log which replicas this broker has on its disks and yet can't serve."""
    for key, error in logs.unopened().items():
        if isinstance(error, DiskFullError):
            continue  # Reported when it is tried again, until there is room.
        by_itself = isinstance(error, DamagedLogError)
        log.error(
            "partition not opened, its replica here is offline",
            topic_partition_id=str(key),
            reason=error.message,
            next_step="look after the disk; the partition is copied anew by itself while another "
            "replica is in sync"
            if by_itself
            else "move the directory named above away and restart this broker; it then copies the "
            "partition anew from its leader",
        )
