"""The metrics that there are, and whether a query of PromQL asks for others."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry

from penstock.pipeline.progress import Gauges
from tests.unit.broker.test_metrics import everything, shown_by

TARGET_LABELS: Final = {"cluster", "node", "instance", "job", "pod"}
"""What Prometheus adds to all that it scrapes, as our configuration has it."""

_HISTOGRAM: Final = ("_bucket", "_count", "_sum")
_NAME: Final = re.compile(r"\b((?:penstock|process)_[a-z_]+)\b(?:\{([^}]*)\})?")
_BY: Final = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_MATCHER: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@cache
def known() -> dict[str, frozenset[str]]:
    """The labels of each metric, by its name."""
    pipeline = CollectorRegistry()
    Gauges(pipeline)
    found: dict[str, frozenset[str]] = {"up": frozenset()}
    metrics = everything()
    histograms = {
        family.name for family in metrics.registry.collect() if family.type == "histogram"
    }
    for text in shown_by(metrics):
        name, _, labels = text.rstrip("}").partition("{")
        own = frozenset(filter(None, labels.split(",")))
        found[name] = own
        if name in histograms:
            found.update({name + suffix: own | {"le"} for suffix in _HISTOGRAM})
    for collector in pipeline._collector_to_names:
        (family,) = collector.describe()
        suffix = "_total" if family.type == "counter" else ""
        found[family.name + suffix] = frozenset(getattr(collector, "_labelnames", ()))
    return found


def check_query(query: str, *, legend: str = "") -> list[str]:
    """What in a query, or its legend, is not there."""
    complaints = []
    allowed = set(TARGET_LABELS)
    for name, matchers in _NAME.findall(query):
        labels = known().get(name)
        if labels is None:
            complaints.append(f"no metric {name}")
            continue
        allowed |= labels
        complaints += [
            f"{name} has no label {label}"
            for label in _MATCHER.findall(re.sub(r'"[^"]*"', '""', matchers))
            if label not in labels | TARGET_LABELS
        ]
    named = [label.strip() for inner in _BY.findall(query) for label in inner.split(",")]
    named += re.findall(r"\{\{\s*(\w+)\s*\}\}", legend)
    complaints += [f"no label {label} in {query}" for label in named if label not in allowed]
    return complaints
