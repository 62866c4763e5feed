"""Moves amounts between accounts so that no amount is ever lost or made, whatever dies and when.

A transfer is two records, a debit and a credit, on whatever partitions their accounts have. They
are sent in one transaction, so that readers of committed records see both or neither. Where the
account has too little the block raises after the debit was sent, and nothing of it counts::

    penstock topics create ledger --partitions 3
    python examples/money_transfer.py localhost:9092 ledger 20

The sum of all balances is 0 at every moment. The transactional id is this program's name: a second
one with the same is not a second clerk but the first one's successor, who ends what that left open,
and the first is fenced. Give each clerk an id of its own (``--id``) where several are to work.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import NamedTuple

from penstock.client import Consumer, PenstockError, Producer, TopicPartition

ACCOUNTS = ("ann", "bob", "cleo", "dan", "eve")
CREDIT = 50
"""So far an account may go below 0."""


class RefusedError(Exception):
    """The account has too little."""


def balances(bootstrap: str, topic: str) -> Counter[str]:
    """What each account has, by all transfers that are committed."""
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
    return found


class Transfer(NamedTuple):
    """What is to be moved."""

    amount: int
    source: str
    to: str


def move(producer: Producer, topic: str, known: Counter[str], wanted: Transfer) -> None:
    """Move it, or nothing. Raises RefusedError."""
    amount, source, to = wanted
    with producer.transaction():
        producer.send(topic, -amount, source)
        if known[source] - amount < -CREDIT:
            raise RefusedError  # Too late to unsend the debit, and no need to.
        producer.send(topic, amount, to)
    # Only now: what was not committed moved nothing.
    known[source] -= amount
    known[to] += amount


def say(line: str) -> None:
    """Print it at once."""
    print(line, flush=True)  # noqa: T201 - an example


def main() -> int:
    """Make so many transfers, and show the balances."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="ledger")
    parser.add_argument("count", nargs="?", type=int, default=20)
    parser.add_argument("--id", default="clerk", help="the transactional id")
    arguments = parser.parse_args()
    bootstrap, topic = arguments.bootstrap, arguments.topic
    try:
        with Producer(
            bootstrap,
            transactional_id=arguments.id,
            key_serializer="str",
            value_serializer="json",
            linger_ms=0,
        ) as producer:
            producer.init_transactions()  # From here on nobody else of this name moves anything.
            known = balances(bootstrap, topic)
            for _ in range(arguments.count):
                source, to = random.sample(ACCOUNTS, 2)
                amount = random.randint(1, 40)
                try:
                    move(producer, topic, known, Transfer(amount, source, to))
                except RefusedError:
                    say(f"{source} has too little for {amount}")
                else:
                    say(f"{amount} from {source} to {to}")
        found = balances(bootstrap, topic)
        say(", ".join(f"{name}: {found[name]}" for name in ACCOUNTS))
        say(f"total: {found.total()}")
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
