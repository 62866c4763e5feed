"""The one module that knows what Spark does not document of its declarative pipelines.

Their files are read, and their runs started, by Spark's own code (``pyspark.pipelines``); this
listens to what is registered on the way, since Spark tells nobody afterwards. Spark's minor version
is pinned for the sake of this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.declarative import sql
from penstock.pipeline.declarative.graph import Dataset, Graph, GraphFlow, shown_options
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.reasons import pythons_reason, reason_of

if TYPE_CHECKING:
    from pyspark.pipelines.cli import PipelineSpec
    from pyspark.pipelines.flow import Flow
    from pyspark.pipelines.output import Output
    from pyspark.sql import SparkSession


class DefinitionError(PipelineError):
    """A project's files are not what Spark takes, or its run failed."""


@dataclass(slots=True)
class Pipeline:
    """What a project defines: its graph; by name its sinks, Python's flows, and SQL's views."""

    spec: PipelineSpec
    graph_id: str
    graph: Graph = field(default_factory=Graph)
    sinks: dict[str, Any] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    views_in_sql: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """What a continuous run cannot do, in words."""


@dataclass(frozen=True, slots=True)
class Event:
    """What Spark says of a run: when (seconds since 1970), and what."""

    time: float
    message: str


def load_spec(path: Path) -> PipelineSpec:
    """Read ``spark-pipeline.yml``. Raises DefinitionError for what Spark would not take."""
    import yaml  # noqa: PLC0415 - it comes with Spark's pipelines, as the next one.
    from pyspark.pipelines.cli import load_pipeline_spec  # noqa: PLC0415 - see above.

    try:
        return load_pipeline_spec(path)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise DefinitionError(
            f"{path} is no specification of a pipeline: {error or type(error).__name__}; "
            "next: correct it, or compare with what `penstock pipeline init` writes"
        ) from error
    except Exception as error:
        raise failed(error, f"{path} is not what Spark takes") from error


