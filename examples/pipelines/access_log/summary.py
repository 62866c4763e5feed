"""What the demo of the queries shows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from batch import Expected
from outputs import Comparison
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.demo.report import say
from penstock.cli.output import escape, format_count

_CONSOLE: Final = Console(highlight=False)
_TOP: Final = 3
_WHAT: Final = {
    "requests": "a line that was read",
    "dead-letters": "a line that is none",
    "minutes": "a minute of a path",
    "sessions": "a visit of a client",
    "paths": "totals of a path",
    "alerts": "a client's many 404s",
}


def show(found: Sequence[Comparison], expected: Expected) -> None:
    """A table of what was written, some of what is in it, and in a last line the verdict."""
    table = Table(title="rows", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("output", "a row is"):
        table.add_column(column, no_wrap=True)
    for column in ("by Spark", "by Python", "lost", "surplus"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        counts = (one.found, one.expected, len(one.missing), len(one.surplus))
        table.add_row(one.name, _WHAT[one.name], *map(format_count, counts))
    _CONSOLE.print(table)
    wrong = [one for one in found if not one.agrees]
    if not wrong:
        _highlight(expected)
    for one in wrong:
        for what, rows in (("lost", one.missing), ("surplus", one.surplus)):
            for row in rows[:_TOP]:
                _CONSOLE.print(escape(f"{one.name}: {what}: {row}"), soft_wrap=True)
    if wrong:
        say(f"FAILED: {', '.join(one.name for one in wrong)} differ from what the lines say")
    else:
        say("no row is lost, none is there twice: Spark and plain Python agree")


def _highlight(expected: Expected) -> None:
    busiest = sorted(expected.paths.values(), key=lambda row: -row["requests"])[:_TOP]
    longest = sorted(expected.sessions, key=lambda row: row["begun"] - row["ended"])[:_TOP]
    worst = sorted(expected.alerts.values(), key=lambda row: -row["missing"])[:_TOP]
    _say("busiest paths", [f"{row['path']} ({row['requests']:,})" for row in busiest])
    _say("longest sessions", [_visit(row) for row in longest])
    _say(
        "most 404s",
        [f"{row['client']} ({row['missing']} since {row['since']:%d %b %H:%M})" for row in worst],
    )
    _say(
        "dead letters",
        [letter.line.decode(errors="replace")[:90] for letter in expected.dead_letters[:_TOP]],
    )


def _visit(row: dict[str, Any]) -> str:
    hours = (row["ended"] - row["begun"]).total_seconds() / 3600
    return f"{row['client']} ({row['requests']:,} requests in {hours:.0f} h)"


def _say(what: str, entries: Sequence[str]) -> None:
    if entries:
        _CONSOLE.print(escape(f"{what}: {', '.join(entries)}"), soft_wrap=True)
