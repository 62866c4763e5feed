"""Levels of lines for systemd's journal, which else takes all that a service writes for info."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, TextIO

# What sd-daemon(3) has: a number in angle brackets before each line, which the journal takes off.
_PREFIXES: Final = {
    "debug": "<7>",
    "info": "<6>",
    "warning": "<4>",
    "error": "<3>",
    "critical": "<2>",
}


def goes_to_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``stream`` is what systemd said of it: connected to the journal, not redirected."""
    named = environment.get("JOURNAL_STREAM", "")
    if not named:
        return False
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def leveled(text: str, level: str) -> str:
    """``text`` with its level before each of its lines, those of a traceback too."""
    prefix = _PREFIXES.get(level, _PREFIXES["info"])
    return "\n".join(prefix + line if line else line for line in text.split("\n"))
