"""Reads a topic as a member of a group from asyncio, beside other work of the same loop.

As examples/consumer.py does it without asyncio::

    python examples/async_consumer.py localhost:9092 numbers readers
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from penstock.client import AsyncConsumer, PenstockError, TopicPartition


class Announce:
    """Says which partitions come and go. The methods may be coroutines, or not."""

    async def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """New to this member."""
        print("assigned:", *partitions)  # noqa: T201 - an example

    async def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Given back; what was processed is committed right after this."""
        print("revoked:", *partitions)  # noqa: T201 - an example

    async def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Taken away: the group had given this member up."""
        print("lost:", *partitions)  # noqa: T201 - an example


async def consume(bootstrap: str, topic: str, group: str, count: int) -> None:
    """Read until ``count`` records came; for ever, if it is 0."""
    async with AsyncConsumer(bootstrap, group_id=group, auto_offset_reset="earliest") as consumer:
        consumer.subscribe([topic], Announce())
        number = 0
        async for record in consumer:
            place = f"{record.topic_partition} @ {record.offset}"
            print(place, record.key, record.value)  # noqa: T201 - an example
            number += 1
            if number == count:
                break


def main() -> int:
    """Read until Ctrl-C, or until ``--count`` records came."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("group", nargs="?", default="readers")
    parser.add_argument("--count", type=int, default=0, help="end after so many records")
    arguments = parser.parse_args()
    try:
        asyncio.run(consume(arguments.bootstrap, arguments.topic, arguments.group, arguments.count))
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        pass  # Leaving the block has committed and left the group.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
