"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Sequence

_WIDE = 10_000


class OutputFormat(enum.StrEnum):
    """The two shapes of a command's data."""

    TABLE = "table"
    JSON = "json"


def print_json(value: object) -> None:
    """Print one JSON document on one line, so that lines can be read as they come."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    right: Sequence[str] = (),
) -> None:
    """Print a table; columns named in ``right`` hold numbers and are set to the right.

    Into a pipe a row is never wrapped or cut, however long it is.
    """
    # Imported here: it takes longer than all the rest of a command that prints no table.
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - see above.
    from rich.console import Console  # noqa: PLC0415 - see above.
    from rich.table import Table  # noqa: PLC0415 - see above.

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(escape(_text(cell)) for cell in row))
    # Written by us: rich would take a closed pipe for the end of the program.
    with console.capture() as rendered:
        console.print(table)
    sys.stdout.write(rendered.get())
    sys.stdout.flush()


def escape(text: str) -> str:
    """``text`` with nothing in it that rich would take for markup."""
    return text.replace("[", r"\[")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, (list, tuple)):
        return ",".join(str(part) for part in cell)
    return str(cell)


def format_count(count: int) -> str:
    """A count with its thousands apart."""
    return f"{count:,}"


def format_bytes(count: float) -> str:
    """Bytes in the unit that reads best: ``512 B``, ``2.37 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")
