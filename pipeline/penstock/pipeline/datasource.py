"""Spark's data source and sink "penstock"."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.pipeline.own_schema import refuse_other
from penstock.pipeline.refused_stream import said_later
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.reachable import check_target
from penstock.pipeline.sink.writers import BatchWriter, StreamWriter
from penstock.pipeline.source.batch_reader import BatchReader
from penstock.pipeline.source.columns import schema as source_schema
from penstock.pipeline.source.stream_reader import StreamReader
from penstock.pipeline.source_options import WHERE, SourceOptions
from penstock.pipeline.worker_process import settle_in


class PenstockDataSource(DataSource):
    """``format("penstock")``."""

    _plans = True
    """Whether a writer is asked for to plan a batch: then Spark makes the source of its options.
    The process that commits or aborts a batch of a stream has a pickled one, and a question to the
    cluster that failed there would have a batch be said not to be written that is, or its abort be
    left out."""

    def __getstate__(self) -> dict[str, Any]:
        """What a pickled one has."""
        return {**self.__dict__, "_plans": False}

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock"

    def schema(self) -> StructType:
        """The columns of the source. Spark asks at ``load()``: raises OptionError for every option
        that is wrong whatever the query.
        """
        return source_schema(headers=SourceOptions.load(self.options).include_headers)

    def reader(self, schema: StructType) -> BatchReader:
        """For ``spark.read``. Raises OptionError."""
        return BatchReader(self._source(schema))

    @said_later
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's.
        """For ``spark.readStream``. What is wrong with it fails the query with OptionError."""
        return StreamReader(self._source(schema))

    def _source(self, schema: StructType) -> SourceOptions:
        options = SourceOptions.load(self.options)
        refuse_other(schema, source_schema(headers=options.include_headers), WHERE)
        return options

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For ``df.write``. Raises OptionError, SchemaError, and, where a batch is planned,
        WriteFailedError as ``check_target`` does.
        """
        settle_in()
        plan = SinkPlan.of(self.options, schema, overwrite=overwrite)
        self._ask_for_target(plan)
        return BatchWriter(plan)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's.
        """For ``df.writeStream``. Raises as ``writer`` does.

        ``overwrite`` says that the output mode is complete: each batch has the whole result, and is
        appended, as with Spark's sink for Kafka.
        """
        settle_in()
        plan = SinkPlan.of(self.options, schema, stream=True)
        self._ask_for_target(plan)
        return StreamWriter(plan)

    def _ask_for_target(self, plan: SinkPlan) -> None:
        if self._plans:
            check_target(plan.options)
