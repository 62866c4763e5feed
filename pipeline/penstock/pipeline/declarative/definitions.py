"""The one module that knows what Spark does not document of its declarative pipelines.

Their files are read, and their runs started, by Spark's own code (``pyspark.pipelines``); this
listens to what is registered on the way, since Spark tells nobody afterwards. Spark's minor version
is pinned for the sake of this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.pipeline.declarative import sql
from penstock.pipeline.declarative.graph import Dataset, Graph, GraphFlow, shown_options
from penstock.pipeline.errors import PipelineError
from penstock.pipeline.reasons import (
    MEND,
    NEXT,
    as_written,
    is_hopeless,
    is_unreachable,
    pythons_reason,
    reason_of,
)

if TYPE_CHECKING:
    from pyspark.pipelines.cli import PipelineSpec
    from pyspark.pipelines.flow import Flow
    from pyspark.pipelines.output import Output
    from pyspark.sql import SparkSession

_STATE: Final = re.compile(r"Flow '?([^\s']+)'? (?:is|has) ([A-Z]+)")
_COMPARE: Final = f"{NEXT}correct it, or compare with what `penstock pipeline init` writes"
_UNDER_WAY: Final = frozenset({"QUEUED", "PLANNING", "STARTING", "RUNNING"})


class DefinitionError(PipelineError):
    """A project's files are not what Spark takes, or its run failed.

    ``detail`` is the whole of what Spark said, with its stacks; empty where there is no more.
    """

    detail: str = ""


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

    def names(self) -> list[str]:
        """The datasets and flows as the project writes them."""
        return [*self.graph.datasets, *(flow.name for flow in self.graph.flows)]


@dataclass(frozen=True, slots=True)
class Event:
    """What Spark says of a run: when (seconds since 1970), and what, which may be many lines."""

    time: float
    message: str

    @property
    def brief(self) -> str:
        """The message in a line: of a failure the reason, without the stacks around it."""
        return " ".join(_reasons(self.message) or self.message.splitlines()[:1])


def load_spec(path: Path) -> PipelineSpec:
    """Read ``spark-pipeline.yml``, and see that each of its globs has files.

    Raises DefinitionError for what Spark would not take, or would take for an empty pipeline.
    """
    import yaml  # noqa: PLC0415 - it comes with Spark's pipelines, as the next one.
    from pyspark.pipelines.cli import load_pipeline_spec  # noqa: PLC0415 - see above.

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        if value is None:
            raise DefinitionError(f"{path} is empty{_COMPARE}")
        if not isinstance(value, dict):
            raise DefinitionError(
                f"{path} is no specification of a pipeline: it has no 'name:' and 'storage:', but "
                f"{value!r:.80}{_COMPARE}"
            )
        spec = load_pipeline_spec(path)
    except PipelineError:
        raise
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise DefinitionError(
            f"{path} is no specification of a pipeline: {error or type(error).__name__}{_COMPARE}"
        ) from error
    except Exception as error:
        raise failed(error, f"{path} is not what Spark takes") from error
    _see_files(path, spec)
    return spec


def _see_files(path: Path, spec: PipelineSpec) -> None:
    """Raise DefinitionError for a glob without a file: Spark would pass over it, and run nothing.

    What counts as a file of it is what Spark's own reading takes.
    """
    if not spec.libraries:
        raise DefinitionError(
            f"{path} names no files: it has no 'libraries:'; next: add\n"
            "libraries: [{glob: {include: transformations/**}}]"
        )
    root = path.parent.resolve()
    for one in spec.libraries:
        try:
            found = any(
                file.is_file() and "__pycache__" not in file.parts
                for file in root.glob(one.include)
            )
        except (ValueError, RuntimeError) as error:  # Of an absolute path the latter.
            raise DefinitionError(
                f"{path}: 'include: {one.include}' cannot be looked up: {error}; next: write a "
                f"path relative to {root}, of a file, or of a directory with /** behind it"
            ) from error
        if not found:
            # Spark has put this behind a directory's /**.
            written = one.include.removesuffix("/*") if "**" in one.include else one.include
            raise DefinitionError(
                f"{path}: 'include: {written}' matches no file in {root}; next: put a definition "
                "(.py or .sql) there, or correct 'include:' under 'libraries:'"
            )


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

    Yields what Spark says as it says it. A flow that fails is tried again by Spark, twice; where
    that is in vain the run ends as soon as no other flow is under way. Raises DefinitionError when
    it fails.
    """
    from pyspark.pipelines.spark_connect_pipeline import start_run  # noqa: PLC0415 - as above.

    what = "the pipeline is not valid" if dry else "the run failed"
    told = _Told()
    with _failures(what, told, pipeline.names()):
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
                message = as_written(event.message, pipeline.names())
                told.hear(message)
                yield Event(event.timestamp.ToNanoseconds() / 1e9, message)
                if told.in_vain():
                    _end(spark, pipeline, answers)
                    raise RuntimeError(told.reason)


