"""One partition of what a consumer reads: its position, what was fetched of it, what is in its way.

A batch that can't be had, since a broker refuses it as damaged or it came damaged, is asked for
again: another replica may lead soon, and the damaged one is mended from it. Until that has lasted
too long nobody is told, and then once for each time that it was asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from penstock.client.core.subscription import Position
from penstock.wire.errors import CorruptRecordError, PenstockError
from penstock.wire.ids import TopicPartition
from penstock.wire.records import Record, decode_batch, iter_batches, parse_header
from penstock.wire.wording import counted

_NOWHERE: Final = Position(-1)


@dataclass(slots=True)
class _Chunk:
    """Fetched bytes not yet taken; ``at`` is where in them the next batch begins."""

    data: bytes
    at: int = 0


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
    chunks: deque[_Chunk] = field(default_factory=deque)
    decoded: deque[Record] = field(default_factory=deque)
    decoded_next: Position = _NOWHERE  # Where the decoded batch ends.
    buffered_bytes: int = 0
    fetch_id: int = -1
    error: PenstockError | None = None  # Final, until there is another position.
    damage: _Damage | None = None
    complaint: CorruptRecordError | None = None  # To be told once; it is asked for again.
    attempts: int = 0
    retry_at_ms: float = float("-inf")
    failed_epoch: int = -1
    last_error: PenstockError | None = None

    def clear(self) -> None:
        """Drop what was fetched; an answer on its way is none of ours."""
        self._drop_fetched()
        self.error = None
        self.damage = None
        self.complaint = None
        self.attempts = 0
        self.retry_at_ms = float("-inf")

    def _drop_fetched(self) -> None:
        self.generation += 1
        self.chunks.clear()
        self.decoded.clear()
        self.buffered_bytes = 0

    def complain(self) -> None:
        """Raise why nothing can be handed out, if there is a reason that has to be told."""
        if self.error is not None:
            raise self.error
        complaint, self.complaint = self.complaint, None
        if complaint is not None:
            raise complaint

    def buffer(self, partition: TopicPartition, records: bytes) -> None:
        """Keep the whole batches of an answer, and fetch behind them next.

        Raises CorruptRecordError where no batch can be found; what is before that is kept.
        """
        assert self.position is not None
        end = 0
        position = self.position
        damage = ""
        try:
            for header, batch in iter_batches(records, allow_torn_tail=True):
                end += len(batch)
                if header.next_offset > position.offset:
                    position = Position(header.next_offset, header.leader_epoch)
        except CorruptRecordError as error:
            damage = f"at or after offset {position.offset}: {error.message}"
        else:
            if end == 0:
                damage = f"offset {position.offset}: the answer holds no whole batch"
        if end and position.offset > self.position.offset:
            self.chunks.append(_Chunk(records[:end]))
            self.buffered_bytes += end
            self.position = position
        if damage:
            raise CorruptRecordError(f"partition {partition}, {damage}")

    def decode_next(self, partition: TopicPartition) -> bool:
        """Decode batches until one has records to hand out; False when there is none.

        Raises CorruptRecordError where a batch came damaged. It is dropped with all behind it, to
        be fetched anew.
        """
        while self.chunks:
            chunk = self.chunks[0]
            if chunk.at >= len(chunk.data):
                self.chunks.popleft()
                self.buffered_bytes -= len(chunk.data)
                continue
            header = parse_header(chunk.data, chunk.at)
            batch = memoryview(chunk.data)[chunk.at : chunk.at + header.size_bytes]
            try:
                records = [] if header.is_control else decode_batch(batch)
            except CorruptRecordError as error:
                self._drop_fetched()
                self.position = self.cursor
                raise CorruptRecordError(
                    f"partition {partition}, offset {self.cursor.offset}: {error.message}. Seek "
                    f"to {header.next_offset} to read on after the batch"
                ) from None
            chunk.at += header.size_bytes
            cursor = self.cursor.offset
            self.decoded = deque(record for record in records if record.offset >= cursor)
            self.decoded_next = Position(max(header.next_offset, cursor), header.leader_epoch)
            if self.decoded:
                return True
            self.cursor = self.decoded_next
        return False

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
