"""Readers of messages, driven as Spark drives them, without Spark."""

from __future__ import annotations

import pickle
from typing import Any

from penstock.pipeline.connectors.messaging.reader import MessageReader
from tests.support import wait_until

Rows = list[dict[str, Any]]


class Driver:
    """Goes from batch to batch."""

    def __init__(self, reader: MessageReader, start: dict[str, Any] | None = None) -> None:
        self.reader = reader
        self.start = reader.initialOffset() if start is None else start
        self.end = self.start

    def plan(self) -> bool:
        """Plan a batch after the last one, which with that is done. Whether there are rows."""
        self.start = self.end
        self.end = self.reader.latestOffset(self.start, self.reader.getDefaultReadLimit())
        return self.end != self.start

    def plan_of(self, count: int) -> None:
        """Plan a batch that ends with the message of this number, counted from 1."""
        limit = self.reader.getDefaultReadLimit()
        self.start = self.end

        def is_there() -> bool:
            self.end = self.reader.latestOffset(self.start, limit)
            return bool(self.end["number"] == count)

        wait_until(is_there, f"{count} messages", 60)

    def rows(self) -> Rows:
        """Of the planned batch, as its tasks get them."""
        return read(self.reader, self.start, self.end)

    def until(self, count: int) -> Rows:
        """The rows of batches, one after the other, until there are so many."""
        found: Rows = []

        def goes_on() -> bool:
            if self.plan():
                found.extend(self.rows())
            return len(found) >= count

        wait_until(goes_on, f"{count} rows", 60)
        return found


def read(reader: MessageReader, start: dict[str, Any], end: dict[str, Any]) -> Rows:
    partitions = pickle.loads(pickle.dumps(list(reader.partitions(start, end))))
    return [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]
