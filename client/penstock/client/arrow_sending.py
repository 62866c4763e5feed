"""Records to be sent out of Arrow's columns. pyarrow is an extra of the package, and loads when it
is first used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from penstock.client.model import Header
from penstock.client.sending import Plain
from penstock.wire.codec import Strings, join_headers
from penstock.wire.columns import BytesColumn
from penstock.wire.errors import ConfigurationError, InvalidRequestError

_CHUNK_RECORDS: Final = 16_384
_COLUMNS: Final = ("key", "value", "timestamp", "headers", "partition")


class ArrowRecords:
    """The records of a table, chunk by chunk. Raises what is wrong with its columns at once."""

    def __init__(self, data: Any) -> None:
        """``data`` is a pyarrow Table or RecordBatch, or whatever exports an Arrow stream.

        Raises ConfigurationError without pyarrow, InvalidRequestError for columns that are none of
        a record's or of other types.
        """
        try:
            import pyarrow as pa  # noqa: PLC0415 - see above.
        except ImportError as error:
            raise ConfigurationError(
                f"send_arrow() needs pyarrow, which cannot be imported ({error}); next: "
                "pip install 'penstock[arrow]'"
            ) from error
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        elif not isinstance(data, pa.Table):
            if not hasattr(data, "__arrow_c_stream__"):
                raise InvalidRequestError(
                    f"data={type(data).__name__}: a pyarrow.Table or RecordBatch, or another "
                    "object with Arrow's stream interface, is wanted"
                )
            data = pa.table(data)
        self._table = _as_wanted(data)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def chunks(self, now_ms: int) -> Iterator[Plain]:
        """All of them, in order; those without a timestamp column get the time ``now_ms``.

        No object is made of any: they stay in Arrow's buffers, and headers are joined as they
        stand in batches.
        """
        import pyarrow.compute as pc  # noqa: PLC0415 - see above.

        for batch in self._table.to_batches(max_chunksize=_CHUNK_RECORDS):
            if not batch.num_rows:
                continue
            columns = {name: batch.column(name) for name in batch.schema.names}
            times, partitions = columns.get("timestamp"), columns.get("partition")
            yield Plain(
                _strings(columns["value"]),
                _strings(columns["key"]) if "key" in columns else None,
                now_ms if times is None else _numbers(times, "q"),
                *_headers(columns.get("headers")),
                None if partitions is None else _numbers(partitions.fill_null(-1), "i"),
                _distinct(partitions),
                0 if times is None else pc.min(times).as_py(),
            )

    def times(self, now_ms: int) -> int | Sequence[int]:
        """The time of each, or of all."""
        if "timestamp" not in self._table.schema.names:
            return now_ms
        found = array("q")
        for chunk in self._table.column("timestamp").chunks:
            if len(chunk):
                found.frombytes(_numbers(chunk, "q").cast("B"))
        return found


def _as_wanted(table: Any) -> Any:
    """The table with the types that are sent. Raises InvalidRequestError."""
    import pyarrow as pa  # noqa: PLC0415 - see above.

    names = table.schema.names
    odd = [name for name in names if name not in _COLUMNS]
    if odd or len(set(names)) < len(names) or "value" not in names:
        raise InvalidRequestError(
            f"the columns are {', '.join(names) or 'none'}: value, and at most once each key, "
            "timestamp, headers and partition are wanted; next: table.select([...]) them"
        )
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "timestamp": pa.int64(),
        "headers": pa.list_(header),
        "partition": pa.int32(),
    }
    columns = [_cast(name, table.column(name), types[name]) for name in names]
    return pa.table(columns, names=names)


def _cast(name: str, column: Any, wanted: Any) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - see above.

    found = column.type
    try:
        if name == "timestamp":
            if not pa.types.is_integer(found):
                column = column.cast(pa.timestamp("ms", tz=getattr(found, "tz", None)), safe=False)
            if column.null_count:
                raise InvalidRequestError("a timestamp is null; drop the column, or fill it")
        elif name in ("key", "value") and not (_is_bytes(found) or pa.types.is_null(found)):
            raise InvalidRequestError(
                f"column {name!r} is {found}: binary or string is wanted; next: cast it"
            )
        return column.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"column {name!r} is {found}, not {wanted}: {error}") from None


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - see above.

    of = pa.types
    tests = (of.is_binary, of.is_large_binary, of.is_string, of.is_large_string)
    return any(test(kind) for test in tests) or of.is_fixed_size_binary(kind)


def _strings(column: Any) -> Strings:
    validity, offsets, data = column.buffers()
    if not len(column):  # Which may come without offsets.
        return Strings(BytesColumn(None, 0, bytes(4), b""), 0, 0)
    whole = BytesColumn(validity, column.null_count, offsets, data or b"")
    return Strings(whole, column.offset, len(column))


def _numbers(column: Any, form: Literal["i", "q"]) -> memoryview:
    """The numbers of a column without nulls, of as many bytes as the form of ``array`` says."""
    size = array(form).itemsize
    whole = memoryview(column.buffers()[1]).cast("B")
    return whole[size * column.offset : size * (column.offset + len(column))].cast(form)


def _distinct(partitions: Any) -> frozenset[int]:
    if partitions is None:
        return frozenset()
    return frozenset(partitions.unique().drop_null().to_pylist())


class _HeaderRows(Sequence[tuple[Header, ...]]):
    """Each record's headers, made when they are looked at."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, number: Any) -> Any:
        pairs = self._column[number].as_py() or ()
        return tuple(pair and (pair["key"], pair["value"]) for pair in pairs)


def _headers(column: Any) -> tuple[_HeaderRows | None, Strings | None]:
    """Those of each record, and as they stand in a batch, where they all can."""
    if column is None:
        return None, None
    import pyarrow as pa  # noqa: PLC0415 - see above.
    import pyarrow.compute as pc  # noqa: PLC0415 - see above.

    rows, pairs = _HeaderRows(column), column.flatten()
    if pairs.null_count:
        return rows, None
    counts = pc.list_value_length(column).fill_null(0)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(counts)])
    names, values = pairs.flatten()
    return rows, join_headers(_numbers(ends, "i"), _strings(names), _strings(values))
