"""Words of messages that depend on a number."""

from __future__ import annotations

from typing import Final

_PLURAL_VERBS: Final = {"": "", "was": "were", "is": "are"}


def counted(number: int, noun: str, verb: str = "") -> str:
    """``number`` with its noun and verb: "1 record was", "2 records were".

    ``noun`` and ``verb`` (nothing, "was" or "is") are given in the singular.
    """
    if number == 1:
        return f"1 {noun} {verb}".rstrip()
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending} {_PLURAL_VERBS[verb]}".rstrip()
