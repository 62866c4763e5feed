"""The columns of the source: those of Spark's Kafka source, in Spark's Arrow layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.pipeline.errors import PipelineError

if TYPE_CHECKING:
    import pyarrow

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_COLUMNS = [
    StructField("key", BinaryType()),
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("timestamp", TimestampType()),
    StructField("timestampType", IntegerType()),
]
_HEADERS = StructField("headers", ArrayType(_HEADER))


def schema(*, headers: bool) -> StructType:
    """Spark's schema of the source; with the column ``headers`` if that is asked for."""
    return StructType([*_COLUMNS, _HEADERS] if headers else _COLUMNS)


@dataclass(slots=True)
class Converter:
    """Makes of a consumer's tables what Spark takes, for one partition of a topic.

    Keys, values and headers are passed on as they are; no Python object is made of any record.
    """

    topic: str
    partition: int
    timestamp_type: int
    headers: bool
    _schema: Any = None
    _constant: dict[str, Any] = field(default_factory=dict)
    _constant_rows: int = 0

    def batches(self, table: pyarrow.Table) -> Iterator[pyarrow.RecordBatch]:
        """The table's rows, in batches as they came. Raises PipelineError for a time that Spark
        has no room for.
        """
        import pyarrow as pa  # noqa: PLC0415 - it loads in tasks, not where a query is planned.

        if self._schema is None:
            self._schema = to_arrow_schema(schema(headers=self.headers), timezone="UTC")
        for chunk in table.to_batches():
            count = chunk.num_rows
            if count > self._constant_rows:
                self._make_constants(count)
            arrays = {
                "key": chunk.column("key"),
                "value": chunk.column("value"),
                "offset": chunk.column("offset"),
                "timestamp": self._times(chunk),
                **{name: column.slice(0, count) for name, column in self._constant.items()},
            }
            if self.headers:
                kind = self._schema.field("headers").type
                arrays["headers"] = _headers(chunk.column("headers"), kind)
            columns = [arrays[name] for name in self._schema.names]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _make_constants(self, count: int) -> None:
        import pyarrow as pa  # noqa: PLC0415 - see above.

        self._constant = {
            "topic": pa.repeat(pa.scalar(self.topic, pa.string()), count),
            "partition": pa.repeat(pa.scalar(self.partition, pa.int32()), count),
            "timestampType": pa.repeat(pa.scalar(self.timestamp_type, pa.int32()), count),
        }
        self._constant_rows = count

    def _times(self, chunk: pyarrow.RecordBatch) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - see above.

        try:
            return chunk.column("timestamp").cast(self._schema.field("timestamp").type)
        except pa.ArrowInvalid as error:
            offsets = chunk.column("offset")
            raise PipelineError(
                f"partition {self.topic}-{self.partition}: a record at offset {offsets[0]} to "
                f"{offsets[-1]} has a time that Spark's timestamps, in microseconds, have no room "
                f"for ({error}); next: begin behind it by startingOffsets, and mend its producer"
            ) from None


def _headers(column: Any, kind: Any) -> Any:
    """The same lists under Spark's names and types."""
    import pyarrow as pa  # noqa: PLC0415 - see above.

    pairs = column.values
    fields = list(kind.value_type)
    renamed = pa.StructArray.from_arrays([pairs.field(0), pairs.field(1)], fields=fields)
    return pa.ListArray.from_arrays(column.offsets, renamed, type=kind)
