"""Writes numbered records from asyncio, and says where each one went.

As examples/producer.py does it without asyncio::

    python examples/async_producer.py localhost:9092 numbers 10
"""

from __future__ import annotations

import argparse
import asyncio

from penstock.client import AsyncProducer, PenstockError


async def produce(bootstrap: str, topic: str, count: int) -> None:
    """Send without waiting for each, then look at the verdicts."""
    async with AsyncProducer(
        bootstrap, acks="all", key_serializer="str", value_serializer="json"
    ) as producer:
        futures = [
            await producer.send(topic, value={"number": number}, key=f"key-{number % 3}")
            for number in range(count)
        ]
        for place in await asyncio.gather(*futures):
            print(f"{place.topic_partition} @ {place.offset}")  # noqa: T201 - an example


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("count", nargs="?", type=int, default=10)
    arguments = parser.parse_args()
    try:
        asyncio.run(produce(arguments.bootstrap, arguments.topic, arguments.count))
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
