"""What a partition remembers of one producer id: its epoch, last batches and last mark. Pure.

The mark is that of the epoch: it ended the transaction before, and may be sent again for as long as
its coordinator does not know that it is there. Then it must say the same. One that says otherwise
is of a transaction that was ended here by somebody else, and would be in halves if it were taken
for what is there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from penstock.wire.errors import CorruptRecordError
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader

BATCHES_KEPT: Final = 5
SEQUENCE_MASK: Final = 2**31 - 1
CONTIGUOUS_MAX: Final = 2**30  # Half of the sequence space: further back is further ahead.

_ENTRY: Final = struct.Struct(">qhqIB")
_BATCH: Final = struct.Struct(">qiiq")
# An entry with its batches in one go, by how many these are: of thousands it is made at once.
_ENTRIES: Final = [
    struct.Struct(_ENTRY.format + _BATCH.format[1:] * kept).pack for kept in range(BATCHES_KEPT + 1)
]
# How many batches follow an entry takes the lower bits of its last byte; the mark takes the others,
# which are 0 in what was written before marks were remembered.
_KEPT_BITS: Final = 4
_MARK_CODES: Final[dict[MarkerType | None, int]] = {
    None: 0,
    MarkerType.ABORT: 1,
    MarkerType.COMMIT: 2,
}
_MARKS: Final = {code: mark for mark, code in _MARK_CODES.items()}


class ProducerBatch(NamedTuple):
    """One batch that a producer has in the log."""

    base_offset: int
    last_offset_delta: int
    base_sequence: int
    timestamp_ms: int

    @property
    def last_offset(self) -> int:
        """The offset of its last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """The sequence number of its last record."""
        return (self.base_sequence + self.last_offset_delta) & SEQUENCE_MASK

    @property
    def next_sequence(self) -> int:
        """The sequence number that must come after it."""
        return (self.base_sequence + self.last_offset_delta + 1) & SEQUENCE_MASK


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """One producer id: its epoch, its last batches (oldest first) and when it last wrote.

    ``contiguous``: so many sequence numbers right before the next one are known to be in the log.
    ``mark`` is what the mark under this epoch says; None where there is none, or it is not known.
    """

    producer_epoch: int
    batches: tuple[ProducerBatch, ...]
    last_seen_ms: int
    contiguous: int
    mark: MarkerType | None = None

    def after(self, batch: ProducerBatch, producer_epoch: int, now_ms: int) -> ProducerEntry:
        """The entry once ``batch`` is in the log."""
        count = batch.last_offset_delta + 1
        if producer_epoch != self.producer_epoch:
            return ProducerEntry(producer_epoch, (batch,), now_ms, count)
        follows = bool(self.batches) and self.batches[-1].next_sequence == batch.base_sequence
        return ProducerEntry(
            producer_epoch,
            (*self.batches[1 - BATCHES_KEPT :], batch),
            now_ms,
            min(self.contiguous + count, CONTIGUOUS_MAX) if follows else count,
            self.mark,
        )

    def below(self, offset: int) -> ProducerEntry | None:
        """What of it is of batches that end below ``offset``; None where all of them come later.

        A mark is before all batches of its epoch.
        """
        if not self.batches or self.batches[-1].last_offset < offset:
            return self
        batches = tuple(one for one in self.batches if one.last_offset < offset)
        if not batches:
            return None
        count = batches[-1].last_offset_delta + 1
        return ProducerEntry(self.producer_epoch, batches, self.last_seen_ms, count, self.mark)


def recorded(
    header: BatchHeader,
    entry: ProducerEntry | None,
    base_offset: int,
    now_ms: int,
    mark: MarkerType | None = None,
) -> ProducerEntry | None:
    """The producer's entry once the batch is in the log; None when nothing is to be kept.

    ``mark`` is what a control batch says. Of two under one epoch the first counts, which ended the
    transaction: the second is there where a leader had forgotten the producer.
    """
    if header.producer_id < 0:
        return None
    if entry is None:
        entry = ProducerEntry(-1, (), now_ms, 0)
    epoch = header.producer_epoch
    if epoch < entry.producer_epoch:
        return entry  # Let in by a leader that had forgotten the newer epoch.
    if header.is_control or header.base_sequence < 0:
        if epoch == entry.producer_epoch:
            known = mark if entry.mark is None else entry.mark
            return ProducerEntry(epoch, entry.batches, now_ms, entry.contiguous, known)
        return ProducerEntry(epoch, (), now_ms, 0, mark)
    batch = ProducerBatch(
        base_offset, header.last_offset_delta, header.base_sequence, header.max_timestamp_ms
    )
    return entry.after(batch, epoch, now_ms)


def encode_entry(producer_id: int, entry: ProducerEntry) -> bytes:
    """The entry as snapshots have it."""
    kept = len(entry.batches)
    return _ENTRIES[kept](
        producer_id,
        entry.producer_epoch,
        entry.last_seen_ms,
        entry.contiguous,
        kept | _MARK_CODES[entry.mark] << _KEPT_BITS,
        *chain.from_iterable(entry.batches),
    )


def decode_entries(data: bytes, position: int, count: int) -> tuple[dict[int, ProducerEntry], int]:
    """The entries from ``position`` on by producer id, and where they end.

    Raises struct.error where they are cut short, and CorruptRecordError.
    """
    entries: dict[int, ProducerEntry] = {}
    for _ in range(count):
        producer_id, epoch, seen_ms, contiguous, kept_and_mark = _ENTRY.unpack_from(data, position)
        position += _ENTRY.size
        kept, code = kept_and_mark & ((1 << _KEPT_BITS) - 1), kept_and_mark >> _KEPT_BITS
        if code not in _MARKS:
            raise CorruptRecordError(
                f"a producer snapshot says that producer {producer_id} has a mark of kind {code}, "
                "which there is not"
            )
        end = position + kept * _BATCH.size
        batches = tuple(
            ProducerBatch(*_BATCH.unpack_from(data, at)) for at in range(position, end, _BATCH.size)
        )
        position = end
        entries[producer_id] = ProducerEntry(epoch, batches, seen_ms, contiguous, _MARKS[code])
    return entries, position
