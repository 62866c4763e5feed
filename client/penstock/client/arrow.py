"""Records as a pyarrow.Table, zero copy from the columns that the codec makes.

pyarrow is an extra of the package, and loads when it is first used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.client.core.subscription import ColumnRun
from penstock.client.model import ConsumerRecord
from penstock.wire.columns import BytesColumn, HeadersColumn
from penstock.wire.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow


def check() -> None:
    """Raise ConfigurationError, which says what to install, where pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401, PLC0415 - see above.
    except ImportError as error:
        raise ConfigurationError(
            f"fetch_arrow() needs pyarrow, which cannot be imported ({error}); next: "
            "pip install 'penstock[arrow]'"
        ) from error


def schema() -> pyarrow.Schema:
    """The columns of every table; those of Spark's Kafka source, where it has them."""
    import pyarrow as pa  # noqa: PLC0415 - see above.

    header = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
    return pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            pa.field("topic", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
            pa.field("headers", pa.list_(header), nullable=False),
        ]
    )


def table(runs: Iterable[ColumnRun | Sequence[ConsumerRecord]]) -> pyarrow.Table:
    """All of them, one after the other; a chunk for each."""
    import pyarrow as pa  # noqa: PLC0415 - see above.

    fields = schema()
    batches = [
        pa.record_batch(
            _of_columns(fields, run) if isinstance(run, ColumnRun) else _of_records(fields, run),
            schema=fields,
        )
        for run in runs
    ]
    return pa.Table.from_batches(batches, schema=fields)


def _of_columns(fields: pyarrow.Schema, run: ColumnRun) -> list[Any]:
    import pyarrow as pa  # noqa: PLC0415 - see above.

    columns, count = run.columns, run.columns.record_count

    def whole(name: str, data: Any) -> Any:
        kind = fields.field(name).type
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])

    partition = array("i", [run.partition.partition]) * count
    return [
        _strings(pa.binary(), columns.keys, count),
        _strings(pa.binary(), columns.values, count),
        pa.DictionaryArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(bytes(4 * count))]),
            pa.array([run.partition.topic], pa.string()),
        ),
        whole("partition", partition),
        whole("offset", columns.offsets),
        whole("timestamp", columns.timestamps_ms),
        _headers(fields.field("headers").type, columns.headers, count),
    ]


def _strings(kind: pyarrow.DataType, column: BytesColumn, count: int) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - see above.

    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, count, buffers, column.null_count)


def _headers(kind: pyarrow.DataType, headers: HeadersColumn | None, count: int) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - see above.

    if headers is None:
        offsets = pa.py_buffer(bytes(4 * (count + 1)))
        pairs = pa.array([], kind.value_type)
    else:
        offsets = pa.py_buffer(headers.offsets)
        length = len(memoryview(headers.names.offsets).cast("B")) // 4 - 1
        names = _strings(pa.string(), headers.names, length)
        values = _strings(pa.binary(), headers.values, length)
        pairs = pa.StructArray.from_arrays([names, values], fields=list(kind.value_type))
    return pa.ListArray.from_buffers(kind, count, [None, offsets], 0, children=[pairs])


def _of_records(fields: pyarrow.Schema, records: Sequence[ConsumerRecord]) -> list[Any]:
    """What iteration or ``poll`` left."""
    import pyarrow as pa  # noqa: PLC0415 - see above.

    headers = [
        [{"key": name, "value": value} for name, value in record.headers] for record in records
    ]
    columns = {
        "key": [record.key for record in records],
        "value": [record.value for record in records],
        "topic": [record.topic for record in records],
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "headers": headers,
    }
    return [pa.array(columns[name], fields.field(name).type) for name in fields.names]
