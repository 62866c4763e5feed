"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_MOST_FITTED_ROWS: Final = 1_000
"""What folds cells to fit the terminal takes half a millisecond for each row."""


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
    right: Sequence[str] = (),
    title: str = "",
) -> None:
    """Print a table; columns named in ``right`` hold numbers and are set to the right.

    A ``title`` stands in a line above it.

    Into a pipe a row is never wrapped or cut, however long it is; nor is any of a long table.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    if title:
        sys.stdout.write(f"{title}\n")
    if sys.stdout.isatty() and len(texts) <= _MOST_FITTED_ROWS:
        sys.stdout.write(_fitted(columns, texts, right))
    else:
        sys.stdout.writelines(_lines(columns, texts, right))
    sys.stdout.flush()


def _fitted(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str]) -> str:
    """The table as wide as the terminal, with cells folded where they must be."""
    # Imported here: it takes longer than all the rest of a command that prints no table.
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - see above.
    from rich.console import Console  # noqa: PLC0415 - see above.
    from rich.table import Table  # noqa: PLC0415 - see above.

    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    # Written by us: rich would take a closed pipe for the end of the program.
    with console.capture() as rendered:
        console.print(table)
    return rendered.get()


def _lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    """The lines of the same table, each row one line, as wide as it must be.

    Made by hand, since rich takes ten seconds for 20,000 rows.
    """
    from rich.cells import cell_len  # noqa: PLC0415 - as above.

    cells = [[" ".join(text.splitlines()) for text in row] for row in rows]
    widths = [
        max([cell_len(title), *(cell_len(row[place]) for row in cells)])
        for place, title in enumerate(columns)
    ]
    blank = " " * (sum(widths) + 3 * len(widths) - 1) + "\n"

    def line(row: Sequence[str]) -> str:
        padded = []
        for title, text, width in zip(columns, row, widths, strict=True):
            space = " " * (width - cell_len(text))
            padded.append(space + text if title in right else text + space)
        return f" {'   '.join(padded)} \n"

    yield blank
    yield line(columns)
    yield f" {'─' * (len(blank) - 3)} \n"
    yield from (line(row) for row in cells)
    yield blank


def escape(text: str) -> str:
    """``text`` with nothing in it that rich would take for markup."""
    return text.replace("[", r"\[")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, (list, tuple)):
        return ",".join(_shown(str(part)) for part in cell)
    return _shown(str(cell))


def _shown(text: str) -> str:
    """``text`` without what a terminal would obey: names are whatever their makers sent."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
        for sign in text
    )


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