class _Told:
    """What Spark has told of a run's failures, and of which flows are under way."""

    def __init__(self) -> None:
        self.reason = ""
        self.detail = ""
        self._under_way: set[str] = set()
        self._hopeless: set[str] = set()
        self._unreached: set[str] = set()

    def hear(self, message: str) -> None:
        """Take in an event's message."""
        if found := _STATE.match(message):
            flow, state = found.groups()
            (self._under_way.add if state in _UNDER_WAY else self._under_way.discard)(flow)
        # Each attempt fails anew, and for the same reason.
        for reason in _reasons(message):
            self.reason, self.detail = reason, message
            if found and (is_hopeless(reason) or self._is_unreachable_again(found[1], reason)):
                self._hopeless.add(found[1])

    def _is_unreachable_again(self, flow: str, reason: str) -> bool:
        """An outage may pass between two attempts, and a wrong address does not."""
        if not is_unreachable(reason):
            return False
        is_again = flow in self._unreached
        self._unreached.add(flow)
        return is_again

    def in_vain(self) -> bool:
        """Whether all that could still happen is that flows without hope are tried again."""
        return bool(self._hopeless) and self._under_way <= self._hopeless


def _end(spark: SparkSession, pipeline: Pipeline, answers: Iterator[Any]) -> None:
    """End the run under way, as Spark does when its graph is dropped."""
    import pyspark.sql.connect.proto as pb2  # noqa: PLC0415 - it may be missing.

    command = pb2.Command()
    command.pipeline_command.drop_dataflow_graph.dataflow_graph_id = pipeline.graph_id
    connect: Any = spark
    # However it ends: why the run failed is known. Who went away before the end would have both
    # sides complain of it.
    with contextlib.suppress(Exception):
        connect.client.execute_command(command)
        for _ in answers:
            pass


def failed(error: Exception, what: str, names: Sequence[str] = ()) -> DefinitionError:
    """``error`` of Spark's as one of ours; its stack traces stay out of the message.

    ``names`` are those of the project, for they are lower case in what Spark says.
    """
    whole = as_written(str(error), names)
    text = reason_of(whole) or type(error).__name__
    step = "" if NEXT in text else NEXT + MEND
    made = DefinitionError(f"{what}: {text}{step}")
    made.detail = whole if "\n" in whole.strip() else ""
    return made


def _reasons(message: str) -> list[str]:
    """What an event says of a failure, if it does, that is no consequence of another one."""
    first, *more = message.partition("=== Streaming Query")[0].splitlines() or [""]
    if "fail" not in first.lower() or "upstream" in first:
        return []
    in_python = pythons_reason(more)
    return [" ".join([first, *(more[:1] if in_python is None else [in_python])])]


@contextlib.contextmanager
def _failures(what: str, told: _Told | None = None, names: Sequence[str] = ()) -> Iterator[None]:
    """Whatever a project's own code or Spark raises inside is the project's failure.

    What Spark ``told`` before is the reason, where it did: what it raises only points there.
    """
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if told is None or not told.reason:
            raise failed(error, what, names) from error
        made = failed(RuntimeError(told.reason), what)
        made.detail = told.detail
        raise made from error


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
