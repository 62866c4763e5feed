"""Writes numbered records and says where each one went.

Run it against ``penstock dev`` after ``penstock topics create numbers --partitions 3``::

    python examples/producer.py localhost:9092 numbers 10
"""

from __future__ import annotations

import argparse

from penstock.client import PenstockError, Producer


def main() -> int:
    """Send, wait for the verdicts, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("count", nargs="?", type=int, default=10)
    arguments = parser.parse_args()
    try:
        with Producer(
            arguments.bootstrap, acks="all", key_serializer="str", value_serializer="json"
        ) as producer:
            futures = [
                producer.send(arguments.topic, value={"number": number}, key=f"key-{number % 3}")
                for number in range(arguments.count)
            ]
            for future in futures:
                place = future.result()
                print(f"{place.topic_partition} @ {place.offset}")  # noqa: T201 - an example
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
