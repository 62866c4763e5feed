"""Who writes within ``foreachBatch``, as the driver knows it. Spark Connect's client knows nothing.

Unlike the tasks of ``sink.identity``, which are told by properties alone, the driver has the Spark
context, whose id and start tell one driver's executions from another's.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from penstock.pipeline.errors import OptionError


def writer_of(frame: DataFrame, sink_id: str | None) -> str:
    """``sink_id``, or without one the name of the query, which its checkpoint keeps.

    Raises OptionError where there is neither.
    """
    if sink_id:
        return sink_id
    found = _property(frame, "sql.streaming.queryId")
    if not found:
        raise OptionError(
            "there is no query whose id could be the sink's; next: pass sink_id=, or use the sink "
            "with foreachBatch"
        )
    return f"spark-{found}"


def execution_of(frame: DataFrame) -> str | None:
    """The name of this execution of a batch, with all that its ``foreachBatch`` does.

    A repetition of the batch has another one. None where it cannot be told: outside of a query, in
    a thread of the program's own, and behind Spark Connect.
    """
    root = _property(frame, "spark.sql.execution.root.id")
    if not root or not _property(frame, "sql.streaming.queryId"):
        return None
    context = frame.sparkSession.sparkContext
    return f"{context.applicationId}/{context.startTime}/{root}"


def _property(frame: DataFrame, name: str) -> str | None:
    # Spark Connect's session has no such attribute.
    context: Any = getattr(frame.sparkSession, "sparkContext", None)
    return None if context is None else context.getLocalProperty(name)
