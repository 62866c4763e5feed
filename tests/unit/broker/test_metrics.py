"""What is counted, and under which names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from penstock.broker.metrics import BrokerMetrics
from penstock.wire.errors import DiskFullError, ErrorCode

DOCUMENTED = Path(__file__).resolve().parents[3] / "docs/operating/metrics.md"


def test_refusals_of_the_active_controller_are_counted_by_command_and_reason() -> None:
    metrics = BrokerMetrics()
    for _ in range(2):
        metrics.controller_refused("alter_partition", ErrorCode.INVALID_UPDATE_VERSION)
    metrics.controller_refused("heartbeat", ErrorCode.STALE_BROKER_EPOCH)
    metrics.controller_refused("", ErrorCode.INVALID_REQUEST)
    shown = generate_latest(metrics.registry).decode().splitlines()
    name = "penstock_controller_refusals_total"
    assert f'{name}{{command="alter_partition",error="INVALID_UPDATE_VERSION"}} 2.0' in shown
    assert f'{name}{{command="heartbeat",error="STALE_BROKER_EPOCH"}} 1.0' in shown
    assert f'{name}{{command="none",error="INVALID_REQUEST"}} 1.0' in shown


def test_refused_batches_are_shown_by_those_errors_that_there_were() -> None:
    metrics = BrokerMetrics()

    def shown() -> list[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith("penstock_refused_batches_total{")]

    assert shown() == []
    for _ in range(2):
        metrics.refused(DiskFullError("no room"))
    assert shown() == ['penstock_refused_batches_total{error="DISK_FULL"} 2.0']


def rows() -> list[str]:
    text = DOCUMENTED.read_text()
    return re.findall(r"^\| `((?:penstock|process)_[^`]*)` \|", text, re.MULTILINE)


def shown_by(metrics: BrokerMetrics) -> set[str]:
    """The names of what is shown, each with its labels."""
    return {
        described(family, getattr(collector, "_labelnames", ()))
        for collector in metrics.registry._collector_to_names
        # The library's collector of the process has no labels, and does not describe itself.
        for family in getattr(collector, "describe", collector.collect)()
    }


def described(family: Metric, labels: Sequence[str]) -> str:
    suffix = "_total" if family.type == "counter" else ""
    named = ",".join(getattr(family, "_labelnames", labels))
    return family.name + suffix + (f"{{{named}}}" if named else "")


class Idle:
    """A cleaner and a scrubber that have nothing to tell."""

    dirtiest_ratio = 0.0
    uncleanable_count = 0


def everything() -> BrokerMetrics:
    """All that a node with both roles shows."""
    metrics = BrokerMetrics()
    metrics.watch_followers(lambda _: 0)
    metrics.watch_damage(lambda: 0, lambda: 0)
    metrics.watch_fenced(lambda: True)
    metrics.watch_unsent("clients", lambda: 1)
    metrics.watch_unfinished("clients", lambda: 1)
    metrics.watch_metadata(lambda: 0)
    metrics.watch_offline(lambda: 0, lambda: 0)
    metrics.storage.watch_room([])
    metrics.storage.cleaning.watch(Idle())  # type: ignore[arg-type]  # As far as it is asked.
    metrics.storage.scrubbing.watch(Idle(), [])  # type: ignore[arg-type]  # The same.
    return metrics


def test_every_metric_is_documented_with_its_labels_and_nothing_else_is() -> None:
    assert sorted(rows()) == sorted(shown_by(everything()))


def test_every_metric_has_kafkas_counterpart_or_says_that_there_is_none() -> None:
    for line in DOCUMENTED.read_text().splitlines():
        if line.startswith(("| `penstock_", "| `process_")):
            cells = re.sub(r"`[^`]*`", "code", line).strip("|").split("|")
            assert len(cells) == 3, line
            assert cells[2].strip() == "-" or "code" in cells[2], line
