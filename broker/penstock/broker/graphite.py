"""Metrics for Graphite, beside Prometheus: sent now and then, by a thread of its own."""

from __future__ import annotations

import re
import threading
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.bridge.graphite import GraphiteBridge

from penstock.wire.transport import format_address

log = structlog.get_logger()

_TIMEOUT_S: Final = 5.0


class GraphitePusher:
    """Sends what a registry shows under ``penstock.NAME``, every so often.

    A server that cannot be reached is told of once, and again once it was reached meanwhile; what
    could not be sent is not sent later. Nothing waits for it.
    """

    def __init__(
        self, registry: CollectorRegistry, address: tuple[str, int], interval_s: float, name: str
    ) -> None:
        self._bridge = GraphiteBridge(address, registry=registry, timeout_seconds=_TIMEOUT_S)
        self._address = format_address(*address)
        self._interval_s = interval_s
        self._prefix = "penstock." + re.sub(r"[^A-Za-z0-9_-]", "_", name)
        self._stopping = threading.Event()
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to send."""
        self._thread = threading.Thread(target=self._run, name="graphite", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more. Returns at once: what is under way may end after it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.push()

    def push(self) -> None:
        """Send everything once. Raises nothing."""
        try:
            self._bridge.push(prefix=self._prefix)
        except Exception as error:  # Whatever it is: figures for people must not harm the node.
            if not self._is_failing:
                self._is_failing = True
                log.warning(
                    "metrics are not sent to Graphite",
                    address=self._address,
                    reason=str(error),
                    next_step="start the server, or correct metrics.graphite; the node goes on",
                )
            return
        if self._is_failing:
            self._is_failing = False
            log.info("metrics are sent to Graphite again", address=self._address)
