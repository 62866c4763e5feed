"""A node as a service of a manager that wants to be told, as systemd does of ``Type=notify``."""

from __future__ import annotations

import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


class Manager:
    """Takes down what the node says."""

    def __init__(self, address: str) -> None:
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while message := self._socket.recv(8192):
            self.heard += message.decode().split("\n")

    @property
    def states(self) -> list[str]:
        return [word for word in self.heard if word != "WATCHDOG=1"]

    @property
    def pats(self) -> int:
        return self.heard.count("WATCHDOG=1")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as short:  # Addresses have 108 bytes at most.
        address = str(Path(short) / "notify")
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "600000")
        with closing(Manager(address)) as made:
            yield made


def test_start_stop_and_how_it_is_in_between(manager: Manager, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    first = cluster.nodes[1]
    try:
        first.start()
        # It is through its start without the others: whoever waits for it goes on to start them.
        wait_until(lambda: "READY=1" in manager.heard, "it has started")
        joining = "STATUS=the controller knows no leader of the quorum"
        wait_until(
            lambda: any(word.startswith(joining) for word in manager.heard), "it says what it lacks"
        )
        cluster.nodes[2].start()
        cluster.nodes[3].start()
        cluster.wait_ready()
        wait_until(lambda: "STATUS=the node serves" in manager.heard, "they serve")
        before = manager.pats
        wait_until(lambda: manager.pats > before + 3, "their loops turn")
        manager.heard.clear()
        assert first.stop() == 0
        wait_until(lambda: "STOPPING=1" in manager.heard, "its stop is told")
    finally:
        cluster.close()


def test_a_start_that_takes_long_is_ended_when_it_is_to_be(
    manager: Manager, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, 1)
    node = cluster.nodes[1]
    node.module = "tests.integration.broker.run_long_recovery"
    try:
        node.start()
        starts = "STATUS=the node starts: it opens its directories and recovers its logs"
        wait_until(lambda: starts in manager.heard, "it starts")
        wait_until(lambda: "controller listens" in node.log.read_text(), "it is in the middle")
        assert node.stop() == 0
    finally:
        cluster.close()
    wait_until(lambda: "STATUS=the node stops" in manager.heard, "its stop is told")
    assert "READY=1" not in manager.heard
    assert not manager.pats
    # The next start recovers what this one has not.
    node.module = "penstock.broker"
    try:
        cluster.start()
    finally:
        cluster.close()


def test_why_it_ended_stays_to_be_read(manager: Manager, tmp_path: Path) -> None:
    node = Cluster(tmp_path, 1).nodes[1]
    node.config.write_text(node.config.read_text().replace("node.id = 1", "node.id = 7"))
    node.start()
    assert node.process is not None
    assert node.process.wait(30) == 2
    wait_until(
        lambda: any(word.startswith("STATUS=") and "node 1" in word for word in manager.heard),
        "it says why",
    )


def test_one_that_a_watchdog_ends_says_where_it_stood(manager: Manager, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    node = cluster.nodes[1]
    try:
        cluster.start()
        assert node.process is not None
        node.signal(signal.SIGABRT)
        assert node.process.wait(20) == -signal.SIGABRT
    finally:
        cluster.close()
    log = node.log.read_text()
    assert "Fatal Python error: Aborted" in log
    assert re.search(r'File ".*penstock/broker/__main__\.py", line \d+ in run', log)
