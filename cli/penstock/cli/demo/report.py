"""What the demo tells: its steps as they happen, and the tables at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.demo.verdict import Verdict
from penstock.cli.output import escape, format_count

_CONSOLE: Final = Console(highlight=False)
_begun: list[float] = []


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the end of the demo shows."""

    verdict: Verdict
    killed_node: int
    was_controller: bool
    standstill_seconds: Mapping[int, float | None]
    counted_by: str


def start_clock() -> None:
    """Begin to count the time that :func:`say` shows."""
    _begun[:] = [time.monotonic()]


def say(text: str) -> None:
    """Print a step with the time since :func:`start_clock`."""
    elapsed = time.monotonic() - _begun[0]
    _CONSOLE.print(escape(f"{elapsed:6.1f} s  {text}"), soft_wrap=True)


def print_report(report: Report) -> None:
    """Print the tables and, in one last line, whether all went well."""
    verdict = report.verdict
    _print_lines(report)
    _print_counts(
        "status codes",
        sorted(verdict.expected_counts.statuses.items(), key=lambda item: -item[1]),
        verdict.counts.statuses,
        report.counted_by,
    )
    _print_counts(
        "top paths", verdict.expected_counts.top_paths(), verdict.counts.paths, report.counted_by
    )
    if verdict.ok:
        say("nothing was lost, nothing was duplicated, and the counts agree")
    else:
        say("FAILED: " + "; ".join(_complaints(verdict)))


def _print_lines(report: Report) -> None:
    verdict = report.verdict
    table = Table(title="lines", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column("count", justify="right")
    for what, count in (
        ("in", verdict.lines),
        ("acknowledged", verdict.acknowledged),
        ("consumed", verdict.consumed),
        *((f"  by {name}", count) for name, count in sorted(verdict.by_member.items())),
        ("lost", verdict.lost),
        ("duplicated", verdict.duplicated),
    ):
        table.add_row(what, format_count(count))
    role = ", the active controller too" if report.was_controller else ""
    for partition, seconds in sorted(report.standstill_seconds.items()):
        table.add_row(
            f"writes to partition {partition} stood still (node {report.killed_node} killed{role})",
            "for good" if seconds is None else f"{seconds * 1000:,.0f} ms",
        )
    _CONSOLE.print(table)


def _print_counts(
    title: str, expected: list[tuple[str, int]], consumed: Mapping[str, int], counted_by: str
) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", overflow="fold")
    table.add_column("consumed", justify="right")
    table.add_column(counted_by, justify="right")
    for what, count in expected:
        table.add_row(escape(what), format_count(consumed.get(what, 0)), format_count(count))
    _CONSOLE.print(table)


def _complaints(verdict: Verdict) -> list[str]:
    found = []
    if verdict.acknowledged != verdict.lines:
        found.append(f"{verdict.lines - verdict.acknowledged} lines were not acknowledged")
    if verdict.lost:
        found.append(f"{verdict.lost} lines were lost")
    if verdict.duplicated:
        found.append(f"{verdict.duplicated} lines were duplicated")
    if verdict.altered:
        found.append(f"{verdict.altered} lines came out changed")
    if not verdict.counts_agree:
        found.append("the counts differ from those of the file")
    return found
