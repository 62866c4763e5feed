"""One task's reading: exactly the records between two offsets of one partition, as Arrow batches.

What is there is what the log has: compaction, aborted transactions and the marks of committed ones
leave gaps, at the end of a range as well. So a range is read to its end when the consumer's
position is there, and never when its last record came.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.client import (
    Consumer,
    InvalidRequestError,
    NoOffsetError,
    OffsetOutOfRangeError,
    PenstockError,
    TopicPartition,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from penstock.client.config import ConsumerConfig
from penstock.pipeline.errors import ReadTimeoutError
from penstock.pipeline.source.columns import Converter
from penstock.pipeline.source.losses import lost
from penstock.pipeline.source.offsets import Offsets
from penstock.pipeline.source_options import SourceOptions

if TYPE_CHECKING:
    import pyarrow

_POLL_MS: Final = 25
"""So long one fetch is waited for before the position is looked at: what lies between the last
record and the end of a range, such as the mark of a transaction, wakes nobody."""
_DOUBT_S: Final = 1.0
"""When nothing comes for so long, the leader is asked afresh whether there is anything at all."""
_GONE: Final = (
    NoOffsetError, OffsetOutOfRangeError, UnknownTopicIdError, UnknownTopicOrPartitionError
)  # fmt: skip


@dataclass(frozen=True)
class Slice(InputPartition):
    """What one task reads. ``finished`` are the offsets that the query is done with, on the one
    task of a batch that is to commit them.
    """

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str
    timestamp_type: int
    finished: Offsets | None = None

    @property
    def where(self) -> TopicPartition:
        """The partition of the topic."""
        return TopicPartition(self.topic, self.partition)


def read_slice(options: SourceOptions, wanted: Slice) -> Iterator[pyarrow.RecordBatch]:
    """The records of the slice, in order, in batches of at most ``maxRecordsPerFetch``.

    Raises DataLossError where the log does not have them any more (with failOnDataLoss=false it
    reads on where the log begins), and ReadTimeoutError when nothing moved for
    ``penstock.default.api.timeout.ms``: where the partition has no leader, say.
    """
    with open_consumer(options) as consumer:
        yield from _Reading(consumer, options, wanted).batches()


def open_consumer(options: SourceOptions, **unless_given: Any) -> Consumer:
    """A consumer that sees what the query is to see."""
    settings = {**unless_given, **options.clients.of(ConsumerConfig)}
    settings["isolation_level"] = options.isolation_level
    settings["auto_offset_reset"] = "none"
    return Consumer(options.clients.bootstrap_servers, **settings)


class _Reading:
    """The way of one consumer through one slice."""

    def __init__(self, consumer: Consumer, options: SourceOptions, wanted: Slice) -> None:
        self._consumer = consumer
        self._options = options
        self._wanted = wanted
        self._where = wanted.where
        self._position = wanted.start
        self._patience_s = consumer.config.default_api_timeout_ms / 1000
        self._moved_at = self._asked_at = monotonic()
        self._is_asked_again = False
        self._topic_id = uuid.UUID(wanted.topic_id).bytes

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """See ``read_slice``."""
        wanted = self._wanted
        converter = Converter(
            wanted.topic,
            wanted.partition,
            wanted.timestamp_type,
            headers=self._options.include_headers,
        )
        if not self._begin():
            return
        while self._position < wanted.end:
            try:
                table = self._fetch()
            except _GONE as error:
                if not self._go_on(error):
                    return
                continue
            if table.num_rows:
                # A consumer's table may hold the first record behind the end.
                yield from converter.batches(_before(table, wanted.end))

    def _begin(self) -> bool:
        """Whether there is anything to read."""
        try:
            self._consumer.assign([self._where])
            self._consumer.seek(self._where, self._position)
        except (UnknownTopicOrPartitionError, InvalidRequestError) as error:
            self._lost(f"it is not there any more ({error})")
            return False
        return True

    def _fetch(self) -> pyarrow.Table:
        """What came, maybe nothing."""
        # One more than can be left: so what follows the last record is gone past at once.
        most = min(self._options.max_rows, self._wanted.end - self._position + 1)
        # When an answer to what was asked for again is here, records of it can be taken.
        is_answered = self._is_asked_again and self._end() >= 0
        table = self._consumer.fetch_arrow(0 if is_answered else _POLL_MS, most)
        known = self._consumer.positions().get(self._where)
        if known is not None and known.topic_id not in (b"", self._topic_id):
            raise UnknownTopicIdError("another topic has its name")
        position = self._position if known is None else known.offset
        if table.num_rows and (first := table.column("offset")[0].as_py()) < self._position:
            # Brokers cut their log before what was read, and what they have there now is new.
            self._lost(f"its log was cut, and goes on at offset {first}")
            table = table.slice(_rows_before(table, self._position))
        if position > self._position:
            self._move(position)
        elif is_answered and self._end() >= self._wanted.end:
            self._move(self._wanted.end)  # The log goes on to there, and has nothing.
        else:
            self._doubt()
        return table

    def _move(self, position: int) -> None:
        self._position = position
        self._moved_at = self._asked_at = monotonic()
        self._is_asked_again = False

    def _end(self) -> int:
        """The end of the log, as an answer since the last seek said; -1 before there was one."""
        lag = self._consumer.current_lag(self._where)
        return -1 if lag is None else self._consumer.position(self._where) + lag

    def _doubt(self) -> None:
        """Nothing came. Ask again whether there is anything, now and then; give up in the end."""
        now = monotonic()
        if now - self._moved_at > self._patience_s:
            trouble = self._consumer.trouble()
            raise ReadTimeoutError(
                f"partition {self._where}: nothing could be read at offset {self._position} (of "
                f"{self._wanted.start} to {self._wanted.end}) for {self._patience_s:.0f} s"
                f"{f': {trouble}' if trouble is not None else ''}; next: see `penstock topics "
                f"describe {self._where.topic}` for its leader; penstock.default.api.timeout.ms "
                "says how long to wait"
            )
        if now - self._asked_at >= _DOUBT_S and not self._is_asked_again:
            self._consumer.seek(self._where, self._position)
            self._is_asked_again = True

    def _go_on(self, error: PenstockError) -> bool:
        """Whether reading goes on after a loss: where the log begins, if that is wanted."""
        if not isinstance(error, OffsetOutOfRangeError):
            self._lost(f"its topic was deleted, or deleted and made anew ({error})")
            return False
        begin = self._consumer.beginning_offsets([self._where])[self._where]
        if begin <= self._position:
            self._lost(f"its log ends before that ({error})")
            return False
        self._lost(f"its log begins at offset {begin} by now")
        self._move(min(begin, self._wanted.end))
        self._consumer.seek(self._where, self._position)
        return True

    def _lost(self, why: str) -> None:
        lost(
            f"partition {self._where}: the records from offset {self._position} on, up to "
            f"{self._wanted.end}, cannot all be read: {why}",
            fail=self._options.fail_on_data_loss,
        )


def _before(table: pyarrow.Table, end: int) -> pyarrow.Table:
    """The rows before an offset."""
    if table.column("offset")[-1].as_py() < end:
        return table
    return table.slice(0, _rows_before(table, end))


def _rows_before(table: pyarrow.Table, offset: int) -> int:
    """How many rows are before an offset; offsets ascend."""
    offsets = table.column("offset")
    low, high = 0, table.num_rows
    while low < high:
        middle = (low + high) // 2
        if offsets[middle].as_py() < offset:
            low = middle + 1
        else:
            high = middle
    return low
