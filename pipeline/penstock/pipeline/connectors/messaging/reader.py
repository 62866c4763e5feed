"""The streaming reader that both sources share.

An offset is the number of messages that a reader has planned batches with, and the reader's name.
A reader lives as long as a query runs, and its numbers mean nothing to the next one. So a batch
that Spark planned with an earlier reader, and asks for again after a restart, is empty: its
messages are with the broker, which delivers them anew, into a batch after it. They must not be
read into that batch itself: a sink that had committed it before the crash would pass over them.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.pipeline.connectors.messaging.inbox import Inbox

_log: Final = logging.getLogger(__name__)
_POLL_S: Final = 0.05
"""An idle query asks a hundred times a second; a message that comes ends the wait."""
_ROWS_A_PARTITION: Final = 10_000

Offset = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of batches."""

    rows: int | None
    min_partitions: int
    available_now_s: float
    """For how long at most a query that ends goes on reading."""


class Link(Protocol):
    """A connection to a broker, with a thread of its own that fills the inbox."""

    def start(self) -> None:
        """Connect and begin to receive. Raises ConnectorError. Idempotent."""
        ...

    def acknowledge(self, tags: Sequence[Any]) -> None:
        """Tell the broker that these are done with. Tags of a connection that is gone are not."""
        ...

    def waiting_at_start(self) -> int | None:
        """How many messages there were for us then; None where the broker does not tell."""
        ...

    def is_exhausted(self) -> bool:
        """Whether the broker has nothing more for us now."""
        ...

    def close(self) -> None:
        """Send what is to be acknowledged, and disconnect. Idempotent."""
        ...


class Rows(InputPartition):
    """Some rows of a batch, as Arrow's bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None)
        self.data = data


class MessageReader(DataSourceStreamReader, SupportsTriggerAvailableNow, ABC):
    """Reads what a link delivers, in a process beside the driver; tasks only call ``read``."""

    def __init__(self, schema: StructType, limits: Limits) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._limits = limits
        # Of the reader that plans, once it does. One that tasks are sent has neither, and pickles.
        self._opened: tuple[Link, Inbox[Any]] | None = None
        self._name = uuid.uuid4().hex
        self._until: float | None = None
        """Of a query that ends: when it does at the latest."""

    @abstractmethod
    def connect(self) -> tuple[Link, Inbox[Any]]:
        """A link that is not started yet, and what it fills."""

    # --- as Spark calls it --------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's.
        """Connects, so that what is wrong is said at once. Raises ConnectorError."""
        self._started()
        return self._offset(0)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's.
        """Option maxRowsPerTrigger."""
        return ReadAllAvailable() if self._limits.rows is None else ReadMaxRows(self._limits.rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's.
        """From here on the query ends when the broker has nothing more."""
        self._started()
        self._until = time.monotonic() + self._limits.available_now_s

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's.
        """Plans a batch. Raises ConnectorError.

        Spark asks for what follows ``start`` when what is before it is in its commit log, and not
        earlier. ``commit`` says the same, but only when a next batch is planned: of a query that
        has nothing to do for hours, or ends, the last messages would stay unacknowledged.
        """
        link, inbox = self._started()
        self.commit(start)
        low = self._number(start) or 0
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._until is None:
            end = inbox.plan(low, most, _POLL_S)
        else:
            end = _plan_now(link, inbox, low, most, self._until)
        return start if end == low else self._offset(end)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The rows themselves: there is nowhere that a task could read them from."""
        high = self._number(end)
        if high is None:
            _log.warning("a batch of an earlier run is empty: the broker delivers its rows anew")
            return []
        _, inbox = self._started()
        rows = inbox.rows(self._number(start) or 0, high)
        size = min(_ROWS_A_PARTITION, max(1, -(-len(rows) // self._limits.min_partitions)))
        return [Rows(self._pack(rows[at : at + size])) for at in range(0, len(rows), size)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        assert isinstance(partition, Rows)
        with pa.ipc.open_stream(partition.data) as stream:
            yield from stream

    def commit(self, end: Offset) -> None:
        """Acknowledges."""
        number = self._number(end)
        if number is not None:
            link, inbox = self._started()
            if tags := inbox.done(number):
                link.acknowledge(tags)

    def stop(self) -> None:
        """Disconnects; the broker keeps what is not acknowledged."""
        if self._opened is not None:
            self._opened[0].close()

    # --- inside -------------------------------------------------------------------------------

    def _started(self) -> tuple[Link, Inbox[Any]]:
        if self._opened is None:
            opened = self.connect()
            opened[0].start()
            self._opened = opened
        return self._opened

    def _offset(self, number: int) -> Offset:
        return {"reader": self._name, "number": number}

    def _number(self, offset: Offset) -> int | None:
        """None: it is of an earlier reader."""
        return int(offset["number"]) if offset["reader"] == self._name else None

    def _pack(self, rows: list[tuple[Any, ...]]) -> bytes:
        columns = zip(*rows, strict=True)
        arrays = [
            pa.array(column, entry.type)
            for column, entry in zip(columns, self._schema, strict=True)
        ]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        data: bytes = sink.getvalue().to_pybytes()
        return data


def _plan_now(link: Link, inbox: Inbox[Any], low: int, most: int | None, until: float) -> int:
    """Of a query that ends: ``low`` where it does."""
    if (target := link.waiting_at_start()) is not None:
        most = target - low if most is None else min(most, target - low)
        if most <= 0:
            return low
    while time.monotonic() < until:
        # Asked first: what arrives between the two is planned.
        is_last = link.is_exhausted()
        if (end := inbox.plan(low, most, _POLL_S)) > low or is_last:
            return end
    _log.warning("the query ends by availableNowTimeout; the next run has what is left")
    return low
