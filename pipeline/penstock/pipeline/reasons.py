"""What Spark says of a failure, without the stacks of Java and Python around it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_PYTHONS: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception): .*)")
_END: Final = "=== Streaming Query"
_STACKS: Final = ("JVM stack", "Driver stack", "at ")


def reason_of(text: str) -> str:
    """Why it failed, in a line: by Python's last exception where there is one, else by Spark."""
    lines = [line.strip() for line in text.partition(_END)[0].splitlines()]
    if (reason := pythons_reason(lines)) is not None:
        return reason
    cut = next((i for i, line in enumerate(lines) if line.startswith(_STACKS)), None)
    return " ".join(filter(None, lines[:cut]))


def pythons_reason(lines: Iterable[str]) -> str | None:
    """The last exception of Python in these lines, if any, by its class without the module."""
    found = [match[1] for line in lines if (match := _PYTHONS.fullmatch(line))]
    return found[-1] if found else None
