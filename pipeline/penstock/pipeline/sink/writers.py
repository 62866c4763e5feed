"""The sink as Spark calls it: thin, one class for each of its interfaces.

A writer is made in a process beside the driver, pickled, and sent to each task; of a streaming
query another one is made for the commit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.client import PenstockError
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.setting_names import settings_as_options
from penstock.pipeline.sink import at_least_once, exactly_once
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink_options import Delivery
from penstock.pipeline.worker_process import settle_in


def _write(plan: SinkPlan, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    settle_in()
    try:
        with settings_as_options():
            if plan.options.delivery is Delivery.EXACTLY_ONCE:
                return exactly_once.write(plan, batches)
            return at_least_once.write(plan, batches)
    except (PenstockError, PipelineError) as error:
        # What they say is for whoever runs the query. Spark would show the way to them above it.
        raise error.with_traceback(None) from error.__cause__


class BatchWriter(DataSourceArrowWriter):
    """Of ``df.write``, in ``foreachBatch`` and outside of queries."""

    def __init__(self, plan: SinkPlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        return _write(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks are done."""
        settle_in()
        with settings_as_options():
            exactly_once.commit(self._plan, messages, one=False)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when the write has failed."""
        exactly_once.abort(self._plan, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Of ``df.writeStream``."""

    def __init__(self, plan: SinkPlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task of each batch."""
        return _write(self._plan, iterator)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's.
    ) -> None:
        """In the driver, when all tasks of a batch are done, and before Spark notes that."""
        with settings_as_options():
            exactly_once.commit(self._plan, messages, one=True)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's.
    ) -> None:
        """In the driver, when a batch has failed."""
        exactly_once.abort(self._plan, messages)
