"""Reads that would wait for the disk are made in another thread first (see Log.cold_read).

The event loop serves every other partition meanwhile, so anything may have changed afterwards:
the leader, the epoch, the log's start and end, whether the partition is here at all. Whoever comes
back from here looks again before reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.broker.replication.partition import Partition

Job = Callable[[], None]


async def warm(job: Job) -> None:
    """Run a job of Log.cold_read or Log.cold_times in a thread.

    Whoever waits may be cancelled; the job is run all the same, since it holds a file open.
    """
    await asyncio.shield(_run(job))


def both(first: Job | None, second: Job | None) -> Job | None:
    """One job in place of two, as far as there are any."""
    if first is None or second is None:
        return first or second

    def run() -> None:
        first()
        second()

    return run


def _run(job: Job) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(None, job)


class Warming:
    """The partitions of one stream whose next records are being brought into memory.

    ``ready(partition)`` is called on the loop once they are. One job a partition at a time.
    """

    def __init__(self, ready: Callable[[Partition], None]) -> None:
        self._ready = ready
        self._partitions: set[Partition] = set()

    def __contains__(self, partition: Partition) -> bool:
        return partition in self._partitions

    def start(self, partition: Partition, job: Job) -> None:
        """Run a job of the partition's log."""
        self._partitions.add(partition)
        _run(job).add_done_callback(lambda _done: self._finish(partition))

    def _finish(self, partition: Partition) -> None:
        self._partitions.discard(partition)
        self._ready(partition)
