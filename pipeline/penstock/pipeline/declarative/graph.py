"""What a pipeline consists of: its datasets and the flows between them, as values and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.pipeline.errors import PipelineError


class GraphError(PipelineError):
    """The parts of a pipeline do not fit together."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A named part: a view, a table, a materialized view, or a sink with what it writes to."""

    name: str
    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GraphFlow:
    """A query that fills ``target`` from other datasets (``reads``) and from outside."""

    name: str
    target: str
    reads: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


@dataclass(slots=True)
class Graph:
    """The datasets by name, and the flows, both in the order of their definition."""

    datasets: dict[str, Dataset] = field(default_factory=dict)
    flows: list[GraphFlow] = field(default_factory=list)

    def edges(self) -> list[tuple[str, str, str]]:
        """From what, to what, by which flow; what is read from outside is named by itself."""
        found = []
        for flow in self.flows:
            sources = [*flow.outside, *(self.find(name) for name in flow.reads)]
            found += [(source, flow.target, flow.name) for source in sources if source]
        return found

    def find(self, name: str) -> str:
        """The dataset that a query means by ``name``; empty when it means none of these."""
        last = name.rpartition(".")[2].lower()
        for one in self.datasets:
            if one.lower() == name.lower() or one.rpartition(".")[2].lower() == last:
                return one
        return ""

    def in_order(self) -> list[str]:
        """The datasets, each behind all that it reads. Raises GraphError for a circle."""
        before: dict[str, set[str]] = {name: set() for name in self.datasets}
        for flow in self.flows:
            if flow.target in before:
                found = {self.find(name) for name in flow.reads}
                before[flow.target] |= found - {"", flow.target}
        ordered: list[str] = []
        while before:
            ready = [name for name, needed in before.items() if needed.isdisjoint(before)]
            if not ready:
                raise GraphError(
                    f"these datasets read each other in a circle: {', '.join(before)}; "
                    "next: have one of them read something else"
                )
            ordered += ready
            for name in ready:
                del before[name]
        return ordered


def shown_options(options: Mapping[str, str]) -> str:
    """What says where data is, of the options of a source or sink; never what may be a secret."""
    telling = ("subscribe", "subscribepattern", "assign", "topic", "path", "dbtable", "resource")
    lowered = {key.lower(): value for key, value in options.items()}
    return " ".join(lowered[key] for key in telling if key in lowered)


def as_text(graph: Graph) -> str:
    """A line for each dataset, and under it one for each flow that fills it."""
    lines = []
    for dataset in graph.datasets.values():
        detail = f", {dataset.detail}" if dataset.detail else ""
        lines.append(f"{dataset.name} ({dataset.kind}{detail})")
        for flow in graph.flows:
            if flow.target != dataset.name:
                continue
            sources = [*flow.outside, *filter(None, map(graph.find, flow.reads))]
            by = f" by {flow.name}" if flow.name != dataset.name else ""
            lines.append(f"  <- {', '.join(sources) or 'nothing of this pipeline'}{by}")
    return "\n".join(lines)


def as_dot(graph: Graph) -> str:
    """The graph for Graphviz, left to right; what is outside is drawn dashed."""
    outside = dict.fromkeys(source for flow in graph.flows for source in flow.outside)
    shapes = {"sink": "cds", "view": "ellipse"}
    lines = ["digraph pipeline {", "  rankdir=LR;"]
    lines += [f"  {_quoted(name)} [shape=box, style=dashed];" for name in outside]
    for dataset in graph.datasets.values():
        label = f"{dataset.name}\n{dataset.detail}" if dataset.detail else dataset.name
        shape = shapes.get(dataset.kind, "box")
        lines.append(f"  {_quoted(dataset.name)} [shape={shape}, label={_quoted(label)}];")
    for source, target, flow in graph.edges():
        label = f" [label={_quoted(flow)}]" if flow != target else ""
        lines.append(f"  {_quoted(source)} -> {_quoted(target)}{label};")
    return "\n".join([*lines, "}"])


def as_value(graph: Graph) -> dict[str, object]:
    """The graph for programs: ``datasets`` (name, kind, detail) and ``edges`` (from, to, flow)."""
    return {
        "datasets": [
            {"name": one.name, "kind": one.kind, "detail": one.detail}
            for one in graph.datasets.values()
        ],
        "edges": [
            {"from": source, "to": target, "flow": flow} for source, target, flow in graph.edges()
        ],
    }


def only_sinks_and_views(graph: Graph) -> None:
    """Raise GraphError where there is a table: these are filled by triggered runs."""
    tables: Iterable[Dataset] = (
        one for one in graph.datasets.values() if one.kind not in ("sink", "view")
    )
    if names := ", ".join(f"{one.name} ({one.kind})" for one in tables):
        raise GraphError(
            f"a continuous run fills sinks, and these are tables: {names}; "
            "next: run without --continuous, which fills tables too, or write to a sink"
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
