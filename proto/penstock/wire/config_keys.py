"""Keys of configs: what every table of them is made of."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1
MAX_SHOWN_CHARS: Final = 100
"""So much of a mistake is repeated to whoever made it."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key: ``parse`` takes the text to a value or raises ValueError saying what is allowed."""

    key: str
    default: str
    documentation: str
    parse: Callable[[str], object]


def _ascii(text: str) -> str:
    """A newer Python knows more of the world's digits: controllers would not all agree on them."""
    if not text.isascii():
        raise ValueError(text)
    return text


def integer(low: int, high: int = MAX_INT64) -> Callable[[str], int]:
    """Takes whole numbers within these bounds."""

    def parse(text: str) -> int:
        try:
            value = int(_ascii(text))
        except ValueError:
            raise ValueError("a whole number is wanted") from None
        if not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high} is wanted")
        return value

    return parse


def ratio(text: str) -> float:
    """Takes numbers from 0 to 1."""
    try:
        value = float(_ascii(text))
    except ValueError:
        raise ValueError("a number from 0 to 1 is wanted") from None
    if not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1 is wanted")
    return value


def boolean(text: str) -> bool:
    """Takes true and false."""
    if text not in ("true", "false"):
        raise ValueError("true or false is wanted")
    return text == "true"


def one_of(*allowed: str) -> Callable[[str], str]:
    """Takes these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is wanted")
        return text

    return parse


def suggest(word: str, known: list[str]) -> str:
    """A phrase that names the known word nearest to ``word``, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
