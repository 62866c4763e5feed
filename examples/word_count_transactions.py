"""Counts words so that each line counts exactly once, whatever dies and when.

Reads lines, and writes for each batch how often each of its words came. These increments and the
group's positions are one transaction: a process that dies before its commit has written nothing
that counts, and whoever takes over reads the same lines again::

    penstock topics create lines --partitions 3
    penstock topics create counts --partitions 3
    python examples/word_count_transactions.py localhost:9092 lines counts --id 1
    python examples/word_count_transactions.py localhost:9092 lines counts --show

Run as many as there are partitions, each with an ``--id`` of its own: they are a group, and share
the lines. ``--show`` adds the increments up, as a reader of committed records.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from penstock.client import (
    Consumer,
    ConsumerRecord,
    FencedMemberEpochError,
    MaxPollExceededError,
    PenstockError,
    Producer,
    TopicPartition,
    TransactionAbortableError,
)


def count(consumer: Consumer, producer: Producer, topic: str) -> NoReturn:
    """Count for ever."""
    while True:
        records = consumer.poll()
        if not records:
            continue
        try:
            with producer.transaction():
                for word, number in words(records).items():
                    producer.send(topic, number, word)
                producer.send_offsets_to_transaction(
                    consumer.positions(), consumer.group_metadata()
                )
        except (TransactionAbortableError, FencedMemberEpochError, MaxPollExceededError) as error:
            # Nothing of it counts. The lines are read again, by whoever has the partitions now.
            print(f"again: {error}", flush=True)  # noqa: T201 - an example
            rewind(consumer)
        else:
            print(f"{len(records)} lines", flush=True)  # noqa: T201 - an example


def words(records: Sequence[ConsumerRecord]) -> Counter[str]:
    """How often each word comes."""
    return Counter(word for record in records for word in record.value.lower().split())


def rewind(consumer: Consumer) -> None:
    """Go back to what is committed."""
    for partition, position in consumer.committed(*consumer.assignment()).items():
        if position is None:
            consumer.seek_to_beginning(partition)
        else:
            consumer.seek(partition, position.offset)


def show(bootstrap: str, topic: str) -> None:
    """Print each word with its count, by all that is committed."""
    found: Counter[str] = Counter()
    with Consumer(
        bootstrap,
        isolation_level="read_committed",
        key_deserializer="str",
        value_deserializer="json",
    ) as consumer:
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(name) < end for name, end in ends.items()):
            for record in consumer.poll(1_000):
                found[record.key] += record.value
    for word, number in sorted(found.items()):
        print(f"{number} {word}")  # noqa: T201 - an example


def main() -> int:
    """Count until Ctrl-C, or show what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("lines", nargs="?", default="lines")
    parser.add_argument("counts", nargs="?", default="counts")
    parser.add_argument("--group", default="word-count")
    parser.add_argument("--id", default="1", help="which of the group's processes this is")
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    try:
        if arguments.show:
            show(arguments.bootstrap, arguments.counts)
            return 0
        with (
            Consumer(
                arguments.bootstrap,
                topics=arguments.lines,
                group_id=arguments.group,
                isolation_level="read_committed",
                enable_auto_commit=False,  # The transactions commit the positions.
                auto_offset_reset="earliest",
                session_timeout_ms=6_000,  # Who dies is replaced after so long.
                value_deserializer="str",
            ) as consumer,
            Producer(
                arguments.bootstrap,
                transactional_id=f"{arguments.group}-{arguments.id}",
                transaction_timeout_ms=10_000,
                key_serializer="str",
                value_serializer="json",
            ) as producer,
        ):
            count(consumer, producer, arguments.counts)
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
