"""Arrow's columns from Spark, as the client sends them. Pure, and without an object for a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.pipeline.errors import RowError

_WHERE: Final = "the penstock sink"


def by_topic(
    batch: pa.RecordBatch, names: Sequence[str], topic: str | None, now_ms: int
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic, in their order; at least one row in each.

    ``names`` are those of ``columns.check`` for this batch, ``topic`` the option; ``now_ms`` is the
    time of rows whose timestamp is null. Raises RowError for a row that can be no record.
    """
    if not batch.num_rows:
        return
    columns = dict(zip(names, batch.columns, strict=True))
    if "timestamp" in columns:
        columns["timestamp"] = _times(columns["timestamp"], now_ms)
    if "headers" in columns:
        _check_headers(columns["headers"])
    topics = columns.pop("topic", None)
    rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    if topics is None:
        assert topic is not None  # columns.check has seen to it.
        yield topic, rows
        return
    if topics.null_count:
        raise RowError(
            f"{_WHERE}: the topic of {topics.null_count} of {len(topics)} rows is null; next: give "
            "each row a topic, filter such rows out, or set option topic instead of the column"
        )
    found = topics.dictionary_encode()
    if len(found.dictionary) == 1:
        yield found.dictionary[0].as_py(), rows
        return
    # Arrow's sort is stable: rows of one topic stay in their order.
    order = pc.sort_indices(found.indices)
    rows = rows.take(order)
    counts = pc.value_counts(found.indices.take(order))  # In the order in which they come.
    at = 0
    for entry in counts:
        number, count = entry["values"].as_py(), entry["counts"].as_py()
        yield found.dictionary[number].as_py(), rows.slice(at, count)
        at += count


def _times(column: pa.Array, now_ms: int) -> pa.Array:
    """Milliseconds since 1970; Spark counts in microseconds."""
    times = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    return times.cast(pa.int64()).fill_null(now_ms)


def _check_headers(column: pa.Array) -> None:
    pairs = column.flatten()
    missing = pairs.null_count or pairs.field("key").null_count
    if missing:
        raise RowError(
            f"{_WHERE}: {missing} headers are null, or have a null key; next: filter them out of "
            "the arrays: filter(headers, pair -> pair.key IS NOT NULL)"
        )
