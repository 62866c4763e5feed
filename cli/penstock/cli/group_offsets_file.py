"""Committed offsets of a group in a file: JSON with all there is, or CSV as Kafka's tool has it."""

from __future__ import annotations

import csv
import enum
import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.wire.config_keys import MAX_INT32, MAX_INT64
from penstock.wire.errors import InvalidRequestError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    from penstock.client import OffsetAndMetadata

_COLUMNS: Final = ("topic", "partition", "offset", "leader_epoch", "metadata")
_SHAPE: Final = (
    'lines of topic,partition,offset or {"offsets": [{"topic": "orders", "partition": 0, '
    '"offset": 42}]}'
)


class FileFormat(enum.StrEnum):
    """How offsets are written down."""

    JSON = "json"
    CSV = "csv"


def render(
    group_id: str, offsets: Mapping[TopicPartition, OffsetAndMetadata], how: FileFormat
) -> str:
    """The file's text, one line a partition where it is CSV."""
    rows = [
        (where.topic, where.partition, entry.offset, entry.leader_epoch, entry.metadata)
        for where, entry in sorted(offsets.items())
    ]
    if how is FileFormat.JSON:
        entries = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        document = {"group_id": group_id, "offsets": entries}
        return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(rows)
    return text.getvalue()


def parse(text: str, name: str) -> dict[TopicPartition, OffsetAndMetadata]:
    """The offsets in a file of either format, ours or Kafka's; ``name`` is for errors.

    Raises InvalidRequestError that says which line or entry cannot be meant.
    """
    if text.lstrip().startswith(("{", "[")):
        entries = _json_entries(text, name)
    else:
        entries = _csv_entries(text)
    offsets: dict[TopicPartition, OffsetAndMetadata] = {}
    for place, entry in entries:
        where, position = _position(entry, f"{name}, {place}")
        if where in offsets:
            raise InvalidRequestError(f"{name}, {place}: {where} is there twice")
        offsets[where] = position
    if not offsets:
        raise InvalidRequestError(f"{name} has no offsets; wanted are {_SHAPE}")
    return offsets


def _json_entries(text: str, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from None
    entries = document.get("offsets") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequestError(f"{name} has no list of offsets; wanted are {_SHAPE}")
    return [(f"entry {number}", entry) for number, entry in enumerate(entries, start=1)]


def _csv_entries(text: str) -> list[tuple[str, Mapping[str, Any]]]:
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    columns: tuple[str, ...] = _COLUMNS
    first = 1
    if rows and rows[0][0].strip() == "topic":
        columns = tuple(cell.strip() for cell in rows[0])
        rows, first = rows[1:], 2
    return [
        (f"line {number}", dict(zip(columns, row, strict=False)))
        for number, row in enumerate(rows, start=first)
    ]


def _position(entry: Mapping[str, Any], place: str) -> tuple[TopicPartition, OffsetAndMetadata]:
    from penstock.client import OffsetAndMetadata  # noqa: PLC0415 - it imports gRPC.

    topic, metadata = entry.get("topic"), entry.get("metadata", "")
    if not isinstance(topic, str) or not topic or not isinstance(metadata, str):
        raise InvalidRequestError(f"{place} names no topic; wanted are {_SHAPE}")
    partition = _whole(entry, "partition", place, 0, MAX_INT32)
    offset = _whole(entry, "offset", place, 0, MAX_INT64)
    epoch = _whole(entry, "leader_epoch", place, -1, MAX_INT32) if entry.get("leader_epoch") else -1
    return TopicPartition(topic.strip(), partition), OffsetAndMetadata(offset, epoch, metadata)


def _whole(entry: Mapping[str, Any], key: str, place: str, low: int, high: int) -> int:
    value = entry.get(key)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise InvalidRequestError(
            f"{place}: {key} is {value!r}, and a whole number from {low} to {high} is wanted"
        )
    return number
