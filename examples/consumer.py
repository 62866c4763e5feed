"""Reads a topic as a member of a group, and commits what it has processed.

Start it twice and the two share the topic's partitions; stop one and the other takes over::

    python examples/consumer.py localhost:9092 numbers readers
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from penstock.client import Consumer, PenstockError, TopicPartition


class Announce:
    """Says which partitions come and go."""

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """New to this member."""
        print("assigned:", *partitions)  # noqa: T201 - an example

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Given back; what was processed is committed right after this."""
        print("revoked:", *partitions)  # noqa: T201 - an example

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Taken away: the group had given this member up."""
        print("lost:", *partitions)  # noqa: T201 - an example


def main() -> int:
    """Read until Ctrl-C, or until ``--count`` records came."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("group", nargs="?", default="readers")
    parser.add_argument("--count", type=int, default=0, help="end after so many records")
    arguments = parser.parse_args()
    try:
        with Consumer(
            arguments.bootstrap, group_id=arguments.group, auto_offset_reset="earliest"
        ) as consumer:
            consumer.subscribe([arguments.topic], Announce())
            for number, record in enumerate(consumer, 1):
                place = f"{record.topic_partition} @ {record.offset}"
                print(place, record.key, record.value)  # noqa: T201 - an example
                if number == arguments.count:
                    break
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        pass  # Leaving the block has committed and left the group.
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
