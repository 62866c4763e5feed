"""What a dashboard is made of, and the JSON that Grafana wants for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_WIDE, _HIGH, _COLUMNS = 8, 8, 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its curves by legend, or with ``single`` one number each."""

    title: str
    curves: Sequence[tuple[str, str]]
    unit: str = "short"
    single: bool = False
    bad_from: float | None = None
    """From this value on a single number is red."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. ``variables``: by name the metric and the label whose values are to choose."""

    name: str
    title: str
    panels: Sequence[Panel]
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)


def rate(metric: str, chosen: str, by: str) -> str:
    """What of a counter comes in a second, in sum by these labels."""
    return f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))"


def quantile(share: float, metric: str, chosen: str, by: str) -> str:
    """The bound that this share of a histogram is within, by these labels."""
    buckets = rate(f"{metric}_bucket", chosen, f"{by}, le")
    return f"histogram_quantile({share}, {buckets})"


def less(metric: str, other: str, chosen: str) -> str:
    """One metric without another."""
    return f"{metric}{{{chosen}}} - {other}{{{chosen}}}"


def curve(title: str, legend: str, expr: str, unit: str = "short") -> Panel:
    """A panel of one query."""
    return Panel(title, [(legend, expr)], unit)


def number(title: str, expr: str, bad_from: float | None = None, unit: str = "short") -> Panel:
    """A panel of one number; from ``bad_from`` on it is red."""
    return Panel(title, [("", expr)], unit, single=True, bad_from=bad_from)


def as_json(dashboard: Dashboard) -> str:
    """What Grafana is given."""
    model = {
        "uid": f"penstock-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["penstock"], "title": "Penstock", "asDropdown": True}
        ],
        "templating": {"list": [_source(), *map(_variable, dashboard.variables.items())]},
        "panels": _placed(dashboard.panels),
    }
    return json.dumps(model, indent=1, ensure_ascii=False) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}


def _variable(entry: tuple[str, tuple[str, str]]) -> dict[str, Any]:
    name, (metric, label) = entry
    query = f"label_values({metric}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # What has no such label (there is one cluster alone) is shown too.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The panels from left to right: six numbers in a row, or three pictures."""
    placed, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        wide, high = (4, 4) if panel.single else (_WIDE, _HIGH)
        if x + wide > _COLUMNS or (height and high != height):
            x, y = 0, y + height
        height = high
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": wide, "h": high}))
        x += wide
    return placed


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_from is not None:
        steps.append({"color": "red", "value": panel.bad_from})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if not panel.single:
        defaults |= {"color": {"mode": "palette-classic"}}
        if not any("deriv(" in expr for _, expr in panel.curves):
            defaults["min"] = 0
    return {
        "id": number,
        "title": panel.title,
        "type": "stat" if panel.single else "timeseries",
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for at, (legend, expr) in enumerate(panel.curves)
        ],
    }
