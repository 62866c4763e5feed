"""deploy/compose, as its reader starts it; Prometheus and Grafana come from registries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.ports import free_ports
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "compose" / "docker-compose.yaml"
START_S = 180
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


class Compose:
    """A project of compose of this test's own."""

    def __init__(self, image: str) -> None:
        self.name = f"penstock-test-{uuid.uuid4().hex[:8]}"
        ports = free_ports(3)
        self.outside = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._environment = {
            **os.environ,
            "IMAGE": image,
            **{f"BROKER_{node}_PORT": str(port) for node, port in enumerate(ports, 1)},
        }

    def run(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker-compose", "-f", str(FILE), "-p", self.name, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def do(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def client(self, *arguments: str) -> str:
        return self.do("run", "--rm", "-T", "client", *arguments)

    def state(self, node: int) -> dict[str, Any]:
        identity = self.do("ps", "-q", f"node-{node}").strip()
        done = subprocess.run(
            ["docker", "inspect", "--format", "{{json .State}}", identity],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def is_healthy(self, node: int) -> bool:
        return bool(self.state(node)["Health"]["Status"] == "healthy")

    def wait_healthy(self) -> None:
        try:
            wait_until(
                lambda: all(self.is_healthy(node) for node in (1, 2, 3)),
                "all nodes serve",
                timeout_s=START_S,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.run('logs', '--tail', '20').stdout}") from None


@pytest.fixture(scope="module")
def compose(image: str) -> Iterator[Compose]:
    if shutil.which("docker-compose") is None:
        pytest.skip("there is no docker-compose")
    made = Compose(image)
    try:
        made.do("up", "-d")
        made.wait_healthy()
        yield made
    finally:
        made.run("down", "--volumes", "--timeout", "30")


def test_the_whole_file_is_one_that_compose_takes(compose: Compose) -> None:
    whole = yaml.safe_load(compose.do("--profile", "monitoring", "--profile", "client", "config"))
    assert set(whole["services"]) == {
        *("node-1", "node-2", "node-3", "client", "prometheus", "grafana")
    }
    for name, service in whole["services"].items():
        hosts = {host_of(port) for port in service.get("ports", [])}
        assert hosts <= {"127.0.0.1"}, name
        assert ":" in service["image"], name


def host_of(port: Any) -> str:
    """Where a port is open, as versions of compose write it: in words, or as one text."""
    return str(port["host_ip"]) if isinstance(port, dict) else port.split(":")[0]


def test_what_is_written_outlives_a_restart_of_each_node(compose: Compose) -> None:
    compose.client("topics", "create", "orders", "--partitions", "3")
    compose.client("bench", "produce", "--topic", "orders", "--records", "100")
    written = ends(compose)
    assert sum(one["offset"] for one in written) >= 100
    for node in (1, 2, 3):
        compose.do("restart", f"node-{node}")
        compose.wait_healthy()
    assert ends(compose) == written


def test_clients_of_this_machine_need_no_names_of_nodes(compose: Compose) -> None:
    """Each broker is spoken to, for a partition that it leads."""
    topic = ["visits", "--partitions", "3", "--replication-factor", "3"]
    outside(compose, "topics", "create", *topic)
    outside(compose, "bench", "produce", "--topic", "visits", "--records", "300")
    found = json.loads(outside(compose, "offsets", "get", "visits", "--output", "json"))
    assert sum(one["offset"] for one in found) >= 300
    assert len({one["partition"] for one in found}) == 3


def outside(compose: Compose, *arguments: str) -> str:
    """What a command says that runs on this machine, and not in a container."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "-b", compose.outside, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ends(compose: Compose) -> list[dict[str, Any]]:
    found = compose.client("offsets", "get", "orders", "--output", "json")
    return [{key: one[key] for key in ("partition", "offset")} for one in json.loads(found)]


def test_a_node_whose_disk_is_lost_is_not_started_as_a_new_one(compose: Compose) -> None:
    compose.do("rm", "--stop", "--force", "node-3")
    subprocess.run(
        ["docker", "volume", "rm", f"{compose.name}_disk-3"], capture_output=True, check=True
    )
    compose.do("up", "-d", "node-3")

    def said() -> bool:
        text = compose.run("logs", "node-3").stdout
        return "node 3 of cluster penstock-compose had a disk there" in text

    wait_until(said, "it says that the disk is lost", timeout_s=START_S)
    assert not compose.is_healthy(3)
    # The others are as they were.
    assert '"orders"' in compose.client("topics", "describe", "orders", "--output", "json")
