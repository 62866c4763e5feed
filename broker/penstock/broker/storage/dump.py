"""What a segment file holds, read without a broker: for ``penstock log dump`` and for tests.

Nothing is written, and no index is used; the file may belong to a running broker, whose last batch
may then be incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from penstock.wire.errors import CorruptRecordError
from penstock.wire.markers import DecodedMarker, decode_marker
from penstock.wire.records import HEADER_BYTES, BatchHeader, decode_batch, parse_header

_LOG_NAME: Final = re.compile(r"(\d{20})\.log")


@dataclass(frozen=True, slots=True)
class BatchDump:
    """One batch of a segment. ``error`` is what is wrong with it, or None.

    ``marker`` is how the mark in it ended a transaction, commit or abort, and
    ``coordinator_epoch`` who wrote that; None where it is no mark, or one that can't be read.
    """

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    record_count: int
    leader_epoch: int
    compression: str
    timestamp_type: str
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    is_control: bool
    crc: int
    error: str | None = None
    marker: str | None = None
    coordinator_epoch: int | None = None

    def to_json(self) -> dict[str, object]:
        """The fields by name, for json.dumps."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """The sum of a segment. It is sound when ``errors`` is empty.

    ``sound_bytes``: up to here every batch is sound; a recovery would cut the file there.
    """

    path: str
    size_bytes: int
    sound_bytes: int
    batches: int
    records: int
    first_offset: int
    next_offset: int
    errors: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.errors

    def to_json(self) -> dict[str, object]:
        """The fields by name, for json.dumps."""
        return {**asdict(self), "ok": self.ok}


def dump_segment(path: Path, *, verify: bool = False) -> Iterator[BatchDump]:
    """Each batch of a ``.log`` file. With ``verify`` checksums and records are read as well.

    A batch that is not sound comes with its ``error``; where even its header can't be, the
    iteration ends after an entry with size 0. Raises OSError when the file can't be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        position = 0
        expected = _base_offset(path)
        while position < size:
            dumped = _dump_batch(file, position, size, expected, verify=verify)
            yield dumped
            if dumped.size_bytes == 0:
                return
            position += dumped.size_bytes
            expected = dumped.last_offset + 1


def _base_offset(path: Path) -> int | None:
    """The offset that the segment must begin with, if its name says so."""
    match = _LOG_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _dump_batch(
    file: BinaryIO, position: int, size: int, expected: int | None, *, verify: bool
) -> BatchDump:
    file.seek(position)
    try:
        header = parse_header(file.read(HEADER_BYTES))
        if position + header.size_bytes > size:
            raise CorruptRecordError(
                f"the batch at offset {header.base_offset} has {header.size_bytes} bytes, but the "
                f"file ends after {size - position}"
            )
    except CorruptRecordError as error:
        return _unreadable(position, error.message)
    error_text = _order_error(header, expected)
    is_mark = header.is_control and header.producer_id >= 0
    marker: DecodedMarker | None = None
    if (verify or is_mark) and error_text is None:
        file.seek(position)
        batch = file.read(header.size_bytes)
        try:
            if is_mark:
                marker = decode_marker(batch)
            else:
                decode_batch(batch)
        except CorruptRecordError as error:
            error_text = error.message
    return _describe(header, position, error_text, marker)


def _order_error(header: BatchHeader, expected: int | None) -> str | None:
    if header.last_offset_delta < 0:
        return f"the batch ends at offset {header.last_offset}, before it begins"
    if expected is not None and header.base_offset < expected:
        return f"the batch begins at offset {header.base_offset}, but {expected} comes next"
    return None


def _describe(
    header: BatchHeader, position: int, error: str | None, marker: DecodedMarker | None
) -> BatchDump:
    try:
        compression = header.compression.name.lower()
    except CorruptRecordError as unknown:
        compression, error = "unknown", error or unknown.message
    return BatchDump(
        position=position,
        size_bytes=header.size_bytes,
        base_offset=header.base_offset,
        last_offset=header.last_offset,
        record_count=header.record_count,
        leader_epoch=header.leader_epoch,
        compression=compression,
        timestamp_type="LogAppendTime" if header.is_log_append_time else "CreateTime",
        base_timestamp_ms=header.base_timestamp_ms,
        max_timestamp_ms=header.max_timestamp_ms,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
        is_control=header.is_control,
        crc=header.crc,
        error=error,
        marker=marker.type.name.lower() if marker is not None else None,
        coordinator_epoch=marker.coordinator_epoch if marker is not None else None,
    )


def _unreadable(position: int, error: str) -> BatchDump:
    return BatchDump(
        position,
        0,
        -1,
        -1,
        0,
        -1,
        "unknown",
        "unknown",
        -1,
        -1,
        -1,
        -1,
        -1,
        False,
        False,
        0,
        error,
    )


def verify_segment(path: Path) -> SegmentReport:
    """Read all of a ``.log`` file and say what is wrong with it. Raises OSError."""
    errors: list[str] = []
    sound = batches = records = 0
    first_offset = next_offset = -1
    for dumped in dump_segment(path, verify=True):
        if dumped.error is not None:
            errors.append(f"byte {dumped.position}: {dumped.error}")
        elif not errors:
            sound = dumped.position + dumped.size_bytes
        if dumped.size_bytes == 0:
            continue
        batches += 1
        records += dumped.record_count
        next_offset = dumped.last_offset + 1
        if first_offset < 0:
            first_offset = dumped.base_offset
    return SegmentReport(
        path=str(path),
        size_bytes=path.stat().st_size,
        sound_bytes=sound,
        batches=batches,
        records=records,
        first_offset=first_offset,
        next_offset=next_offset,
        errors=tuple(errors),
    )
