"""Words of messages that depend on a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SHOWN: Final = 3
"""How many of many a message names."""
_PLURAL_VERBS: Final = {"": "", "was": "were", "is": "are"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """``number`` with its noun and verb: "1 record was", "2 records were".

    ``noun`` and ``verb`` (nothing, "was" or "is") are given in the singular.
    """
    if number == 1:
        return f"1 {noun} {verb}".rstrip()
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending} {_PLURAL_VERBS[verb]}".rstrip()


def some(names: Sequence[str], number: int) -> str:
    """The first SHOWN of ``number`` things with these names: "a, b, c and 4 more"."""
    shown = ", ".join(names[:SHOWN])
    more = number - min(len(names), SHOWN)
    return f"{shown} and {more} more" if more > 0 else shown
