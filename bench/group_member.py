"""One member of a consumer group as a process, which notes when each partition was heard of.

For bench/group_failover.py, which asks it over pipes (bench/children.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from children import Answer, serve, settings

from penstock.client import AsyncConsumer

_POLL_MS: Final = 1_000


class ListeningMember:
    """Reads as long as the process lives. Times are of the monotonic clock, in seconds."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self._consumer = consumer
        self._arrivals: dict[int, list[float]] = {}

    async def read(self) -> None:
        """Note when each poll brought records of which partitions."""
        while True:
            batches = await self._consumer.poll_batch(_POLL_MS)
            now = time.monotonic()
            for partition in batches:
                self._arrivals.setdefault(partition.partition, []).append(now)

    async def held(self) -> Answer:
        """The partitions that are read now."""
        return {"held": sorted(entry.partition for entry in self._consumer.assignment())}

    async def first_reads(self, *, after: float) -> Answer:
        """When each partition first brought records after a time, if it did."""
        firsts = {
            partition: next((at for at in times if at > after), None)
            for partition, times in self._arrivals.items()
        }
        return {"firsts": {name: at for name, at in firsts.items() if at is not None}}

    async def gaps(self, *, begin: float, end: float) -> Answer:
        """The longest time without records that touches a stretch of time, by partition."""
        return {
            "gaps": {
                partition: longest_gap(times, begin, end)
                for partition, times in self._arrivals.items()
            }
        }

    async def forget(self) -> Answer:
        """Forget all arrivals but the newest of each partition."""
        self._arrivals = {partition: times[-1:] for partition, times in self._arrivals.items()}
        return {}


def longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """The longest time between two of ``times`` of which a part lies within the stretch.

    What has not ended at ``end`` is counted up to the next time after it.
    """
    after = next((at for at in times if at >= end), end)
    edges = [*(at for at in times if at < end), after]
    return max(
        (later - earlier for earlier, later in pairwise(edges) if later > begin),
        default=end - begin,
    )


async def main() -> None:
    """Read until the parent is gone."""
    given = settings()
    consumer = AsyncConsumer(
        given["bootstrap"],
        topics=given["topic"],
        group_id=given["group"],
        session_timeout_ms=given["session_timeout_ms"],
        auto_offset_reset="latest",
    )
    member = ListeningMember(consumer)
    reading = asyncio.create_task(member.read())
    serving = asyncio.create_task(
        serve(
            {
                "held": member.held,
                "first_reads": member.first_reads,
                "gaps": member.gaps,
                "forget": member.forget,
            }
        )
    )
    try:
        # Reading ends by an error alone, which is then raised.
        done, _ = await asyncio.wait((reading, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (reading, serving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await consumer.close()


if __name__ == "__main__":
    asyncio.run(main())
