"""Writes objects of the application's own, and chooses partitions by a rule of its own.

Urgent orders have partition 0 for themselves; all others are spread by their key as usual::

    penstock topics create orders --partitions 4
    python examples/custom_partitioner.py localhost:9092 orders
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.client import Consumer, PenstockError, Producer

URGENT = b"urgent-"


@dataclass(frozen=True)
class Order:
    """What this application writes and reads."""

    table: int
    wish: str


def to_bytes(order: Order) -> bytes:
    """A serialiser is any callable that makes bytes (or None)."""
    return json.dumps(asdict(order)).encode()


def to_order(data: bytes | None) -> Order | None:
    """A deserialiser is the reverse; None is a record without a value."""
    return None if data is None else Order(**json.loads(data))


def choose(
    topic: str,
    key: bytes | None,
    value: bytes | None,
    partition_count: int,
    available: Sequence[int],
) -> int:
    """A partitioner: called from whichever thread sends, so it keeps nothing to itself."""
    if partition_count == 1 or (key or b"").startswith(URGENT):
        return 0
    return 1 + sum(key or b"") % (partition_count - 1)


def main() -> int:
    """Write six orders, and read them back."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="orders")
    arguments = parser.parse_args()
    try:
        with Producer(
            arguments.bootstrap,
            partitioner=choose,
            key_serializer="str",
            value_serializer=to_bytes,
        ) as producer:
            for table in range(6):
                key = f"{'urgent' if table % 3 == 0 else 'normal'}-{table}"
                producer.send(arguments.topic, Order(table, "two coffees"), key)
        with Consumer(
            arguments.bootstrap,
            topics=arguments.topic,
            auto_offset_reset="earliest",
            value_deserializer=to_order,
        ) as consumer:
            while records := consumer.poll(2_000):
                for record in records:
                    print(record.partition, record.key, record.value)  # noqa: T201 - an example
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
