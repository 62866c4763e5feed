"""Patterns of dates and times, as Java has them, put together from parts that no time zone moves.

Spark's own ``date_format`` goes by the session's time zone, and there an hour a year comes twice
and another one never. Connect goes by UTC.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.pipeline.errors import TransformError

_TOKEN: Final = re.compile(
    r"'(?P<quoted>(?:[^']|'')*)'|(?P<run>([A-Za-z])\3*)|(?P<plain>[^A-Za-z'])"
)
_KNOWN: Final = {
    "y": (1, 2, 4), "M": (1, 2), "d": (1, 2), "H": (1, 2), "m": (1, 2), "s": (1, 2),
    "S": (1, 2, 3, 4, 5, 6), "X": (1, 2, 3),
}  # fmt: skip


def parse_pattern(pattern: str) -> list[tuple[str, int] | str]:
    """The parts of a pattern: (letter, how many) for what a time fills in, text for what stays.

    Raises TransformError for letters beyond y M d H m s S X: of these alone it is plain what
    they mean in every language.
    """
    parts: list[tuple[str, int] | str] = []
    at = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None:
            raise TransformError(f"'{pattern}' has a quote without end; next: close it")
        at = found.end()
        if (run := found["run"]) is not None:
            if len(run) not in _KNOWN.get(run[0], ()):
                raise TransformError(
                    f"'{pattern}': '{run}' is not known here; next: write yyyy MM dd HH mm ss S X, "
                    "and put text between '…'"
                )
            parts.append((run[0], len(run)))
        elif (text := found["quoted"]) is not None:
            # Two quotes are one, within quotes and outside of them.
            parts.append(text.replace("''", "'") or "'")
        else:
            parts.append(found["plain"])
    return parts


def has_zone(pattern: str) -> bool:
    """Whether text by this pattern says its own offset from UTC."""
    return any(isinstance(part, tuple) and part[0] == "X" for part in parse_pattern(pattern))
