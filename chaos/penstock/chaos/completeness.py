"""Whether a stored history is the one that its run wrote: an end that is cut off proves nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.chaos.history import History
from penstock.chaos.verdict import Valid, Verdict

CHECKER: Final = "history"
"""What the verdict on it is called."""
FIGURE: Final = "history"
"""Where a judgement's figures keep what ``seal`` says."""


def seal(path: Path, history: History) -> dict[str, Any]:
    """What tells the file of this history from any other."""
    return {"events": len(history.events), "sha256": _digest(path)}


def doubts(path: Path, history: History, sealed: Mapping[str, Any]) -> list[Verdict]:
    """A verdict that nothing is certain, where the file is another one than was sealed."""
    events, found = sealed["events"], len(history.events)
    if found != events:
        reason = f"{path} has {found:,} events, and the run wrote {events:,}"
    elif _digest(path) != sealed["sha256"]:
        reason = f"{path} is not what the run wrote, though it has as many events"
    else:
        return []
    return [Verdict(CHECKER, Valid.UNKNOWN, found, reason=reason)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
