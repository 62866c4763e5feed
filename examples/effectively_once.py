"""Adds up numbers by key so that each record counts exactly once, whatever dies and when.

Results and position are stored together, in one transaction of one SQLite database: either both
are there or neither is, and a start goes on from the position that the results belong to::

    python examples/producer.py localhost:9092 numbers 1000
    python examples/effectively_once.py localhost:9092 numbers totals.db

It rests on three things. The topic has no record twice: its producers are idempotent, as they are
unless told otherwise, and do not send again what they sent before. The database keeps a
transaction whole, and on disk. And a position is moved on only from where this process began: a
second process on the same database is stopped by that, not trusted to be absent. The cluster's
committed offsets play no part, so no group is needed.
"""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from typing import NoReturn

from penstock.client import Consumer, ConsumerRecord, PenstockError, TopicPartition

TABLES = """
CREATE TABLE IF NOT EXISTS totals (key TEXT PRIMARY KEY, total INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS positions (
    topic TEXT, partition INTEGER, next_offset INTEGER NOT NULL, PRIMARY KEY (topic, partition)
);
"""


class Store:
    """Totals, and the position up to which they are the totals."""

    def __init__(self, path: str) -> None:
        # Transactions begin and end where this class says so.
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.executescript(TABLES)

    def position(self, partition: TopicPartition, begin: int) -> int:
        """The offset of the first record that does not count yet: at first, ``begin``."""
        self._database.execute(
            "INSERT OR IGNORE INTO positions VALUES (?, ?, ?)", (*partition, begin)
        )
        found = self._database.execute(
            "SELECT next_offset FROM positions WHERE topic = ? AND partition = ?", partition
        )
        return int(found.fetchone()[0])

    def add(self, partition: TopicPartition, begin: int, records: Sequence[ConsumerRecord]) -> int:
        """Count the records that follow on ``begin``, and move the position past them."""
        end = records[-1].offset + 1
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # Commits at the end, or rolls back.
            moved = self._database.execute(
                "UPDATE positions SET next_offset = ?"
                " WHERE topic = ? AND partition = ? AND next_offset = ?",
                (end, *partition, begin),
            )
            if moved.rowcount != 1:
                raise SystemExit(f"another process counts {partition} in this database; giving up")
            self._database.executemany(
                "INSERT INTO totals VALUES (?, ?)"
                " ON CONFLICT (key) DO UPDATE SET total = total + excluded.total",
                [(record.key, record.value["number"]) for record in records],
            )
        return end


def count(consumer: Consumer, topic: str, store: Store) -> NoReturn:
    """Count for ever."""
    partitions = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]
    consumer.assign(partitions)
    begins = consumer.beginning_offsets(partitions)
    positions = {
        partition: store.position(partition, begins[partition]) for partition in partitions
    }
    for partition, position in positions.items():
        consumer.seek(partition, position)
    while True:
        for partition, records in consumer.poll_batch().items():
            positions[partition] = store.add(partition, positions[partition], records)
            print(f"{partition} @ {positions[partition]}", flush=True)  # noqa: T201 - an example


def main() -> int:
    """Count until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("database", nargs="?", default="totals.db")
    arguments = parser.parse_args()
    try:
        # A position that the log no longer has is an error here, and not a reason to skip.
        with Consumer(
            arguments.bootstrap,
            auto_offset_reset="none",
            key_deserializer="str",
            value_deserializer="json",
        ) as consumer:
            count(consumer, arguments.topic, Store(arguments.database))
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
