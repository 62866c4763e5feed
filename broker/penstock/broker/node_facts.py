"""What a node tells of itself to who looks after it: software, clock, disks, process, metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

from penstock.broker.config import NodeConfig
from penstock.broker.storage.data_directory import DataDirectory
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import node_pb2
from penstock.wire import codec

DISK_S: Final = 2.0
"""A disk that takes longer for a small fsync is reported as one that did not answer."""
_TRIES: Final = 3
_WRITTEN_BYTES: Final = 4_096
_UNKNOWN: Final = -1
_STARTED_MS: Final = time.time_ns() // 1_000_000  # As good as: this is imported at start.


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A disk as it was found: -1 stands for what could not be found out."""

    total_bytes: int = _UNKNOWN
    free_bytes: int = _UNKNOWN
    fsync_us: int = _UNKNOWN


class DiskProbe:
    """Measures one directory's disk, off the event loop and never twice at once.

    In a thread of its own that nothing waits for at the end: a disk may hang for good.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._measuring: asyncio.Future[DiskFacts] | None = None

    async def measure(self, timeout_s: float = DISK_S) -> DiskFacts:
        """What is found, or what is known to be unknown after so long. On one event loop."""
        if self._measuring is None or self._measuring.done():
            self._measuring = self._begin()
        done, _ = await asyncio.wait([self._measuring], timeout=timeout_s)
        return self._measuring.result() if done else DiskFacts()

    def _begin(self) -> asyncio.Future[DiskFacts]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[DiskFacts] = loop.create_future()

        def work() -> None:
            facts = measure_disk(self.path)
            with suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(found.set_result, facts)

        threading.Thread(target=work, name="disk probe", daemon=True).start()
        return found


def measure_disk(path: Path) -> DiskFacts:
    """Room, and the median time of a few small fsyncs. The file has no name: none is left behind.

    What has an error is told as unknown; blocks as long as the disk does.
    """
    total = free = _UNKNOWN
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        total, free = usage.total, usage.free
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            times = [_fsync_us(file.fileno()) for _ in range(_TRIES)]
    except OSError:
        return DiskFacts(total, free)
    return DiskFacts(total, free, int(statistics.median(times)))


def _fsync_us(descriptor: int) -> int:
    os.write(descriptor, bytes(_WRITTEN_BYTES))
    began_ns = time.monotonic_ns()
    os.fsync(descriptor)
    return (time.monotonic_ns() - began_ns) // 1_000


class NodeFacts:
    """Answers for one node, whichever of its ports is asked. Used on one event loop."""

    def __init__(self, config: NodeConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._registry = registry
        self._homes: dict[Path, DataDirectory] = {}
        self._probes: list[DiskProbe] = []
        self._rendering = asyncio.Lock()
        self.watch(())

    def watch(self, homes: Sequence[DataDirectory]) -> None:
        """Tell of these too, which a broker writes to, beside a controller's directory."""
        self._homes = {home.path: home for home in homes}
        paths = [*self._homes]
        if "controller" in self._config.roles and self._config.metadata_directory not in paths:
            paths.append(self._config.metadata_directory)
        self._probes = [DiskProbe(path) for path in paths]

    async def read_metrics(self) -> node_pb2.ReadMetricsResponse:
        """What /metrics answers. One at a time: it takes a thread's time for each series."""
        async with self._rendering:
            text = await asyncio.to_thread(generate_latest, self._registry)
        return node_pb2.ReadMetricsResponse(node_id=self._config.node_id, text=text.decode())

    async def describe(self) -> node_pb2.DescribeNodeResponse:
        """Everything, freshly found out, within DISK_S."""
        disks = await asyncio.gather(*(probe.measure() for probe in self._probes))
        descriptors, limit = _descriptors()
        return node_pb2.DescribeNodeResponse(
            node_id=self._config.node_id,
            version=importlib.metadata.version("penstock"),
            min_metadata_version=1,
            max_metadata_version=METADATA_VERSION,
            codec_compiled=codec.IS_COMPILED,
            roles=sorted(self._config.roles),
            clock_ms=time.time_ns() // 1_000_000,
            started_ms=_STARTED_MS,
            directories=[
                node_pb2.NodeDirectory(
                    path=str(probe.path),
                    total_bytes=disk.total_bytes,
                    free_bytes=disk.free_bytes,
                    fsync_us=disk.fsync_us,
                    failure=self._failure(probe.path),
                )
                for probe, disk in zip(self._probes, disks, strict=True)
            ],
            open_descriptors=descriptors,
            max_descriptors=limit,
            resident_bytes=_resident_bytes(),
            http_address=self._config.metrics_listen,
        )

    def _failure(self, path: Path) -> str:
        home = self._homes.get(path)
        return "" if home is None or home.failure is None else home.failure.message


def _descriptors() -> tuple[int, int]:
    """How many are open, and how many may be."""
    try:
        import resource  # noqa: PLC0415 - not on every system.

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), limit
    except (ImportError, OSError):
        return _UNKNOWN, _UNKNOWN


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return _UNKNOWN
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
