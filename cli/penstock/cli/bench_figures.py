"""What a benchmark of `penstock bench` measured, and how it is told."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.cli.output import format_count, print_json, print_table
from penstock.wire.errors import PenstockError

_QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))


@dataclass(slots=True)
class Figures:
    """What one run came to. Times are in seconds, bytes are those of the values alone."""

    benchmark: str
    mode: str
    topic: str
    timed: str
    """What ``latencies`` are the times of, in words."""
    records: int = 0
    value_bytes: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process, all its threads."""
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    unacknowledged: int = 0
    """What was on its way when the run was stopped."""
    longest_gap: float | None = None
    """The longest time without an acknowledgement, where that was looked at."""
    behind: float | None = None
    """How far behind its schedule the run was at worst, where it had one."""
    first_error: PenstockError | None = None

    def summary(self) -> dict[str, Any]:
        """The figures by the names that programs know them by; None for what there is none of."""
        seconds = max(self.seconds, 1e-9)
        timed = sorted(self.latencies)
        return {
            "benchmark": self.benchmark,
            "mode": self.mode,
            "topic": self.topic,
            "records": self.records,
            "errors": self.errors,
            "unacknowledged": self.unacknowledged,
            "seconds": round(self.seconds, 6),
            "records_per_s": round(self.records / seconds, 1),
            "mb_per_s": round(self.value_bytes / 1e6 / seconds, 3),
            "cpu_s_per_million": (
                round(self.cpu_seconds / self.records * 1e6, 4) if self.records else None
            ),
            **{f"{name}_ms": _ms(quantile(timed, part)) for name, part in _QUANTILES},
            "longest_gap_ms": _ms(self.longest_gap),
            "behind_ms": _ms(self.behind),
            "timed": self.timed,
        }


def quantile(ordered: Sequence[float], part: float) -> float | None:
    """The least value that ``part`` of the values do not exceed (nearest rank); None of none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def show(figures: Figures, *, as_json: bool) -> None:
    """Print the figures on standard output."""
    summary = figures.summary()
    if as_json:
        print_json(summary)
        return
    print_table(
        ("Figure", "Value"),
        [
            ("records", format_count(figures.records)),
            ("seconds", f"{figures.seconds:.2f}"),
            ("records/s", f"{summary['records_per_s']:,.0f}"),
            ("MB/s", f"{summary['mb_per_s']:,.2f}"),
            ("client CPU-s per million records", _shown(summary["cpu_s_per_million"], "")),
            *((f"{name} latency", _shown(summary[f"{name}_ms"], " ms")) for name, _ in _QUANTILES),
            *_where_there("longest time without an acknowledgement", summary["longest_gap_ms"]),
            *_where_there("most behind the rate", summary["behind_ms"]),
            *([("not acknowledged", figures.unacknowledged)] if figures.unacknowledged else []),
            ("errors", format_count(figures.errors)),
        ],
        right=("Value",),
        title=f"bench {figures.benchmark}, {figures.mode}; latency: {figures.timed}",
    )


def _shown(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:,.2f}{unit}"


def _where_there(name: str, value_ms: float | None) -> list[tuple[str, str | None]]:
    return [] if value_ms is None else [(name, _shown(value_ms, " ms"))]


class Stopwatch:
    """Wall-clock and CPU time of this process from the start to the last mark."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._cpu_started = time.process_time()
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def mark(self) -> None:
        """What comes later does not count, unless it is marked again."""
        self.seconds = time.perf_counter() - self.started
        self.cpu_seconds = time.process_time() - self._cpu_started
