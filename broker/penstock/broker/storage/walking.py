"""Headers of batches, read from segment files by whoever has their names, in any thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from penstock.broker.storage.batches import next_header
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.placing import Placed
from penstock.wire.records import HEADER_BYTES, BatchHeader

_WALK_BYTES: Final = 8 * 1024


class ChangedError(Exception):
    """A segment was cleaned or deleted while it was read: it is to be begun anew."""


class Source(NamedTuple):
    """A segment to be read."""

    path: Path
    base_offset: int
    size_bytes: int


def walk_file(disk: Disk, fd: int, start: tuple[int, int], size_bytes: int) -> Iterator[Placed]:
    """The batches of an open segment file up to ``size_bytes``, headers only.

    ``start``: the position of the first, and its base offset. Raises CorruptRecordError for a
    header that can't be, or OSError.
    """
    position, offset = start
    chunk, chunk_at = b"", 0
    while position < size_bytes:
        if position - chunk_at + HEADER_BYTES > len(chunk):
            chunk_at = position
            chunk = disk.read_at(fd, min(_WALK_BYTES, size_bytes - position), position)
        header = next_header(chunk, position - chunk_at, offset, size_bytes - position)
        yield Placed(header, position)
        position += header.size_bytes
        offset = header.next_offset


def batches_between(
    disk: Disk, sources: list[Source], begin: int, end: int
) -> Iterator[tuple[BatchHeader, Callable[[], bytes]]]:
    """The batches from the one that holds ``begin`` on that begin before ``end``.

    Of each its header, and what reads all of it before the next one is asked for, unverified.
    Raises ChangedError where the sources do not reach there or do not follow each other,
    CorruptRecordError for a header that can't be, or OSError.
    """
    reached = sources[0].base_offset
    for source in sources:
        if source.base_offset != reached:
            raise ChangedError
        for fd, placed in _batches(disk, source, end):
            header = placed.header
            if begin < header.next_offset and header.base_offset < end:
                yield header, partial(disk.read_at, fd, header.size_bytes, placed.position)
            reached = header.next_offset
    if reached < end:
        raise ChangedError


def _batches(disk: Disk, source: Source, end: int) -> Iterator[tuple[int, Placed]]:
    try:
        fd = disk.open(source.path, os.O_RDONLY)
    except FileNotFoundError:
        raise ChangedError from None
    try:
        for placed in walk_file(disk, fd, (0, source.base_offset), source.size_bytes):
            if placed.header.base_offset >= end:
                return
            yield fd, placed
    finally:
        os.close(fd)
