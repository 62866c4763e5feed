"""Keeps high watermarks over a restart, now and then."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from penstock.broker.replication.partition import Partition
from penstock.broker.replication.ports import LogStore
from penstock.wire.errors import PenstockError

logger = structlog.get_logger()

INTERVAL_S: Final = 5.0
"""How old a kept high watermark may be. An old one costs nothing but a late start of reads: what
is committed is found anew with the in-sync replicas."""


class HighWatermarkCheckpoints:
    """Writes those that changed every INTERVAL_S; there is no timer while none did."""

    def __init__(self, logs: LogStore) -> None:
        self._logs = logs
        self._changed: dict[Partition, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, partition: Partition) -> None:
        """The partition's high watermark moved."""
        self._changed[partition] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._write)

    def forget(self, partition: Partition) -> None:
        """The partition is gone."""
        self._changed.pop(partition, None)

    def stop(self) -> None:
        """Write what is due and end."""
        if self._timer is not None:
            self._timer.cancel()
        self._write()

    def _write(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, {}
        for partition in changed:
            try:
                self._logs.checkpoint_high_watermark(
                    partition.key, partition.replica.high_watermark
                )
            except PenstockError as error:
                logger.warning(
                    "high watermark not kept", partition=str(partition.name), error=error.message
                )
