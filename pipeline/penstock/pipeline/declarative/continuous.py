"""A project of declarative pipelines run for good, where Spark itself runs it once.

Every flow into a sink becomes a streaming query, with the very checkpoint that Spark's own runs
use: either kind of run goes on where the other one stopped.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.pipeline.declarative.definitions import DefinitionError, Pipeline, failed
from penstock.pipeline.declarative.graph import GraphError, only_sinks_and_views
from penstock.pipeline.running import start_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_INTERVAL: Final = "500 milliseconds"
"""How often a query looks for records; back to back it would do so 100 times a second."""

_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RunningFlow:
    """A flow's query, while it runs."""

    name: str
    target: str
    query: Any


def start(
    spark: SparkSession, pipeline: Pipeline, *, interval: str = DEFAULT_INTERVAL
) -> list[RunningFlow]:
    """Start a query for each flow into a sink; none is left running when one cannot be started.

    ``interval`` is Spark's text for how often each looks for records. Raises GraphError for a
    project with tables or without a sink, and DefinitionError.
    """
    if pipeline.unknown:
        raise GraphError(
            f"a continuous run cannot do this: {', '.join(pipeline.unknown)}; "
            "next: run without --continuous"
        )
    only_sinks_and_views(pipeline.graph)
    started: list[RunningFlow] = []
    try:
        _make_views(spark, pipeline)
        for flow in pipeline.flows:
            if flow.target in pipeline.sinks:
                query = _start_flow(spark, pipeline, flow, interval)
                started.append(RunningFlow(flow.name, flow.target, query))
    except Exception as error:
        stop(started)
        if isinstance(error, DefinitionError):
            raise
        raise failed(error, "the queries could not be started", pipeline.names()) from error
    if not started:
        raise GraphError("no flow writes to a sink; next: have one do so, by append_flow")
    return started


def watch(flows: list[RunningFlow], wait: Callable[[float], bool]) -> None:
    """Return when ``wait(seconds)`` says that it is time to stop.

    Raises DefinitionError as soon as one of the queries has ended by itself, unless that time comes
    just then: what tells us to stop may have told Spark's own process as well.
    """
    while not wait(_POLL_S):
        for flow in flows:
            if (error := _failure(flow)) is not None and not wait(_POLL_S):
                raise failed(error, f"the flow {flow.name} failed") from error


def _failure(flow: RunningFlow) -> Exception | None:
    """Why a flow runs no more; None while it runs."""
    try:
        if flow.query.isActive:
            return None
        ended: Exception | None = flow.query.exception()
    except Exception as error:  # Spark itself has gone.
        return error
    return ended or RuntimeError("its query was stopped by somebody else")


def stop(flows: list[RunningFlow]) -> None:
    """Stop the queries. What one was writing is written again, once, by the run that comes next."""
    for flow in flows:
        # A server that has gone has stopped them itself.
        with contextlib.suppress(Exception):
            flow.query.stop()


def _make_views(spark: SparkSession, pipeline: Pipeline) -> None:
    functions = {flow.target: flow for flow in pipeline.flows}
    for name in pipeline.graph.in_order():
        if name in pipeline.views_in_sql:
            frame: DataFrame = spark.sql(pipeline.views_in_sql[name])
        elif name in functions and name not in pipeline.sinks:
            with _settings(spark, functions[name].spark_conf):
                frame = functions[name].func()
        else:
            continue
        frame.createOrReplaceTempView(name)


def _start_flow(spark: SparkSession, pipeline: Pipeline, flow: Any, interval: str) -> Any:
    sink = pipeline.sinks[flow.target]
    with _settings(spark, {**pipeline.spec.configuration, **flow.spark_conf}):
        frame = flow.func()
        if not frame.isStreaming:
            raise DefinitionError(
                f"the flow {flow.name} reads no stream; next: read by spark.readStream, or STREAM "
                "in SQL"
            )
        writer = frame.writeStream.queryName(flow.name).format(sink.format)
        writer = writer.options(**sink.options).outputMode("append")
        place = _checkpoint(spark, pipeline.spec.storage, flow.target, flow.name)
        writer = writer.option("checkpointLocation", place)
        return start_query(writer.trigger(processingTime=interval))


def _checkpoint(spark: SparkSession, storage: str, target: str, flow: str) -> str:
    """Where Spark's own runs keep a flow's checkpoint: the last, for a full refresh adds one.

    It is looked up by Spark, on whatever file system the storage is.
    """
    root = f"{storage.rstrip('/')}/_checkpoints/{target}/{flow}"
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - it may be missing.

    # Named twice, since of one path alone Spark complains, at length, that it is not there yet.
    paths = [f"{root}/*/metadata"] * 2
    try:
        files = spark.read.format("binaryFile").load(paths).select("path").collect()
    except AnalysisException as error:
        if "PATH_NOT_FOUND" not in str(error):
            raise
        return f"{root}/0"
    numbers = [
        int(found[1]) for row in files if (found := re.search(r"/(\d+)/metadata$", row.path))
    ]
    return f"{root}/{max(numbers, default=0)}"


@contextlib.contextmanager
def _settings(spark: SparkSession, values: Any) -> Any:
    """The session with these settings; a query keeps those that it was started with."""
    before = {key: spark.conf.get(key, None) for key in values}
    for key, value in values.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, value)
