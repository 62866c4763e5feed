"""Prometheus metrics of the process: what it is, what it uses, and how punctual its loop is."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.broker.durations import Durations
from penstock.wire import codec

REVISION: Final = "PENSTOCK_REVISION"
"""The environment variable in which an image says which commit it was built from."""

_LOOK_S: Final = 0.25
_ESTABLISHED: Final = rb"^ *\d+: [0-9A-F]+:%04X [0-9A-F]+:[0-9A-F]{4} 01 "
"""A line of these tables: the local address ends in the port, and 01 is the state."""
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


class ProcessMetrics(Collector):
    """What is known of any process, beside the library's ``process_*``. Used on one event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        ProcessCollector(registry=registry)
        build = Gauge(
            "penstock_build_info",
            "1, with the software that this node runs",
            ["version", "revision", "codec"],
            registry=registry,
        )
        build.labels(
            version=_version(),
            revision=os.environ.get(REVISION, "unknown"),
            codec="compiled" if codec.IS_COMPILED else "reference",
        ).set(1)
        self._node = Gauge(
            "penstock_node_info",
            "1, with who this node is",
            ["node", "cluster", "roles", "rack"],
            registry=registry,
        )
        self._delays = Durations()
        self._pauses = Durations()
        self._ports: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gc_began_s = 0.0
        registry.register(self)

    def about(self, node_id: int, cluster_id: str, roles: Iterable[str], rack: str) -> None:
        """Say who the node is."""
        self._node.labels(
            node=str(node_id), cluster=cluster_id, roles=",".join(sorted(roles)), rack=rack
        ).set(1)

    def listens(self, listener: str, port: int) -> None:
        """Show how many connections there are to this port."""
        if port:
            self._ports[listener] = port

    def start(self) -> None:
        """Begin to look how late the running loop's timers are, and how long collections take."""
        self._loop = asyncio.get_running_loop()
        self._look_at(self._loop.time() + _LOOK_S)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Look no more. Safe to call without a start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def _look_at(self, due_s: float) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_at(due_s, self._look, due_s)

    def _look(self, due_s: float) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        self._delays.observe(max(0.0, now_s - due_s))
        self._look_at(now_s + _LOOK_S)

    def _collected(self, phase: str, _info: Mapping[str, int]) -> None:
        # Collections do not overlap: whichever thread has one, holds up all others.
        if phase == "start":
            self._gc_began_s = perf_counter()
        else:
            self._pauses.observe(perf_counter() - self._gc_began_s)

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families()

    def collect(self) -> Iterator[Metric]:
        """The families as things are now."""
        delays, pauses, connections = self._families()
        self._delays.add_to(delays, ())
        self._pauses.add_to(pauses, ())
        for listener, count in sorted(count_connections(self._ports).items()):
            connections.add_metric((listener,), count)
        yield from (delays, pauses, connections)

    def _families(
        self,
    ) -> tuple[HistogramMetricFamily, HistogramMetricFamily, GaugeMetricFamily]:
        return (
            HistogramMetricFamily(
                "penstock_event_loop_delay_seconds",
                "How late the event loop's timers fire, looked at four times a second",
            ),
            HistogramMetricFamily(
                "penstock_gc_pause_seconds", "How long Python's garbage collections took"
            ),
            GaugeMetricFamily(
                "penstock_connections",
                "TCP connections to this node's ports (on Linux)",
                labels=["listener"],
            ),
        )


def count_connections(ports: Mapping[str, int]) -> dict[str, int]:
    """Established connections to these ports of this machine, by listener; none where unknown."""
    tables = []
    for table in _TABLES:
        try:
            tables.append(table.read_bytes())
        except OSError:
            continue
    if not tables or not ports or not sys.platform.startswith("linux"):
        return {}
    return {
        listener: sum(len(re.findall(_ESTABLISHED % port, text, re.MULTILINE)) for text in tables)
        for listener, port in ports.items()
    }


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
