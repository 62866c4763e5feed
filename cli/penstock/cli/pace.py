"""How fast a command that moves many records goes, and how far it is."""

from __future__ import annotations

import sys
import time
from typing import Final

from penstock.cli.errors import report
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import format_count

_TERMINAL_SECONDS: Final = 0.2
_LINE_SECONDS: Final = 5.0
_CLEAR: Final = "\r\x1b[K"
_LOOK_UP_SECONDS: Final = 0.1


class Schedule:
    """When the next record is due at a rate; without one, at once."""

    def __init__(self, rate: float, interrupt: Interrupt) -> None:
        self._rate = rate
        self._interrupt = interrupt
        self._started = time.perf_counter()
        self.behind = 0.0

    def wait_for(self, number: int) -> bool:
        """Wait until the record of this number, from 0 on, is due; False at a stop signal."""
        due = self._started + number / self._rate if self._rate else 0.0
        while not self._interrupt.count:
            left = due - time.perf_counter()
            if left <= 0:
                self.behind = max(self.behind, -left)
                return True
            # In short parts: a first stop signal wakes nobody up who sleeps here.
            time.sleep(min(left, _LOOK_UP_SECONDS))
        return False


class Progress:
    """How far a run is, on standard error: a line that changes on a terminal, else one in 5 s."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LINE_SECONDS
        self._done = 0
        self._started = self._told = time.perf_counter()
        self._told_count = 0

    def advance(self, count: int) -> None:
        """So many records more. Costs a look at the clock."""
        self._done += count
        now = time.perf_counter()
        if now - self._told < self._every:
            return
        rate = (self._done - self._told_count) / (now - self._told)
        self._told, self._told_count = now, self._done
        text = (
            f"{self._what} {format_count(self._done)} of {format_count(self._total)} records "
            f"({rate:,.0f}/s)"
        )
        if self._terminal:
            _write(_CLEAR + text)
        else:
            report(text)

    def end(self) -> None:
        """Take the line away."""
        if self._terminal:
            _write(_CLEAR)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        # Nobody looks any more; the run is not for the progress line.
        return
