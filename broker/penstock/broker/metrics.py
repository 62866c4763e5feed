"""Prometheus metrics of a broker. Label children are made once and kept."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, start_http_server

from penstock.v1 import log_pb2
from penstock.wire.errors import ERRORS, AddressInUseError, ErrorCode, PenstockError
from penstock.wire.transport import parse_address


class BrokerMetrics:
    """What a broker counts. Safe on any thread; a count costs about a microsecond."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self._produced_bytes = Counter(
            "penstock_produced_bytes", "Bytes of record batches appended", registry=self.registry
        )
        self._fetched_bytes = Counter(
            "penstock_fetched_bytes", "Bytes of record batches served", registry=self.registry
        )
        refused = Counter(
            "penstock_refused_batches",
            "Produce requests refused for one partition, by error",
            ["error"],
            registry=self.registry,
        )
        self._refused = {code: refused.labels(error=code.name) for code in ERRORS}
        self._controller_refused = Counter(
            "penstock_controller_refusals",
            "What this node refused as the active controller, by command and error: one of each "
            "partition of a command about partitions",
            ["command", "error"],
            registry=self.registry,
        )

    def produced(self, size_bytes: int) -> None:
        """Count what was appended and acknowledged."""
        self._produced_bytes.inc(size_bytes)

    def refused(self, error: PenstockError) -> None:
        """Count a refusal."""
        self._refused[error.code].inc()

    def controller_refused(self, command: str, code: int) -> None:
        """Count what the active controller in this process refused."""
        name = ErrorCode(code).name
        self._controller_refused.labels(command=command or "none", error=name).inc()

    def fetched(self, response: log_pb2.FetchResponse) -> None:
        """Count what was served."""
        self._fetched_bytes.inc(sum(len(entry.records) for entry in response.partitions))

    def serve(self, address: str) -> None:
        """Offer the metrics over HTTP in a thread of its own.

        Raises AddressInUseError that names the address when nothing can listen there.
        """
        host, port = parse_address(address)
        try:
            start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: {error.strerror}; change metrics.listen or stop the "
                "other process"
            ) from None
