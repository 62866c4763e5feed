"""What Spark takes of the machine: the CPU seconds and the memory of its processes.

In local mode this process is the driver's Python. Below it is one Java, which is driver and
executor at once, and below that are the Python processes that Spark starts: those in which tasks
run, and those beside the driver that plan what is read and commit what is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import psutil

_LOOK_S: Final = 0.5
_MB: Final = 1e6


class Watch(Protocol):
    """Looks when it is told."""

    def look(self) -> None:
        """Look now."""


W = TypeVar("W", bound=Watch)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory in MB. What processes share is split among them (PSS), where the system tells it."""

    java_mb: float
    driver_python_mb: float
    workers_mb: float
    workers: int
    """How many Python processes there are below Java."""

    @property
    def total_mb(self) -> float:
        """Of all of them."""
        return self.java_mb + self.driver_python_mb + self.workers_mb


def processes(nodes: Sequence[int]) -> Iterator[psutil.Process]:
    """This one and all below it, but the nodes of the cluster."""
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        if process.pid not in nodes:
            yield process


class CpuWatch:
    """What Spark's processes use from now on. It never shrinks when one of them ends.

    What a process has used is gone with it, and is found at its parent only once that has waited
    for it. So each counts for itself, as it was when it was last looked at.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._used_s: dict[psutil.Process, float] = {}
        self._began_s = 0.0
        self._began_s = self.seconds()

    def look(self) -> None:
        """Look now."""
        for process in processes(self._nodes):
            with suppress(psutil.NoSuchProcess):
                self._used_s[process] = sum(process.cpu_times()[:2])

    def seconds(self) -> float:
        """CPU seconds since the beginning."""
        self.look()
        return sum(self._used_s.values()) - self._began_s


def footprint(nodes: Sequence[int]) -> Footprint:
    """What Spark's processes take now."""
    java_mb = here_mb = workers_mb = 0.0
    workers = 0
    here = psutil.Process().pid
    for process in processes(nodes):
        with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            size_mb = memory_mb(process)
            if process.pid == here:
                here_mb = size_mb
            elif process.name() == "java":
                java_mb += size_mb
            else:
                workers_mb += size_mb
                workers += 1
    return Footprint(java_mb, here_mb, workers_mb, workers)


def memory_mb(process: psutil.Process) -> float:
    """Its proportional set size; where the system does not tell it, its resident set size."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / _MB
    except (FileNotFoundError, PermissionError):
        pass
    return float(process.memory_info().rss) / _MB


class MemoryWatch:
    """Looks now and then, and keeps what it saw when the sum was largest."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self.peak = footprint(nodes)

    def look(self) -> None:
        """Look now."""
        found = footprint(self._nodes)
        if found.total_mb > self.peak.total_mb:
            self.peak = found


@contextmanager
def watching(nodes: Sequence[int]) -> Iterator[MemoryWatch]:
    """Look twice a second while the block runs."""
    with _looking(MemoryWatch(nodes)) as watch:
        yield watch


@contextmanager
def watching_cpu(nodes: Sequence[int]) -> Iterator[CpuWatch]:
    """Look twice a second while the block runs."""
    with _looking(CpuWatch(nodes)) as watch:
        yield watch


@contextmanager
def _looking(watch: W) -> Iterator[W]:
    over = threading.Event()

    def run() -> None:
        while not over.wait(_LOOK_S):
            watch.look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()
        watch.look()
