"""Reads closed segments from front to back, in the cleaner's threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.storage.batches import next_header
from penstock.broker.storage.cleaner.counting import Counts
from penstock.broker.storage.cleaner.filtering import AbortedRanges
from penstock.broker.storage.cleaner.offset_map import OffsetMap
from penstock.broker.storage.cleaner.throttle import Throttle
from penstock.broker.storage.disk import Disk, SharedFile
from penstock.broker.storage.placing import SegmentDamagedError
from penstock.wire.errors import CorruptRecordError
from penstock.wire.records import HEADER_BYTES, MAX_RECORDS_BYTES, BatchHeader, verify_batch
from penstock.wire.rewriting import read_spans

_CHUNK_BYTES: Final = 1024 * 1024


class CleaningStoppedError(Exception):
    """The cleaner is to stop; what it has begun is dropped."""


class MapTooSmallError(Exception):
    """Not even the keys of one batch fit into the memory that the cleaner may use."""


@dataclass(frozen=True, slots=True)
class Source:
    """A closed segment to be read: its open file, and what must be in it."""

    file: SharedFile
    base_offset: int
    end_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What every reader of one log needs; a copy, for other threads than the log's.

    ``is_stopping`` is asked before every batch.
    """

    disk: Disk
    throttle: Throttle
    epochs: EpochHistory
    log_start_offset: int
    is_stopping: Callable[[], bool]
    counts: Counts


def read_batches(source: Source, reading: Reading) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Every batch of a segment, verified as it is for readers.

    Raises SegmentDamagedError with the place, OSError or CleaningStoppedError.
    """
    chunk = _Chunk(source, reading)
    position, offset = 0, source.base_offset
    while position < source.size_bytes:
        if reading.is_stopping():
            raise CleaningStoppedError
        try:
            header = next_header(
                chunk.read(position, HEADER_BYTES), 0, offset, source.size_bytes - position
            )
            batch = chunk.read(position, header.size_bytes)
            verify_batch(batch)
            _check_epoch(header, reading)
        except CorruptRecordError as error:
            raise SegmentDamagedError(
                f"{error.message} (segment {source.file.path}, byte {position})", source.base_offset
            ) from None
        yield header, batch
        position += header.size_bytes
        offset = header.next_offset
    if offset != source.end_offset:
        raise SegmentDamagedError(
            f"the batches end at offset {offset}, not at {source.end_offset} (segment "
            f"{source.file.path})",
            source.base_offset,
        )


def _check_epoch(header: BatchHeader, reading: Reading) -> None:
    """The leader epoch is not covered by the checksum. Below the log's start none is known."""
    if header.last_offset < reading.log_start_offset:
        return
    epoch = reading.epochs.epoch_at(header.last_offset)
    if header.leader_epoch != epoch:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} has leader epoch {header.leader_epoch}; "
            f"{epoch} wrote it"
        )


class _Chunk:
    """The part of a segment that was read last; it is read in large pieces."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._source = source
        self._reading = reading
        self._at = 0
        self._data = b""

    def read(self, position: int, size: int) -> memoryview:
        """Up to ``size`` bytes; fewer when the file is shorter than it was."""
        start = position - self._at
        if start + size > len(self._data):
            wanted = min(max(size, _CHUNK_BYTES), self._source.size_bytes - position)
            self._reading.throttle.spend(wanted)
            fd = self._source.file.fd
            self._data = self._reading.disk.read_at(fd, wanted, position)
            self._reading.counts.read(len(self._data))
            self._at, start = position, 0
        return memoryview(self._data)[start : start + size]


class LastBatches:
    """Finds the last batch of each producer below the end of a clean.

    ``remembered`` is what is known of the producers when the clean begins. It keeps a few batches
    of each, which may all come after that end; so those that the clean reads are noted as well.
    """

    def __init__(self, remembered: ProducerState) -> None:
        self._remembered = remembered.copy()
        self._noted = ProducerState()

    def note(self, header: BatchHeader) -> None:
        """A batch below the end was read."""
        if self._remembered.entry(header.producer_id) is not None:
            self._noted.record(header, header.base_offset, 0)

    def below(self, end_offset: int) -> dict[int, int]:
        """The base offsets, as Filter wants them."""
        found = self._remembered.last_batches(end_offset)
        for producer_id, base_offset in self._noted.last_batches(end_offset).items():
            if found.get(producer_id, 0) < 0:
                found[producer_id] = base_offset
        return found

    @property
    def epochs(self) -> dict[int, int]:
        """The newest epoch of each producer."""
        return self._remembered.epochs()


def note_batches(
    source: Source,
    reading: Reading,
    latest: OffsetMap,
    aborted: AbortedRanges,
    producers: LastBatches,
    *,
    from_offset: int,
    end_offset: int,
) -> int:
    """Put the keys of a segment's records into the map; up to which offset that went.

    Marks, and what was aborted, replace nothing.
    That is the segment's end, or where ``latest`` was full; a batch is noted as a whole or not at
    all, for its producer as well. Batches before ``from_offset`` and from ``end_offset`` on are
    passed over.
    """
    reached = source.base_offset
    for header, batch in read_batches(source, reading):
        if header.base_offset >= end_offset:
            break
        is_new = header.last_offset >= from_offset and header.record_count > 0
        if is_new and not header.is_control and not aborted.covers(header):
            if header.record_count > latest.room:
                return reached
            for span in read_spans(batch, header, max_bytes=MAX_RECORDS_BYTES).spans:
                if span.key is not None:
                    latest.put(span.key, span.offset)
        producers.note(header)
        reached = header.next_offset
    return reached