def define(spark: SparkSession, path: Path, spec: PipelineSpec) -> Pipeline:
    """Run the project's definitions and register them with Spark; what was defined.

    Whatever the project's files print goes to standard error. Raises DefinitionError.
    """
    from pyspark.pipelines.cli import register_definitions  # noqa: PLC0415 - it may be missing.
    from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph  # noqa: PLC0415 - as above.

    with (
        _failures(f"the definitions of {path.parent} failed"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        graph_id = create_dataflow_graph(
            spark,
            default_catalog=spec.catalog,
            default_database=spec.database,
            sql_conf=spec.configuration,
        )
        pipeline = Pipeline(spec, graph_id)
        register_definitions(path, _registry(spark, pipeline), spec, spark, graph_id)
    return pipeline


def run(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    dry: bool = False,
    refresh: Sequence[str] = (),
    full_refresh: Sequence[str] = (),
    full_refresh_all: bool = False,
) -> Iterator[Event]:
    """Run it once, on all that there is to read, or, ``dry``, only see whether it could run.

    Yields what Spark says as it says it. Raises DefinitionError when it fails.
    """
    from pyspark.pipelines.spark_connect_pipeline import start_run  # noqa: PLC0415 - as above.

    what = "the pipeline is not valid" if dry else "the run failed"
    told: list[str] = []
    with _failures(what, told):
        answers = start_run(
            spark,
            pipeline.graph_id,
            full_refresh=list(full_refresh),
            full_refresh_all=full_refresh_all,
            refresh=list(refresh),
            dry=dry,
            storage=pipeline.spec.storage,
        )
        for answer in answers:
            if "pipeline_event_result" in answer:
                event = answer["pipeline_event_result"].event
                # Each attempt fails anew, and for the same reason.
                told[:] = [*told, *_reasons(event.message)][-1:]
                yield Event(event.timestamp.ToNanoseconds() / 1e9, event.message)


def failed(error: Exception, what: str) -> DefinitionError:
    """``error`` of Spark's as one of ours; its stack traces stay out of the message."""
    text = reason_of(str(error)) or type(error).__name__
    return DefinitionError(f"{what}: {text}; next: mend what this names, and try again")


def _reasons(message: str) -> list[str]:
    """What an event says of a failure, if it does, that is no consequence of another one."""
    first, *more = message.partition("=== Streaming Query")[0].splitlines() or [""]
    if "fail" not in first.lower() or "upstream" in first:
        return []
    in_python = pythons_reason(more)
    return [" ".join([first, *(more[:1] if in_python is None else [in_python])])]


@contextlib.contextmanager
def _failures(what: str, told: Sequence[str] = ()) -> Iterator[None]:
    """Whatever a project's own code or Spark raises inside is the project's failure.

    What Spark ``told`` before is the reason, where it did: what it raises only points there.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise failed(RuntimeError(" ".join(told)) if told else error, what) from error


def _registry(spark: SparkSession, pipeline: Pipeline) -> Any:
    """Spark's registry, which also keeps what passes through it."""
    from pyspark.pipelines.flow import AutoCdcFlow  # noqa: PLC0415 - it may be missing.
    from pyspark.pipelines.output import (  # noqa: PLC0415 - as above.
        MaterializedView,
        Sink,
        TemporaryView,
    )
    from pyspark.pipelines.spark_connect_graph_element_registry import (  # noqa: PLC0415 - as above.
        SparkConnectGraphElementRegistry,
    )

    class Registry(SparkConnectGraphElementRegistry):
        def register_output(self, output: Output) -> None:
            super().register_output(output)
            kind, detail = "table", ""
            if isinstance(output, Sink):
                kind = "sink"
                detail = f"{output.format} {shown_options(output.options)}".strip()
                pipeline.sinks[output.name] = output
            elif isinstance(output, TemporaryView):
                kind = "view"
            elif isinstance(output, MaterializedView):
                kind = "materialized view"
            pipeline.graph.datasets[output.name] = Dataset(output.name, kind, detail)

        def register_flow(self, flow: Flow) -> None:
            plans: list[Any] = []

            def watched() -> Any:
                frame: Any = flow.func()
                plans.append(frame._plan.plan(self._client))
                return frame

            super().register_flow(dataclasses.replace(flow, func=watched))
            reads, outside = _sources(plans)
            pipeline.graph.flows.append(GraphFlow(flow.name, flow.target, reads, outside))
            pipeline.flows.append(flow)

        def register_auto_cdc_flow(self, flow: AutoCdcFlow) -> None:
            super().register_auto_cdc_flow(flow)
            name = flow.name or flow.target
            pipeline.graph.flows.append(GraphFlow(name, flow.target, (flow.source,)))
            pipeline.unknown.append(f"{name} (an automatic flow of changes)")

        def register_sql(self, sql_text: str, file_path: Path) -> None:
            super().register_sql(sql_text, file_path)
            _take_sql(pipeline, sql_text)

    return Registry(spark, pipeline.graph_id)


def _take_sql(pipeline: Pipeline, text: str) -> None:
    for statement in sql.statements(text):
        found = sql.definition(statement)
        if found is None:
            if unknown := sql.unknown_creation(statement):
                pipeline.unknown.append(unknown)
            continue
        if found.kind != "flow":
            pipeline.graph.datasets[found.name] = Dataset(found.name, found.kind)
        if found.kind == "view":
            pipeline.views_in_sql[found.name] = found.query
            if "." in found.name:
                # It would be a temporary view of the session, whose names have one part.
                pipeline.unknown.append(f"{found.name} (a view with a database in its name)")
        if found.query:
            reads = tuple(sql.names_read(found.query))
            pipeline.graph.flows.append(GraphFlow(found.name, found.target, reads))


def _sources(plans: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that plans of Connect's protocol read, and where else they read from."""
    names: dict[str, None] = {}
    outside: dict[str, None] = {}
    waiting = list(plans)
    while waiting:
        message = waiting.pop()
        kind = message.DESCRIPTOR.name
        if kind == "NamedTable":
            names[sql.plain_name(message.unparsed_identifier)] = None
        elif kind == "DataSource":
            options = {**dict(message.options), "path": " ".join(message.paths)}
            if not message.paths:
                del options["path"]
            outside[f"{message.format} {shown_options(options)}".strip()] = None
        elif kind == "SQL":
            names.update(dict.fromkeys(sql.names_read(message.query)))
        for descriptor, value in message.ListFields():
            if descriptor.message_type is None:
                continue
            if descriptor.message_type.GetOptions().map_entry:
                entries = list(value.values())
                waiting += [one for one in entries if hasattr(one, "DESCRIPTOR")]
            elif hasattr(value, "DESCRIPTOR"):
                waiting.append(value)
            else:
                waiting += list(value)
    return tuple(names), tuple(outside)
