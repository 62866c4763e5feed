"""One task's reading: exactly the records between two offsets of one partition, as Arrow batches.

What is there is what the log has: compaction, aborted transactions and the marks of committed ones
leave gaps, at the end of a range as well. So a range is read to its end when the consumer's
position is there, and never when its last record came.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep
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
_AGREE_S: Final = 10.0
"""A broker may hear late of what there is. So what one says is missing is asked for again, by new
connections, for so long before it is passed over."""
_AGREE_TO_FAIL_S: Final = 2.0
"""The same where the query fails for it: Spark attempts a task several times anyway."""
_AGREE_ANSWERS: Final = 5
"""And so many answers have to say so, with none between them that has the partition."""
_AGREE_PAUSE_S: Final = 0.1
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
    reading = _Reading(options, wanted)
    try:
        yield from reading.batches()
    finally:
        reading.close()


def open_consumer(options: SourceOptions, **unless_given: Any) -> Consumer:
    """A consumer that sees what the query is to see."""
    settings = {**unless_given, **options.clients.of(ConsumerConfig)}
    settings["isolation_level"] = options.isolation_level
    settings["auto_offset_reset"] = "none"
    return Consumer(options.clients.bootstrap_servers, **settings)


class _Reading:
    """The way through one slice, by one consumer after the other."""

    def __init__(self, options: SourceOptions, wanted: Slice) -> None:
        self._consumer = open_consumer(options)
        self._is_placed = False
        self._missing_since: float | None = None
        self._missing_answers = 0
        self._options = options
        self._wanted = wanted
        self._where = wanted.where
        self._position = wanted.start
        self._patience_s = self._consumer.config.default_api_timeout_ms / 1000
        self._moved_at = self._asked_at = monotonic()
        self._is_asked_again = False
        self._topic_id = uuid.UUID(wanted.topic_id).bytes

    def close(self) -> None:
        """Free the connections."""
        self._consumer.close(0)

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """See ``read_slice``."""
        wanted = self._wanted
        converter = Converter(
            wanted.topic,
            wanted.partition,
            wanted.timestamp_type,
            headers=self._options.include_headers,
        )
        while self._position < wanted.end:
            try:
                self._place()
                table = self._fetch()
            except _GONE as error:
                if not self._go_on(error):
                    return
                continue
            if table.num_rows:
                # A consumer's table may hold the first record behind the end.
                yield from converter.batches(_before(table, wanted.end))

    def _place(self) -> None:
        """Have the consumer where reading is. Raises what it raises for what is not there."""
        if self._is_placed:
            return
        try:
            self._consumer.assign([self._where])
            self._consumer.seek(self._where, self._position)
        except InvalidRequestError as error:  # The topic has no such partition.
            raise UnknownTopicOrPartitionError(error.message) from error
        self._is_placed = True

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
        if self._missing_answers and self._end() >= 0:
            self._is_there()
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
        self._is_there()

    def _is_there(self) -> None:
        """An answer has the partition: what others said before is worth nothing."""
        self._missing_since = None
        self._missing_answers = 0

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
        """Whether reading goes on after an answer that something is gone: it is asked for again, or
        reading goes on where the log begins, if that is wanted.
        """
        why = f"it is not there any more, or its topic was deleted and made anew ({error})"
        if isinstance(error, OffsetOutOfRangeError):
            try:
                begin = self._consumer.beginning_offsets([self._where])[self._where]
            except _GONE as gone:
                why = f"it is not there any more ({gone})"
            else:
                if begin > self._position:
                    self._lost(f"its log begins at offset {begin} by now")
                    self._move(min(begin, self._wanted.end))
                    self._consumer.seek(self._where, self._position)
                    return True
                why = f"its log ends before that ({error})"
        now = monotonic()
        if self._missing_since is None:
            self._missing_since = now
        self._missing_answers += 1
        patience_s = _AGREE_TO_FAIL_S if self._options.fail_on_data_loss else _AGREE_S
        is_late = now - self._missing_since >= patience_s
        if is_late and self._missing_answers >= _AGREE_ANSWERS:
            self._lost(why)
            return False
        # Another connection may be to a broker that knows more, and asks for the leader anew.
        self._consumer.close(0)
        sleep(_AGREE_PAUSE_S)
        self._consumer = open_consumer(self._options)
        self._is_placed = self._is_asked_again = False
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
