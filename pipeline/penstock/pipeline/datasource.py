"""Spark's data source and sink "penstock"."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.writers import BatchWriter, StreamWriter


class PenstockDataSource(DataSource):
    """``format("penstock")``."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For ``df.write``. Raises OptionError and SchemaError."""
        return BatchWriter(SinkPlan.of(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's.
        """For ``df.writeStream``. Raises OptionError and SchemaError.

        ``overwrite`` says that the output mode is complete: each batch has the whole result, and is
        appended, as with Spark's sink for Kafka.
        """
        return StreamWriter(SinkPlan.of(self.options, schema))
