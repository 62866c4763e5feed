"""From rows to what is to be done in Elasticsearch. Pure."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from penstock.pipeline.connectors.elasticsearch.options import (
    PLACE,
    ElasticsearchOptions,
    Tombstones,
    WriteMethod,
)


@dataclass(frozen=True, slots=True)
class Action:
    """One document to write or to delete."""

    row: Mapping[str, Any] = field(repr=False)
    index: str
    id: str
    version: int | None
    document: bytes | None
    """JSON on one line; None deletes."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that is not written, and why."""

    row: Mapping[str, Any] = field(repr=False)
    kind: str
    reason: str
    index: str | None = None
    id: str | None = None

    def __str__(self) -> str:
        document = "" if self.id is None else f" (document {self.id!r} of index {self.index})"
        return f"{place(self.row)}{document}: {self.kind}: {self.reason}"


class _BadRowError(ValueError):
    """Of one row."""


_BAD: Final = "malformed_row"


def actions(
    rows: list[dict[str, Any]], options: ElasticsearchOptions
) -> Iterator[Action | Refused]:
    """What these rows want, in their order. A tombstone that is to be ignored wants nothing."""
    for row in rows:
        try:
            action = _action(row, options)
        except _BadRowError as error:
            yield Refused(row, _BAD, str(error))
            continue
        if action is not None:
            yield action


def _action(row: dict[str, Any], options: ElasticsearchOptions) -> Action | None:
    if options.from_columns:
        document = _json_of_columns(row)
    elif row["value"] is not None:
        document = _one_line(row["value"])
    elif options.tombstones is Tombstones.IGNORE:
        return None
    elif options.tombstones is Tombstones.DELETE:
        document = None
    else:
        raise _BadRowError("it has no value; see option tombstones")
    index = row["topic"].lower() if options.index is None else options.index
    version = None
    if options.version_column is not None:
        version = row[options.version_column]
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise _BadRowError(
                f"column {options.version_column} has {version!r}; a version is a whole number, 0 "
                "or more"
            )
    return Action(row, index, _id(row, options.id_column), version, document)


def _id(row: Mapping[str, Any], column: str | None) -> str:
    if column is None:
        return "+".join(str(row[name]) for name in PLACE)
    value = row[column]
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise _BadRowError(f"column {column}, its id, is not UTF-8") from None
    if value is None or value == "":
        raise _BadRowError(f"column {column}, its id, is empty")
    return str(value)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _one_line(value: str | bytes) -> bytes:
    """A JSON object as it was given. A bulk request has its documents line by line, so that what
    is no JSON would spoil its neighbours.
    """
    try:
        # Decoded here: json would take UTF-16 too, whose bytes are no lines.
        text = value.decode() if isinstance(value, bytes) else value
        found = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"its value is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _BadRowError(f"its value is no JSON object: {text[:100]!r}")
    if "\n" in text or "\r" in text:
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(found, separators=(",", ":")).encode()


def _json_of_columns(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise _BadRowError(f"its columns make no JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):  # Of which datetime is one.
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()  # As Elasticsearch's type binary has it.
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(f"a {type(value).__name__} is no JSON")


def place(row: Mapping[str, Any]) -> str:
    """Where a row came from, for people."""
    if all(row.get(name) is not None for name in PLACE):
        return "record {}-{}@{}".format(*(row[name] for name in PLACE))
    return f"row {str(dict(row))[:120]}"


def lines(action: Action, method: WriteMethod) -> bytes:
    """The action as a bulk request has it: a line or two, each with its end."""
    about: dict[str, Any] = {"_index": action.index, "_id": action.id}
    if action.version is not None:
        about |= {"version": action.version, "version_type": "external"}
    if action.document is None:
        return json.dumps({"delete": about}).encode() + b"\n"
    if method is WriteMethod.UPSERT:
        body = b'{"doc_as_upsert":true,"doc":' + action.document + b"}"
        return json.dumps({"update": about}).encode() + b"\n" + body + b"\n"
    return json.dumps({"index": about}).encode() + b"\n" + action.document + b"\n"
