"""Metrics go to Graphite, and a server that is not there is told of once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client import CollectorRegistry, Gauge

from penstock.broker.graphite import GraphitePusher
from penstock.wire.transport import parse_address
from tests.support import wait_until


class Server:
    """Takes what is sent to a port."""

    def __init__(self, port: int = 0) -> None:
        self.text = ""
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65_536):
                    self.text += data.decode()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("penstock_groups", "Of this test", ["state"], registry=registry).labels("stable").set(4)
    return registry


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_it_is_sent_every_so_often(registry: CollectorRegistry, server: Server) -> None:
    pusher = GraphitePusher(registry, ("127.0.0.1", server.port), 0.05, "node-1")
    pusher.start()
    try:
        wanted = "penstock.node-1.penstock_groups.state.stable 4.0 "
        wait_until(lambda: server.text.count(wanted) >= 2, "it was sent twice", 10)
    finally:
        pusher.stop()


def test_an_absent_server_is_told_of_once_each_time(registry: CollectorRegistry) -> None:
    first = Server()
    first.close()
    pusher = GraphitePusher(registry, parse_address(f"127.0.0.1:{first.port}"), 60, "node-1")
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            pusher.push()
        second = Server(first.port)
        pusher.push()
        pusher.push()
        second.close()
        pusher.push()
    assert [line["event"] for line in lines] == [
        "metrics are not sent to Graphite",
        "metrics are sent to Graphite again",
        "metrics are not sent to Graphite",
    ]
    assert lines[0]["log_level"] == "warning"
    assert f"127.0.0.1:{first.port}" in lines[0]["address"]
    assert "the node goes on" in lines[0]["next_step"]


def test_a_fault_of_a_metric_harms_nothing(server: Server) -> None:
    broken = CollectorRegistry()
    Gauge("broken", "Fails", registry=broken).set_function(lambda: 1 / 0)
    pusher = GraphitePusher(broken, ("127.0.0.1", server.port), 60, "node-1")
    with structlog.testing.capture_logs() as lines:
        pusher.push()
    assert [line["event"] for line in lines] == ["metrics are not sent to Graphite"]
