"""Deletes what topics keep no longer: looks through the partitions of this broker now and then."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from penstock.broker.replication.partition import Partition
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.retention import delete_old, free_what_was_deleted
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Replicas(Protocol):
    """What is asked of the replica manager."""

    def partitions(self) -> Iterable[Partition]:
        """Every partition hosted here."""
        ...


class Logs(Protocol):
    """What is asked of the log manager."""

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        """The log of a partition, if it is here and open."""
        ...


class Retention:
    """Moves the log starts of the partitions led here, as their topics' configs want it.

    Followers learn of it from what the leader pushes. One event loop: a look at one partition, or
    at a few of its segments, is all that is done at a time, and files are removed in another
    thread.
    """

    def __init__(
        self,
        replicas: Replicas,
        logs: Logs,
        *,
        interval_ms: int,
        wall_clock_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self._replicas = replicas
        self._logs = logs
        self._interval_s = interval_ms / 1000
        self._wall_clock_ms = wall_clock_ms
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look, once an interval."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def check(self) -> None:
        """Look through every partition once."""
        for partition in list(self._replicas.partitions()):
            more = True
            while more:
                more = self._guarded_step(partition)
                await asyncio.sleep(0)

    def _guarded_step(self, partition: Partition) -> bool:
        try:
            return self._step(partition)
        except PenstockError as error:
            # Its disk has failed or is full, or a header is damaged: the others go on.
            logger.warning(
                "old records not deleted", partition=str(partition.name), reason=error.message
            )
            return False
        except Exception:
            # A fault of ours must not keep the other partitions from being looked at, ever again.
            logger.exception("old records not deleted", partition=str(partition.name))
            return False

    def _step(self, partition: Partition) -> bool:
        """Delete a few segments; whether there may be more."""
        log = self._logs.get(partition.key)
        if log is None or log.home.failure is not None or partition.closed:
            return False
        before = log.log_start_offset
        if partition.is_leader:
            high_watermark = partition.replica.high_watermark
            start = delete_old(log, high_watermark=high_watermark, now_ms=self._wall_clock_ms())
            if start > before:
                partition.advance_log_start(start)
                logger.info("old records deleted", partition=log.name, log_start_offset=start)
        free_what_was_deleted(log)
        return log.log_start_offset > before
