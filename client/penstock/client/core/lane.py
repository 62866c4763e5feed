"""One partition of what a consumer reads: its position, what was fetched of it, what is in its way.

A batch that can't be had, since a broker refuses it as damaged or it came damaged, is asked for
again: another replica may lead soon, and the damaged one is mended from it. Until that has lasted
too long nobody is told, and then once for each time that it was asked for.

Batches are checked when they come, before a position is taken from them: one that is wrong would
be fetched behind, and end in the reset policy or in a gap. Base offsets and leader epochs are not
covered by a batch's own checksum; the answer's covers them, and batches follow one another without
a gap. Where an answer has a checksum and it holds, that of each batch is not looked at on arrival:
the broker did before it made the answer's. When batches are decoded their own are, for they may
have lain in memory for long. So each byte is summed twice, once for its way and once for its stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from penstock.client.core.aborted import AbortedBatches
from penstock.client.core.subscription import Position, Run
from penstock.client.model import ConsumerRecord
from penstock.wire.batch import (
    BatchHeader,
    Buffer,
    checksum,
    iter_batches,
    parse_header,
    verify_batch,
)
from penstock.wire.codec import ColumnsBuilder
from penstock.wire.errors import CorruptRecordError, PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.records import add_to_columns, decode_batch_as
from penstock.wire.wording import counted

DecodedT = TypeVar("DecodedT")

_NOWHERE: Final = Position(-1)


@dataclass(slots=True)
class _Chunk:
    """Fetched batches not yet taken: where in them the next begins, and what it must be."""

    data: Buffer
    offset: int  # Its base offset.
    epoch: int  # The least leader epoch that it may have,
    last_epoch: int  # and the largest.
    aborted: AbortedBatches
    at: int = 0

    def batch(self) -> tuple[BatchHeader, memoryview]:
        """The next batch. Raises CorruptRecordError if it is not what was fetched."""
        header = parse_header(self.data, self.at)
        if header.base_offset != self.offset or not self.epoch <= header.leader_epoch <= (
            self.last_epoch
        ):
            raise CorruptRecordError(
                f"a batch of offset {self.offset} and leader epoch {self.epoch} to "
                f"{self.last_epoch} was fetched, and now it says that it has offset "
                f"{header.base_offset} and epoch {header.leader_epoch}"
            )
        return header, memoryview(self.data)[self.at : self.at + header.size_bytes]

    def is_left_out(self, header: BatchHeader, batch: memoryview) -> bool:
        """Whether the batch has nothing for applications: a mark, or what was aborted.

        Raises CorruptRecordError if such a one, or one that may be, is not sound.
        """
        if not (header.is_control or self.aborted):
            return False
        verify_batch(batch)
        return self.aborted.covers(header) or header.is_control

    def go_past(self, header: BatchHeader) -> None:
        """The next batch is the one behind this."""
        self.at += header.size_bytes
        self.offset, self.epoch = header.next_offset, header.leader_epoch


@dataclass(slots=True)
class _Damage:
    """What can't be had: where, since when, and how often it was asked for again."""

    offset: int
    since_ms: float
    tries: int = 0


