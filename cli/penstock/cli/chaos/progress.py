"""What a run shows while it goes on: one line that changes, or a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.cli.errors import report

if TYPE_CHECKING:
    from penstock.chaos.live import Status
    from penstock.chaos.nemeses import Fault

_EVERY_S: Final = 5.0


class Shown:
    """An onlooker that writes to standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_terminal: Final = sys.stderr.isatty()
        self._quiet: Final = quiet
        self._next_s = 0.0
        self._width = 0
        self._began: list[Fault] = []
        """Since the last line."""

    def phase(self, name: str) -> None:
        """Another phase has begun."""
        self._clear()
        if not self._quiet:
            report(f"{name} ...")

    def status(self, status: Status) -> None:
        """How the load goes."""
        if self._quiet:
            return
        self._began += status.began
        line = describe(status, () if self._is_terminal else self._began)
        if self._is_terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)
        elif status.elapsed_s >= self._next_s:
            self._next_s = status.elapsed_s + _EVERY_S
            self._began.clear()
            report(line)

    def _clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0


def describe(status: Status, began: Sequence[Fault] = ()) -> str:
    """One line on how it stands, with the faults that ``began`` since the last line."""
    latency = "-"
    if status.p50_ms is not None and status.p99_ms is not None:
        latency = f"p50 {status.p50_ms:.0f} ms, p99 {status.p99_ms:.0f} ms"
    fault = "no fault"
    if status.fault is not None:
        fault = _name(status.fault)
    over = began[:-1] if status.fault is not None else began
    if over:
        fault += f"; since the last line {', '.join(map(_name, over))}"
    return (
        f"{status.elapsed_s:5.1f} of {status.duration_s:g} s  "
        f"{status.records_a_second:8,.0f} records/s  {latency}  "
        f"failed {status.failed}, ambiguous {status.ambiguous}  "
        f"anomalies {status.anomalies}  [{fault}]"
    )


def _name(fault: Fault) -> str:
    return f"{fault.kind} at {fault.target}"
