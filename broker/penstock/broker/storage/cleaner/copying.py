"""Copies what stays of some segments into a new one, in the cleaner's threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.broker.storage.checkpoints import write_durably
from penstock.broker.storage.cleaner.filtering import Filter
from penstock.broker.storage.cleaner.reading import Reading, Source, read_batches
from penstock.broker.storage.cleaner.swapping import SwapFiles
from penstock.broker.storage.disk import Buffer
from penstock.broker.storage.index import MemoryIndex, TimeEntry
from penstock.broker.storage.transaction_index import TransactionIndex, joined
from penstock.wire.records import BatchHeader, parse_header
from penstock.wire.rewriting import filler, is_filler

_WRITE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy came to. ``changed`` is False when every batch stayed as it was."""

    size_bytes: int
    changed: bool


@dataclass(slots=True)
class _Gone:
    """Batches in a row that are gone, of one leader epoch."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    timestamp_ms: int


def copy(
    sources: Sequence[Source],
    reading: Reading,
    batches: Filter,
    files: SwapFiles,
    interval_bytes: int,
) -> Copied:
    """Write what stays of the segments into the files of a new one, and put them on the disk.

    The new segment covers the very offsets of the old ones, without a gap: where batches are gone
    there is a filler. Raises what ``read_batches`` and ``Filter.apply`` raise; what was written is
    then to be removed.
    """
    fd = reading.disk.open(files.cleaned_log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        writer = _Writer(fd, reading, interval_bytes)
        changed = len(sources) > 1
        marks: dict[int, bool] = {}  # By offset, and whether they stay.
        count = 0
        for source in sources:
            for header, batch in read_batches(source, reading):
                count += 1
                kept = batches.apply(header, batch)
                changed |= kept is not batch and not is_filler(header)
                if header.is_control:
                    marks[header.last_offset] = kept is not None
                if kept is None:
                    writer.skip(header)
                else:
                    writer.add(header if kept is batch else parse_header(kept), kept)
        writer.finish()
        changed |= writer.count != count
        if changed:
            reading.disk.sync_data(fd)
    finally:
        os.close(fd)
    if changed:
        write_durably(reading.disk, files.cleaned_index, writer.index.encode_offsets())
        write_durably(reading.disk, files.cleaned_time_index, writer.index.encode_times())
        _write_transactions(sources, reading, files, marks)
    return Copied(writer.size_bytes, changed)


def _write_transactions(
    sources: Sequence[Source], reading: Reading, files: SwapFiles, marks: Mapping[int, bool]
) -> None:
    """The entries of the old indexes, but of marks that are gone.

    Such a mark ended a transaction of which nothing is left, and a reader that is told of it would
    take the producer's next one for it.
    """
    index: TransactionIndex | None = TransactionIndex()
    if marks:
        paths = [source.file.path.with_suffix(".txnindex") for source in sources]
        bases = [source.base_offset for source in sources]
        index = joined(list(zip(paths, bases, strict=True)))
    if index is not None:
        left = TransactionIndex()
        for one in index:
            if marks.get(one.last_offset, True):
                left.append(one)
        write_durably(reading.disk, files.cleaned_transaction_index, left.encode())


class _Writer:
    """Writes batches one after the other, and makes their index."""

    def __init__(self, fd: int, reading: Reading, interval_bytes: int) -> None:
        self.index = MemoryIndex()
        self.size_bytes = 0  # With what is pending.
        self.count = 0
        self._fd = fd
        self._reading = reading
        self._interval_bytes = interval_bytes
        self._base_offset = -1
        self._largest: TimeEntry | None = None
        self._gone: _Gone | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def skip(self, header: BatchHeader) -> None:
        """The batch is gone; a filler is to cover its offsets, and those of its neighbours."""
        gone = self._gone
        if gone is None or gone.leader_epoch != header.leader_epoch:
            self._fill()
            self._gone = _Gone(
                header.base_offset, header.last_offset, header.leader_epoch, header.max_timestamp_ms
            )
            return
        gone.last_offset = header.last_offset
        gone.timestamp_ms = max(gone.timestamp_ms, header.max_timestamp_ms)

    def add(self, header: BatchHeader, batch: Buffer) -> None:
        """Write a batch."""
        self._fill()
        self._put(header, bytes(batch))

    def _fill(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            data = filler(gone.base_offset, gone.last_offset, gone.leader_epoch, gone.timestamp_ms)
            self._put(parse_header(data), data)

    def _put(self, header: BatchHeader, data: bytes) -> None:
        if self._base_offset < 0:
            self._base_offset = header.base_offset
        relative = header.base_offset - self._base_offset
        largest = self._largest
        if header.record_count and (
            largest is None or header.max_timestamp_ms > largest.timestamp_ms
        ):
            self._largest = TimeEntry(header.max_timestamp_ms, relative)
        if self.size_bytes - self.index.last_indexed_position >= self._interval_bytes:
            self.index.add_offset(relative, self.size_bytes)
            if self._largest is not None:
                self.index.add_time(*self._largest)
        self.size_bytes += len(data)
        self.count += 1
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        data = memoryview(b"".join(self._pending))
        position = self.size_bytes - len(data)
        self._pending, self._pending_bytes = [], 0
        self._reading.throttle.spend(len(data))
        while data:
            written = self._reading.disk.write_at(self._fd, [data], position)
            self._reading.counts.written(written)
            data, position = data[written:], position + written

    def finish(self) -> None:
        """Write what is left, and complete the index."""
        self._fill()
        self._write()
        if self._largest is not None:
            self.index.add_time(*self._largest)
