from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]
START_S = 120


def docker(*arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def node(image: str) -> Iterator[str]:
    """A cluster of one node, in a container that may do nothing and write nothing but its data."""
    name = f"penstock-test-{uuid.uuid4().hex[:12]}"
    volume = ("--mount", f"type=volume,source={name},target=/var/lib/penstock")
    settings = {
        "NODE_ID": "1",
        "BROKER_ADVERTISED": "127.0.0.1:9092",
        "CONTROLLER_LISTEN": "127.0.0.1:10092",
        "CONTROLLER_QUORUM_VOTERS": "1@127.0.0.1:10092",
    }
    environment = [f"--env=PENSTOCK_{key}={text}" for key, text in settings.items()]
    try:
        docker(
            *("run", "--rm", "--read-only", *volume, image),
            *("format", "--data-dir", "/var/lib/penstock/data", "--node-id", "1"),
        )
        docker(
            *("run", "--detach", "--name", name, "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--health-interval", "1s"),
            *volume,
            *environment,
            image,
        )
        yield name
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)
        subprocess.run(["docker", "volume", "rm", name], capture_output=True, check=False)


def state(node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", node))
    return found


def test_a_node_is_healthy_as_nobody_and_stops_when_it_is_asked_to(node: str) -> None:
    wait_until(lambda: state(node)["Health"]["Status"] == "healthy", "it serves", timeout_s=START_S)
    assert docker("exec", node, "id", "-u") == "10001"
    docker("exec", node, "penstock", "topics", "create", "orders", "--partitions", "1")
    docker("stop", "-t", "60", node)
    assert state(node)["ExitCode"] == 0, docker("logs", node)
    # What it has is in the volume: it is the same node again.
    docker("start", node)
    wait_until(
        lambda: state(node)["Health"]["Status"] == "healthy", "it serves again", timeout_s=START_S
    )
    assert "orders" in docker("exec", node, "penstock", "topics", "list")


def test_a_node_that_does_not_serve_is_not_healthy(node: str) -> None:
    wait_until(lambda: state(node)["Health"]["Status"] == "healthy", "it serves", timeout_s=START_S)
    said = subprocess.run(
        [
            *("docker", "exec", "--env", "PENSTOCK_BROKER_LISTEN=127.0.0.1:9999", node),
            *("python", "/opt/penstock/etc/health.py"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 1
    assert "does not answer at 127.0.0.1:9999" in said.stdout