@dataclass(slots=True)
class Lane:
    """One partition. The Fetcher is its only owner."""

    position: Position | None = None  # What is fetched next.
    cursor: Position = _NOWHERE  # What is handed out next.
    topic_id: bytes = b""  # What the positions belong to.
    generation: int = 0
    paused: bool = False
    is_outside: bool = False  # The log has no such position; said when nothing is left before it.
    chunks: deque[_Chunk] = field(default_factory=deque)
    buffered_bytes: int = 0
    fetch_id: int = -1
    error: PenstockError | None = None  # Final, until there is another position.
    damage: _Damage | None = None
    complaint: CorruptRecordError | None = None  # To be told once; it is asked for again.
    attempts: int = 0
    retry_at_ms: float = float("-inf")
    failed_epoch: int = -1
    last_error: PenstockError | None = None
    end_offset: int = -1  # Of what can be read, as the last answer since ``clear`` said.
    end_held_ms: float | None = None  # Since when an open transaction keeps it where it is.

    def clear(self) -> None:
        """Drop what was fetched; an answer on its way is none of ours."""
        self.drop_fetched()
        self.end_offset = -1
        self.end_held_ms = None
        self.is_outside = False
        self.error = None
        self.damage = None
        self.complaint = None
        self.attempts = 0
        self.retry_at_ms = float("-inf")

    def note_end(self, end_offset: int, high_watermark: int, now_ms: float) -> None:
        """What an answer said of where reading ends, and where what is committed to the log does.

        There is more than can be read where a transaction is open, which begins at the end.
        """
        if high_watermark <= end_offset:
            self.end_held_ms = None
        elif self.end_held_ms is None or end_offset != self.end_offset:
            self.end_held_ms = now_ms
        self.end_offset = end_offset

    @property
    def is_at_end(self) -> bool:
        """Whether all was handed out that can be read."""
        return self.position is not None and 0 <= self.end_offset <= self.cursor.offset

    def drop_fetched(self) -> None:
        """Drop what was fetched and not taken; an answer on its way is none of ours."""
        self.generation += 1
        self.chunks.clear()
        self.buffered_bytes = 0

    def complain(self) -> None:
        """Raise why nothing can be handed out, if there is a reason that has to be told."""
        if self.error is not None:
            raise self.error
        complaint, self.complaint = self.complaint, None
        if complaint is not None:
            raise complaint

    def buffer(
        self,
        partition: TopicPartition,
        records: Buffer,
        crc: int | None = None,
        aborted: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Keep the whole batches of an answer, and fetch behind them next.

        ``crc`` is what the broker says that the CRC-32C of all of it is, if it says so; ``aborted``
        are the aborted transactions in it, as producer id and first offset. Raises
        CorruptRecordError where a batch is damaged or out of place; what is before that is kept.
        """
        assert self.position is not None
        position = self.position
        if crc is not None and checksum(records) != crc:
            raise CorruptRecordError(
                f"partition {partition}, offset {position.offset}: the answer was damaged on its "
                "way"
            )
        begins: BatchHeader | None = None
        end = 0
        damage: CorruptRecordError | None = None
        try:
            for header, batch in iter_batches(records, allow_torn_tail=True):
                if crc is None:
                    _verify(header, batch, position)
                _check(header, position, follows=begins is not None)
                begins = begins or header
                end += len(batch)
                position = Position(header.next_offset, header.leader_epoch)
            if begins is None:
                raise CorruptRecordError("the answer holds no whole batch")
        except CorruptRecordError as error:
            damage = error
        if begins is not None:
            chunk = _Chunk(
                records[:end],
                begins.base_offset,
                begins.leader_epoch,
                position.leader_epoch,
                AbortedBatches(aborted),
            )
            self.chunks.append(chunk)
            self.buffered_bytes += end
            self.position = position
        if damage is not None:
            raise CorruptRecordError(
                f"partition {partition}, offset {position.offset}: {damage.message}"
            ) from None

    def decode_next(self, partition: TopicPartition) -> Run | None:
        """The records of the next batch that has any to be handed out; None when nothing is left.

        One without records says only how far reading has come: what was left was of marks, or
        aborted. Raises CorruptRecordError where a batch was damaged since it came. It is dropped
        with all behind it, to be fetched anew.
        """

        def decode(batch: memoryview, header: BatchHeader) -> list[ConsumerRecord]:
            if self.chunks[0].is_left_out(header, batch):
                return []
            shared = (header.leader_epoch, self.topic_id)
            offset = self.cursor.offset
            _, records = decode_batch_as(batch, offset, ConsumerRecord, partition, shared)
            return records

        before = self.cursor
        while self.chunks:
            header, records = self._decode(partition, decode)
            self._go_past(header)
            if records:
                return Run(partition, records, header.size_bytes, self.cursor)
        return Run(partition, [], 0, self.cursor) if self.cursor != before else None

    def decode_into(self, columns: ColumnsBuilder, partition: TopicPartition, most: int) -> int:
        """Add up to ``most`` records of the next batch that has any to the columns.

        Returns the size of the batch's records, decompressed; 0 when there is none. Raises as
        ``decode_next``; what was added before stays.
        """

        def decode(batch: memoryview, header: BatchHeader) -> tuple[int, int]:
            if self.chunks[0].is_left_out(header, batch):
                return 0, 0
            return add_to_columns(columns, batch, self.cursor.offset, most)[1:]

        had = columns.record_count
        while self.chunks:
            header, (left_out, size_bytes) = self._decode(partition, decode)
            if left_out:
                self.cursor = Position(columns.last_offset + 1, header.leader_epoch)
                return size_bytes
            self._go_past(header)
            if columns.record_count > had:
                return size_bytes
        return 0

    def _decode(
        self, partition: TopicPartition, decode: Callable[[memoryview, BatchHeader], DecodedT]
    ) -> tuple[BatchHeader, DecodedT]:
        try:
            header, batch = self.chunks[0].batch()
            try:
                return header, decode(batch, header)
            except CorruptRecordError as error:
                raise CorruptRecordError(error.message + _after(header, self.cursor)) from None
        except CorruptRecordError as error:
            self.drop_fetched()
            self.position = self.cursor
            raise CorruptRecordError(
                f"partition {partition}, offset {self.cursor.offset}: {error.message}"
            ) from None

    def _go_past(self, header: BatchHeader) -> None:
        chunk = self.chunks[0]
        chunk.go_past(header)
        if chunk.at >= len(chunk.data):
            self.chunks.popleft()
            self.buffered_bytes -= len(chunk.data)
        self.cursor = Position(max(header.next_offset, self.cursor.offset), header.leader_epoch)

    def note_damage(
        self,
        partition: TopicPartition,
        error: CorruptRecordError,
        *,
        now_ms: float,
        patience_ms: float,
    ) -> CorruptRecordError:
        """Note that the position can't be had, and give what there is to say of it.

        The application is to be told once that has lasted ``patience_ms`` at this very offset.
        """
        assert self.position is not None
        offset = self.position.offset
        if self.damage is None or self.damage.offset != offset:
            self.damage = _Damage(offset, now_ms)
        # An answer that comes damaged is an answer, and has set the attempts back.
        self.attempts = self.damage.tries
        self.damage.tries += 1
        lasted_ms = now_ms - self.damage.since_ms
        told = CorruptRecordError(
            f"{error.message}; asked for {counted(self.damage.tries, 'time')} in "
            f"{lasted_ms / 1000:.0f} s; the consumer goes on asking, and reads on when it is "
            "mended or another replica leads; next: see `penstock topics describe "
            f"{partition.topic}`, or seek() past it",
            leader=error.leader,
        )
        if lasted_ms >= patience_ms:
            self.complaint = told
        return told


def _verify(header: BatchHeader, batch: memoryview, position: Position) -> None:
    """Raise CorruptRecordError unless the batch is sound."""
    try:
        verify_batch(batch)
    except CorruptRecordError as error:
        raise CorruptRecordError(error.message + _after(header, position)) from None


def _check(header: BatchHeader, position: Position, *, follows: bool) -> None:
    """Raise CorruptRecordError unless the batch is the one that is read next.

    It begins at ``position`` where it ``follows`` on another, and contains it elsewhere.
    """
    base, offset = header.base_offset, position.offset
    if not (base == offset if follows else base <= offset < header.next_offset):
        raise CorruptRecordError(
            f"a batch of offsets {base} to {header.last_offset} came where {offset} is next"
        )
    if header.leader_epoch < position.leader_epoch:
        raise CorruptRecordError(
            f"the batch at offset {base} has leader epoch {header.leader_epoch}, but what is "
            f"before it has {position.leader_epoch}"
        )


def _after(header: BatchHeader, position: Position) -> str:
    """Where to read on behind a damaged batch, if what it says of that can be believed."""
    whole = header.record_count == header.last_offset_delta + 1
    if not whole or not header.base_offset <= position.offset < header.next_offset:
        return ""
    return f". Seek to {header.next_offset} to read on after the batch"
