"""Probes of real nodes: from the first moment of a start to the stop, and under garbage."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AdminClient
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.support import wait_until

pytestmark = pytest.mark.integration


class Probed(Cluster):
    """Nodes with an HTTP port each."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        super().__init__(directory, count)
        self.http = dict(zip(self.nodes, free_ports(count), strict=True))
        for node_id, port in self.http.items():
            with self.nodes[node_id].config.open("a") as config:
                config.write(f'metrics.listen = "127.0.0.1:{port}"\n')

    def get(self, node_id: int, path: str) -> tuple[int, str]:
        """The status and the text; 0 while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http[node_id], timeout=15)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def can_roll(self, node_id: int) -> dict[str, Any]:
        status, text = self.get(node_id, "/can-roll")
        told: dict[str, Any] = json.loads(text)
        assert status == (200 if told["can_roll"] else 503)
        assert told["can_roll"] == (not told["reasons"])
        return told


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Probed]:
    cluster = Probed(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def test_probes_follow_a_node_through_its_life(cluster: Probed) -> None:
    cluster.nodes[1].start()
    # Alone it can have no leader: it has started, and is not ready.
    wait_until(lambda: cluster.get(1, "/startupz")[0] == 200, "node 1 has started", 30)
    assert cluster.get(1, "/livez") == (200, "ok\n")
    status, why = cluster.get(1, "/readyz")
    assert (status, "knows no leader" in why, "registered" in why) == (503, True, True)
    assert not cluster.can_roll(1)["can_roll"]
    cluster.start()
    for node_id in cluster.nodes:
        wait_until(lambda n=node_id: cluster.get(n, "/readyz")[0] == 200, "it is ready", 30)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("orders", 3, 3)
    for node_id in cluster.nodes:
        wait_until(lambda n=node_id: cluster.can_roll(n)["can_roll"], "it may be stopped", 30)

    cluster.nodes[3].kill()
    wait_until(lambda: not cluster.can_roll(1)["can_roll"], "3 is missed", 30)

    def reasons() -> str:
        return " ".join(cluster.can_roll(1)["reasons"])

    wait_until(lambda: "min.insync.replicas" in reasons(), "its partitions are short", 30)
    wait_until(lambda: "controller 3 does not answer" in reasons(), "so is the quorum", 30)
    assert cluster.get(1, "/readyz")[0] == 200, "what other nodes lack is no matter of this one"

    cluster.nodes[3].start()
    cluster.wait_ready()
    wait_until(lambda: cluster.can_roll(1)["can_roll"], "3 is back and in sync", 30)
    assert cluster.nodes[1].stop() == 0
    assert cluster.get(1, "/livez")[0] == 0


def test_probes_are_answered_while_logs_are_recovered(cluster: Probed) -> None:
    late = cluster.nodes[3]
    late.module = "tests.integration.broker.run_long_recovery"
    for node in cluster.nodes.values():
        node.start()
    wait_until(lambda: cluster.get(3, "/livez")[0] == 200, "its port is open", 30)
    wait_until(lambda: cluster.get(1, "/startupz")[0] == 200, "node 1 has started", 30)
    for path in ("/startupz", "/readyz"):
        status, why = cluster.get(3, path)
        assert (status, "recovers its logs" in why) == (503, True)
    assert "recovers its logs" in str(cluster.can_roll(3)["reasons"])
    assert cluster.get(3, "/metrics")[0] == 200
    (late.directory / "recovered").touch()
    cluster.wait_ready()
    wait_until(lambda: cluster.get(3, "/readyz")[0] == 200, "it is ready", 30)
    assert cluster.get(3, "/startupz") == (200, "ok\n")


def test_a_node_that_stands_still_says_nothing_and_comes_back(cluster: Probed) -> None:
    cluster.start()
    node = cluster.nodes[2]
    node.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: any(b.fenced for b in described(cluster)), "the others fence it", 30)
    finally:
        node.signal(signal.SIGCONT)
    wait_until(lambda: cluster.get(2, "/readyz")[0] == 200, "it is let in again", 30)
    assert cluster.get(2, "/livez")[0] == 200


def described(cluster: Probed) -> Any:
    answer = cluster.describe(1)
    return [] if answer is None else answer.brokers


def test_a_port_under_garbage_goes_on_and_its_node_serves(cluster: Probed) -> None:
    cluster.start()
    chance = random.Random(3)
    held = [socket.create_connection(("127.0.0.1", cluster.http[1]), 10) for _ in range(200)]
    try:
        for number, connection in enumerate(held):
            try:
                connection.sendall(
                    chance.randbytes(chance.randrange(1, 2_000)) if number % 2 else b"G"
                )
            except OSError:
                continue  # It was ended already, to make room.
        for path in ("/livez", "/readyz", "/metrics"):
            assert cluster.get(1, path)[0] == 200, path
        assert "penstock_produced_bytes_total" in cluster.get(1, "/metrics")[1]
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic("orders", 1, 3)
    finally:
        for connection in held:
            connection.close()
    assert "Traceback" not in cluster.nodes[1].log.read_text()


def test_a_controller_without_a_broker_answers_for_itself(cluster: Probed) -> None:
    for node_id in (1, 2, 3):
        with cluster.nodes[node_id].config.open("a") as config:
            config.write('node.roles = "controller"\n')
    for node_id in (1, 2):
        cluster.nodes[node_id].start()
    wait_until(lambda: cluster.get(1, "/startupz")[0] == 200, "node 1 has started", 30)
    assert "knows no leader" in cluster.get(1, "/readyz")[1], "the first start wants all three"
    cluster.nodes[3].start()
    for node_id in cluster.nodes:
        wait_until(lambda n=node_id: cluster.get(n, "/readyz") == (200, "ok\n"), "joined", 30)
        wait_until(lambda n=node_id: cluster.can_roll(n)["can_roll"], "it may be stopped", 30)
    cluster.nodes[3].kill()
    wait_until(
        lambda: "controller 3 does not answer" in str(cluster.can_roll(1)), "3 is missed", 30
    )
    assert cluster.get(2, "/readyz")[0] == 200
    cluster.nodes[2].kill()
    wait_until(lambda: cluster.get(1, "/readyz")[0] == 503, "there is no majority", 30)
    assert "confirms who leads" in str(cluster.can_roll(1))
    journal = cluster.nodes[1].directory / "raft"
    shown = cluster.get(1, "/metrics")[1]
    for what in ("free", "total"):
        assert f'penstock_log_directory_{what}_bytes{{directory="{journal}"}} ' in shown


def test_a_second_node_on_the_port_says_so(cluster: Probed) -> None:
    with socket.create_server(("127.0.0.1", cluster.http[1])):
        cluster.nodes[1].start()
        assert cluster.nodes[1].process is not None
        assert cluster.nodes[1].process.wait(30) == 1
    assert "change metrics.listen" in cluster.nodes[1].log.read_text()
