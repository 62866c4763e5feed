"""What is known of a run while it runs, for whoever looks on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.chaos.nemeses import Fault


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a run. Rates and latencies are of the time since the look before."""

    phase: str
    elapsed_s: float
    duration_s: float
    records: int
    records_a_second: float
    ok: int
    failed: int
    ambiguous: int
    p50_ms: float | None
    p99_ms: float | None
    fault: Fault | None
    faults_done: int
    anomalies: int
    """Records that readers found damaged, or written by nobody; the rest is found by judging."""
    began: Sequence[Fault] = ()
    """Faults that began since the look before."""


class Onlooker(Protocol):
    """Hears of a run. Called by the runner's thread alone."""

    def phase(self, name: str) -> None:
        """Another phase has begun."""
        ...

    def status(self, status: Status) -> None:
        """Twice a second or so, while there is load."""
        ...


class Nobody:
    """Looks away."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def status(self, status: Status) -> None:
        """Nothing."""


class Gauge:
    """Adds up what workers and the faults' thread say. Thread-safe."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s: Final = duration_s
        self._lock: Final = threading.Lock()
        self._totals = dict.fromkeys(("ok", "fail", "info", "records", "damaged"), 0)
        self._latencies_ms: list[float] = []
        self._fault: Fault | None = None
        self._faults_done = 0
        self._began: list[Fault] = []
        self._last_records = 0
        self._last_s = 0.0

    def add(self, progress: Mapping[str, Any]) -> None:
        """A worker's progress."""
        with self._lock:
            for name in self._totals:
                self._totals[name] += progress[name]
            self._latencies_ms += progress["latencies_ms"]

    def fault(self, fault: Fault | None) -> None:
        """A fault begins, or none holds any more."""
        with self._lock:
            self._faults_done += self._fault is not None and fault is None
            self._fault = fault
            if fault is not None:
                self._began.append(fault)

    def look(self, phase: str, elapsed_s: float) -> Status:
        """How it stands."""
        with self._lock:
            latencies = sorted(self._latencies_ms)
            self._latencies_ms = []
            records = self._totals["records"]
            since = elapsed_s - self._last_s
            rate = (records - self._last_records) / since if since > 0 else 0.0
            self._last_records, self._last_s = records, elapsed_s
            began, self._began = self._began, []
            return Status(
                phase,
                elapsed_s,
                self._duration_s,
                records,
                rate,
                self._totals["ok"],
                self._totals["fail"],
                self._totals["info"],
                percentile(latencies, 50),
                percentile(latencies, 99),
                self._fault,
                self._faults_done,
                self._totals["damaged"],
                began,
            )


def percentile(ordered: list[float], percent: float) -> float | None:
    """Of numbers in order, by nearest rank; None of nothing."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
